//! Operators at which differentiation ends (`stop_gradient`) or takes another path (`straight_through`).

use crate::op::{Call, Gradient, GradientCall, Op, OpError, Sample, TensorType, attrs};
use crate::reference::required;
use graph::{Builder, Expr, Memlet, Tensor};

/// `stop_gradient`: `out = x`, a constant to whoever differentiates. Source: `torch.Tensor.detach`.
#[derive(Debug)]
pub struct StopGradient;

impl Op for StopGradient {
    fn name(&self) -> &'static str {
        "stop_gradient"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![call.input(0)?.clone()])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        Ok(vec![required(call, inputs, 0)?.clone()])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let x = call.input_id(0)?;
        if let Some(out) = call.output_id(0) {
            let shape = builder.shape(out);
            builder.map_over(&shape, out, Expr::In(0), |i| {
                vec![Memlet::new(x, i.to_vec())]
            });
        }
        Ok(())
    }

    fn gradient(&self, _: &GradientCall, _: &mut Builder) -> Result<Gradient, OpError> {
        Ok(Gradient::Zero)
    }

    fn samples(&self) -> Vec<Sample> {
        vec![Sample::new("of a matrix", &[&[3, 4]], attrs([])).not_differentiable()]
    }
}

/// `straight_through`: `out = y`; the gradient of `out` is that of `v`, and `y` is a constant to
/// whoever differentiates. `v` has the type and shape of `y`. Nothing reads it in the forward pass.
///
/// This expresses a function with a backward pass of its own. If that pass is linear in the gradient,
/// `dx = Bᵀ·dy`, it is the gradient of `v = B·x`. Source: the straight-through estimator
/// of [Bengio et al. 2013](https://arxiv.org/abs/1308.3432), where `v = x`.
#[derive(Debug)]
pub struct StraightThrough;

impl Op for StraightThrough {
    fn name(&self) -> &'static str {
        "straight_through"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let (y, v) = (call.input(0)?, call.input(1)?);
        if y != v {
            return Err(call.shape_error(format!("its operands differ: {y:?} and {v:?}")));
        }
        Ok(vec![y.clone()])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        Ok(vec![required(call, inputs, 0)?.clone()])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let y = call.input_id(0)?;
        if let Some(out) = call.output_id(0) {
            let shape = builder.shape(out);
            builder.map_over(&shape, out, Expr::In(0), |i| {
                vec![Memlet::new(y, i.to_vec())]
            });
        }
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, _: &mut Builder) -> Result<Gradient, OpError> {
        match g.dy(0) {
            Some(dy) if g.wants(1) => Ok(g.only(1, dy)),
            _ => Ok(g.nothing()),
        }
    }

    fn samples(&self) -> Vec<Sample> {
        let shapes: &[&[i64]] = &[&[3, 4], &[3, 4]];
        vec![Sample::new("of matrices", shapes, attrs([])).not_differentiable()]
    }
}
