//! Elements picked and placed by indices that are data.

use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr, Symbol};
use ops::attrs;

pub static RULES: Rules = &[
    ("Gather", gather),
    ("GatherElements", gather_elements),
    ("GatherND", gather_nd),
    ("OneHot", one_hot),
    ("ScatterElements", scatter_elements),
    ("TopK", topk),
    ("Trilu", trilu),
];

/// Indices of `i64`, negative ones counted from the end of a dimension of `size`.
fn counted(cx: &mut NodeCx, position: usize, size: &SymExpr) -> Result<ContainerId, Refusal> {
    // Constants that need no counting stay as they are.
    if let Ok(ints) = cx.known(position) {
        let within = |e: &SymExpr| e.as_const().is_some_and(|n| n >= 0);
        if ints.elements.iter().all(within) {
            let index = cx.input(position)?;
            return cx.cast(index, DType::I64);
        }
    }
    let index = cx.input(position)?;
    let i = Expr::In(0).cast(DType::I64);
    let from_end = i.clone().add(Expr::Index(size.clone()));
    let index_or = Expr::select(i.clone().lt(Expr::int(0)), from_end, i);
    cx.elementwise(index_or, &[index])
}

fn along(axis: usize) -> graph::Attrs {
    attrs([("axis", Attr::Int(axis as i64))])
}

fn gather(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let axis = cx.axis(cx.int("axis", 0)?, cx.rank(x))?;
    let index = counted(cx, 1, &cx.shape(x)[axis].clone())?;
    single(cx.op1("gather", &[x, index], along(axis))?)
}

fn gather_elements(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let axis = cx.axis(cx.int("axis", 0)?, cx.rank(x))?;
    let index = counted(cx, 1, &cx.shape(x)[axis].clone())?;
    single(cx.op1("gather_elements", &[x, index], along(axis))?)
}

/// The last dimension of the indices picks along the first dimensions of `x`, taken as one.
fn gather_nd(cx: &mut NodeCx) -> Values {
    if cx.int("batch_dims", 0)? != 0 {
        return Err("`batch_dims` is not supported".into());
    }
    let (x, index) = (cx.input(0)?, cx.input(1)?);
    let (shape, index_shape) = (cx.shape(x), cx.shape(index));
    let depth = index_shape.last().and_then(SymExpr::as_const);
    let depth = depth
        .and_then(|k| usize::try_from(k).ok())
        .filter(|k| *k <= shape.len() && *k > 0);
    let depth = depth.ok_or("the last size of its indices does not fit its input")?;
    let outer = &index_shape[..index_shape.len() - 1];
    let mut position: Option<ContainerId> = None;
    for (d, size) in shape.iter().enumerate().take(depth) {
        let column = attrs([
            ("axis", Attr::Int(index_shape.len() as i64 - 1)),
            ("start", Attr::Sizes(vec![d.into()])),
            ("stop", Attr::Sizes(vec![(d + 1).into()])),
            ("step", Attr::Int(1)),
        ]);
        let column = cx.op1("slice", &[index], column)?;
        let column = cx.reshape(column, outer.to_vec())?;
        let from_end = Expr::In(0).add(Expr::Index(size.clone()));
        let mut i = Expr::select(Expr::In(0).lt(Expr::int(0)), from_end, Expr::In(0));
        let mut inputs = vec![column];
        if let Some(before) = position {
            i = i.add(Expr::In(1).mul(Expr::Index(size.clone())));
            inputs.push(before);
        }
        position = Some(cx.elementwise(i, &inputs)?);
    }
    let mut flat = vec![SymExpr::product(&shape[..depth])];
    flat.extend_from_slice(&shape[depth..]);
    let x = cx.reshape(x, flat)?;
    let position = position.ok_or("its indices are empty")?;
    single(cx.op1("gather", &[x, position], along(0))?)
}

/// Without a reduction no element may be written twice, so a written element is the sum of what is
/// written to it, and one is written if something was counted there.
fn scatter_elements(cx: &mut NodeCx) -> Values {
    let (x, updates) = (cx.input(0)?, cx.input(2)?);
    let axis = cx.axis(cx.int("axis", 0)?, cx.rank(x))?;
    let index = counted(cx, 1, &cx.shape(x)[axis].clone())?;
    match cx.text("reduction", "none")?.as_str() {
        "add" => single(cx.op1("scatter_add", &[x, index, updates], along(axis))?),
        "none" => {
            let zero = cx.elementwise(Expr::In(0).mul(Expr::int(0)), &[x])?;
            let ones = Expr::select(Expr::In(0).eq_(Expr::In(0)), Expr::int(1), Expr::int(1));
            let dtype = cx.dtype(x);
            let ones = cx.elementwise(ones.cast(dtype), &[updates])?;
            let sum = cx.op1("scatter_add", &[zero, index, updates], along(axis))?;
            let count = cx.op1("scatter_add", &[zero, index, ones], along(axis))?;
            let y = Expr::select(Expr::In(2).eq_(Expr::int(0)), Expr::In(0), Expr::In(1));
            single(cx.elementwise(y, &[x, sum, count])?)
        }
        other => Err(Refusal(format!("reduction `{other}` is not supported"))),
    }
}

fn one_hot(cx: &mut NodeCx) -> Values {
    let (index, values) = (cx.input(0)?, cx.input(2)?);
    let depth = match cx.known(1) {
        Ok(ints) => ints.elements.first().cloned(),
        Err(_) => cx.scalar(1)?.map(|n| SymExpr::constant(n as i64)),
    };
    let depth = depth.ok_or("its depth is absent")?;
    let mut shape = cx.shape(index);
    let axis = cx.axis(cx.int("axis", -1)?, shape.len() + 1)?;
    shape.insert(axis, SymExpr::constant(1));
    let index = cx.reshape(index, shape.clone())?;
    shape[axis] = depth.clone();
    let index = expanded(cx, index, shape)?;
    let part = |cx: &mut NodeCx, n: i64| {
        let list = attrs([
            ("axis", Attr::Int(0)),
            ("start", Attr::Sizes(vec![n.into()])),
            ("stop", Attr::Sizes(vec![(n + 1).into()])),
            ("step", Attr::Int(1)),
        ]);
        cx.op1("slice", &[values], list)
    };
    let (off, on) = (part(cx, 0)?, part(cx, 1)?);
    let i = Expr::In(0).cast(DType::I64);
    let from_end = i.clone().add(Expr::Index(depth));
    let i = Expr::select(i.clone().lt(Expr::int(0)), from_end, i);
    let here = Expr::Index(SymExpr::symbol(Symbol::new(format!("i{axis}"))));
    let y = Expr::select(i.eq_(here), Expr::In(2), Expr::In(1));
    single(cx.elementwise(y, &[index, off, on])?)
}

/// Always sorted, which `sorted = 0` allows too.
fn topk(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let axis = cx.axis(cx.int("axis", -1)?, cx.rank(x))?;
    let k = cx
        .sizes(1)?
        .first()
        .cloned()
        .ok_or("its number of elements is absent")?;
    cx.int("sorted", 1)?;
    let list = attrs([
        ("axis", Attr::Int(axis as i64)),
        ("k", Attr::Sizes(vec![k])),
        ("largest", Attr::Bool(cx.int("largest", 1)? != 0)),
    ]);
    let outputs = cx.op("topk", &[Some(x)], list)?;
    Ok(outputs.into_iter().map(Value::Data).collect())
}

/// Keeps the upper (or lower) triangle of the last two dimensions, shifted by `k`.
fn trilu(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let rank = cx.rank(x);
    if rank < 2 {
        return Err("its input must have at least 2 dimensions".into());
    }
    let k = cx.scalar(1)?.unwrap_or(0.0) as i64;
    let index = |d: usize| SymExpr::symbol(Symbol::new(format!("i{d}")));
    let distance = Expr::Index(index(rank - 1) - index(rank - 2) - k);
    let kept = match cx.int("upper", 1)? {
        0 => distance.le(Expr::int(0)),
        _ => distance.ge(Expr::int(0)),
    };
    let dtype = cx.dtype(x);
    let y = Expr::select(kept, Expr::In(0), Expr::int(0)).cast(dtype);
    single(cx.elementwise(y, &[x])?)
}
