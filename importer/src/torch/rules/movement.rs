//! Operators that move values: views, permutations, slices, joins, padding.
//!
//! Where the document's result shape says all there is to say (views of every kind), arguments are
//! not read again.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site, element_index};
use graph::{Attr, Binary, ContainerId, Expr, SymExpr};
use ops::attrs;

pub(super) const RULES: Table = &[
    ("aten.view.default", reshape),
    ("aten.reshape.default", reshape),
    ("aten._unsafe_view.default", reshape),
    ("aten.view_as.default", reshape),
    ("aten.flatten.using_ints", reshape),
    ("aten.unflatten.int", reshape),
    ("aten.squeeze.default", reshape),
    ("aten.squeeze.dim", reshape),
    ("aten.squeeze.dims", reshape),
    ("aten.unsqueeze.default", reshape),
    ("aten.expand.default", expand),
    ("aten.expand_as.default", expand),
    ("aten.broadcast_to.default", expand),
    ("aten.permute.default", permute),
    ("aten.transpose.int", transpose),
    ("aten.t.default", turn_last_two),
    ("aten.numpy_T.default", reverse_all),
    ("aten.mT.default", turn_last_two),
    ("aten.flip.default", flip),
    ("aten.repeat.default", repeat),
    ("aten.slice.Tensor", slice),
    ("aten.narrow.default", narrow),
    ("aten.select.int", select),
    ("aten.split.Tensor", split),
    ("aten.split_with_sizes.default", split),
    ("aten.split.sizes", split),
    ("aten.chunk.default", split),
    ("aten.unbind.int", unbind),
    ("aten.cat.default", cat),
    ("aten.concat.default", cat),
    ("aten.stack.default", stack),
    ("aten.diagonal.default", diagonal),
    ("aten.slice_scatter.default", slice_scatter),
    ("aten.select_scatter.default", select_scatter),
    ("aten.constant_pad_nd.default", |s| pad(s, "constant")),
    ("aten.reflection_pad1d.default", |s| pad(s, "reflect")),
    ("aten.reflection_pad2d.default", |s| pad(s, "reflect")),
    ("aten.reflection_pad3d.default", |s| pad(s, "reflect")),
    ("aten.replication_pad1d.default", |s| pad(s, "replicate")),
    ("aten.replication_pad2d.default", |s| pad(s, "replicate")),
    ("aten.replication_pad3d.default", |s| pad(s, "replicate")),
    ("aten.pad.default", pad_named),
];

fn reshape(s: &mut Site) -> Results {
    let (x, shape) = (s.subject()?, s.out_shape(0));
    Ok(vec![Some(s.reshape(x, shape)?)])
}

fn expand(s: &mut Site) -> Results {
    let (x, shape) = (s.subject()?, s.out_shape(0));
    Ok(vec![Some(s.expand(x, shape)?)])
}

fn permute(s: &mut Site) -> Results {
    let x = s.subject()?;
    let rank = s.rank(x);
    let order = s.axes("dims", rank)?.iter().map(|a| *a as i64).collect();
    Ok(vec![Some(s.permute(x, order)?)])
}

fn transpose(s: &mut Site) -> Results {
    let x = s.subject()?;
    let rank = s.rank(x);
    let (a, b) = (s.axis("dim0", rank)?, s.axis("dim1", rank)?);
    swapped(s, x, a, b)
}

fn reverse_all(s: &mut Site) -> Results {
    let x = s.subject()?;
    let order = (0..s.rank(x) as i64).rev().collect();
    Ok(vec![Some(s.permute(x, order)?)])
}

fn turn_last_two(s: &mut Site) -> Results {
    let x = s.subject()?;
    match s.rank(x) {
        0 | 1 => Ok(vec![Some(x)]),
        rank => swapped(s, x, rank - 2, rank - 1),
    }
}

fn swapped(s: &mut Site, x: ContainerId, a: usize, b: usize) -> Results {
    let mut order: Vec<i64> = (0..s.rank(x) as i64).collect();
    if !order.is_empty() {
        order.swap(a, b);
    }
    Ok(vec![Some(s.permute(x, order)?)])
}

fn flip(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axes = s.ints("dims")?;
    Ok(vec![Some(s.op1(
        "flip",
        &[x],
        attrs([("axes", Attr::Ints(axes))]),
    )?)])
}

fn repeat(s: &mut Site) -> Results {
    let (x, repeats) = (s.subject()?, s.sizes("repeats")?);
    Ok(vec![Some(s.op1(
        "tile",
        &[x],
        attrs([("repeats", Attr::Sizes(repeats))]),
    )?)])
}

/// `x[…, start:stop:step, …]` along `axis`.
pub(super) fn cut(
    s: &mut Site,
    x: ContainerId,
    axis: usize,
    (start, stop, step): (SymExpr, SymExpr, i64),
) -> Result<ContainerId, RuleError> {
    let size = s.builder.shape(x)[axis].clone();
    if start.is_zero() && stop == size && step == 1 {
        return Ok(x);
    }
    let a = attrs([
        ("axis", Attr::Int(axis as i64)),
        ("start", Attr::Sizes(vec![start])),
        ("stop", Attr::Sizes(vec![stop])),
        ("step", Attr::Int(step)),
    ]);
    s.op1("slice", &[x], a)
}

/// A bound counted from the front and clamped to the size, as slicing in Python has it.
fn bound(given: SymExpr, size: &SymExpr) -> SymExpr {
    match (given.as_const(), size.as_const()) {
        (Some(i), Some(n)) => SymExpr::constant((if i < 0 { i + n } else { i }).clamp(0, n)),
        (Some(i), None) if i < 0 => size.clone() + SymExpr::constant(i),
        // The exporter writes "to the end" as the largest integer.
        (Some(i), None) if i > i64::from(i32::MAX) => size.clone(),
        _ => given,
    }
}

/// Axis, bounds and step of a slice of `x`.
fn sliced(s: &Site, x: ContainerId) -> Result<(usize, (SymExpr, SymExpr, i64)), RuleError> {
    let axis = match s.has("dim") {
        true => s.axis("dim", s.rank(x))?,
        false => 0,
    };
    let size = s.builder.shape(x)[axis].clone();
    let start = match s.has("start") {
        true => bound(s.size("start")?, &size),
        false => SymExpr::constant(0),
    };
    let stop = match s.has("end") {
        true => bound(s.size("end")?, &size),
        false => size,
    };
    Ok((axis, (start, stop, s.int_or("step", 1)?)))
}

fn slice(s: &mut Site) -> Results {
    let x = s.subject()?;
    let (axis, bounds) = sliced(s, x)?;
    Ok(vec![Some(cut(s, x, axis, bounds)?)])
}

/// `x` with `src` in the place of a slice: `src`, spread so that its elements lie where they belong,
/// is chosen there.
fn slice_scatter(s: &mut Site) -> Results {
    let (x, src) = (s.subject()?, s.tensor("src")?);
    let (axis, (start, stop, step)) = sliced(s, x)?;
    let size = s.builder.shape(x)[axis].clone();
    let mut shape = s.builder.shape(src);
    let length = shape[axis].clone() * step;
    let mut spread = src;
    if step != 1 {
        shape.insert(axis + 1, SymExpr::constant(1));
        spread = s.reshape(spread, shape.clone())?;
        shape[axis + 1] = SymExpr::constant(step);
        spread = s.expand(spread, shape.clone())?;
        shape.remove(axis + 1);
        shape[axis] = length.clone();
        spread = s.reshape(spread, shape.clone())?;
    }
    let mut low = vec![SymExpr::constant(0); shape.len()];
    let mut high = low.clone();
    low[axis] = start.clone();
    high[axis] = size - start.clone() - length;
    let a = attrs([("low", Attr::Sizes(low)), ("high", Attr::Sizes(high))]);
    spread = s.op1("pad", &[spread], a)?;
    let at = element_index(axis);
    let mut inside = Expr::Index(at.clone())
        .ge(Expr::Index(start.clone()))
        .and(Expr::Index(at.clone()).lt(Expr::Index(stop)));
    if step != 1 {
        let rest = Expr::binary(Binary::Mod, Expr::Index(at - start), Expr::int(step));
        inside = inside.and(rest.eq_(Expr::int(0)));
    }
    chosen(s, inside, spread, x)
}

/// `x` with `src` in the place of one element along an axis.
fn select_scatter(s: &mut Site) -> Results {
    let (x, src) = (s.subject()?, s.tensor("src")?);
    let axis = s.axis("dim", s.rank(x))?;
    let at = picked(s, x, axis)?;
    let mut shape = s.builder.shape(src);
    shape.insert(axis, SymExpr::constant(1));
    let src = s.reshape(src, shape)?;
    let here = Expr::Index(element_index(axis)).eq_(Expr::Index(at));
    chosen(s, here, src, x)
}

/// `src` where `inside` holds, `x` elsewhere.
fn chosen(s: &mut Site, inside: Expr, src: ContainerId, x: ContainerId) -> Results {
    let dtype = s.out_dtype(0);
    let expr = Expr::select(inside, Expr::In(1).cast(dtype), Expr::In(0));
    Ok(vec![Some(s.elementwise(expr, &[x, src], dtype)?)])
}

/// The elements with equal positions along two axes: a slice of the two taken as one.
fn diagonal(s: &mut Site) -> Results {
    let x = s.subject()?;
    let rank = s.rank(x);
    let (a, b) = match s.has("dim1") {
        true => (s.axis("dim1", rank)?, s.axis("dim2", rank)?),
        false => (0, 1),
    };
    let mut order: Vec<i64> = (0..rank as i64)
        .filter(|d| *d != a as i64 && *d != b as i64)
        .collect();
    order.extend([a as i64, b as i64]);
    let turned = s.permute(x, order)?;
    let mut shape = s.builder.shape(turned);
    let (rows, columns) = (shape[rank - 2].as_const(), shape[rank - 1].as_const());
    let (Some(rows), Some(columns)) = (rows, columns) else {
        return Err(s.unsupported("of symbolic size"));
    };
    let offset = s.int_or("offset", 0)?;
    let start = if offset < 0 {
        -offset * columns
    } else {
        offset
    };
    let length = (rows - (-offset).max(0))
        .min(columns - offset.max(0))
        .max(0);
    let stop = (start + (length - 1) * (columns + 1) + 1).max(start);
    shape.truncate(rank - 2);
    shape.push(SymExpr::constant(rows * columns));
    let flat = s.reshape(turned, shape)?;
    let bounds = (
        SymExpr::constant(start),
        SymExpr::constant(stop),
        columns + 1,
    );
    Ok(vec![Some(cut(s, flat, rank - 2, bounds)?)])
}

fn narrow(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axis = s.axis("dim", s.rank(x))?;
    let size = s.builder.shape(x)[axis].clone();
    let start = bound(s.size("start")?, &size);
    let stop = start.clone() + s.size("length")?;
    Ok(vec![Some(cut(s, x, axis, (start, stop, 1))?)])
}

/// One element along an axis, which disappears.
pub(super) fn pick(
    s: &mut Site,
    x: ContainerId,
    axis: usize,
    at: SymExpr,
) -> Result<ContainerId, RuleError> {
    let stop = at.clone() + SymExpr::constant(1);
    let row = cut(s, x, axis, (at, stop, 1))?;
    let mut shape = s.builder.shape(row);
    shape.remove(axis);
    s.reshape(row, shape)
}

/// The element that `index` names along an axis of `x`, counted from the front.
fn picked(s: &Site, x: ContainerId, axis: usize) -> Result<SymExpr, RuleError> {
    let at = s.size("index")?;
    Ok(match at.as_const() {
        Some(i) if i < 0 => s.builder.shape(x)[axis].clone() + SymExpr::constant(i),
        _ => at,
    })
}

fn select(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axis = s.axis("dim", s.rank(x))?;
    let at = picked(s, x, axis)?;
    Ok(vec![Some(pick(s, x, axis, at)?)])
}

/// Parts whose sizes are those of the documented results.
fn split(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axis = match s.has("dim") {
        true => s.axis("dim", s.rank(x))?,
        false => 0,
    };
    let mut parts = Vec::new();
    let mut start = SymExpr::constant(0);
    for position in 0..s.node.outputs.len() {
        let stop = start.clone() + s.out_shape(position)[axis].clone();
        parts.push(Some(cut(s, x, axis, (start, stop.clone(), 1))?));
        start = stop;
    }
    Ok(parts)
}

fn unbind(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axis = match s.has("dim") {
        true => s.axis("dim", s.rank(x))?,
        false => 0,
    };
    (0..s.node.outputs.len())
        .map(|i| Ok(Some(pick(s, x, axis, SymExpr::constant(i as i64))?)))
        .collect()
}

fn cat(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut parts = Vec::new();
    for part in s.tensors("tensors")? {
        // Empty ones add nothing; PyTorch lets those of one dimension join anything.
        if s.builder.shape(part).iter().any(SymExpr::is_zero) {
            continue;
        }
        parts.push(s.cast(part, dtype)?);
    }
    joined(s, &parts, "dim")
}

fn stack(s: &mut Site) -> Results {
    let parts = s.tensors("tensors")?;
    let rank = s.out_shape(0).len();
    let axis = match s.has("dim") {
        true => s.axis("dim", rank)?,
        false => 0,
    };
    let mut rows = Vec::new();
    for part in parts {
        let mut shape = s.builder.shape(part);
        shape.insert(axis, SymExpr::constant(1));
        rows.push(s.reshape(part, shape)?);
    }
    joined(s, &rows, "dim")
}

fn joined(s: &mut Site, parts: &[ContainerId], dim: &str) -> Results {
    let rank = s.out_shape(0).len();
    let axis = match s.has(dim) {
        true => s.axis(dim, rank)?,
        false => 0,
    };
    if let [one] = parts {
        return Ok(vec![Some(*one)]);
    }
    let a = attrs([("axis", Attr::Int(axis as i64))]);
    Ok(vec![Some(s.op1("concat", parts, a)?)])
}

fn pad_named(s: &mut Site) -> Results {
    match s.text_or("mode", "constant")?.as_str() {
        "constant" => pad(s, "constant"),
        "reflect" => pad(s, "reflect"),
        "replicate" => pad(s, "replicate"),
        "circular" => pad(s, "wrap"),
        mode => Err(s.unsupported(format!("mode `{mode}`"))),
    }
}

/// PyTorch lists amounts from the last dimension, low before high.
fn pad(s: &mut Site, mode: &str) -> Results {
    let x = s.subject()?;
    let amounts = s.sizes(if s.has("padding") { "padding" } else { "pad" })?;
    let rank = s.rank(x);
    let zero = || vec![SymExpr::constant(0); rank];
    let (mut low, mut high) = (zero(), zero());
    if amounts.len() > 2 * rank {
        return Err(s.unsupported("more padding than dimensions"));
    }
    for (from_last, pair) in amounts.chunks_exact(2).enumerate() {
        low[rank - 1 - from_last] = pair[0].clone();
        high[rank - 1 - from_last] = pair[1].clone();
    }
    let a = attrs([
        ("low", Attr::Sizes(low)),
        ("high", Attr::Sizes(high)),
        ("mode", Attr::Str(mode.into())),
        ("value", Attr::Float(s.float_or("value", 0.0)?)),
    ]);
    Ok(vec![Some(s.op1("pad", &[x], a)?)])
}
