//! Running sums along an axis: `cumsum`.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{add_at, required, unravel};
use crate::shape_rules::axis;
use graph::{Attr, Builder, DType, Expr, Memlet, Reduction, Tensor};

/// `cumsum`: `out[…, i, …] = Σ_{j ≤ i} x[…, j, …]`, with `reverse` over `j ≥ i`.
///
/// Attributes `axis: Int`, `reverse: Bool` (false). Integers and bool are summed in i64. Gradient:
/// the sum in the other direction. Source: ONNX CumSum-14, `torch.cumsum`. The expansion takes
/// n² additions for an axis of n elements, as maps have no order; see `loops`.
#[derive(Debug)]
pub struct Cumsum;

impl Op for Cumsum {
    fn name(&self) -> &'static str {
        "cumsum"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let mut x = call.input(0)?.clone();
        axis(call, call.int("axis")?, x.rank())?;
        if !x.dtype.is_float() {
            x.dtype = DType::I64;
        }
        Ok(vec![x])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let x = required(call, inputs, 0)?;
        let axis = axis(call, call.int("axis")?, x.shape.len())?;
        let reverse = call.bool_or("reverse", false)?;
        let dtype = self.infer(call)?[0].dtype;
        let mut sums = match dtype.is_float() {
            true => Tensor::from_f64(dtype, &x.shape, x.to_f64()),
            false => Tensor::from_i64(dtype, &x.shape, x.to_i64()),
        };
        let positions: Vec<usize> = if reverse {
            (0..x.len()).rev().collect()
        } else {
            (0..x.len()).collect()
        };
        let step: usize = x.shape[axis + 1..].iter().product();
        for at in positions {
            let i = unravel(at, &x.shape)[axis];
            if reverse && i + 1 < x.shape[axis] {
                let next = sums.at(at + step);
                add_at(&mut sums, at, next);
            } else if !reverse && i > 0 {
                let last = sums.at(at - step);
                add_at(&mut sums, at, last);
            }
        }
        Ok(vec![sums])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        let Some(out) = call.output_id(0) else {
            return Ok(());
        };
        let shape = builder.shape(x);
        let axis = axis(call, call.int("axis")?, shape.len())?;
        let reverse = call.bool_or("reverse", false)?;
        let element = if builder.dtype(x) == DType::Bool {
            Expr::In(0).cast(DType::I64)
        } else {
            Expr::In(0)
        };
        // The last parameter is the distance back (or ahead); beyond the edge there is nothing.
        let rank = shape.len();
        let mut space = shape.clone();
        space.push(shape[axis].clone());
        let term = (Reduction::Sum, element);
        builder.reduce_over(&space, (&[rank], false), out, term, |i| {
            let mut source = i[..rank].to_vec();
            source[axis] = if reverse {
                source[axis].clone() + i[rank].clone()
            } else {
                source[axis].clone() - i[rank].clone()
            };
            vec![Memlet::new(x, source).or_fill(0.0)]
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0).filter(|_| g.wants(0)) else {
            return Ok(g.nothing());
        };
        let mut back = g.call.library.attrs.clone();
        let reverse = g.call.bool_or("reverse", false)?;
        back.insert("reverse".into(), Attr::Bool(!reverse));
        Ok(g.only(0, builder.op1("cumsum", &[dy], back)?))
    }

    fn samples(&self) -> Vec<Sample> {
        let by =
            |axis, reverse| attrs([("axis", Attr::Int(axis)), ("reverse", Attr::Bool(reverse))]);
        vec![
            Sample::new("forward", &[&[2, 4, 3]], by(1, false)),
            Sample::new("backward", &[&[2, 4]], by(-1, true)),
            Sample::new("of a long axis", &[&[2, 70, 3]], by(1, false)),
            Sample::new("of a long row, backward", &[&[3, 65]], by(1, true)),
            Sample::new("of a long row of integers", &[&[40]], by(0, false))
                .dtype(0, DType::I32)
                .not_differentiable(),
            Sample::new("of integers", &[&[5]], by(0, false))
                .dtype(0, DType::I32)
                .not_differentiable(),
        ]
    }
}
