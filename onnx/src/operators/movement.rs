//! Operators that give the same elements other sizes or repeat them: Identity, Reshape, Expand, …

use super::strided::{View, taken};
use super::{Call, Inference, Operator, Symbolic, axis, broadcast};
use crate::fact::Fact;
use crate::tensor::{Tensor, room, sizes};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    // An optional value that holds a tensor is that tensor here; where it may be absent, models are cut.
    Operator::new("Optional", same, |call| Ok(vec![call.input(0)?.clone()])),
    Operator::new("OptionalGetElement", same, |call| {
        Ok(vec![call.input(0)?.clone()])
    }),
    Operator::new("Identity", same, |call| Ok(vec![call.input(0)?.clone()]))
        .symbolic(Symbolic::Moves(&[])),
    Operator::new("Reshape", infer_reshape, reshape).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Flatten", infer_flatten, flatten).symbolic(Symbolic::Moves(&[])),
    Operator::new("Squeeze", infer_squeeze, squeeze).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Unsqueeze", infer_unsqueeze, unsqueeze).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Expand", infer_expand, expand).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Tile", infer_tile, tile).symbolic(Symbolic::Moves(&[0])),
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
    /// The broadcast of a tensor of sizes `from` to sizes `to`; each of `from`, aligned at the end, is 1 or equal.
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
            None => return cx.like_first(cx.shape_as_long_as(1)),
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
    // Where a given size is 0, ONNX Runtime finds the open one among the sizes that are not.
    let is_empty = to.contains(&0);
    let product = |sizes: &mut dyn Iterator<Item = i64>| {
        let counted = sizes.filter(|n| *n != -1 && !(is_empty && *n == 0));
        counted.fold(1i64, i64::saturating_mul)
    };
    let rest = product(&mut to.iter().copied());
    let whole = product(&mut x.shape.iter().map(|n| *n as i64));
    let refused = |to: &[i64]| Err(format!("{:?} cannot take the shape {to:?}", x.shape));
    if to.contains(&-1) && whole.checked_rem(rest) != Some(0) {
        return refused(&to);
    }
    for size in to.iter_mut().filter(|n| **n == -1) {
        *size = whole / rest;
    }
    match sizes(&to) {
        Ok((shape, n)) if n == x.len() => Ok(vec![x.reshaped(&shape)]),
        _ => refused(&to),
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
    if at.len() != axes.len() {
        return None;
    }
    let mut shape = from.to_vec();
    for d in &at {
        shape.insert(*d, one.clone());
    }
    Some(shape)
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

fn infer_flatten(cx: &Inference) -> Option<Vec<Fact>> {
    let Some(from) = cx.shape(0) else {
        return cx.like_first(Some(cx.unknown_shape(2)));
    };
    let at = flattened_at(cx.attributes.int("axis"), from.len())?;
    let (outer, inner) = from.split_at(at);
    cx.like_first(Some(vec![SymExpr::product(outer), SymExpr::product(inner)]))
}

/// How many dimensions Flatten merges into the first of its result.
fn flattened_at(given: Option<i64>, rank: usize) -> Option<usize> {
    let at = given.unwrap_or(1);
    let at = if at < 0 { at + rank as i64 } else { at };
    usize::try_from(at).ok().filter(|at| *at <= rank)
}

fn flatten(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let at = flattened_at(call.attributes.int("axis"), x.shape.len())
        .ok_or_else(|| format!("its axis is not one of {:?}", x.shape))?;
    let (outer, inner) = x.shape.split_at(at);
    Ok(vec![x.reshaped(&[
        outer.iter().product(),
        inner.iter().product(),
    ])])
}

/// The input, broadcast to the sizes in input 1.
fn infer_expand(cx: &Inference) -> Option<Vec<Fact>> {
    let Some(to) = cx.ints(1) else {
        let rank = cx.shape_as_long_as(1)?.len().max(cx.rank(0)?);
        return cx.like_first(Some(cx.unknown_shape(rank)));
    };
    let shape = cx
        .shape(0)
        .and_then(|from| broadcast(&[from, &to], cx.unknowns));
    cx.like_first(shape)
}

fn expand(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (to, _) = sizes(&call.ints(1)?)?;
    let shape = super::pointwise::joined(&x.shape, &to)?;
    Ok(vec![expanded(x, &shape)])
}

/// Returns the elements repeated along dimensions of size 1, to sizes `to`.
pub fn expanded(x: &Tensor, to: &[usize]) -> Tensor {
    if x.shape == to {
        return x.clone();
    }
    taken(x, &View::whole(&x.shape).broadcast(to))
}

fn infer_tile(cx: &Inference) -> Option<Vec<Fact>> {
    let Some(from) = cx.shape(0) else {
        return cx.like_first(cx.shape_as_long_as(1));
    };
    let shape = match cx.ints(1) {
        Some(times) if times.len() == from.len() => {
            let pairs = from.iter().zip(times);
            pairs.map(|(n, times)| n.clone() * times).collect()
        }
        _ => cx.unknown_shape(from.len()),
    };
    cx.like_first(Some(shape))
}

fn tile(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (times, _) = sizes(&call.ints(1)?)?;
    if times.len() != x.shape.len() {
        return Err(format!("{times:?} does not repeat {:?}", x.shape));
    }
    let whole = View::whole(&x.shape);
    let mut view = View {
        shape: Vec::new(),
        strides: Vec::new(),
        first: 0,
    };
    let mut shape = Vec::new();
    for (d, times) in times.iter().enumerate() {
        view.shape.extend([*times, x.shape[d]]);
        view.strides.extend([0, whole.strides[d]]);
        shape.push(times.saturating_mul(x.shape[d]) as i64);
    }
    let (shape, _) = sizes(&shape)?;
    room(&shape)?;
    Ok(vec![taken(x, &view).reshaped(&shape)])
}
