//! Numbers made up for one tensor, by its element type and by what reads it.
//!
//! Owns what is drawn for an element type, and what is planted; which tensors and sizes are made up is for
//! `samples.rs`.

use super::attempts::Integers;
use super::random::Random;
use super::samples::Planted;
use crate::attributes::Attributes;
use crate::element::Element;
use crate::proto::{GraphProto, NodeProto};
use crate::tensor::{Tensor, Values as Elements};
use bytes::Bytes;

/// Integers of both signs are at most that far from 0.
const MOST_SIGNED: i64 = 9;

pub(super) fn magnitudes(tensor: Tensor) -> Tensor {
    match tensor.to_f64() {
        Some(values) if tensor.element().is_float() => {
            let values: Vec<f64> = values.iter().map(|v| v.abs()).collect();
            Tensor::floats(tensor.element(), &tensor.shape, &values).unwrap_or(tensor)
        }
        _ => tensor,
    }
}

pub(super) fn plant(tensor: Tensor, planted: Planted, random: &mut Random) -> Tensor {
    let values = match planted {
        Planted::Nothing => return tensor,
        Planted::Nan => vec![f64::NAN],
        Planted::Infinity => vec![f64::INFINITY, f64::NEG_INFINITY],
    };
    let Some(mut elements) = tensor
        .to_f64()
        .filter(|v| tensor.element().is_float() && !v.is_empty())
    else {
        return tensor;
    };
    for value in values {
        let at = random.below(elements.len() as u64) as usize;
        elements[at] = value;
    }
    Tensor::floats(tensor.element(), &tensor.shape, &elements).unwrap_or(tensor)
}

impl Random {
    /// Text, each element one of `words`.
    pub(super) fn chosen(&mut self, shape: &[usize], words: &[Bytes]) -> Tensor {
        let n: usize = shape.iter().product();
        let one = |_| words[self.below(words.len() as u64) as usize].clone();
        Tensor::new(shape, Elements::String((0..n).map(one).collect()))
    }

    /// A tensor of made-up numbers. Where they look something up, all are below `bound`: integers, and floats that
    /// the model casts to positions.
    pub(super) fn tensor(
        &mut self,
        element: Element,
        shape: &[usize],
        bound: Option<i64>,
        integers: Integers,
    ) -> Tensor {
        let n = shape.iter().product();
        if element.is_float() {
            // Positions may be given as floats, which the model casts: that cuts off the fraction, which other
            // readers see.
            let one = |random: &mut Random| match (bound, integers) {
                (Some(_), Integers::Zeros) => 0.0,
                (Some(bound), _) => {
                    let whole = random.below(bound.max(1) as u64) as f64;
                    whole + random.below(1 << 9) as f64 / 1024.0
                }
                (None, _) => random.normal(),
            };
            let values: Vec<f64> = (0..n).map(|_| one(self)).collect();
            if let Some(tensor) = Tensor::floats(element, shape, &values) {
                return tensor;
            }
        }
        if element == Element::String {
            let text = (0..n).map(|_| Bytes::from(format!("text {}", self.below(3))));
            return Tensor::new(shape, Elements::String(text.collect()));
        }
        // 8-bit integers are usually quantized values: all of them.
        let (from, end) = match (integers, bound, element) {
            (Integers::Zeros, ..) => (0, 1),
            (_, Some(bound), _) => (0, bound.max(1)),
            (Integers::Ones, None, _) => (1, 2),
            (_, None, Element::U8 | Element::I8) => (0, 256),
            (Integers::Signed, None, Element::I16 | Element::I32 | Element::I64) => {
                (-MOST_SIGNED, MOST_SIGNED + 1)
            }
            (Integers::Signed, None, Element::U16 | Element::U32 | Element::U64) => {
                (0, MOST_SIGNED + 1)
            }
            _ => (0, 2),
        };
        let values: Vec<i64> = (0..n)
            .map(|_| from + self.below((end - from) as u64) as i64)
            .collect();
        Tensor::of_ints(element, shape, &values)
            .unwrap_or_else(|| Tensor::new(&[0], Elements::I64(Vec::new())))
    }
}

/// Most values between an input and the categories that it names.
const MOST_BETWEEN: usize = 256;

/// The texts that are known to every node that reads `name`, directly or after nodes that move it, and knows any.
pub(super) fn words(graph: &GraphProto, name: &str) -> Vec<Bytes> {
    let mut lists = Vec::new();
    let mut values = vec![name];
    let mut seen = 0;
    while let Some(value) = values.get(seen).copied().filter(|_| seen < MOST_BETWEEN) {
        seen += 1;
        let reads = |node: &&NodeProto| node.input.first().is_some_and(|input| input == value);
        for node in graph.node.iter().filter(reads) {
            match categories(node) {
                Some(known) => lists.push(known),
                None if moves(node) => values.extend(node.output.iter().map(String::as_str)),
                None => {}
            }
        }
    }
    let mut lists = lists.into_iter();
    let mut words: Vec<Bytes> = lists.next().map(<[Bytes]>::to_vec).unwrap_or_default();
    for list in lists {
        words.retain(|word| list.contains(word));
    }
    words
}

/// The texts that a node knows.
fn categories(node: &NodeProto) -> Option<&[Bytes]> {
    let attributes = Attributes::new(node);
    let list = |name| attributes.get(name).map(|a| a.strings.as_slice());
    let known = list("cats_strings").or(list("keys_strings"));
    known.filter(|known| !known.is_empty())
}

/// Whether a node gives elements of its first input as they are.
fn moves(node: &NodeProto) -> bool {
    matches!(
        node.op_type.as_str(),
        "ArrayFeatureExtractor"
            | "Flatten"
            | "Gather"
            | "Identity"
            | "Reshape"
            | "Slice"
            | "Split"
            | "Squeeze"
            | "Transpose"
            | "Unsqueeze"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_that_look_something_up_have_fractions_that_a_cast_cuts_off() {
        for element in [Element::F32, Element::F16, Element::BF16] {
            let drawn = Random::new(7).tensor(element, &[400], Some(5), Integers::Masks);
            let drawn = drawn.to_f64().expect("floats");
            let whole: Vec<f64> = drawn.iter().map(|v| v.trunc()).collect();
            assert!((0..5).all(|n| whole.contains(&f64::from(n))), "{whole:?}");
            assert!(whole.iter().all(|v| (0.0..5.0).contains(v)), "{whole:?}");
            assert!(drawn.iter().any(|v| v.fract() > 0.25), "{element}");
            let zeros = Random::new(7).tensor(element, &[9], Some(5), Integers::Zeros);
            assert_eq!(zeros.to_f64(), Some(vec![0.0; 9]));
        }
    }
}
