//! Positions of extremes along an axis: `arg_reduce`.

use crate::op::{Call, Gradient, GradientCall, Op, OpError, Sample, TensorType, attrs};
use crate::reduce::{gather_scalars, kept_index};
use crate::reference::{constant_shape, required};
use crate::shape_rules::{axis, reduced};
use graph::{Attr, Binary, Builder, DType, Expr, Memlet, Reduction, Scalar, SymExpr, Tensor};

/// `arg_reduce`: position of the extreme along an axis, as i64; the first of several, a NaN before all.
///
/// Attributes `kind: argmax` or `argmin`, `axis: Int`, `keep: Bool` (false). No gradient.
/// Source: ONNX ArgMax-13, `torch.argmax`.
#[derive(Debug)]
pub struct ArgReduce;

struct Extreme {
    reduction: Reduction,
    axis: usize,
    keep: bool,
}

fn extreme(call: &Call) -> Result<Extreme, OpError> {
    let reduction = match call.str("kind")?.as_str() {
        "argmax" => Reduction::Max,
        "argmin" => Reduction::Min,
        other => return Err(call.unsupported(format!("kind `{other}`"))),
    };
    Ok(Extreme {
        reduction,
        axis: axis(call, call.int("axis")?, call.input(0)?.rank())?,
        keep: call.bool_or("keep", false)?,
    })
}

impl Op for ArgReduce {
    fn name(&self) -> &'static str {
        "arg_reduce"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let extreme = extreme(call)?;
        let shape = reduced(&call.input(0)?.shape, &[extreme.axis], extreme.keep);
        Ok(vec![TensorType::new(DType::I64, shape)])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let extreme = extreme(call)?;
        let shape = constant_shape(call, &self.infer(call)?[0].shape)?;
        let beats = match extreme.reduction {
            Reduction::Max => Binary::Gt,
            _ => Binary::Lt,
        };
        let first = |values: &Vec<Scalar>| {
            let mut best = 0;
            for (n, v) in values.iter().enumerate() {
                let better = beats.eval(*v, values[best]).as_i64() != 0;
                let is_nan = |v: Scalar| v.as_f64().is_nan();
                if better || (is_nan(*v) && !is_nan(values[best])) {
                    best = n;
                }
            }
            best as i64
        };
        let values = gather_scalars(x, &[extreme.axis], |v| v)
            .iter()
            .map(first)
            .collect();
        Ok(vec![Tensor::from_i64(DType::I64, &shape, values)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let extreme = extreme(call)?;
        let (shape, dtype) = (builder.shape(x), builder.dtype(x));
        let axes = [extreme.axis];
        let best = builder.transient("extreme", dtype, &reduced(&shape, &axes, true));
        let keep = (extreme.reduction, Expr::In(0));
        builder.reduce_over(&shape, (&axes, true), best, keep, |i| {
            vec![Memlet::new(x, i.iter().cloned())]
        });
        let mut hit = Expr::In(0).eq_(Expr::In(1));
        if dtype.is_float() {
            hit = hit.or(Expr::In(0).is_nan());
        }
        let position = Expr::Index(SymExpr::symbol(format!("i{}", extreme.axis).as_str()));
        let candidate = Expr::select(hit, position, Expr::int(i64::MAX));
        let first = (Reduction::Min, candidate);
        builder.reduce_over(&shape, (&axes, extreme.keep), out, first, |i| {
            let group = Memlet::new(best, kept_index(i, &axes));
            vec![Memlet::new(x, i.iter().cloned()), group]
        });
        Ok(())
    }

    fn gradient(&self, _: &GradientCall, _: &mut Builder) -> Result<Gradient, OpError> {
        Ok(Gradient::Zero)
    }

    fn samples(&self) -> Vec<Sample> {
        let by = |kind: &str, axis, keep| {
            attrs([
                ("kind", Attr::Str(kind.into())),
                ("axis", Attr::Int(axis)),
                ("keep", Attr::Bool(keep)),
            ])
        };
        let ties = Tensor::from_f64(DType::F32, &[2, 3], vec![1.0, 3.0, 3.0, f64::NAN, 2.0, 2.0]);
        let sample = |name: &str, inputs: &[&[i64]], attrs| {
            Sample::new(name, inputs, attrs).not_differentiable()
        };
        vec![
            sample("largest", &[&[2, 5, 3]], by("argmax", 1, false)),
            sample("smallest, kept", &[&[2, 5]], by("argmin", -1, true)),
            sample("first of equals", &[], by("argmax", 1, false)).value(0, ties.clone()),
            sample("first of equals from below", &[], by("argmin", 1, false)).value(0, ties),
        ]
    }
}
