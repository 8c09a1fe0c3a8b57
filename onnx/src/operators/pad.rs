//! Pad and CenterCropPad: elements around a tensor.

use super::{Call, Inference, Operator, axis};
use crate::each_type;
use crate::fact::Fact;
use crate::tensor::{Item, Tensor, Values};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new("Pad", infer_pad, pad),
    Operator::new("CenterCropPad", infer_center, center),
];

fn infer_pad(cx: &Inference) -> Option<Vec<Fact>> {
    let from = cx.shape(0)?;
    let unknown = || cx.like_first(Some(cx.unknown_shape(from.len())));
    let pads = match cx.attributes.ints("pads") {
        Some(ints) => Some(
            ints.iter()
                .map(|n| SymExpr::constant(*n))
                .collect::<Vec<_>>(),
        ),
        None => cx.ints(1),
    };
    let axes = match cx.fact(3) {
        None => Some((0..from.len() as i64).collect()),
        Some(_) => cx.known_ints(3),
    };
    let (Some(pads), Some(axes)) = (pads, axes) else {
        return unknown();
    };
    if pads.len() != 2 * axes.len() {
        return None;
    }
    let mut shape = from.to_vec();
    for (n, d) in axes.iter().enumerate() {
        let d = axis(*d, from.len())?;
        shape[d] = shape[d].clone() + pads[n].clone() + pads[n + axes.len()].clone();
    }
    cx.like_first(Some(shape))
}

fn pad(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let rank = x.shape.len();
    let given = call.ints_of("pads", 1)?.ok_or("its pads are missing")?;
    let axes = match call.optional(3) {
        Some(_) => call.ints(3)?,
        None => (0..rank as i64).collect(),
    };
    if given.len() != 2 * axes.len() {
        return Err(format!(
            "{given:?} are not the pads of {} dimensions",
            axes.len()
        ));
    }
    let mut pads = vec![(0, 0); rank];
    for (n, d) in axes.iter().enumerate() {
        let d = axis(*d, rank).ok_or_else(|| format!("axis {d} is not one of {rank}"))?;
        pads[d] = (given[n], given[n + axes.len()]);
    }
    let mode = call.attributes.text("mode").unwrap_or("constant");
    let sources: Vec<Vec<Option<usize>>> = (0..rank)
        .map(|d| sources(x.shape[d], pads[d], mode))
        .collect::<Result<_, _>>()?;
    let fill = match (call.attributes.float("value"), call.optional(2)) {
        (Some(value), _) => Tensor::floats(x.element(), &[1], &[f64::from(value)]),
        (None, fill) => fill.cloned(),
    };
    Ok(vec![selected(x, &sources, fill.as_ref())?])
}

/// The source of every position along a padded dimension of `n` elements; `None` is fill.
fn sources(n: usize, (begin, end): (i64, i64), mode: &str) -> Result<Vec<Option<usize>>, String> {
    // Negative pads cut first; the positive ones repeat what is left after that.
    let n = n as i64;
    let low = begin.saturating_neg().clamp(0, n);
    let high = n.saturating_sub(end.saturating_neg().max(0)).clamp(low, n);
    let (begin, end, n) = (begin.max(0), end.max(0), high - low);
    let all = begin.checked_add(end).and_then(|p| p.checked_add(n));
    let all = all.filter(|all| *all < 1 << 30);
    let all = all.ok_or_else(|| format!("pads {begin} and {end} are too large"))?;
    let source = |at: i64| {
        let at = at - begin;
        let inside = match mode {
            _ if (0..n).contains(&at) => Some(at),
            "constant" => None,
            _ if n == 0 => None,
            "edge" => Some(at.clamp(0, n - 1)),
            "wrap" => Some(at.rem_euclid(n)),
            _ if n == 1 => Some(0),
            _ => {
                let turn = at.rem_euclid(2 * n - 2);
                Some(turn.min(2 * n - 2 - turn))
            }
        };
        inside.map(|at| (at + low) as usize)
    };
    match mode {
        "constant" | "edge" | "reflect" | "wrap" => Ok((0..all).map(source).collect()),
        _ => Err(format!("its mode `{mode}` is not known")),
    }
}

/// The elements at those positions along each dimension; where there is none, `fill` or zero.
fn selected(
    x: &Tensor,
    sources: &[Vec<Option<usize>>],
    fill: Option<&Tensor>,
) -> Result<Tensor, String> {
    fn each<T: Item>(
        v: &[T],
        shape: &[usize],
        sources: &[Vec<Option<usize>>],
        fill: Option<&Tensor>,
    ) -> Option<Values> {
        let fill = match fill {
            None => T::default(),
            Some(fill) => T::of(&fill.values)?.first()?.clone(),
        };
        let n = sources.iter().map(Vec::len).product();
        let mut to = Vec::with_capacity(n);
        lines(v, 0, shape, sources, &fill, &mut to);
        Some(T::wrap(to))
    }
    let shape: Vec<usize> = sources.iter().map(Vec::len).collect();
    crate::tensor::room(&shape)?;
    let values = each_type!(&*x.values, v => each(v, &x.shape, sources, fill));
    let values = values.ok_or("its fill value is of another type")?;
    Ok(Tensor::new(&shape, values))
}

/// Appends the part of the result below position `at` of the dimensions already walked.
fn lines<T: Clone>(
    v: &[T],
    at: usize,
    shape: &[usize],
    sources: &[Vec<Option<usize>>],
    fill: &T,
    to: &mut Vec<T>,
) {
    let (Some((size, inner)), Some((source, rest))) = (shape.split_first(), sources.split_first())
    else {
        to.push(v[at].clone());
        return;
    };
    if rest.is_empty() {
        to.extend(source.iter().map(|s| match s {
            Some(s) => v[at * size + s].clone(),
            None => fill.clone(),
        }));
        return;
    }
    for s in source {
        match s {
            Some(s) => lines(v, at * size + s, inner, rest, fill, to),
            None => {
                let n: usize = rest.iter().map(Vec::len).product();
                to.resize(to.len() + n, fill.clone());
            }
        }
    }
}

fn infer_center(cx: &Inference) -> Option<Vec<Fact>> {
    let mut shape = cx.shape(0)?.to_vec();
    let axes = match cx.attributes.ints("axes") {
        Some(axes) => axes.to_vec(),
        None => (0..shape.len() as i64).collect(),
    };
    let to = cx.ints(1).filter(|to| to.len() == axes.len());
    for (n, d) in axes.iter().enumerate() {
        let d = axis(*d, shape.len())?;
        shape[d] = match &to {
            Some(to) => to[n].clone(),
            None => cx.unknown(),
        };
    }
    cx.like_first(Some(shape))
}

fn center(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let rank = x.shape.len();
    let axes = match call.attributes.ints("axes") {
        Some(axes) => axes.to_vec(),
        None => (0..rank as i64).collect(),
    };
    let to = call.ints(1)?;
    if to.len() != axes.len() || to.iter().any(|n| *n < 0) {
        return Err(format!(
            "{to:?} are not the sizes of {} dimensions",
            axes.len()
        ));
    }
    let mut kept: Vec<Vec<Option<usize>>> = Vec::new();
    for n in &x.shape {
        kept.push((0..*n).map(Some).collect());
    }
    for (d, to) in axes.iter().zip(to) {
        let d = axis(*d, rank).ok_or_else(|| format!("axis {d} is not one of {rank}"))?;
        let n = x.shape[d] as i64;
        // The odd element is cut or added at the end.
        let begin = if to < n {
            -((n - to) / 2)
        } else {
            (to - n) / 2
        };
        kept[d] = sources(x.shape[d], (begin, to - n - begin), "constant")?;
    }
    Ok(vec![selected(x, &kept, None)?])
}
