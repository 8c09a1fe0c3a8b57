//! Where differentiation ends: `stop_gradient`.

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
