//! Random operators. Their numbers are a pure function of a seed, an id and the element's position
//! (Philox), so that a gradient recomputes them instead of storing them.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant_shape, required};
use crate::shape_rules::display;
use graph::{Attr, Builder, DType, Expr, Memlet, Scalar, SymExpr, Tensor, philox};

/// `dropout`: `out[i] = x[i] / (1 − p)` where `u(seed, id, i) ≥ p`, else 0.
///
/// Inputs x, seed (scalar i64 in `[0, 2⁶²)`); attributes `p: Float` in `[0, 1]`, `id: Int` in `[0, 2³⁰)`
/// (different for each place of the model), `mask: Bool` (false): also give the mask, bool, as a
/// second output. `u` is [`philox::uniform`] with key `seed + 2³²·id` and the row-major position as
/// counter. Gradient: the same dropout of the incoming gradient; the mask is recomputed.
/// Source: ONNX Dropout-13 in training mode, `torch.native_dropout`.
#[derive(Debug)]
pub struct Dropout;

/// What the attributes of a `dropout` ask for.
///
/// # Errors
/// Attributes out of range, or a second input that is no seed.
pub(crate) fn rule(call: &Call) -> Result<philox::Dropout, OpError> {
    let (p, id) = (call.float("p")?, call.int_or("id", 0)?);
    if !(0.0..=1.0).contains(&p) {
        return Err(call.shape_error(format!("probability {p} is outside [0, 1]")));
    }
    if !(0..1 << 30).contains(&id) {
        return Err(call.shape_error(format!("id {id} is outside [0, 2^30)")));
    }
    let seed = call.input(1)?;
    if seed.dtype != DType::I64 || seed.rank() != 0 {
        return Err(call.shape_error(format!(
            "the seed must be one i64, it is {} {}",
            seed.dtype,
            display(&seed.shape)
        )));
    }
    Ok(philox::Dropout::new(p, id))
}

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let x = call.input(0)?;
        if !x.dtype.is_float() {
            return Err(call.unsupported(format!("{}; convert it to a float first", x.dtype)));
        }
        let mut types = vec![x.clone()];
        rule(call)?;
        if call.bool_or("mask", false)? {
            types.push(TensorType::new(DType::Bool, x.shape.clone()));
        }
        Ok(types)
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let (x, seed) = (required(call, inputs, 0)?, required(call, inputs, 1)?);
        let rule = rule(call)?;
        let key = (seed.at(0).as_i64() + rule.offset) as u64;
        constant_shape(call, &call.input(0)?.shape)?;
        let mut out = Tensor::zeros(x.dtype, &x.shape);
        let mut mask = Tensor::zeros(DType::Bool, &x.shape);
        for at in 0..x.len() {
            if f64::from(philox::uniform(key, at as u64)) >= rule.threshold {
                out.set(at, Scalar::Float(x.at(at).as_f64() * rule.scale));
                mask.set(at, Scalar::Bool(true));
            }
        }
        Ok(match call.bool_or("mask", false)? {
            true => vec![out, mask],
            false => vec![out],
        })
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let (x, seed) = (call.input_id(0)?, call.input_id(1)?);
        let shape = builder.shape(x);
        let rule = rule(call)?;
        let position = shape
            .iter()
            .enumerate()
            .fold(SymExpr::constant(0), |at, (d, n)| {
                at * n.clone() + SymExpr::symbol(format!("i{d}").as_str())
            });
        let kept = |seed: usize| {
            let key = Expr::In(seed).add(Expr::int(rule.offset));
            let uniform = Expr::Uniform(key.into(), Expr::Index(position.clone()).into());
            uniform.ge(Expr::float(rule.threshold))
        };
        if let Some(out) = call.output_id(0) {
            let scaled = Expr::In(0).mul(Expr::float(rule.scale));
            let value = Expr::select(kept(1), scaled, Expr::float(0.0));
            builder.map_over(&shape, out, value, |i| {
                vec![Memlet::new(x, i.iter().cloned()), Memlet::new(seed, [])]
            });
        }
        if let Some(mask) = call.output_id(1) {
            builder.map_over(&shape, mask, kept(0), |_| vec![Memlet::new(seed, [])]);
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let mut attrs = g.call.library.attrs.clone();
        attrs.remove("mask");
        let dx = builder.op1("dropout", &[dy, g.call.input_id(1)?], attrs)?;
        Ok(g.only(0, dx))
    }

    fn samples(&self) -> Vec<Sample> {
        let of = |p, id, mask| {
            attrs([
                ("p", Attr::Float(p)),
                ("id", Attr::Int(id)),
                ("mask", Attr::Bool(mask)),
            ])
        };
        let seed = Tensor::from_i64(DType::I64, &[], vec![1234]);
        let x: &[&[i64]] = &[&[2, 3, 4]];
        vec![
            Sample::new("some", x, of(0.3, 0, false)).value(1, seed.clone()),
            Sample::new("some, with mask", x, of(0.5, 7, true)).value(1, seed.clone()),
            Sample::new("none", x, of(0.0, 0, false)).value(1, seed.clone()),
            Sample::new("all", x, of(1.0, 0, false)).value(1, seed),
        ]
    }
}
