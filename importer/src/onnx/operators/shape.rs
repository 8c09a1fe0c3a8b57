//! Rearrangements: the same elements under another shape or order, repeated or not.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Attr, ContainerId, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("DepthToSpace", depth_to_space),
    ("Expand", expand),
    ("Flatten", flatten),
    ("Reshape", reshape),
    ("SpaceToDepth", space_to_depth),
    ("Squeeze", squeeze),
    ("Tile", tile),
    ("Transpose", transpose),
    ("Unsqueeze", unsqueeze),
];

/// A 0 copies the input's size (unless `allowzero`), a −1 takes what is left.
fn reshape(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let from = cx.shape(x);
    let copy = cx.int("allowzero", 0)? == 0;
    let mut to = cx.sizes(1)?;
    for (d, size) in to.iter_mut().enumerate() {
        if size.is_zero() && copy {
            let same = from.get(d).cloned();
            *size = same.ok_or_else(|| {
                Refusal(format!(
                    "its shape copies dimension {d}, which its input lacks"
                ))
            })?;
        }
    }
    let open: Vec<_> = (0..to.len())
        .filter(|d| to[*d].as_const() == Some(-1))
        .collect();
    if let [d] = open.as_slice() {
        to[*d] = 1.into();
        to[*d] = rest(&from, &to).ok_or_else(|| {
            Refusal(format!(
                "its elements do not divide into shape {}",
                written(&to)
            ))
        })?;
    }
    single(cx.reshape(x, to)?)
}

/// The size that makes `to`, which has 1 in its place, hold as many elements as `from`.
fn rest(from: &[SymExpr], to: &[SymExpr]) -> Option<SymExpr> {
    // Equal sizes cancel first, so that few symbolic divisions are left.
    let mut from: Vec<_> = from.to_vec();
    let mut left = Vec::new();
    for size in to {
        match from.iter().position(|f| f == size) {
            Some(d) => drop(from.remove(d)),
            None => left.push(size.clone()),
        }
    }
    let (total, divisor) = (SymExpr::product(&from), SymExpr::product(&left));
    match (total.as_const(), divisor.as_const()) {
        (_, Some(0)) => None,
        (Some(n), Some(d)) if n % d != 0 => None,
        _ => Some(
            total
                .divide_exactly(&divisor)
                .unwrap_or_else(|| total.floor_div(&divisor)),
        ),
    }
}

/// A shape for messages.
pub fn written(shape: &[SymExpr]) -> String {
    let sizes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

fn flatten(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let axis = cx.int("axis", 1)?;
    let rank = shape.len() as i64;
    let at = if axis < 0 { axis + rank } else { axis };
    if !(0..=rank).contains(&at) {
        return Err(Refusal(format!(
            "axis {axis} is not one of its {rank} dimensions"
        )));
    }
    let (rows, columns) = shape.split_at(at as usize);
    let to = vec![SymExpr::product(rows), SymExpr::product(columns)];
    single(cx.reshape(x, to)?)
}

fn transpose(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let rank = cx.rank(x);
    let Some(order) = cx.ints("perm")? else {
        let reversed: Vec<_> = (0..rank).rev().collect();
        return single(cx.permute(x, &reversed)?);
    };
    if order.len() != rank {
        return Err(Refusal(format!(
            "its attribute `perm` has {} numbers, not {rank}",
            order.len()
        )));
    }
    cx.axes(&order, rank)?;
    let order: Result<Vec<_>, _> = order.iter().map(|d| cx.axis(*d, rank)).collect();
    single(cx.permute(x, &order?)?)
}

fn squeeze(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let one = SymExpr::constant(1);
    let gone = match cx.ints_of("axes", 1)? {
        Some(axes) => cx.axes(&axes, shape.len())?,
        None => (0..shape.len()).filter(|d| shape[*d] == one).collect(),
    };
    if let Some(d) = gone
        .iter()
        .find(|d| shape[**d].as_const().is_some_and(|n| n != 1))
    {
        return Err(Refusal(format!(
            "dimension {d} of {} has not size 1",
            written(&shape)
        )));
    }
    let kept = (0..shape.len()).filter(|d| !gone.contains(d));
    let to = kept.map(|d| shape[d].clone()).collect();
    single(cx.reshape(x, to)?)
}

fn unsqueeze(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let mut shape = cx.shape(x);
    let axes = cx.ints_of("axes", 1)?.ok_or("its axes are absent")?;
    for axis in cx.axes(&axes, shape.len() + axes.len())? {
        shape.insert(axis, SymExpr::constant(1));
    }
    single(cx.reshape(x, shape)?)
}

/// Broadcasts both ways: a size 1 of the target keeps the input's size.
fn expand(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let (from, to) = (cx.shape(x), cx.sizes(1)?);
    let rank = from.len().max(to.len());
    let one = SymExpr::constant(1);
    let at = |s: &[SymExpr], d: usize| {
        let index = (d + s.len()).checked_sub(rank);
        index.map_or_else(|| SymExpr::constant(1), |i| s[i].clone())
    };
    let mut shape = Vec::new();
    for d in 0..rank {
        let (size, wanted) = (at(&from, d), at(&to, d));
        shape.push(if size == one {
            wanted.clone()
        } else {
            size.clone()
        });
        let clash = (size.clone() - wanted.clone())
            .as_const()
            .is_some_and(|n| n != 0);
        if clash && size != one && wanted != one {
            return Err(Refusal(format!(
                "{} does not broadcast to {}",
                written(&from),
                written(&to)
            )));
        }
    }
    single(expanded(cx, x, shape)?)
}

/// `x` broadcast to `shape`.
pub fn expanded(
    cx: &mut NodeCx,
    x: ContainerId,
    shape: Vec<SymExpr>,
) -> Result<ContainerId, Refusal> {
    if cx.shape(x) == shape {
        return Ok(x);
    }
    cx.op1("expand", &[x], attrs([("shape", Attr::Sizes(shape))]))
}

fn tile(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let repeats = cx.sizes(1)?;
    if repeats.len() != cx.rank(x) {
        return Err(Refusal(format!(
            "it repeats {} of {} dimensions",
            repeats.len(),
            cx.rank(x)
        )));
    }
    // Beyond these, a product with a size may overflow.
    let is_possible = |n: i64| (0..1 << 40).contains(&n);
    let mut known = repeats.iter().filter_map(SymExpr::as_const);
    if let Some(n) = known.find(|n| !is_possible(*n)) {
        return Err(Refusal(format!("it repeats a dimension {n} times")));
    }
    single(cx.op1("tile", &[x], attrs([("repeats", Attr::Sizes(repeats))]))?)
}

/// Batch, channels, height, width and the block size.
fn image(cx: &NodeCx, x: ContainerId) -> Result<([SymExpr; 4], SymExpr), Refusal> {
    let shape: Result<[SymExpr; 4], _> = cx.shape(x).try_into();
    let shape = shape.map_err(|_| Refusal("its input must have 4 dimensions".into()))?;
    let block = cx.int("blocksize", 0)?;
    if block < 1 {
        return Err(Refusal("its attribute `blocksize` is missing".into()));
    }
    Ok((shape, block.into()))
}

fn depth_to_space(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let ([n, c, h, w], b) = image(cx, x)?;
    let area = b.clone() * b.clone();
    let c = c
        .divide_exactly(&area)
        .ok_or("its channels do not divide into blocks")?;
    let (split, order) = match cx.text("mode", "DCR")?.as_str() {
        "DCR" => (
            [
                n.clone(),
                b.clone(),
                b.clone(),
                c.clone(),
                h.clone(),
                w.clone(),
            ],
            [0, 3, 4, 1, 5, 2],
        ),
        "CRD" => (
            [
                n.clone(),
                c.clone(),
                b.clone(),
                b.clone(),
                h.clone(),
                w.clone(),
            ],
            [0, 1, 4, 2, 5, 3],
        ),
        other => return Err(Refusal(format!("its attribute `mode` is `{other}`"))),
    };
    let blocks = cx.reshape(x, split.to_vec())?;
    let moved = cx.permute(blocks, &order)?;
    single(cx.reshape(moved, vec![n, c, h * b.clone(), w * b])?)
}

fn space_to_depth(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let ([n, c, h, w], b) = image(cx, x)?;
    let fits = (h.divide_exactly(&b), w.divide_exactly(&b));
    let (Some(h), Some(w)) = fits else {
        return Err(Refusal(
            "its height and width do not divide into blocks".into(),
        ));
    };
    let order = match cx.text("mode", "DCR")?.as_str() {
        "DCR" => [0, 3, 5, 1, 2, 4],
        "CRD" => [0, 1, 3, 5, 2, 4],
        other => return Err(Refusal(format!("its attribute `mode` is `{other}`"))),
    };
    let split = [&n, &c, &h, &b, &w, &b].map(Clone::clone);
    let blocks = cx.reshape(x, split.to_vec())?;
    let moved = cx.permute(blocks, &order)?;
    single(cx.reshape(moved, vec![n, c * b.clone() * b, h, w])?)
}
