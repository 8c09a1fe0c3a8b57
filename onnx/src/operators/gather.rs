//! Operators that look elements up: Gather, GatherElements, GatherND, Compress, ReverseSequence.

use super::{Call, Inference, Operator, Symbolic, axis};
use crate::fact::Fact;
use crate::same_type;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("Gather", infer_gather, gather).symbolic(Symbolic::Moves(&[0])),
    Operator::new("GatherElements", infer_elements, elements).symbolic(Symbolic::Moves(&[0])),
    Operator::new("GatherND", infer_nd, nd).symbolic(Symbolic::Moves(&[0])),
    Operator::new("Compress", infer_compress, compress).symbolic(Symbolic::Moves(&[0])),
    Operator::new("ReverseSequence", super::movement::same, reverse),
];

/// Positions among `n` elements, negative ones counted from the end.
///
/// # Errors
/// A position outside.
pub fn positions(indices: &Tensor, n: usize) -> Result<Vec<usize>, String> {
    let given = indices.to_i64().ok_or("its indices are not integers")?;
    given.into_iter().map(|i| position(i, n)).collect()
}

/// A position among `n` elements, a negative one counted from the end.
///
/// # Errors
/// It is outside.
pub fn position(index: i64, n: usize) -> Result<usize, String> {
    let at = if index < 0 { index + n as i64 } else { index };
    let inside = usize::try_from(at).ok().filter(|at| *at < n);
    inside.ok_or_else(|| format!("index {index} is outside of {n} elements"))
}

/// Runs of `run` elements at these starts.
pub fn picked_runs(x: &Tensor, shape: &[usize], starts: &[usize], run: usize) -> Tensor {
    let values = same_type!(&*x.values, v => {
        let mut to = Vec::with_capacity(starts.len() * run);
        for start in starts {
            to.extend_from_slice(&v[*start..*start + run]);
        }
        to
    });
    Tensor::new(shape, values)
}

fn infer_gather(cx: &Inference) -> Option<Vec<Fact>> {
    let (from, indices) = (cx.shape(0)?, cx.shape(1)?);
    let at = axis(cx.attributes.int("axis").unwrap_or(0), from.len())?;
    let shape = [&from[..at], indices, &from[at + 1..]].concat();
    cx.like_first(Some(shape))
}

fn gather(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, indices) = (call.input(0)?, call.input(1)?);
    let at = call.axis(0, x.shape.len())?;
    let n = *x.shape.get(at).ok_or("its data is a scalar")?;
    let picked = positions(indices, n)?;
    let outer: usize = x.shape[..at].iter().product();
    let run: usize = x.shape[at + 1..].iter().product();
    let mut starts = Vec::with_capacity(outer * picked.len());
    for o in 0..outer {
        starts.extend(picked.iter().map(|p| (o * n + p) * run));
    }
    let shape = [&x.shape[..at], &indices.shape, &x.shape[at + 1..]].concat();
    Ok(vec![picked_runs(x, &shape, &starts, run)])
}

fn infer_elements(cx: &Inference) -> Option<Vec<Fact>> {
    cx.like_first(cx.shape(1).map(<[_]>::to_vec))
}

/// Positions in data of sizes `shape` that indices along one axis name, row-major in the indices.
///
/// # Errors
/// The ranks differ, the indices reach over another dimension, or an index is outside.
pub fn positions_along(
    shape: &[usize],
    indices: &Tensor,
    axis: usize,
) -> Result<Vec<usize>, String> {
    let fits = shape.len() == indices.shape.len()
        && (0..shape.len()).all(|d| d == axis || indices.shape[d] <= shape[d]);
    if !fits {
        return Err(format!(
            "indices {:?} do not lie in {shape:?}",
            indices.shape
        ));
    }
    let along = positions(indices, shape[axis])?;
    let steps = super::strided::steps(shape);
    let mut at = Vec::with_capacity(along.len());
    for (n, picked) in along.into_iter().enumerate() {
        let (mut rest, mut place) = (n, picked * steps[axis]);
        for d in (0..shape.len()).rev() {
            if d != axis {
                place += rest % indices.shape[d] * steps[d];
            }
            rest /= indices.shape[d];
        }
        at.push(place);
    }
    Ok(at)
}

fn elements(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, indices) = (call.input(0)?, call.input(1)?);
    let axis = call.axis(0, x.shape.len())?;
    let starts = positions_along(&x.shape, indices, axis)?;
    Ok(vec![picked_runs(x, &indices.shape, &starts, 1)])
}

fn infer_nd(cx: &Inference) -> Option<Vec<Fact>> {
    let (from, indices) = (cx.shape(0)?, cx.shape(1)?);
    let batch = usize::try_from(cx.attributes.int("batch_dims").unwrap_or(0)).ok()?;
    let (last, outer) = indices.split_last()?;
    let depth = usize::try_from(last.as_const()?).ok()?;
    let rest = from.get(batch + depth..)?;
    cx.like_first(Some([outer, rest].concat()))
}

/// Starts of what index tuples name in data of sizes `shape`, and how long each is.
///
/// # Errors
/// The tuples are longer than the data has dimensions, or an index is outside.
pub fn positions_of_tuples(
    shape: &[usize],
    indices: &Tensor,
    batch: usize,
) -> Result<(Vec<usize>, usize), String> {
    let (depth, outer) = indices
        .shape
        .split_last()
        .ok_or("its indices are a scalar")?;
    if batch + depth > shape.len() || batch > outer.len() || shape[..batch] != outer[..batch] {
        return Err(format!("indices {:?} do not fit {shape:?}", indices.shape));
    }
    let given = indices.to_i64().ok_or("its indices are not integers")?;
    let steps = super::strided::steps(shape);
    let run = shape[batch + depth..].iter().product();
    let n: usize = outer.iter().product();
    let each = outer[batch..].iter().product::<usize>().max(1);
    let below: usize = shape[batch..].iter().product();
    let mut starts = Vec::with_capacity(n);
    for tuple in 0..n {
        let mut at = tuple / each * below;
        for d in 0..*depth {
            at += position(given[tuple * depth + d], shape[batch + d])? * steps[batch + d];
        }
        starts.push(at);
    }
    Ok((starts, run))
}

fn nd(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, indices) = (call.input(0)?, call.input(1)?);
    let batch = usize::try_from(call.attributes.int("batch_dims").unwrap_or(0))
        .map_err(|_| "its batch_dims is negative")?;
    let (starts, run) = positions_of_tuples(&x.shape, indices, batch)?;
    let depth = indices.shape.last().copied().unwrap_or(0);
    let outer = &indices.shape[..indices.shape.len() - 1];
    let shape = [outer, &x.shape[batch + depth..]].concat();
    Ok(vec![picked_runs(x, &shape, &starts, run)])
}

fn infer_compress(cx: &Inference) -> Option<Vec<Fact>> {
    let Some(at) = cx.attributes.int("axis") else {
        return cx.like_first(Some(vec![cx.unknown()]));
    };
    let mut shape = cx.shape(0)?.to_vec();
    let at = axis(at, shape.len())?;
    shape[at] = match cx.known_ints(1) {
        Some(kept) => SymExpr::from(kept.iter().filter(|k| **k != 0).count()),
        None => cx.unknown(),
    };
    cx.like_first(Some(shape))
}

fn compress(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let kept = call.ints(1)?;
    let flat = x.reshaped(&[x.len()]);
    let (x, at) = match call.attributes.int("axis") {
        None => (&flat, 0),
        Some(_) => (x, call.axis(0, x.shape.len())?),
    };
    let n = *x.shape.get(at).ok_or("its data is a scalar")?;
    let picked: Vec<i64> = (0..kept.len().min(n))
        .filter(|i| kept[*i] != 0)
        .map(|i| i as i64)
        .collect();
    let outer: usize = x.shape[..at].iter().product();
    let run: usize = x.shape[at + 1..].iter().product();
    let mut starts = Vec::new();
    for o in 0..outer {
        starts.extend(picked.iter().map(|p| (o * n + *p as usize) * run));
    }
    let mut shape = x.shape.clone();
    shape[at] = picked.len();
    Ok(vec![picked_runs(x, &shape, &starts, run)])
}

fn reverse(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let lengths = call.ints(1)?;
    let time = call.attributes.int("time_axis").unwrap_or(0);
    let batch = call.attributes.int("batch_axis").unwrap_or(1);
    let ([time @ (0 | 1), batch @ (0 | 1)], [first, second, rest @ ..]) =
        ([time, batch], x.shape.as_slice())
    else {
        return Err("its axes are not the first two of its data".to_string());
    };
    let sizes = [*first, *second];
    let (n_times, n_batch) = (sizes[time as usize], sizes[batch as usize]);
    let inside = |n: &i64| (0..=n_times as i64).contains(n);
    if time == batch || lengths.len() != n_batch || !lengths.iter().all(inside) {
        return Err(format!("lengths {lengths:?} do not fit {:?}", x.shape));
    }
    let run: usize = rest.iter().product();
    let mut starts = Vec::with_capacity(first * second);
    for i in 0..*first {
        for j in 0..*second {
            let (t, b) = if time == 0 { (i, j) } else { (j, i) };
            let length = lengths[b] as usize;
            let t = if t < length { length - 1 - t } else { t };
            let (i, j) = if time == 0 { (t, b) } else { (b, t) };
            starts.push((i * second + j) * run);
        }
    }
    Ok(vec![picked_runs(x, &x.shape, &starts, run)])
}
