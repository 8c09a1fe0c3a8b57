//! Cases from which the samples of losses and of their gradients are made.

use super::shapes::without;
use crate::op::{Sample, attrs};
use graph::{Attr, Attrs, DType, Tensor};

/// A case from which the samples of losses and gradients are made.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) x: &'static [i64],
    pub(super) reduction: &'static str,
    smoothing: f64,
    ignored: Option<i64>,
    weighted: bool,
}

impl Case {
    fn axis(&self) -> usize {
        usize::from(self.x.len() > 1)
    }

    pub(super) fn rows(&self) -> Vec<i64> {
        without(self.x, self.axis())
    }

    /// Classes, some of them ignored if the case says so.
    pub(super) fn targets(&self) -> Tensor {
        let shape: Vec<usize> = self.rows().iter().map(|n| *n as usize).collect();
        let n = shape.iter().product::<usize>() as i64;
        let class = |i: i64| match self.ignored {
            Some(ignored) if i % 3 == 1 => ignored,
            _ => (i * 5 + 2) % self.x[self.axis()],
        };
        Tensor::from_i64(DType::I64, &shape, (0..n).map(class).collect())
    }

    pub(super) fn attrs(&self) -> Attrs {
        let mut list = attrs([
            ("reduction", Attr::Str(self.reduction.into())),
            ("label_smoothing", Attr::Float(self.smoothing)),
        ]);
        if let Some(ignored) = self.ignored {
            list.insert("ignore_index".into(), Attr::Int(ignored));
        }
        list
    }

    pub(super) fn with_weight(&self, sample: Sample, position: usize) -> Sample {
        if !self.weighted {
            return sample.without(position);
        }
        let n = self.x[self.axis()] as usize;
        let weights = (0..n).map(|c| 0.5 + 0.3 * c as f64).collect();
        sample.value(position, Tensor::from_f64(DType::F32, &[n], weights))
    }
}

pub(super) fn cases(of_logits: bool) -> Vec<Case> {
    let case = |name, x, reduction, (smoothing, ignored, weighted)| Case {
        name,
        x,
        reduction,
        smoothing: if of_logits { smoothing } else { 0.0 },
        ignored,
        weighted,
    };
    vec![
        case("mean of rows", &[4, 5], "mean", (0.0, None, false)),
        case("images, sum", &[2, 3, 2, 2], "sum", (0.0, None, false)),
        case("every row", &[3, 4, 2], "none", (0.0, None, false)),
        case("some ignored", &[5, 3], "mean", (0.0, Some(-100), false)),
        case("a class ignored", &[5, 3], "none", (0.0, Some(2), false)),
        case("weights", &[4, 3], "mean", (0.0, Some(-100), true)),
        case("smoothing", &[4, 3], "mean", (0.1, None, false)),
        case("all of it", &[4, 3, 2], "mean", (0.2, Some(1), true)),
        case("one sample", &[4], "mean", (0.1, None, false)),
    ]
}
