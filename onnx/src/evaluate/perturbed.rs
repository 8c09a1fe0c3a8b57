//! The same computation with other roundings: what a node gives is moved by a few units of its last place.
//!
//! Owns which operators round and how far. This is stochastic arithmetic (Vignes, "A stochastic arithmetic for
//! reliable scientific computation", 1993): how far several such runs lie apart shows how far rounding alone moves an
//! output. What an operator gives exactly, a position or the larger of two numbers say, stays as it is.

use super::label;
use crate::element::Element;
use crate::operators::{Operator, Symbolic};
use crate::proto::NodeProto;
use crate::tensor::Tensor;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Roundings that differ from the usual ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perturbed {
    /// Other seeds give other roundings.
    pub seed: u64,
    /// The largest change, in half units of the last place.
    pub roundings: f64,
}

/// Operators that choose among the numbers they read, or give whole ones.
const EXACT: &[&str] = &[
    "Abs",
    "Ceil",
    "Clip",
    "Constant",
    "ConstantOfShape",
    "Dropout",
    "Floor",
    "GlobalMaxPool",
    "Max",
    "MaxPool",
    "Min",
    "Neg",
    "OneHot",
    "Range",
    "ReduceMax",
    "ReduceMin",
    "Relu",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Sign",
    "TopK",
    "Where",
];

/// Operators that add up products: terms that cancel leave the roundings of the large ones.
const SUMS: &[&str] = &[
    "AveragePool",
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Gemm",
    "GlobalAveragePool",
    "MatMul",
    "ReduceMean",
    "ReduceSum",
];

impl Perturbed {
    /// What a node gives, moved.
    pub(super) fn moved(
        &self,
        node: &NodeProto,
        operator: &Operator,
        outputs: Vec<Tensor>,
    ) -> Vec<Tensor> {
        let moves = matches!(operator.symbolic, Symbolic::Moves(_));
        if moves || EXACT.contains(&operator.name) {
            return outputs;
        }
        let mut hasher = DefaultHasher::new();
        (self.seed, label(node)).hash(&mut hasher);
        let mut state = hasher.finish() | 1;
        let is_sum = SUMS.contains(&operator.name);
        let moved = |tensor: Tensor| self.tensor(&tensor, is_sum, &mut state).unwrap_or(tensor);
        outputs.into_iter().map(moved).collect()
    }

    fn tensor(&self, tensor: &Tensor, is_sum: bool, state: &mut u64) -> Option<Tensor> {
        let element = tensor.element();
        let unit = unit(element)?;
        let mut values = tensor.to_f64()?;
        let finite = values.iter().filter(|v| v.is_finite());
        let (sum, n) = finite.fold((0.0, 0usize), |(sum, n), v| (sum + v * v, n + 1));
        let least = match is_sum {
            true => (sum / n.max(1) as f64).sqrt(),
            false => 0.0,
        };
        for value in &mut values {
            // Small whole numbers come of masks and counts, which are exact.
            if value.is_finite() && *value != value.trunc() {
                *value += self.roundings * unit * least.max(value.abs()) * next(state);
            }
        }
        Tensor::floats(element, &tensor.shape, &values)
    }
}

/// Half a unit in the last place of 1; `None` if it is no float.
fn unit(element: Element) -> Option<f64> {
    match element {
        Element::F64 => Some(f64::EPSILON / 2.0),
        Element::F32 => Some(f64::from(f32::EPSILON) / 2.0),
        Element::F16 => Some(2f64.powi(-11)),
        Element::BF16 => Some(2f64.powi(-8)),
        _ => None,
    }
}

/// A number from -1 to 1: xorshift (Marsaglia 2003), with the multiplication of Vigna 2014.
fn next(state: &mut u64) -> f64 {
    let mut x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    let bits = x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11;
    bits as f64 / (1u64 << 52) as f64 - 1.0
}
