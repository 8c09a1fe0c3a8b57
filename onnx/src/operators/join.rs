//! Operators that put tensors together and take them apart along an axis: Concat, Split, Slice.

use super::strided::{View, taken};
use super::symbolic::{is_at_least, larger, smaller};
use super::{Call, Inference, Operator, Symbolic, axis};
use crate::each_type;
use crate::fact::Fact;
use crate::tensor::{Item, Tensor, Values};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("Concat", infer_concat, concat).symbolic(Symbolic::Moves(&[])),
    Operator::new("Split", infer_split, split),
    Operator::new("Slice", infer_slice, slice).symbolic(Symbolic::Moves(&[0])),
];

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
                let sum = shape[d].clone() + part[d].clone();
                shape[d] = match crate::infer::is_too_long(&sum) {
                    true => cx.unknown(),
                    false => sum,
                };
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
    joined(&parts, at).map(|x| vec![x])
}

/// Tensors one after the other along an axis.
///
/// # Errors
/// They differ in type, or in a size besides the one along the axis.
pub fn joined(parts: &[&Tensor], axis: usize) -> Result<Tensor, String> {
    let first = *parts.first().ok_or("there is nothing to join")?;
    for part in parts {
        let same = part.shape.len() == first.shape.len()
            && part.element() == first.element()
            && (0..first.shape.len()).all(|d| d == axis || part.shape[d] == first.shape[d]);
        if !same {
            return Err(format!(
                "{:?} of {} does not go beside {:?} of {}",
                part.shape,
                part.element(),
                first.shape,
                first.element()
            ));
        }
    }
    let mut shape = first.shape.clone();
    shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
    let outer: usize = first.shape[..axis].iter().product();
    let values = each_type!(&*first.values, v => interleaved(v, parts, outer));
    Ok(Tensor::new(&shape, values))
}

/// A run of each part in turn, `outer` times. The parts have the type of `_like`.
fn interleaved<T: Item>(_like: &[T], parts: &[&Tensor], outer: usize) -> Values {
    let parts: Vec<&[T]> = parts.iter().filter_map(|p| T::of(&p.values)).collect();
    let mut all = Vec::with_capacity(parts.iter().map(|p| p.len()).sum());
    for o in 0..outer {
        for part in &parts {
            let run = part.len() / outer;
            all.extend_from_slice(&part[o * run..(o + 1) * run]);
        }
    }
    T::wrap(all)
}

/// The elements at one position along an axis, without that axis.
pub fn slice_at(x: &Tensor, axis: usize, at: usize) -> Tensor {
    let mut view = View::whole(&x.shape);
    view.shape.remove(axis);
    view.first = at * view.strides.remove(axis) as usize;
    taken(x, &view)
}

fn infer_split(cx: &Inference) -> Option<Vec<Fact>> {
    let outputs = cx.node.output.len();
    let Some(from) = cx.shape(0) else {
        return Some(vec![Fact::new(cx.element(0), None); outputs]);
    };
    let at = axis(cx.attributes.int("axis").unwrap_or(0), from.len())?;
    let given = match cx.attributes.ints("split") {
        Some(ints) => Some(ints.iter().map(|n| SymExpr::constant(*n)).collect()),
        None if cx.fact(1).is_some() => cx.ints(1),
        None => even_parts(cx, &from[at]),
    };
    let parts = given.filter(|parts: &Vec<_>| parts.len() == outputs);
    let parts = parts.unwrap_or_else(|| cx.unknown_shape(outputs));
    let part = |n: SymExpr| {
        let mut shape = from.to_vec();
        shape[at] = n;
        Fact::new(cx.element(0), Some(shape))
    };
    Some(parts.into_iter().map(part).collect())
}

/// Sizes of as many parts as the node has outputs; only the last may be smaller.
fn even_parts(cx: &Inference, size: &SymExpr) -> Option<Vec<SymExpr>> {
    let n = cx.attributes.int("num_outputs");
    let n = n.unwrap_or(cx.node.output.len() as i64);
    if n < 1 || n != cx.node.output.len() as i64 {
        return None;
    }
    if let Some(size) = size.as_const().and_then(|n| usize::try_from(n).ok()) {
        let parts = even_sizes(size, n as usize);
        return Some(parts.into_iter().map(SymExpr::from).collect());
    }
    if let Some(part) = size.divide_exactly(&SymExpr::constant(n)) {
        return Some(vec![part; n as usize]);
    }
    if n != 2 || cx.opset < 18 {
        return None;
    }
    let part = rounded_up(size, 2);
    let last = size.clone() - part.clone();
    Some(vec![part, last])
}

/// `size` elements in `n` parts of equal size, but for the last ones, which are smaller or empty.
fn even_sizes(size: usize, n: usize) -> Vec<usize> {
    let part = size.div_ceil(n.max(1));
    let start = |i: usize| (i * part).min(size);
    (0..n).map(|i| start(i + 1) - start(i)).collect()
}

/// `⌈size / n⌉`, for a size that is not negative.
fn rounded_up(size: &SymExpr, n: i64) -> SymExpr {
    (size.clone() + SymExpr::constant(n - 1)).floor_div(&SymExpr::constant(n))
}

fn split(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let at = call.axis(0, x.shape.len())?;
    let size = x.shape[at];
    let n = match call.attributes.int("num_outputs") {
        Some(n) => usize::try_from(n).map_err(|_| "its number of outputs is negative")?,
        None => call.node.output.len(),
    };
    let parts = match call.ints_of("split", 1)? {
        Some(parts) => crate::tensor::sizes(&parts)?.0,
        None if n == call.node.output.len() => even_sizes(size, n),
        None => return Err(format!("it has not {n} outputs")),
    };
    if parts.iter().sum::<usize>() != size {
        return Err(format!("{parts:?} are not the parts of {size}"));
    }
    let whole = View::whole(&x.shape);
    let mut first = 0;
    let mut outputs = Vec::new();
    for part in parts {
        let mut view = whole.clone();
        view.first = first * whole.strides[at] as usize;
        view.shape[at] = part;
        outputs.push(taken(x, &view));
        first += part;
    }
    Ok(outputs)
}

/// What a Slice says, one entry per sliced axis.
struct Cuts<T> {
    axes: Vec<usize>,
    starts: Vec<T>,
    ends: Vec<T>,
    steps: Vec<i64>,
}

/// Type and sizes of the elements between two positions along some dimensions.
pub fn infer_slice(cx: &Inference) -> Option<Vec<Fact>> {
    let from = cx.shape(0)?;
    let Some(cuts) = inferred_cuts(cx, from.len()) else {
        return cx.like_first(Some(cx.unknown_shape(from.len())));
    };
    let mut shape = from.to_vec();
    for (n, d) in cuts.axes.iter().enumerate() {
        let size = kept(&from[*d], &cuts.starts[n], &cuts.ends[n], cuts.steps[n]);
        shape[*d] = size.unwrap_or_else(|| cx.unknown());
    }
    cx.like_first(Some(shape))
}

fn inferred_cuts(cx: &Inference, rank: usize) -> Option<Cuts<SymExpr>> {
    let bound = |name: &str, at: usize| match cx.attributes.ints(name) {
        Some(ints) => Some(ints.iter().map(|n| SymExpr::constant(*n)).collect()),
        None => cx.ints(at),
    };
    let (starts, ends): (Vec<SymExpr>, Vec<SymExpr>) = (bound("starts", 1)?, bound("ends", 2)?);
    let given = |name: &str, at: usize| match (cx.attributes.ints(name), cx.fact(at)) {
        (None, None) => Some(None),
        _ => cx.ints_of(name, at).map(Some),
    };
    let n = starts.len();
    let axes = given("axes", 3)?.unwrap_or((0..n as i64).collect());
    let axes: Vec<usize> = axes.iter().map(|d| axis(*d, rank)).collect::<Option<_>>()?;
    let steps = given("steps", 4)?.unwrap_or(vec![1; n]);
    let fits = [ends.len(), axes.len(), steps.len()] == [n; 3] && !steps.contains(&0);
    fits.then_some(Cuts {
        axes,
        starts,
        ends,
        steps,
    })
}

/// Bounds from here on mean the end of any dimension.
const FAR: i64 = i32::MAX as i64;

/// How many elements of `size` are between two bounds.
fn kept(size: &SymExpr, start: &SymExpr, end: &SymExpr, step: i64) -> Option<SymExpr> {
    if let (Some(size), Some(start), Some(end)) =
        (size.as_const(), start.as_const(), end.as_const())
    {
        return Some(SymExpr::from(span(size as usize, start, end, step).1));
    }
    if step < 0 {
        let from_last = start.as_const().is_some_and(|s| s == -1 || s >= FAR);
        let to_first = end.as_const().is_some_and(|e| e <= -FAR);
        return (from_last && to_first).then_some(rounded_up(size, step.checked_neg()?));
    }
    let (start, end) = (position(size, start)?, position(size, end)?);
    let between = larger(&(end - start), &SymExpr::constant(0));
    Some(rounded_up(&between, step))
}

/// The position that a bound of a forward slice stands for.
fn position(size: &SymExpr, bound: &SymExpr) -> Option<SymExpr> {
    if bound.as_const().is_some_and(|b| b >= FAR) {
        Some(size.clone())
    } else if bound.as_const().is_some_and(|b| b <= -FAR) {
        Some(SymExpr::constant(0))
    } else if is_at_least(bound, 0) {
        Some(smaller(size, bound))
    } else if is_at_least(&-bound.clone(), 1) {
        Some(larger(
            &(size.clone() + bound.clone()),
            &SymExpr::constant(0),
        ))
    } else {
        None
    }
}

/// First position and number of elements of a slice.
fn span(size: usize, start: i64, end: i64, step: i64) -> (usize, usize) {
    let n = size as i64;
    let counted = |at: i64| if at < 0 { at.saturating_add(n) } else { at };
    // Backwards, the position before the first element is a bound too.
    let (low, high) = if step > 0 { (0, n) } else { (-1, n - 1) };
    let start = counted(start).clamp(low, high.max(low));
    let end = counted(end).clamp(low, high.max(low));
    let distance = if step > 0 { end - start } else { start - end };
    let length = distance
        .max(0)
        .unsigned_abs()
        .div_ceil(step.unsigned_abs().max(1));
    (start.max(0) as usize, length as usize)
}

/// The elements between two positions along some dimensions.
///
/// # Errors
/// A sentence: positions that do not fit.
pub fn slice(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let cuts = cuts(call, x.shape.len())?;
    let mut view = View::whole(&x.shape);
    for (n, d) in cuts.axes.iter().enumerate() {
        let (size, step) = (x.shape[*d], cuts.steps[n]);
        let (first, length) = span(size, cuts.starts[n], cuts.ends[n], step);
        view.first += first * view.strides[*d] as usize;
        // A stride is used only where there are two elements, and both are inside.
        view.strides[*d] = view.strides[*d].wrapping_mul(step as isize);
        view.shape[*d] = length;
    }
    Ok(vec![taken(x, &view)])
}

fn cuts(call: &Call, rank: usize) -> Result<Cuts<i64>, String> {
    let starts = call.ints_of("starts", 1)?.ok_or("its starts are missing")?;
    let ends = call.ints_of("ends", 2)?.ok_or("its ends are missing")?;
    let n = starts.len();
    let axes = call.ints_of("axes", 3)?.unwrap_or((0..n as i64).collect());
    let steps = call.ints_of("steps", 4)?.unwrap_or(vec![1; n]);
    if [ends.len(), axes.len(), steps.len()] != [n; 3] || steps.contains(&0) {
        return Err("its starts, ends, axes and steps do not fit together".to_string());
    }
    let places: Option<Vec<usize>> = axes.iter().map(|d| axis(*d, rank)).collect();
    let differ = |p: &Vec<usize>| (1..p.len()).all(|n| !p[..n].contains(&p[n]));
    let places = places
        .filter(differ)
        .ok_or_else(|| format!("axes {axes:?} are not some of {rank} dimensions"))?;
    Ok(Cuts {
        axes: places,
        starts,
        ends,
        steps,
    })
}
