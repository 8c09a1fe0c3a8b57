//! Operators that make tensors of sizes and constants: Shape, Size, Constant, ConstantOfShape, Range, …

use super::symbolic::is_at_least;
use super::{Call, Inference, Operator, Symbolic};
use crate::element::Element;
use crate::fact::{Fact, MAX_ELEMENTS};
use crate::proto::SparseTensorProto;
use crate::same_type;
use crate::stored::{self, Stored};
use crate::tensor::{Tensor, Values, room, sizes};
use graph::SymExpr;
use prost::Message;
use std::path::Path;
use std::sync::Arc;

pub const ROWS: &[Operator] = &[
    Operator::new("Shape", infer_shape, shape).symbolic(Symbolic::Own(shape_elements)),
    Operator::new("Size", infer_size, size).symbolic(Symbolic::Own(size_elements)),
    Operator::new("Constant", |_| None, constant),
    Operator::new("ConstantOfShape", infer_constant_of, constant_of),
    Operator::new("Range", infer_range, range).symbolic(Symbolic::Own(range_elements)),
    Operator::new("EyeLike", infer_like, eye),
    Operator::new("RandomNormal", infer_random, random),
    Operator::new("RandomUniform", infer_random, random),
    Operator::new("RandomNormalLike", infer_like, random),
    Operator::new("RandomUniformLike", infer_like, random),
    Operator::new("Bernoulli", infer_like, random),
    Operator::new("Multinomial", infer_multinomial, random),
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
    let sparse = a.get("sparse_value").and_then(|a| a.sparse_tensor.as_ref());
    let tensor = if let Some(proto) = a.tensor("value") {
        Tensor::of_proto(proto)?
    } else if let Some(sparse) = sparse {
        let sparse = SparseTensorProto::decode(sparse.clone());
        stored::dense(&sparse.map_err(|error| error.to_string())?, Path::new(""))?
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

fn infer_size(_: &Inference) -> Option<Vec<Fact>> {
    Some(vec![Fact::new(Some(Element::I64), Some(Vec::new()))])
}

fn size_elements(cx: &Inference) -> Option<Vec<SymExpr>> {
    Some(vec![SymExpr::product(cx.shape(0)?)])
}

fn size(call: &Call) -> Result<Vec<Tensor>, String> {
    Ok(vec![Tensor::int(call.input(0)?.len() as i64)])
}

fn infer_constant_of(cx: &Inference) -> Option<Vec<Fact>> {
    let element = match cx.attributes.tensor("value") {
        Some(value) => Element::of_number(value.data_type),
        None => Some(Element::F32),
    };
    let shape = cx.ints(0).or_else(|| cx.shape_as_long_as(0));
    let fact = Fact::new(element, shape);
    let every = match cx.attributes.tensor("value") {
        Some(value) => Tensor::of_proto(value).ok(),
        None => Some(Tensor::new(&[1], Values::F32(vec![0.0]))),
    };
    match (fact.len().and(fact.sizes()), every) {
        (Some(shape), Some(every)) if every.len() == 1 => Some(vec![Fact::of_stored(&Arc::new(
            Stored::filled(&shape, every),
        ))]),
        _ => Some(vec![fact]),
    }
}

fn constant_of(call: &Call) -> Result<Vec<Tensor>, String> {
    let (shape, _) = sizes(&call.ints(0)?)?;
    let n = room(&shape)?;
    let value = match call.attributes.tensor("value") {
        Some(value) => Tensor::of_proto(value)?,
        None => Tensor::new(&[1], Values::F32(vec![0.0])),
    };
    if value.len() != 1 {
        return Err(format!("its value has {} elements, not one", value.len()));
    }
    let values = same_type!(&*value.values, v => vec![v.first().cloned().unwrap_or_default(); n]);
    Ok(vec![Tensor::new(&shape, values)])
}

fn infer_range(cx: &Inference) -> Option<Vec<Fact>> {
    let n = range_length(cx).unwrap_or_else(|| cx.unknown());
    cx.like_first(Some(vec![n]))
}

/// One element of an input that is a scalar.
fn one(cx: &Inference, at: usize) -> Option<SymExpr> {
    match cx.ints(at)?.as_slice() {
        [one] => Some(one.clone()),
        _ => None,
    }
}

fn range_length(cx: &Inference) -> Option<SymExpr> {
    let scalar = |at: usize| cx.fact(at)?.scalar();
    if cx.fact(0)?.element.is_some_and(Element::is_float) {
        let n = n_steps(scalar(0)?, scalar(1)?, scalar(2)?)?;
        return Some(SymExpr::constant(n));
    }
    let (start, limit, delta) = (one(cx, 0)?, one(cx, 1)?, one(cx, 2)?.as_const()?);
    if let (Some(start), Some(limit)) = (start.as_const(), limit.as_const()) {
        return Some(SymExpr::constant(n_whole_steps(start, limit, delta)?));
    }
    let distance = if delta < 0 {
        start - limit
    } else {
        limit - start
    };
    let step = delta.checked_abs().filter(|step| *step > 0)?;
    is_at_least(&distance, 0)
        .then(|| (distance + SymExpr::constant(step - 1)).floor_div(&SymExpr::constant(step)))
}

/// How many numbers there are, counted in doubles for each type of float, as ONNX Runtime does.
fn n_steps(start: f64, limit: f64, delta: f64) -> Option<i64> {
    let n = ((limit - start) / delta).ceil().max(0.0);
    (n.is_finite() && delta != 0.0).then_some(n as i64)
}

/// As [`n_steps`], for integers, which may be beyond those of a float.
fn n_whole_steps(start: i64, limit: i64, delta: i64) -> Option<i64> {
    let distance = i128::from(limit) - i128::from(start);
    let (distance, step) = match delta.signum() {
        1 => (distance, i128::from(delta)),
        -1 => (-distance, -i128::from(delta)),
        _ => return None,
    };
    i64::try_from((distance.max(0) + step - 1) / step).ok()
}

fn range_elements(cx: &Inference) -> Option<Vec<SymExpr>> {
    let n = range_length(cx)?
        .as_const()
        .filter(|n| *n <= MAX_ELEMENTS as i64)?;
    let (start, delta) = (one(cx, 0)?, one(cx, 2)?);
    let at = |i: i64| start.clone() + delta.clone() * i;
    Some((0..n).map(at).collect())
}

fn range(call: &Call) -> Result<Vec<Tensor>, String> {
    let element = call.input(0)?.element();
    let refuse = || "its bounds are not three numbers with a step that is not 0".to_string();
    let count = |n: Option<i64>| room(&sizes(&[n.ok_or_else(refuse)?])?.0);
    let made = if element.is_float() {
        let scalar = |at: usize| call.input(at)?.scalar().ok_or_else(refuse);
        let (start, limit, delta) = (scalar(0)?, scalar(1)?, scalar(2)?);
        let n = count(n_steps(start, limit, delta))?;
        let at = |i: usize| start + i as f64 * delta;
        let values: Vec<f64> = (0..n).map(at).collect();
        Tensor::floats(element, &[n], &values)
    } else {
        let one = |at: usize| match call.ints(at)?.as_slice() {
            [one] => Ok(*one),
            _ => Err(refuse()),
        };
        let (start, limit, delta) = (one(0)?, one(1)?, one(2)?);
        let n = count(n_whole_steps(start, limit, delta))?;
        let values: Vec<i64> = (0..n as i64)
            .map(|i| start.wrapping_add(delta.wrapping_mul(i)))
            .collect();
        Tensor::of_ints(element, &[n], &values)
    };
    Ok(vec![made.ok_or_else(refuse)?])
}

/// Sizes of the input; the type an attribute names, or else the input's.
fn infer_like(cx: &Inference) -> Option<Vec<Fact>> {
    let element = match cx.attributes.int("dtype") {
        Some(number) => Element::of_number(number as i32),
        None => cx.element(0),
    };
    Some(vec![Fact::new(element, cx.shape(0).map(<[_]>::to_vec))])
}

fn eye(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let [rows, columns] = x.shape[..] else {
        return Err(format!("{:?} is no matrix", x.shape));
    };
    let element = match call.attributes.int("dtype") {
        Some(number) => Element::of_number(number as i32).ok_or("its type is not supported")?,
        None => x.element(),
    };
    let k = call.attributes.int("k").unwrap_or(0);
    let mut ones = vec![0; rows * columns];
    for row in 0..rows {
        let column = (row as i64)
            .checked_add(k)
            .and_then(|c| usize::try_from(c).ok());
        if let Some(column) = column.filter(|c| *c < columns) {
            ones[row * columns + column] = 1;
        }
    }
    let ones = Tensor::of_ints(Element::I64, &x.shape, &ones).ok_or("it is no matrix")?;
    Ok(vec![super::cast::converted(&ones, call.element(element))?])
}

fn infer_random(cx: &Inference) -> Option<Vec<Fact>> {
    let element = Element::of_number(cx.attributes.int("dtype").unwrap_or(1) as i32);
    let shape = cx.attributes.ints("shape")?;
    let shape = shape.iter().map(|n| SymExpr::constant(*n)).collect();
    Some(vec![Fact::new(element, Some(shape))])
}

fn infer_multinomial(cx: &Inference) -> Option<Vec<Fact>> {
    let element = Element::of_number(cx.attributes.int("dtype").unwrap_or(6) as i32);
    let n = SymExpr::constant(cx.attributes.int("sample_size").unwrap_or(1));
    let shape = cx.shape(0).and_then(|s| Some(vec![s.first()?.clone(), n]));
    Some(vec![Fact::new(element, shape)])
}

fn random(_: &Call) -> Result<Vec<Tensor>, String> {
    Err("it gives random numbers, which differ at every run".to_string())
}
