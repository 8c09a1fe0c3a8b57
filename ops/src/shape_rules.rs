//! Rules about shapes that several operators share: broadcasting, axes, reduced shapes.
//!
//! Everything here is symbolic; nothing here reads data.

use crate::op::{Call, OpBuilder, OpError, attrs};
use graph::{Attr, Builder, ContainerId, Expr, Memlet, SymExpr};

/// Whether the size is the constant 1.
pub fn is_one(size: &SymExpr) -> bool {
    size.as_const() == Some(1)
}

/// Constant sizes as symbolic ones.
pub fn fixed(shape: &[i64]) -> Vec<SymExpr> {
    shape.iter().map(|n| SymExpr::constant(*n)).collect()
}

/// A shape as it is written in messages: `[batch, 3, 2*h]`.
pub fn display(shape: &[SymExpr]) -> String {
    let sizes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    format!("[{}]", sizes.join(", "))
}

/// The shape both broadcast to; `None` if they do not fit. A symbolic size fits itself and 1.
pub fn broadcast(a: &[SymExpr], b: &[SymExpr]) -> Option<Vec<SymExpr>> {
    let rank = a.len().max(b.len());
    let at = |s: &[SymExpr], d: usize| match (d + s.len()).checked_sub(rank) {
        Some(i) => s[i].clone(),
        None => SymExpr::constant(1),
    };
    (0..rank)
        .map(|d| match (at(a, d), at(b, d)) {
            (x, y) if x == y || is_one(&y) => Some(x),
            (x, y) if is_one(&x) => Some(y),
            _ => None,
        })
        .collect()
}

/// Memlet of a broadcast input for indices over the result.
pub fn broadcast_memlet(input: ContainerId, shape: &[SymExpr], indices: &[SymExpr]) -> Memlet {
    let skip = indices.len() - shape.len();
    let subset = shape.iter().zip(&indices[skip..]).map(|(size, index)| {
        if is_one(size) {
            SymExpr::constant(0)
        } else {
            index.clone()
        }
    });
    Memlet::new(input, subset)
}

/// Sums a broadcast value back to `shape`.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn sum_to(
    builder: &mut Builder,
    value: ContainerId,
    shape: &[SymExpr],
) -> Result<ContainerId, OpError> {
    let wide = builder.shape(value);
    if wide == shape {
        return Ok(value);
    }
    let extra = wide.len() - shape.len();
    let axes: Vec<i64> = (0..wide.len())
        .filter(|d| *d < extra || wide[*d] != shape[*d - extra])
        .map(|d| d as i64)
        .collect();
    let summed = builder.op1(
        "reduce",
        &[value],
        attrs([
            ("kind", Attr::Str("sum".into())),
            ("axes", Attr::Ints(axes)),
            ("keep", Attr::Bool(true)),
        ]),
    )?;
    if extra == 0 {
        return Ok(summed);
    }
    reshape(builder, summed, shape)
}

/// The value seen in another shape of as many elements; the value itself if the shape is the same.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn reshape(
    builder: &mut Builder,
    value: ContainerId,
    shape: &[SymExpr],
) -> Result<ContainerId, OpError> {
    if builder.shape(value) == shape {
        return Ok(value);
    }
    builder.op1(
        "reshape",
        &[value],
        attrs([("shape", Attr::Sizes(shape.to_vec()))]),
    )
}

/// The value stretched to `shape` by broadcasting; the value itself if the shape is the same.
///
/// # Errors
/// As [`OpBuilder::op`].
pub fn expand_to(
    builder: &mut Builder,
    value: ContainerId,
    shape: &[SymExpr],
) -> Result<ContainerId, OpError> {
    if builder.shape(value) == shape {
        return Ok(value);
    }
    builder.op1(
        "expand",
        &[value],
        attrs([("shape", Attr::Sizes(shape.to_vec()))]),
    )
}

/// `axis` counted from the front; negative ones count from the back.
///
/// # Errors
/// There is no such axis.
pub fn axis(call: &Call, axis: i64, rank: usize) -> Result<usize, OpError> {
    let n = rank as i64;
    if axis < -n || axis >= n {
        return Err(call.shape_error(format!("axis {axis} is outside a value of rank {rank}")));
    }
    Ok(axis.rem_euclid(n) as usize)
}

/// The axes in attribute `axes`, from the front, sorted, each once; absent or empty means all.
///
/// # Errors
/// There is no such axis.
pub fn axes(call: &Call, rank: usize) -> Result<Vec<usize>, OpError> {
    let given = call.ints_or("axes", Vec::new())?;
    if given.is_empty() {
        return Ok((0..rank).collect());
    }
    let mut found = given
        .into_iter()
        .map(|a| axis(call, a, rank))
        .collect::<Result<Vec<_>, _>>()?;
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// The shape with `axes` of size 1 (`keep`) or left out.
pub fn reduced(shape: &[SymExpr], axes: &[usize], keep: bool) -> Vec<SymExpr> {
    let mut out = Vec::new();
    for (d, size) in shape.iter().enumerate() {
        match (axes.contains(&d), keep) {
            (false, _) => out.push(size.clone()),
            (true, true) => out.push(SymExpr::constant(1)),
            (true, false) => {}
        }
    }
    out
}

/// The number of elements along `axes`.
pub fn extent(shape: &[SymExpr], axes: &[usize]) -> SymExpr {
    SymExpr::product(axes.iter().map(|a| &shape[*a]))
}

/// `1 / size` as an expression.
pub fn reciprocal(size: &SymExpr) -> Expr {
    match size.as_const() {
        Some(n) => Expr::float(1.0 / n as f64),
        None => Expr::float(1.0).div(Expr::Index(size.clone())),
    }
}
