//! Operators that change the order of dimensions: Transpose, DepthToSpace, SpaceToDepth.

use super::strided::{View, taken};
use super::{Call, Inference, Operator, Symbolic, axis};
use crate::fact::Fact;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("Transpose", infer_transpose, transpose).symbolic(Symbolic::Moves(&[])),
    Operator::new("DepthToSpace", infer_to_space, to_space),
    Operator::new("SpaceToDepth", infer_to_depth, to_depth),
];

fn order(given: Option<&[i64]>, rank: usize) -> Option<Vec<usize>> {
    let order: Vec<usize> = match given {
        None => (0..rank).rev().collect(),
        Some(order) => order
            .iter()
            .map(|d| axis(*d, rank))
            .collect::<Option<_>>()?,
    };
    let mut sorted = order.clone();
    sorted.sort_unstable();
    sorted.iter().copied().eq(0..rank).then_some(order)
}

fn infer_transpose(cx: &Inference) -> Option<Vec<Fact>> {
    let from = cx.shape(0)?;
    let order = order(cx.attributes.ints("perm"), from.len())?;
    cx.like_first(Some(order.iter().map(|d| from[*d].clone()).collect()))
}

fn transpose(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let order = order(call.attributes.ints("perm"), x.shape.len())
        .ok_or_else(|| format!("its perm does not order {} dimensions", x.shape.len()))?;
    Ok(vec![permuted(x, &order)])
}

/// Dimension `d` of the result is dimension `order[d]` of `x`.
pub fn permuted(x: &Tensor, order: &[usize]) -> Tensor {
    if order.iter().copied().eq(0..order.len()) {
        return x.clone();
    }
    taken(x, &View::whole(&x.shape).permuted(order))
}

fn block(attributes: crate::attributes::Attributes) -> Option<i64> {
    attributes
        .int("blocksize")
        .filter(|b| (1..1 << 20).contains(b))
}

fn infer_to_space(cx: &Inference) -> Option<Vec<Fact>> {
    let [n, c, h, w] = cx.shape(0)? else {
        return None;
    };
    let b = block(cx.attributes)?;
    let channels = c.divide_exactly(&SymExpr::constant(b * b));
    let channels = channels.unwrap_or_else(|| cx.unknown());
    let shape = vec![n.clone(), channels, h.clone() * b, w.clone() * b];
    cx.like_first(Some(shape))
}

fn infer_to_depth(cx: &Inference) -> Option<Vec<Fact>> {
    let [n, c, h, w] = cx.shape(0)? else {
        return None;
    };
    let b = block(cx.attributes)?;
    let part = |n: &SymExpr| {
        let part = n.divide_exactly(&SymExpr::constant(b));
        part.unwrap_or_else(|| cx.unknown())
    };
    let shape = vec![n.clone(), c.clone() * (b * b), part(h), part(w)];
    cx.like_first(Some(shape))
}

/// The four sizes of an image and the block size.
fn image(call: &Call) -> Result<([usize; 4], usize), String> {
    let x = call.input(0)?;
    let b = block(call.attributes).ok_or("its block size is missing or no size")?;
    let shape = x.shape.as_slice().try_into();
    let shape = shape.map_err(|_| format!("{:?} is no image", x.shape))?;
    Ok((shape, b as usize))
}

fn to_space(call: &Call) -> Result<Vec<Tensor>, String> {
    let ([n, c, h, w], b) = image(call)?;
    if c % (b * b) != 0 {
        return Err(format!("{c} channels do not fill blocks of {b}×{b}"));
    }
    let c = c / (b * b);
    let (split, order) = match call.attributes.text("mode").unwrap_or("DCR") {
        "CRD" => ([n, c, b, b, h, w], [0, 1, 4, 2, 5, 3]),
        _ => ([n, b, b, c, h, w], [0, 3, 4, 1, 5, 2]),
    };
    let moved = permuted(&call.input(0)?.reshaped(&split), &order);
    Ok(vec![moved.reshaped(&[n, c, h * b, w * b])])
}

fn to_depth(call: &Call) -> Result<Vec<Tensor>, String> {
    let ([n, c, h, w], b) = image(call)?;
    if h % b != 0 || w % b != 0 {
        return Err(format!("{h}×{w} does not divide into blocks of {b}×{b}"));
    }
    let (h, w) = (h / b, w / b);
    let split = call.input(0)?.reshaped(&[n, c, h, b, w, b]);
    let order = match call.attributes.text("mode").unwrap_or("DCR") {
        "CRD" => [0, 1, 3, 5, 2, 4],
        _ => [0, 3, 5, 1, 2, 4],
    };
    let moved = permuted(&split, &order);
    Ok(vec![moved.reshaped(&[n, c * b * b, h, w])])
}
