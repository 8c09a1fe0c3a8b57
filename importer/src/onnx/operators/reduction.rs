//! Reductions along axes.

use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Attr, Binary, ContainerId, DType, Expr, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("ArgMax", |cx| arg(cx, "argmax")),
    ("ArgMin", |cx| arg(cx, "argmin")),
    ("CumProd", cumprod),
    ("CumSum", cumsum),
    ("ReduceL1", |cx| reduce(cx, "l1")),
    ("ReduceL2", |cx| reduce(cx, "l2")),
    ("ReduceLogSum", |cx| {
        reduce_with(cx, "sum", None, Some(Expr::In(0).log()))
    }),
    ("ReduceLogSumExp", |cx| reduce(cx, "logsumexp")),
    ("ReduceMax", |cx| reduce(cx, "max")),
    ("ReduceMean", |cx| reduce(cx, "mean")),
    ("ReduceMin", |cx| reduce(cx, "min")),
    ("ReduceProd", |cx| reduce(cx, "prod")),
    ("ReduceSum", |cx| reduce(cx, "sum")),
    ("ReduceSumSquare", |cx| reduce(cx, "sumsq")),
];

fn reduce(cx: &mut NodeCx, kind: &str) -> Values {
    // Without axes and with `noop_with_empty_axes` nothing is summed, but the function still applies.
    let alone = match kind {
        "l1" => Some(Expr::In(0).abs()),
        "l2" => Some(Expr::In(0).mul(Expr::In(0)).sqrt()),
        "sumsq" => Some(Expr::In(0).mul(Expr::In(0))),
        _ => None,
    };
    reduce_with(cx, kind, alone, None)
}

/// Axes come from the attribute or, in newer versions, from the second input. None means all, or with
/// `noop_with_empty_axes` that nothing is reduced and only `alone` is applied.
fn reduce_with(cx: &mut NodeCx, kind: &str, alone: Option<Expr>, after: Option<Expr>) -> Values {
    let x = cx.input(0)?;
    let rank = cx.rank(x);
    let axes = cx.ints_of("axes", 1)?.unwrap_or_default();
    let keep = cx.int("keepdims", 1)? != 0;
    let noop = cx.int("noop_with_empty_axes", 0)? != 0;
    // A single number has no dimension to reduce.
    let mut y = if axes.is_empty() && (noop || rank == 0) {
        match alone {
            Some(f) => cx.elementwise(f, &[x])?,
            None => x,
        }
    } else {
        let axes = match axes.as_slice() {
            [] => (0..rank).collect(),
            given => cx.axes(given, rank)?,
        };
        reduced(cx, x, kind, &axes, keep)?
    };
    if let Some(f) = after {
        y = cx.elementwise(f, &[y])?;
    }
    single(y)
}

/// The reduction in the type of `x`: integer sums are made wider by the operator.
fn reduced(
    cx: &mut NodeCx,
    x: ContainerId,
    kind: &str,
    axes: &[usize],
    keep: bool,
) -> Result<ContainerId, Refusal> {
    let dtype = cx.dtype(x);
    // The largest truth value is whether any is true.
    let kind = match (dtype, kind) {
        (DType::Bool, "max") => "any",
        (DType::Bool, "min") => "all",
        (_, kind) => kind,
    };
    if kind == "mean" && dtype.is_int() {
        return mean_of_integers(cx, x, axes, keep);
    }
    let y = cx.reduce(x, kind, axes, keep)?;
    cx.cast(y, dtype)
}

/// The sum over the number of elements, rounded towards zero.
fn mean_of_integers(
    cx: &mut NodeCx,
    x: ContainerId,
    axes: &[usize],
    keep: bool,
) -> Result<ContainerId, Refusal> {
    let (shape, dtype) = (cx.shape(x), cx.dtype(x));
    let count = SymExpr::product(axes.iter().map(|axis| &shape[*axis]));
    let sum = cx.reduce(x, "sum", axes, keep)?;
    let sum = cx.cast(sum, DType::I64)?;
    let whole = Expr::binary(Binary::FloorDiv, Expr::In(0).abs(), Expr::Index(count));
    let mean = whole.mul(Expr::In(0).sign());
    cx.elementwise(mean.cast(dtype), &[sum])
}

/// With `select_last_index` the last of equal elements counts: it is the first one of the flipped value.
fn arg(cx: &mut NodeCx, kind: &str) -> Values {
    let mut x = cx.input(0)?;
    let axis = cx.axis(cx.int("axis", 0)?, cx.rank(x))?;
    let last = cx.int("select_last_index", 0)? != 0;
    let size = cx.shape(x)[axis].clone();
    if last {
        let list = attrs([("axes", Attr::Ints(vec![axis as i64]))]);
        x = cx.op1("flip", &[x], list)?;
    }
    let list = attrs([
        ("kind", Attr::Str(kind.to_string())),
        ("axis", Attr::Int(axis as i64)),
        ("keep", Attr::Bool(cx.int("keepdims", 1)? != 0)),
    ]);
    let index = cx.op1("arg_reduce", &[x], list)?;
    if !last {
        return single(index);
    }
    let mirrored = Expr::Index(size - 1).sub(Expr::In(0));
    single(cx.elementwise(mirrored, &[index])?)
}

fn cumsum(cx: &mut NodeCx) -> Values {
    let mut x = cx.input(0)?;
    let axis = cx.scalar(1)?.ok_or("its axis is absent")?;
    let axis = cx.axis(axis as i64, cx.rank(x))?;
    let reverse = cx.int("reverse", 0)? != 0;
    if cx.int("exclusive", 0)? != 0 {
        x = shifted(cx, x, axis, reverse)?;
    }
    let list = attrs([
        ("axis", Attr::Int(axis as i64)),
        ("reverse", Attr::Bool(reverse)),
    ]);
    let sum = cx.op1("cumsum", &[x], list)?;
    let dtype = cx.dtype(x);
    single(cx.cast(sum, dtype)?)
}

/// Every element moved by one place along an axis, with a zero in the first place, or in the last one if it is from
/// behind. (Elements cannot be subtracted from sums instead: they may be infinite, or much larger than earlier ones.)
fn shifted(
    cx: &mut NodeCx,
    x: ContainerId,
    axis: usize,
    from_behind: bool,
) -> Result<ContainerId, Refusal> {
    let rank = cx.rank(x);
    let size = cx.shape(x)[axis].clone();
    let none = vec![SymExpr::constant(0); rank];
    let mut one = none.clone();
    one[axis] = 1.into();
    match from_behind {
        false => {
            let longer = cx.padded(x, (one, none), 0.0)?;
            cx.part(longer, axis, 0.into(), size)
        }
        true => {
            let longer = cx.padded(x, (none, one), 0.0)?;
            cx.part(longer, axis, 1.into(), size + 1)
        }
    }
}

/// Computes each element as the product of a row whose later elements are taken as 1: n² products for n elements, like
/// the sums of `cumsum`.
fn cumprod(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let axis = cx.scalar(1)?.ok_or("its axis is absent")?;
    let (shape, dtype) = (cx.shape(x), cx.dtype(x));
    let axis = cx.axis(axis as i64, shape.len())?;
    let (mut row, mut square) = (shape.clone(), shape.clone());
    row.insert(axis, 1.into());
    square.insert(axis, shape[axis].clone());
    let x = cx.reshape(x, row)?;
    let x = expanded(cx, x, square)?;
    let index = |d: usize| SymExpr::symbol(format!("i{d}").as_str());
    let (to, from) = match cx.int("reverse", 0)? {
        0 => (index(axis), index(axis + 1)),
        _ => (index(axis + 1), index(axis)),
    };
    let ahead = Expr::Index(from - to);
    let counts = match cx.int("exclusive", 0)? {
        0 => ahead.le(Expr::int(0)),
        _ => ahead.lt(Expr::int(0)),
    };
    let factor = Expr::select(counts, Expr::In(0), Expr::int(1)).cast(dtype);
    let factor = cx.elementwise(factor, &[x])?;
    let y = cx.reduce(factor, "prod", &[axis + 1], false)?;
    single(cx.cast(y, dtype)?)
}
