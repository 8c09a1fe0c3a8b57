//! Operators that move elements without computing: Identity, Reshape, Transpose, Concat, …

use super::{Call, Inference, Operator, Symbolic, axis};
use crate::fact::Fact;
use crate::same_type;
use crate::tensor::Tensor;
use graph::SymExpr;
use std::sync::Arc;

pub const ROWS: &[Operator] = &[
    Operator::new("Identity", same, |call| Ok(vec![call.input(0)?.clone()]))
        .symbolic(Symbolic::Moves(&[])),
    Operator::new("Reshape", infer_reshape, reshape).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Transpose", infer_transpose, transpose).symbolic(Symbolic::Moves(&[])),
    Operator::new("Concat", infer_concat, concat).symbolic(Symbolic::Moves(&[])),
    Operator::new("Squeeze", infer_squeeze, squeeze).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Unsqueeze", infer_unsqueeze, unsqueeze).symbolic(Symbolic::Moves(&[0])),
];

/// Type and sizes of the first input.
pub fn same(cx: &Inference) -> Option<Vec<Fact>> {
    cx.like_first(cx.shape(0).map(<[_]>::to_vec))
}

/// Where an element of a broadcast result comes from.
pub struct Broadcast {
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Broadcast {
    /// From a tensor of sizes `from` to sizes `to`; each of `from`, aligned at the end, is 1 or equal.
    pub fn new(from: &[usize], to: &[usize]) -> Broadcast {
        let skip = to.len() - from.len();
        let mut strides = vec![0; to.len()];
        let mut step = 1;
        for d in (0..from.len()).rev() {
            strides[skip + d] = if from[d] == 1 { 0 } else { step };
            step *= from[d];
        }
        Broadcast {
            shape: to.to_vec(),
            strides,
        }
    }

    /// Row-major position in the operand for position `n` in the result.
    pub fn at(&self, mut n: usize) -> usize {
        let mut at = 0;
        for d in (0..self.shape.len()).rev() {
            at += n % self.shape[d] * self.strides[d];
            n /= self.shape[d];
        }
        at
    }
}

fn infer_reshape(cx: &Inference) -> Option<Vec<Fact>> {
    let to = match cx.attributes.ints("shape") {
        Some(ints) => ints.iter().map(|n| SymExpr::constant(*n)).collect(),
        None => match cx.ints(1) {
            Some(to) => to,
            None => {
                let rank = cx.fact(1)?.sizes()?.first().copied()?;
                return cx.like_first(Some(cx.unknown_shape(rank)));
            }
        },
    };
    let from = cx.shape(0);
    let mut shape = Vec::with_capacity(to.len());
    for (d, size) in to.iter().enumerate() {
        shape.push(match size.as_const() {
            Some(0) if !cx.attributes.flag("allowzero") => from
                .and_then(|f| f.get(d).cloned())
                .unwrap_or_else(|| cx.unknown()),
            _ => size.clone(),
        });
    }
    if let Some(rest) = shape.iter().position(|n| n.as_const() == Some(-1)) {
        let others = SymExpr::product(
            shape
                .iter()
                .enumerate()
                .filter(|(d, _)| *d != rest)
                .map(|(_, n)| n),
        );
        let size = from.and_then(|f| SymExpr::product(f).divide_exactly(&others));
        shape[rest] = size.unwrap_or_else(|| cx.unknown());
    }
    cx.like_first(Some(shape))
}

fn reshape(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let mut to = call.ints_of("shape", 1)?.ok_or("its shape is missing")?;
    for (d, size) in to.iter_mut().enumerate() {
        if *size == 0 && !call.attributes.flag("allowzero") {
            let from = x
                .shape
                .get(d)
                .ok_or_else(|| format!("dimension {d} to copy is missing"))?;
            *size = *from as i64;
        }
    }
    let rest: i64 = to.iter().filter(|n| **n != -1).product();
    for size in to.iter_mut().filter(|n| **n == -1) {
        *size = if rest == 0 { 0 } else { x.len() as i64 / rest };
    }
    let fits = to.iter().all(|n| *n >= 0) && to.iter().product::<i64>() == x.len() as i64;
    if !fits {
        return Err(format!("{:?} cannot take the shape {to:?}", x.shape));
    }
    let shape: Vec<usize> = to.iter().map(|n| *n as usize).collect();
    Ok(vec![x.reshaped(&shape)])
}

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
    let shape: Vec<usize> = order.iter().map(|d| x.shape[*d]).collect();
    let mut steps = vec![1; x.shape.len()];
    for d in (1..x.shape.len()).rev() {
        steps[d - 1] = steps[d] * x.shape[d];
    }
    let strides: Vec<usize> = order.iter().map(|d| steps[*d]).collect();
    let positions = strided(&shape, &strides, 0);
    Tensor {
        shape,
        values: Arc::new(x.values.pick(positions.into_iter())),
    }
}

/// Positions of a strided walk over `shape`, row-major, from `first`.
pub fn strided(shape: &[usize], strides: &[usize], first: usize) -> Vec<usize> {
    let mut positions = vec![first];
    for (n, stride) in shape.iter().zip(strides) {
        let mut next = Vec::with_capacity(positions.len() * n);
        for at in positions {
            next.extend((0..*n).map(|i| at + i * stride));
        }
        positions = next;
    }
    positions
}

fn infer_concat(cx: &Inference) -> Option<Vec<Fact>> {
    let first = cx.shape(0)?;
    let at = axis(cx.attributes.int("axis").unwrap_or(1), first.len())?;
    let mut shape = first.to_vec();
    for n in 1..cx.inputs.len() {
        let part = cx.shape(n)?;
        if part.len() != shape.len() {
            return None;
        }
        for d in 0..shape.len() {
            if d == at {
                shape[d] = shape[d].clone() + part[d].clone();
            } else if shape[d].as_const().is_none() {
                shape[d] = part[d].clone();
            }
        }
    }
    cx.like_first(Some(shape))
}

fn concat(call: &Call) -> Result<Vec<Tensor>, String> {
    let parts: Vec<&Tensor> = (0..call.inputs.len())
        .map(|n| call.input(n))
        .collect::<Result<_, _>>()?;
    let first = *parts.first().ok_or("it has no input")?;
    let at = call.axis(1, first.shape.len())?;
    for part in &parts {
        let same = part.shape.len() == first.shape.len()
            && part.element() == first.element()
            && (0..first.shape.len()).all(|d| d == at || part.shape[d] == first.shape[d]);
        if !same {
            return Err(format!(
                "{:?} does not go beside {:?}",
                part.shape, first.shape
            ));
        }
    }
    let mut shape = first.shape.clone();
    shape[at] = parts.iter().map(|p| p.shape[at]).sum();
    let outer: usize = first.shape[..at].iter().product();
    // All parts one after the other, then picked run by run.
    let starts: Vec<usize> = parts
        .iter()
        .scan(0, |sum, p| Some(std::mem::replace(sum, *sum + p.len())))
        .collect();
    let mut all = (*first.values).clone();
    for part in &parts[1..] {
        append(&mut all, &part.values);
    }
    if outer == 1 {
        return Ok(vec![Tensor::new(&shape, all)]);
    }
    let mut positions = Vec::with_capacity(all.len());
    for o in 0..outer {
        for (part, start) in parts.iter().zip(&starts) {
            let run = part.len() / outer.max(1);
            positions.extend(start + o * run..start + (o + 1) * run);
        }
    }
    Ok(vec![Tensor::new(&shape, all.pick(positions.into_iter()))])
}

/// Appends elements of the same type; of another type, nothing.
pub fn append(to: &mut crate::tensor::Values, more: &crate::tensor::Values) {
    use crate::tensor::Values as V;
    match (to, more) {
        (V::F32(a), V::F32(b)) => a.extend_from_slice(b),
        (V::F64(a), V::F64(b)) => a.extend_from_slice(b),
        (V::F16(a), V::F16(b)) => a.extend_from_slice(b),
        (V::BF16(a), V::BF16(b)) => a.extend_from_slice(b),
        (V::I8(a), V::I8(b)) => a.extend_from_slice(b),
        (V::I16(a), V::I16(b)) => a.extend_from_slice(b),
        (V::I32(a), V::I32(b)) => a.extend_from_slice(b),
        (V::I64(a), V::I64(b)) => a.extend_from_slice(b),
        (V::U8(a), V::U8(b)) => a.extend_from_slice(b),
        (V::U16(a), V::U16(b)) => a.extend_from_slice(b),
        (V::U32(a), V::U32(b)) => a.extend_from_slice(b),
        (V::U64(a), V::U64(b)) => a.extend_from_slice(b),
        (V::Bool(a), V::Bool(b)) => a.extend_from_slice(b),
        (V::String(a), V::String(b)) => a.extend_from_slice(b),
        _ => {}
    }
}

fn infer_squeeze(cx: &Inference) -> Option<Vec<Fact>> {
    let from = cx.shape(0)?;
    let dropped: Vec<usize> = match cx.ints_of("axes", 1) {
        Some(axes) => axes
            .iter()
            .map(|d| axis(*d, from.len()))
            .collect::<Option<_>>()?,
        None if cx.fact(1).is_some() => return None,
        None => {
            if from.iter().any(|n| n.as_const().is_none()) {
                return None;
            }
            (0..from.len())
                .filter(|d| from[*d].as_const() == Some(1))
                .collect()
        }
    };
    let kept = (0..from.len()).filter(|d| !dropped.contains(d));
    cx.like_first(Some(kept.map(|d| from[d].clone()).collect()))
}

fn squeeze(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let rank = x.shape.len();
    let dropped: Vec<usize> = match call.ints_of("axes", 1)? {
        None => (0..rank).filter(|d| x.shape[*d] == 1).collect(),
        Some(axes) => {
            let at = |d: &i64| axis(*d, rank).filter(|d| x.shape[*d] == 1);
            let all: Option<Vec<usize>> = axes.iter().map(at).collect();
            all.ok_or_else(|| format!("axes {axes:?} are not of size 1 in {:?}", x.shape))?
        }
    };
    let shape: Vec<usize> = (0..rank)
        .filter(|d| !dropped.contains(d))
        .map(|d| x.shape[d])
        .collect();
    Ok(vec![x.reshaped(&shape)])
}

/// `from` with ones at `axes`, which are positions in the result.
fn with_ones<T: Clone>(from: &[T], axes: &[i64], one: T) -> Option<Vec<T>> {
    let rank = from.len() + axes.len();
    let mut at: Vec<usize> = axes.iter().map(|d| axis(*d, rank)).collect::<Option<_>>()?;
    at.sort_unstable();
    at.dedup();
    let mut shape = from.to_vec();
    for d in &at {
        shape.insert(*d, one.clone());
    }
    (at.len() == axes.len()).then_some(shape)
}

fn infer_unsqueeze(cx: &Inference) -> Option<Vec<Fact>> {
    let axes = cx.ints_of("axes", 1)?;
    cx.like_first(Some(with_ones(cx.shape(0)?, &axes, SymExpr::constant(1))?))
}

fn unsqueeze(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let axes = call.ints_of("axes", 1)?.ok_or("its axes are missing")?;
    let shape = with_ones(&x.shape, &axes, 1);
    let shape = shape.ok_or_else(|| format!("axes {axes:?} do not fit {:?}", x.shape))?;
    Ok(vec![x.reshaped(&shape)])
}

/// The same elements repeated along dimensions of size 1, to sizes `to`.
pub fn expanded(x: &Tensor, to: &[usize]) -> Tensor {
    if x.shape == to {
        return x.clone();
    }
    let from = Broadcast::new(&x.shape, to);
    let n: usize = to.iter().product();
    let values = same_type!(&*x.values, v => (0..n).map(|n| v[from.at(n)].clone()).collect());
    Tensor::new(to, values)
}
