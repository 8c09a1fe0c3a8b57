//! Operators on features of the standard's domain for classical machine learning, ai.onnx.ml: Scaler, OneHotEncoder
//! and ArrayFeatureExtractor, all of its version 1.

use super::real::{Real, in_real};
use super::{Call, Inference, Operator};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;

const DOMAIN: &str = "ai.onnx.ml";

pub const ROWS: &[Operator] = &[
    Operator::new("ArrayFeatureExtractor", infer_columns, columns).domain(DOMAIN),
    Operator::new("OneHotEncoder", infer_one_hot, one_hot).domain(DOMAIN),
    Operator::new("Scaler", infer_scaled, scaled).domain(DOMAIN),
];

/// The sizes of the chosen elements of the last dimension; a list is one row.
fn infer_columns(cx: &Inference) -> Option<Vec<Fact>> {
    let chosen = SymExpr::product(cx.shape(1)?);
    let shape = match cx.shape(0)? {
        [] => return None,
        [_] => vec![SymExpr::constant(1), chosen],
        [rows @ .., _] => rows.iter().cloned().chain([chosen]).collect(),
    };
    cx.like_first(Some(shape))
}

/// `ArrayFeatureExtractor` of ai.onnx.ml, version 1: elements of the last dimension, by their positions.
fn columns(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, positions) = (call.input(0)?, call.ints(1)?);
    let (size, rows) = x.shape.split_last().ok_or("its input is a scalar")?;
    if positions.is_empty() {
        return Err("it has no positions".to_string());
    }
    let at = |n: &i64| usize::try_from(*n).ok().filter(|n| n < size);
    let chosen: Option<Vec<usize>> = positions.iter().map(at).collect();
    let chosen = chosen.ok_or_else(|| format!("a position is not below {size}"))?;
    let mut shape = match rows {
        [] => vec![1],
        rows => rows.to_vec(),
    };
    let n_rows: usize = shape.iter().product();
    shape.push(chosen.len());
    let taken = (0..n_rows).flat_map(|row| chosen.iter().map(move |at| row * size + at));
    Ok(vec![Tensor::new(&shape, x.values.pick(taken))])
}

fn infer_scaled(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).map(<[_]>::to_vec);
    Some(vec![Fact::new(Some(Element::F32), shape)])
}

/// `Scaler` of ai.onnx.ml, version 1: `(x − offset)·scale`, one number or one for each element of the last
/// dimension, in `f32`.
fn scaled(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let element = call.element(Element::F32);
    let values = x.to_f64().ok_or("it is not of numbers")?;
    let x = match x.element().is_float() {
        true => x.clone(),
        false => Tensor::floats(element, &x.shape, &values).ok_or("it is not of numbers")?,
    };
    let size = x.shape.last().copied().unwrap_or(1);
    let given = |name: &str, default: f32| match call.attributes.floats(name) {
        None | Some([]) => Ok(vec![default]),
        Some(given) if given.len() == 1 || given.len() == size => Ok(given.to_vec()),
        Some(given) => Err(format!(
            "its attribute `{name}` has {} numbers, but the last dimension has {size}",
            given.len()
        )),
    };
    let (offset, scale) = (given("offset", 0.0)?, given("scale", 1.0)?);
    in_real!(x.element(), R => {
        let at = |list: &[f32], n: usize| R::of(f64::from(list[n % size % list.len()]));
        let one = |(n, x): (usize, &R)| (*x - at(&offset, n)) * at(&scale, n);
        let y = R::read(&x)?.iter().enumerate().map(one).collect();
        R::tensor(element, &x.shape, y).map(|y| vec![y])
    })
}

/// The categories: integers, or text.
enum Categories<'a> {
    Integers(&'a [i64]),
    Text(Vec<&'a [u8]>),
}

fn categories<'a>(attributes: &super::Attributes<'a>) -> Option<Categories<'a>> {
    match attributes.ints("cats_int64s") {
        Some(integers) if !integers.is_empty() => Some(Categories::Integers(integers)),
        _ => {
            let text = &attributes.get("cats_strings")?.strings;
            let text = text.iter().map(AsRef::as_ref).collect();
            Some(Categories::Text(text))
        }
    }
}

impl Categories<'_> {
    fn len(&self) -> usize {
        match self {
            Categories::Integers(list) => list.len(),
            Categories::Text(list) => list.len(),
        }
    }
}

fn infer_one_hot(cx: &Inference) -> Option<Vec<Fact>> {
    let n = categories(&cx.attributes)?.len();
    let mut shape = cx.shape(0).map(<[_]>::to_vec);
    if let Some(shape) = &mut shape {
        shape.push(SymExpr::constant(n as i64));
    }
    Some(vec![Fact::new(Some(Element::F32), shape)])
}

/// `OneHotEncoder` of ai.onnx.ml, version 1: 1 at the position of each element's category, 0 elsewhere; all 0 for an
/// element of no category, where `zeros` allows it.
fn one_hot(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let categories = categories(&call.attributes).ok_or("it has no categories")?;
    let places: Vec<Option<usize>> = match (&categories, &*x.values) {
        (Categories::Text(list), Values::String(v)) => {
            let place = |x: &bytes::Bytes| list.iter().position(|c| *c == x.as_ref());
            v.iter().map(place).collect()
        }
        (Categories::Integers(list), _) => {
            let whole = match x.element().is_float() {
                // Floats are cut to whole numbers, as ONNX Runtime does.
                true => x.to_f64().map(|v| v.iter().map(|x| *x as i64).collect()),
                false => x.to_i64(),
            };
            let whole: Vec<i64> = whole.ok_or("its categories are numbers, its input is text")?;
            let place = |x: &i64| list.iter().position(|c| c == x);
            whole.iter().map(place).collect()
        }
        (Categories::Text(_), _) => {
            return Err("its categories are text, its input is of numbers".to_string());
        }
    };
    let allows = call.attributes.int("zeros").unwrap_or(1) != 0;
    if !allows && places.contains(&None) {
        return Err("an element is none of its categories".to_string());
    }
    let n = categories.len();
    let mut y = vec![0.0; places.len() * n];
    for (at, place) in places.iter().enumerate() {
        if let Some(place) = place {
            y[at * n + place] = 1.0;
        }
    }
    let mut shape = x.shape.clone();
    shape.push(n);
    let element = call.element(Element::F32);
    let y = Tensor::floats(element, &shape, &y);
    y.map(|y| vec![y])
        .ok_or_else(|| format!("its result cannot be of type {element}"))
}
