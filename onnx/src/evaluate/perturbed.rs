//! The same computation with other roundings: what a node gives is moved by a few units of its last place.
//!
//! Owns which operators round and how far. This is stochastic arithmetic (Vignes, "A stochastic arithmetic for
//! reliable scientific computation", 1993): how far several such runs lie apart shows how far rounding alone moves an
//! output. What an operator gives exactly, such as a position or the larger of two numbers, stays as it is.

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

/// Operators that choose among the numbers they read, or give whole ones; besides those that only move elements
/// ([`Symbolic::Moves`]).
const EXACT: &[&str] = &[
    "Abs",
    "Bernoulli",
    "Ceil",
    "CenterCropPad",
    "Clip",
    "Constant",
    "ConstantOfShape",
    "Crop",
    "DepthToSpace",
    "Dropout",
    "EyeLike",
    "Floor",
    "GlobalMaxPool",
    "Hardmax",
    "Max",
    "MaxPool",
    "Min",
    "Neg",
    "OneHot",
    "OneHotEncoder",
    "Optional",
    "OptionalGetElement",
    "Pad",
    "Range",
    "ReduceMax",
    "ReduceMin",
    "Relu",
    "ReverseSequence",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Sign",
    "SpaceToDepth",
    "Split",
    "TensorScatter",
    "ThresholdedRelu",
    "TopK",
    "Trilu",
    "Unique",
    "Where",
];

/// Operators that add up products: terms that cancel leave the roundings of the large ones.
const SUMS: &[&str] = &[
    "AveragePool",
    "Conv",
    "ConvTranspose",
    "CumSum",
    "Einsum",
    "Gemm",
    "GlobalAveragePool",
    "MatMul",
    "ReduceL1",
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
];

impl Perturbed {
    /// What a node gives, moved.
    pub(super) fn moved(
        &self,
        node: &NodeProto,
        operator: &Operator,
        outputs: Vec<Tensor>,
    ) -> Vec<Tensor> {
        if is_exact(operator) {
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
        let n_bits = n_bits(element)?;
        let (unit, smallest) = (2f64.powi(-n_bits), 2f64.powi(n_bits / 2));
        let mut values = tensor.to_f64()?;
        let finite = values.iter().filter(|v| v.is_finite());
        let (sum, n) = finite.fold((0.0, 0usize), |(sum, n), v| (sum + v * v, n + 1));
        let least = match is_sum {
            true => (sum / n.max(1) as f64).sqrt(),
            false => 0.0,
        };
        for value in &mut values {
            // Small whole numbers come from masks, counts and their products, which are exact. Many large numbers are
            // whole only because the type has no room for a fraction.
            let is_small_whole = *value == value.trunc() && value.abs() < smallest;
            if value.is_finite() && !is_small_whole {
                *value += self.roundings * unit * least.max(value.abs()) * next(state);
            }
        }
        Tensor::floats(element, &tensor.shape, &values)
    }
}

/// Whether it gives numbers without rounding.
fn is_exact(operator: &Operator) -> bool {
    matches!(operator.symbolic, Symbolic::Moves(_)) || EXACT.contains(&operator.name)
}

/// Bits of the significand: half a unit in the last place of 1 is 2 to the power of minus this number. `None` for types
/// that are not floats.
fn n_bits(element: Element) -> Option<i32> {
    match element {
        Element::F64 => Some(53),
        Element::F32 => Some(24),
        Element::F16 => Some(11),
        Element::BF16 => Some(8),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operators;

    #[test]
    fn every_operator_named_has_a_row() {
        let rows = operators::names();
        for name in EXACT.iter().chain(SUMS) {
            assert!(rows.contains(name), "{name} is no operator");
        }
        assert!(EXACT.is_sorted() && SUMS.is_sorted());
    }

    #[test]
    fn operators_that_move_elements_are_exact() {
        let is_exact_of = |name: &str| {
            let node = NodeProto {
                op_type: name.to_string(),
                ..Default::default()
            };
            is_exact(operators::find(&node).expect("a row"))
        };
        for name in ["Compress", "Expand", "Identity", "Split", "Tile", "Trilu"] {
            assert!(is_exact_of(name), "{name}");
        }
        assert!(!is_exact_of("MatMul") && !is_exact_of("Exp"));
    }

    #[test]
    fn only_small_whole_numbers_stay() {
        let perturbed = Perturbed {
            seed: 1,
            roundings: 4.0,
        };
        let sizes = [
            (Element::F64, 26),
            (Element::F32, 12),
            (Element::F16, 5),
            (Element::BF16, 4),
        ];
        for (element, power) in sizes {
            let first = 2f64.powi(power);
            for (value, stays) in [(first - 1.0, true), (first, false), (0.0, true)] {
                let tensor = Tensor::floats(element, &[32], &[value; 32]).expect("floats");
                let mut state = 77;
                let moved = perturbed.tensor(&tensor, false, &mut state);
                let is_same = moved.expect("floats").same_bits(&tensor);
                assert_eq!(is_same, stays, "{element} {value}");
            }
        }
    }
}
