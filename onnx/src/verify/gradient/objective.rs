//! The loss of a model's output, computed apart from any graph.

use crate::evaluate::Values;
use crate::tensor::Tensor;

/// A loss of one of a model's outputs, as the training graph defines it.
#[derive(Clone, Debug, PartialEq)]
pub enum Objective {
    /// Mean cross-entropy with the input `labels`, this part of each label spread over all classes.
    CrossEntropy(f64),
    /// Mean squared difference to the input `target`.
    MeanSquaredError,
    /// The output of that name.
    Output(String),
}

impl Objective {
    /// The loss of an output, in float64; `None` if something does not fit.
    pub(super) fn of(&self, output: &Tensor, feeds: &Values) -> Option<f64> {
        let y = output.to_f64()?;
        match self {
            Objective::Output(_) => y.first().copied(),
            Objective::MeanSquaredError => {
                let target = feeds.get("target").filter(|t| t.shape == output.shape)?;
                let target = target.to_f64()?;
                let squares = y.iter().zip(&target).map(|(a, b)| (a - b) * (a - b));
                Some(squares.sum::<f64>() / y.len() as f64)
            }
            Objective::CrossEntropy(smoothing) => {
                let labels = feeds.get("labels")?.to_i64()?;
                let (n, classes) = (*output.shape.first()?, *output.shape.get(1)?);
                let inner: usize = output.shape[2..].iter().product();
                let mut sum = 0.0;
                for (row, label) in labels.iter().enumerate() {
                    let (outer, at) = (row / inner, row % inner);
                    let one = |c: usize| y.get((outer * classes + c) * inner + at).copied();
                    let logits: Vec<f64> = (0..classes).map(one).collect::<Option<_>>()?;
                    let most = logits.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
                    let total: f64 = logits.iter().map(|v| (v - most).exp()).sum();
                    let log = |v: f64| v - most - total.ln();
                    let own = log(*logits.get(usize::try_from(*label).ok()?)?);
                    let all: f64 = logits.iter().map(|v| log(*v)).sum();
                    sum -= (1.0 - smoothing) * own + smoothing * all / classes as f64;
                }
                (labels.len() == n * inner).then(|| sum / labels.len() as f64)
            }
        }
    }
}
