//! Operators on shapes and constants: Shape, Size, Constant, ConstantOfShape, …

use super::{Call, Inference, Operator, Symbolic};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("Shape", infer_shape, shape).symbolic(Symbolic::Own(shape_elements)),
    Operator::new("Constant", |_| None, constant),
];

/// First and last kept dimension of `Shape`.
fn span(attributes: crate::attributes::Attributes, rank: usize) -> (usize, usize) {
    let rank = rank as i64;
    let clamp = |at: i64| (if at < 0 { at + rank } else { at }).clamp(0, rank) as usize;
    let start = clamp(attributes.int("start").unwrap_or(0));
    (
        start,
        clamp(attributes.int("end").unwrap_or(rank)).max(start),
    )
}

fn infer_shape(cx: &Inference) -> Option<Vec<Fact>> {
    let n = match cx.rank(0) {
        Some(rank) => {
            let (start, end) = span(cx.attributes, rank);
            SymExpr::from(end - start)
        }
        None => cx.unknown(),
    };
    Some(vec![Fact::new(Some(Element::I64), Some(vec![n]))])
}

fn shape_elements(cx: &Inference) -> Option<Vec<SymExpr>> {
    let sizes = cx.shape(0)?;
    let (start, end) = span(cx.attributes, sizes.len());
    Some(sizes[start..end].to_vec())
}

fn shape(call: &Call) -> Result<Vec<Tensor>, String> {
    let sizes = &call.input(0)?.shape;
    let (start, end) = span(call.attributes, sizes.len());
    let sizes: Vec<i64> = sizes[start..end].iter().map(|n| *n as i64).collect();
    Ok(vec![Tensor::ints(&sizes)])
}

fn constant(call: &Call) -> Result<Vec<Tensor>, String> {
    let a = call.attributes;
    let text = |s: &[u8]| bytes::Bytes::copy_from_slice(s);
    let tensor = if let Some(proto) = a.tensor("value") {
        Tensor::of_proto(proto)?
    } else if let Some(x) = a.float("value_float") {
        Tensor::new(&[], Values::F32(vec![x]))
    } else if let Some(v) = a.floats("value_floats") {
        Tensor::new(&[v.len()], Values::F32(v.to_vec()))
    } else if let Some(i) = a.int("value_int") {
        Tensor::int(i)
    } else if let Some(v) = a.ints("value_ints") {
        Tensor::ints(v)
    } else if let Some(s) = a.get("value_string").and_then(|a| a.s.as_ref()) {
        Tensor::new(&[], Values::String(vec![text(s)]))
    } else if let Some(a) = a.get("value_strings") {
        Tensor::new(&[a.strings.len()], Values::String(a.strings.clone()))
    } else {
        return Err("it has no value that can be read".to_string());
    };
    Ok(vec![tensor])
}
