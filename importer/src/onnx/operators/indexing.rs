//! Elements picked and placed by indices that are data.

use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr, Symbol, Tensor};
use ops::attrs;

pub static RULES: Rules = &[
    ("Compress", compress),
    ("Gather", gather),
    ("GatherElements", gather_elements),
    ("GatherND", gather_nd),
    ("Hardmax", hardmax),
    ("MaxUnpool", max_unpool),
    ("OneHot", one_hot),
    ("ScatterElements", scatter_elements),
    ("ScatterND", scatter_nd),
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

/// Row-major positions in the leading dimensions of `shape`: the first `batch` of these are shared with the indices,
/// and the last dimension of `index` gives positions in those after them.
fn flat_positions(
    cx: &mut NodeCx,
    index: ContainerId,
    shape: &[SymExpr],
    batch: usize,
) -> Result<(ContainerId, usize), Refusal> {
    let index_shape = cx.shape(index);
    let depth = index_shape.last().and_then(SymExpr::as_const);
    let depth = depth
        .and_then(|k| usize::try_from(k).ok())
        .filter(|k| batch + *k <= shape.len() && *k > 0 && batch < index_shape.len());
    let depth = depth.ok_or("the last size of its indices does not fit its input")?;
    let outer = &index_shape[..index_shape.len() - 1];
    // Positions of the dimensions that indices and input share.
    let shared = (0..batch).fold(SymExpr::constant(0), |at, d| {
        at * shape[d].clone() + SymExpr::symbol(Symbol::new(format!("i{d}")))
    });
    let mut position: Option<ContainerId> = None;
    for (d, size) in shape.iter().enumerate().skip(batch).take(depth) {
        let last = index_shape.len() - 1;
        let at = d - batch;
        let column = cx.part(index, last, at.into(), (at + 1).into())?;
        let column = cx.reshape(column, outer.to_vec())?;
        let from_end = Expr::In(0).add(Expr::Index(size.clone()));
        let i = Expr::select(Expr::In(0).lt(Expr::int(0)), from_end, Expr::In(0));
        let mut i = i.cast(DType::I64);
        let mut inputs = vec![column];
        if let Some(before) = position {
            i = i.add(Expr::In(1).mul(Expr::Index(size.clone())));
            inputs.push(before);
        } else if batch > 0 {
            i = i.add(Expr::Index(shared.clone() * size.clone()));
        }
        position = Some(cx.elementwise(i, &inputs)?);
    }
    Ok((position.ok_or("its indices are empty")?, batch + depth))
}

/// The first `n` dimensions of `x` as one.
fn flattened(cx: &mut NodeCx, x: ContainerId, n: usize) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(x);
    if shape.len() < n {
        return Err(Refusal(format!(
            "{n} dimensions are needed, and it has {}",
            shape.len()
        )));
    }
    let mut flat = vec![SymExpr::product(&shape[..n])];
    flat.extend_from_slice(&shape[n..]);
    cx.reshape(x, flat)
}

/// The last dimension of the indices picks along the first dimensions of `x`, taken as one.
fn gather_nd(cx: &mut NodeCx) -> Values {
    let batch = usize::try_from(cx.int("batch_dims", 0)?).unwrap_or(0);
    let (x, index) = (cx.input(0)?, cx.input(1)?);
    let (position, n) = flat_positions(cx, index, &cx.shape(x), batch)?;
    let x = flattened(cx, x, n)?;
    single(cx.along("gather", &[x, position], 0)?)
}

/// Slices put where indices say, or added there.
fn scatter_nd(cx: &mut NodeCx) -> Values {
    let (x, index, updates) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let shape = cx.shape(x);
    let (position, n) = flat_positions(cx, index, &shape, 0)?;
    let rank = cx.rank(position);
    let flat = flattened(cx, x, n)?;
    let updates = flattened(cx, updates, rank)?;
    // One index for each element of a slice.
    let slices = cx.shape(updates);
    let mut sizes = vec![SymExpr::constant(1); slices.len()];
    sizes[0] = slices[0].clone();
    let position = cx.reshape(position, sizes)?;
    let position = expanded(cx, position, slices)?;
    let y = scattered(cx, flat, position, updates, 0)?;
    single(cx.reshape(y, shape)?)
}

/// What the node's `reduction` makes of elements written at indices along an axis.
fn scattered(
    cx: &mut NodeCx,
    x: ContainerId,
    index: ContainerId,
    updates: ContainerId,
    axis: usize,
) -> Result<ContainerId, Refusal> {
    match cx.text("reduction", "none")?.as_str() {
        "add" => cx.along("scatter_add", &[x, index, updates], axis),
        "none" => scatter_set(cx, x, index, updates, axis),
        "max" => scatter_reduced(cx, x, index, updates, (axis, "max")),
        "min" => scatter_reduced(cx, x, index, updates, (axis, "min")),
        "mul" => scatter_reduced(cx, x, index, updates, (axis, "prod")),
        other => Err(Refusal(format!("reduction `{other}` is not supported"))),
    }
}

/// Most pairs of a written element and a result's element that are compared.
const MOST_PAIRS: i64 = 1 << 26;

/// Elements combined with those that are there. Each element of the result compares its place with that of every
/// update; products have no other form, while `scatter_max` and `scatter_min` could take extremes of floats.
fn scatter_reduced(
    cx: &mut NodeCx,
    x: ContainerId,
    index: ContainerId,
    updates: ContainerId,
    (axis, kind): (usize, &str),
) -> Result<ContainerId, Refusal> {
    let dtype = cx.dtype(x);
    let (shape, written) = (cx.shape(x), cx.shape(index));
    if dtype == DType::Bool {
        return Err(Refusal(format!(
            "reduction `{kind}` of truth values is not supported"
        )));
    }
    let (least, greatest) = match dtype.is_float() {
        true => (Expr::float(f64::NEG_INFINITY), Expr::float(f64::INFINITY)),
        false => ends(dtype),
    };
    let (neutral, combined) = match kind {
        "prod" => (Expr::int(1).cast(dtype), Expr::In(0).mul(Expr::In(1))),
        "max" => (least, Expr::In(0).max(Expr::In(1))),
        _ => (greatest, Expr::In(0).min(Expr::In(1))),
    };
    let pairs = SymExpr::product(&written) * shape[axis].clone();
    if pairs.as_const().is_none_or(|n| n > MOST_PAIRS) {
        return Err(Refusal(format!(
            "reduction `{kind}` compares {pairs} pairs of positions; at most {MOST_PAIRS} are supported"
        )));
    }
    // Dimension `axis` is that of the result, the one after it that of the updates.
    let mut row = written.clone();
    row.insert(axis, 1.into());
    let index = cx.reshape(index, row.clone())?;
    let place = cx.positions(&shape[axis], axis, row.len())?;
    let updates = cx.reshape(updates, row)?;
    let here = Expr::In(0).cast(DType::I64).eq_(Expr::In(1));
    let asked = Expr::select(here, Expr::In(2), neutral.clone()).cast(dtype);
    let asked = cx.elementwise(asked, &[index, place, updates])?;
    let mut found = cx.reduce(asked, kind, &[axis + 1], false)?;
    found = cx.cast(found, dtype)?;
    // Beyond the index's sizes nothing is written at all.
    let mut own = written;
    own[axis] = shape[axis].clone();
    let high: Vec<SymExpr> = shape
        .iter()
        .zip(&own)
        .map(|(to, own)| to.clone() - own.clone())
        .collect();
    if high.iter().all(SymExpr::is_zero) {
        return cx.elementwise(combined, &[x, found]);
    }
    let is_written = cx.filled(own, DType::Bool, 1.0)?;
    let around = (vec![0.into(); shape.len()], high);
    let is_written = cx.padded(is_written, around.clone(), 0.0)?;
    let found = cx.padded(found, around, 0.0)?;
    let y = Expr::select(Expr::In(2), combined, Expr::In(0));
    cx.elementwise(y, &[x, found, is_written])
}

/// The least and the greatest number of a type of integers.
fn ends(dtype: DType) -> (Expr, Expr) {
    let n_bits = 8 * dtype.bytes() as u32;
    let (least, greatest) = match dtype {
        DType::U8 => (0, 255),
        _ => (i64::MIN >> (64 - n_bits), i64::MAX >> (64 - n_bits)),
    };
    (Expr::int(least), Expr::int(greatest))
}

/// Elements put at indices along an axis. None may be written twice: so a written element is the sum of its updates,
/// and an element is written if its updates were counted to be more than 0.
pub fn scatter_set(
    cx: &mut NodeCx,
    x: ContainerId,
    index: ContainerId,
    updates: ContainerId,
    axis: usize,
) -> Result<ContainerId, Refusal> {
    let dtype = cx.dtype(x);
    // Not a product with zero, which would be NaN for an infinite element.
    let filled = |n: i64| {
        let is_number = Expr::In(0).eq_(Expr::In(0));
        Expr::select(is_number, Expr::int(n), Expr::int(n)).cast(dtype)
    };
    let zero = cx.elementwise(filled(0), &[x])?;
    let ones = cx.elementwise(filled(1), &[updates])?;
    let sum = cx.along("scatter_add", &[zero, index, updates], axis)?;
    let count = cx.along("scatter_add", &[zero, index, ones], axis)?;
    let y = Expr::select(Expr::In(2).eq_(Expr::int(0)), Expr::In(0), Expr::In(1));
    cx.elementwise(y, &[x, sum, count])
}

fn scatter_elements(cx: &mut NodeCx) -> Values {
    let (x, updates) = (cx.input(0)?, cx.input(2)?);
    let axis = cx.axis(cx.int("axis", 0)?, cx.rank(x))?;
    let index = counted(cx, 1, &cx.shape(x)[axis].clone())?;
    single(scattered(cx, x, index, updates, axis)?)
}

/// Where a constant condition holds, along an axis or of all elements in one row.
fn compress(cx: &mut NodeCx) -> Values {
    let kept: Vec<i64> = (0..)
        .zip(cx.numbers(1)?)
        .filter(|(_, truth)| *truth != 0.0)
        .map(|(at, _)| at)
        .collect();
    let mut x = cx.input(0)?;
    let axis = if cx.has("axis") {
        cx.axis(cx.int("axis", 0)?, cx.rank(x))?
    } else {
        let n = SymExpr::product(&cx.shape(x));
        x = cx.reshape(x, vec![n])?;
        0
    };
    let kept = Tensor::from_i64(DType::I64, &[kept.len()], kept);
    let kept = cx.constant(kept);
    single(cx.along("gather", &[x, kept], axis)?)
}

/// Numbers of a pool put back where they were the largest, zeros elsewhere. Indices count through the whole
/// result that the window alone would give; a given size adds elements after it.
fn max_unpool(cx: &mut NodeCx) -> Values {
    let (x, index) = (cx.input(0)?, cx.input(1)?);
    let shape = cx.shape(x);
    let kernel = cx
        .ints("kernel_shape")?
        .ok_or("its attribute `kernel_shape` is missing")?;
    let d = kernel.len();
    let stride = cx.ints("strides")?.unwrap_or_else(|| vec![1; d]);
    let pads = cx.ints("pads")?.unwrap_or_else(|| vec![0; 2 * d]);
    let all = kernel.iter().chain(&stride).chain(&pads);
    let is_usual = all.clone().all(|n| n.unsigned_abs() <= MOST_PAIRS as u64);
    if !is_usual || shape.len() != d + 2 || stride.len() != d || pads.len() != 2 * d {
        return Err("its window does not fit its input".into());
    }
    let mut to = shape[..2].to_vec();
    for n in 0..d {
        let size = (shape[n + 2].clone() - 1) * stride[n];
        to.push(size + (kernel[n] - pads[n] - pads[n + d]));
    }
    let flat = vec![SymExpr::product(&shape)];
    let x = cx.reshape(x, flat.clone())?;
    let index = cx.reshape(index, flat)?;
    let dtype = cx.dtype(x);
    let zeros = cx.filled(vec![SymExpr::product(&to)], dtype, 0.0)?;
    let y = scatter_set(cx, zeros, index, x, 0)?;
    let y = cx.reshape(y, to.clone())?;
    let Some(wanted) = cx.optional_known(2)? else {
        return single(y);
    };
    if wanted.elements.len() != to.len() {
        return Err("its output_shape does not fit its input".into());
    }
    let pairs = wanted.elements.iter().zip(&to);
    let high: Vec<SymExpr> = pairs
        .map(|(wanted, own)| wanted.clone() - own.clone())
        .collect();
    let low = vec![0.into(); to.len()];
    single(cx.padded(y, (low, high), 0.0)?)
}

/// 1 at the first largest element along an axis, 0 elsewhere.
fn hardmax(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let (shape, dtype) = (cx.shape(x), cx.dtype(x));
    let axis = cx.axis(cx.int("axis", -1)?, shape.len())?;
    let list = attrs([
        ("kind", Attr::Str("argmax".to_string())),
        ("axis", Attr::Int(axis as i64)),
        ("keep", Attr::Bool(false)),
    ]);
    let index = cx.op1("arg_reduce", &[x], list)?;
    let list = attrs([
        ("depth", Attr::Sizes(vec![shape[axis].clone()])),
        ("dtype", Attr::DType(dtype)),
    ]);
    let hot = cx.op1("one_hot", &[index], list)?;
    let mut order: Vec<usize> = (0..shape.len() - 1).collect();
    order.insert(axis, shape.len() - 1);
    single(cx.permute(hot, &order)?)
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
