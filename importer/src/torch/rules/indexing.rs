//! Look-ups and scatters by integer tensors, and order.

use super::Table;
use super::movement::cut;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, ContainerId, DType, Expr, SymExpr};
use ops::attrs;

pub(super) const RULES: Table = &[
    ("aten.embedding.default", embedding),
    ("aten.index_select.default", index_select),
    ("aten.index.Tensor", index),
    ("aten.index_put.default", index_put),
    ("aten.index_add.default", index_add),
    ("aten.gather.default", gather),
    ("aten.scatter_add.default", scatter_add),
    ("aten.scatter.value", scatter_value),
    ("aten.scatter_reduce.two", scatter_reduce),
    ("aten.topk.default", topk),
    ("aten.sort.default", sort),
    ("aten.sort.stable", sort),
];

fn axis_attr(axis: usize) -> (&'static str, Attr) {
    ("axis", Attr::Int(axis as i64))
}

fn embedding(s: &mut Site) -> Results {
    let (weight, index) = (s.tensor("weight")?, s.tensor("indices")?);
    if s.flag("scale_grad_by_freq")? || s.flag("sparse")? {
        return Err(s.unsupported("sparse or frequency-scaled gradients"));
    }
    let mut a = attrs([axis_attr(0)]);
    let padding = s.int_or("padding_idx", -1)?;
    if padding >= 0 {
        a.insert("padding_idx".into(), Attr::Int(padding));
    }
    Ok(vec![Some(s.op1("gather", &[weight, index], a)?)])
}

fn index_select(s: &mut Site) -> Results {
    let (x, index) = (s.subject()?, s.tensor("index")?);
    let axis = s.axis("dim", s.rank(x))?;
    take(s, x, index, axis)
}

fn take(s: &mut Site, x: ContainerId, index: ContainerId, axis: usize) -> Results {
    Ok(vec![Some(s.op1(
        "gather",
        &[x, index],
        attrs([axis_attr(axis)]),
    )?)])
}

/// `x[:, index]`: integer tensors, whole slices elsewhere.
fn index(s: &mut Site) -> Results {
    let x = s.subject()?;
    let (axes, indices) = indexed(s)?;
    let (x, axis, index) = one_index(s, x, &axes, &indices)?;
    take(s, x, index, axis)
}

/// The axes that have an index in `indices`, and these indices.
fn indexed(s: &Site) -> Result<(Vec<usize>, Vec<ContainerId>), RuleError> {
    let given = s.optional_tensors("indices")?;
    let used = given
        .iter()
        .enumerate()
        .filter_map(|(d, i)| Some((d, (*i)?)));
    let (axes, indices): (Vec<usize>, Vec<ContainerId>) = used.unzip();
    if indices.iter().any(|i| s.builder.dtype(*i) == DType::Bool) {
        return Err(s.unsupported("a boolean mask, whose result has no known size"));
    }
    if indices.is_empty() {
        return Err(s.unsupported("no index"));
    }
    Ok((axes, indices))
}

/// `x` with the indexed axes merged into one, the position of that axis, and one index for it, counted from the front.
/// Indexed axes that are not neighbours come to the front, as in PyTorch.
fn one_index(
    s: &mut Site,
    x: ContainerId,
    axes: &[usize],
    indices: &[ContainerId],
) -> Result<(ContainerId, usize, ContainerId), RuleError> {
    let sizes: Vec<SymExpr> = axes
        .iter()
        .map(|a| s.builder.shape(x)[*a].clone())
        .collect();
    let mut at = Expr::int(0);
    for (n, size) in sizes.iter().enumerate() {
        let (i, size) = (Expr::In(n).cast(DType::I64), Expr::Index(size.clone()));
        let wrapped = Expr::select(i.clone().lt(Expr::int(0)), i.clone().add(size.clone()), i);
        at = if n == 0 {
            wrapped
        } else {
            at.mul(size).add(wrapped)
        };
    }
    let index = s.elementwise(at, indices, DType::I64)?;
    let (first, rank) = (axes[0], s.rank(x));
    if axes.len() == 1 {
        return Ok((x, first, index));
    }
    let together = axes.windows(2).all(|w| w[1] == w[0] + 1);
    let axis = if together { first } else { 0 };
    let mut order: Vec<usize> = (0..rank).filter(|d| !axes.contains(d)).collect();
    order.splice(axis..axis, axes.iter().copied());
    let turned = s.permute(x, order.iter().map(|d| *d as i64).collect())?;
    let mut shape = s.builder.shape(turned);
    shape.splice(axis..axis + axes.len(), [SymExpr::product(&sizes)]);
    Ok((s.reshape(turned, shape)?, axis, index))
}

/// Writes a value where a mask holds, or adds values at one index along the first axis.
fn index_put(s: &mut Site) -> Results {
    let (x, values, dtype) = (s.subject()?, s.tensor("values")?, s.out_dtype(0));
    let given = s.optional_tensors("indices")?;
    if let [Some(mask)] = given.as_slice()
        && s.builder.dtype(*mask) == DType::Bool
    {
        if !s
            .builder
            .shape(values)
            .iter()
            .all(|n| *n == SymExpr::constant(1))
            || s.flag("accumulate")?
        {
            return Err(s.unsupported("a boolean mask with several values"));
        }
        let value = s.reshape(values, vec![])?;
        let mut shape = s.builder.shape(*mask);
        let one = SymExpr::constant(1);
        let sizes = s.builder.shape(x);
        if shape
            .iter()
            .zip(&sizes)
            .any(|(m, n)| *m == one && *n != one)
        {
            // PyTorch raises an error; before 2.14 its tracer does not.
            return Err(s.unsupported("a mask of another size than the tensor"));
        }
        shape.resize(s.rank(x), one);
        let mask = s.reshape(*mask, shape)?;
        let expr = Expr::select(Expr::In(1), Expr::In(2).cast(dtype), Expr::In(0));
        return Ok(vec![Some(s.elementwise(expr, &[x, mask, value], dtype)?)]);
    }
    if !s.flag("accumulate")? {
        return Err(s.unsupported("values written at indices that may repeat"));
    }
    let (axes, indices) = indexed(s)?;
    if axes != [0] {
        return Err(s.unsupported("indices of other axes than the first"));
    }
    let (x, _, index) = one_index(s, x, &axes, &indices)?;
    let mut shape = s.builder.shape(index);
    shape.extend_from_slice(&s.builder.shape(x)[1..]);
    let values = s.expand(values, shape)?;
    added_rows(s, x, 0, index, values)
}

/// `x[:, index] += alpha·source`.
fn index_add(s: &mut Site) -> Results {
    let (x, index, mut source) = (s.subject()?, s.tensor("index")?, s.tensor("source")?);
    let axis = s.axis("dim", s.rank(x))?;
    if s.float_or("alpha", 1.0)? != 1.0 {
        let dtype = s.builder.dtype(source);
        let alpha = s.factor("alpha", dtype)?;
        source = s.elementwise(Expr::In(0).mul(alpha), &[source], dtype)?;
    }
    added_rows(s, x, axis, index, source)
}

/// Adds `rows` to `x` where `index` says along `axis`; the index's dimensions stand for that axis.
fn added_rows(
    s: &mut Site,
    x: ContainerId,
    axis: usize,
    index: ContainerId,
    rows: ContainerId,
) -> Results {
    let n = SymExpr::product(&s.builder.shape(index));
    let mut shape = s.builder.shape(x);
    shape[axis] = n.clone();
    let rows = s.reshape(rows, shape.clone())?;
    let mut aligned = vec![SymExpr::constant(1); shape.len()];
    aligned[axis] = n;
    let index = s.reshape(index, aligned)?;
    let index = s.expand(index, shape)?;
    let a = attrs([axis_attr(axis)]);
    Ok(vec![Some(s.op1("scatter_add", &[x, index, rows], a)?)])
}

fn gather(s: &mut Site) -> Results {
    let (x, index) = (s.subject()?, s.tensor("index")?);
    let axis = s.axis("dim", s.rank(x))?;
    Ok(vec![Some(s.op1(
        "gather_elements",
        &[x, index],
        attrs([axis_attr(axis)]),
    )?)])
}

/// A number in the places that an index names.
fn scatter_value(s: &mut Site) -> Results {
    let (x, index, dtype) = (s.subject()?, s.tensor("index")?, s.out_dtype(0));
    let axis = s.axis("dim", s.rank(x))?;
    let value = s.scalar("value")?;
    let of = |v: f64| Expr::float(v).cast(DType::F32);
    let none = s.elementwise(of(0.0), &[x], DType::F32)?;
    let one = s.elementwise(of(1.0), &[index], DType::F32)?;
    let a = attrs([axis_attr(axis)]);
    let hits = s.op1("scatter_add", &[none, index, one], a)?;
    let hit = Expr::In(1).gt(Expr::float(0.0));
    let expr = Expr::select(hit, value.cast(dtype), Expr::In(0));
    Ok(vec![Some(s.elementwise(expr, &[x, hits], dtype)?)])
}

fn scatter_add(s: &mut Site) -> Results {
    let (x, index, mut src) = (s.subject()?, s.tensor("index")?, s.tensor("src")?);
    let axis = s.axis("dim", s.rank(x))?;
    // What lies beyond the index is not read.
    for (d, size) in s.builder.shape(index).into_iter().enumerate() {
        src = cut(s, src, d, (SymExpr::constant(0), size, 1))?;
    }
    Ok(vec![Some(s.op1(
        "scatter_add",
        &[x, index, src],
        attrs([axis_attr(axis)]),
    )?)])
}

/// The largest or the smallest at each place; `_decomposed_indexing.py` writes the other reductions as sums.
fn scatter_reduce(s: &mut Site) -> Results {
    let (x, index, mut src) = (s.subject()?, s.tensor("index")?, s.tensor("src")?);
    let axis = s.axis("dim", s.rank(x))?;
    let op = match s.text_or("reduce", "")?.as_str() {
        "amax" => "scatter_max",
        "amin" => "scatter_min",
        other => return Err(s.unsupported(format!("the reduction {other}"))),
    };
    for (d, size) in s.builder.shape(index).into_iter().enumerate() {
        src = cut(s, src, d, (SymExpr::constant(0), size, 1))?;
    }
    let mut a = attrs([axis_attr(axis)]);
    // The flag is absent where it is true.
    if s.has("include_self") && !s.flag("include_self")? {
        a.insert("include_self".into(), Attr::Bool(false));
    }
    Ok(vec![Some(s.op1(op, &[x, index, src], a)?)])
}

fn topk(s: &mut Site) -> Results {
    let x = s.subject()?;
    let axis = if s.has("dim") {
        s.axis("dim", s.rank(x))?
    } else {
        s.rank(x) - 1
    };
    let k = s.size("k")?;
    let largest = !s.node.args.contains_key("largest") || s.flag("largest")?;
    let a = attrs([
        axis_attr(axis),
        ("k", Attr::Sizes(vec![k])),
        ("largest", Attr::Bool(largest)),
    ]);
    both(s, "topk", x, a)
}

fn sort(s: &mut Site) -> Results {
    let x = s.subject()?;
    if s.rank(x) == 0 {
        return Err(s.unsupported("of a scalar"));
    }
    let axis = match s.has("dim") {
        true => s.axis("dim", s.rank(x))?,
        false => s.rank(x) - 1,
    };
    let size = s.builder.shape(x)[axis].clone();
    let a = attrs([
        axis_attr(axis),
        ("k", Attr::Sizes(vec![size])),
        ("largest", Attr::Bool(s.flag("descending")?)),
    ]);
    both(s, "topk", x, a)
}

fn both(
    s: &mut Site,
    op: &str,
    x: ContainerId,
    a: graph::Attrs,
) -> Result<Vec<Option<ContainerId>>, RuleError> {
    let made = ops::OpBuilder::op(&mut s.builder, op, &[Some(x)], a)?;
    Ok(made.into_iter().map(Some).collect())
}
