//! Binary cross entropy of probabilities, one term for each element.
//!
//! `−(t·max(ln x, −100) + (1 − t)·max(ln(1 − x), −100))`, so that a probability of 0 or 1 costs at most 100.
//! The gradient is not that of the bounded logarithms: `dx = dy·(x − t) / max(x·(1 − x), 10⁻¹²)`, which at
//! 0 and 1 still points away from a wrong answer. Source: `torch.nn.functional.binary_cross_entropy`.

use crate::op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
use crate::reference::{constant_shape, required};
use graph::{Attr, Binary, Builder, DType, Expr, Library, Tensor};

/// `binary_cross_entropy` (x, target) → terms; all of one shape.
#[derive(Debug)]
pub struct BinaryCrossEntropy;

/// The least that a logarithm counts.
const LEAST: f64 = -100.0;
/// The least that x·(1 − x) counts in the gradient.
const STEEPEST: f64 = 1e-12;

fn one() -> Expr {
    Expr::float(1.0)
}

fn bounded_log(x: Expr) -> Expr {
    Expr::binary(Binary::Max, x.log(), Expr::float(LEAST))
}

/// `max(ln(1 − x), −100) − max(ln x, −100)`: the slope along the target.
fn log_odds(x: &Expr) -> Expr {
    bounded_log(one().sub(x.clone())).sub(bounded_log(x.clone()))
}

impl Op for BinaryCrossEntropy {
    fn name(&self) -> &'static str {
        "binary_cross_entropy"
    }

    fn infer(&self, call: &Call) -> Result<Vec<TensorType>, OpError> {
        let (x, target) = (call.input(0)?, call.input(1)?);
        if x.shape != target.shape {
            return Err(call.shape_error("the target has another shape than the probabilities"));
        }
        if !x.dtype.is_float() {
            return Err(call.unsupported(format!("elements of type {}", x.dtype)));
        }
        Ok(vec![x.clone()])
    }

    fn evaluate(&self, call: &Call, inputs: &[Option<&Tensor>]) -> Result<Vec<Tensor>, OpError> {
        let ty = &self.infer(call)?[0];
        let x = required(call, inputs, 0)?.to_f64();
        let target = required(call, inputs, 1)?.to_f64();
        let log = |x: f64| if x.is_nan() { x } else { x.ln().max(LEAST) };
        let term = |(x, t): (&f64, &f64)| -(t * log(*x) + (1.0 - t) * log(1.0 - x));
        let terms = x.iter().zip(&target).map(term).collect();
        let shape = constant_shape(call, &ty.shape)?;
        Ok(vec![Tensor::from_f64(ty.dtype, &shape, terms)])
    }

    fn expand(&self, call: &Call, builder: &mut Builder) -> Result<(), OpError> {
        let Some(y) = call.output_id(0) else {
            return Ok(());
        };
        let (x, t) = (Expr::In(0), Expr::In(1));
        let hit = t.clone().mul(bounded_log(x.clone()));
        let miss = one().sub(t).mul(bounded_log(one().sub(x)));
        let dtype = call.input(0)?.dtype;
        builder.library(Library {
            op: "elementwise".into(),
            attrs: attrs([
                ("expr", Attr::Expr(hit.add(miss).neg())),
                ("dtype", Attr::DType(dtype)),
            ]),
            inputs: call.library.inputs.clone(),
            outputs: vec![Some(y)],
        });
        Ok(())
    }

    fn gradient(&self, g: &GradientCall, builder: &mut Builder) -> Result<Gradient, OpError> {
        let Some(dy) = g.dy(0) else {
            return Ok(g.nothing());
        };
        let (x_id, t_id) = (g.call.input_id(0)?, g.call.input_id(1)?);
        let (x, t, d) = (Expr::In(0), Expr::In(1), Expr::In(2));
        let spread = one().sub(x.clone()).mul(x.clone());
        let spread = Expr::binary(Binary::Max, spread, Expr::float(STEEPEST));
        let slopes = [
            d.clone().mul(x.clone().sub(t)).div(spread),
            d.mul(log_odds(&x)),
        ];
        let mut gradients = Vec::new();
        for (position, slope) in slopes.into_iter().enumerate() {
            if !g.wants(position) {
                gradients.push(None);
                continue;
            }
            let dtype = g.call.input(position)?.dtype;
            let list = attrs([("expr", Attr::Expr(slope)), ("dtype", Attr::DType(dtype))]);
            gradients.push(Some(builder.op1("elementwise", &[x_id, t_id, dy], list)?));
        }
        Ok(Gradient::Rule(gradients))
    }

    fn samples(&self) -> Vec<Sample> {
        let sure = Tensor::from_f64(DType::F32, &[4], vec![0.0, 1.0, 0.0, 1.0]);
        let target = Tensor::from_f64(DType::F32, &[4], vec![0.0, 1.0, 1.0, 0.0]);
        vec![
            Sample::new("terms", &[&[3, 5], &[3, 5]], attrs([])).range(0.05, 0.95),
            // Central differences would need probabilities below 0 and above 1.
            Sample::new("certain", &[], attrs([]))
                .value(0, sure)
                .value(1, target)
                .not_differentiable(),
        ]
    }
}
