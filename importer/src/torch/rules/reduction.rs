//! Reductions along dimensions.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, ContainerId, DType, Expr, SymExpr};
use ops::attrs;

pub(super) const RULES: Table = &[
    ("aten.sum.default", |s| reduce(s, "sum")),
    ("aten.sum.dim_IntList", |s| reduce(s, "sum")),
    ("aten.mean.default", |s| reduce(s, "mean")),
    ("aten.mean.dim", |s| reduce(s, "mean")),
    ("aten.prod.default", |s| reduce(s, "prod")),
    ("aten.prod.dim_int", |s| reduce(s, "prod")),
    ("aten.amax.default", |s| extremes(s, "max", "all")),
    ("aten.amin.default", |s| extremes(s, "min", "all")),
    ("aten.max.default", |s| extremes(s, "max", "nan")),
    ("aten.min.default", |s| extremes(s, "min", "nan")),
    ("aten.any.default", |s| reduce(s, "any")),
    ("aten.any.dim", |s| reduce(s, "any")),
    ("aten.any.dims", |s| reduce(s, "any")),
    ("aten.all.default", |s| reduce(s, "all")),
    ("aten.all.dim", |s| reduce(s, "all")),
    ("aten.all.dims", |s| reduce(s, "all")),
    ("aten.logsumexp.default", |s| reduce(s, "logsumexp")),
    ("aten.linalg_vector_norm.default", vector_norm),
    ("aten.norm.ScalarOpt_dim", vector_norm),
    ("aten.var.correction", |s| variance(s, false)),
    ("aten.std.correction", |s| variance(s, true)),
    ("aten.var.dim", |s| variance(s, false)),
    ("aten.std.dim", |s| variance(s, true)),
    ("aten.var_mean.correction", variance_and_mean),
    ("aten.argmax.default", |s| position(s, "argmax")),
    ("aten.argmin.default", |s| position(s, "argmin")),
    ("aten.max.dim", |s| extreme(s, "argmax")),
    ("aten.min.dim", |s| extreme(s, "argmin")),
    ("aten.cumsum.default", cumulative_sum),
];

fn dims(s: &Site, rank: usize) -> Result<Vec<usize>, RuleError> {
    s.axes("dim", rank)
}

fn reduce(s: &mut Site, kind: &str) -> Results {
    let x = s.subject()?;
    let dtype = s.out_dtype(0);
    let x = match kind {
        "any" | "all" => x,
        _ => s.cast(x, dtype)?,
    };
    let axes = dims(s, s.rank(x))?;
    let keep = s.flag("keepdim")?;
    Ok(vec![Some(s.reduce(kind, x, &axes, keep)?)])
}

/// The largest or smallest elements; `at_nan` says where the gradient of a NaN goes.
fn extremes(s: &mut Site, kind: &str, at_nan: &str) -> Results {
    let x = s.subject()?;
    let axes = dims(s, s.rank(x))?;
    if axes.is_empty() {
        return Ok(vec![Some(x)]);
    }
    let mut a = attrs([
        ("kind", Attr::Str(kind.into())),
        ("axes", Attr::Ints(axes.iter().map(|a| *a as i64).collect())),
        ("keep", Attr::Bool(s.flag("keepdim")?)),
    ]);
    if s.builder.dtype(x).is_float() {
        a.insert("at_nan".into(), Attr::Str(at_nan.into()));
    }
    Ok(vec![Some(s.op1("reduce", &[x], a)?)])
}

fn vector_norm(s: &mut Site) -> Results {
    let order = s.float_or(
        if s.node.args.contains_key("ord") {
            "ord"
        } else {
            "p"
        },
        2.0,
    )?;
    let dtype = s.out_dtype(0);
    let x = s.subject()?;
    let x = s.cast(x, dtype)?;
    let axes = dims(s, s.rank(x))?;
    let keep = s.flag("keepdim")?;
    let kind = match order {
        1.0 => "l1",
        2.0 => "l2",
        f64::INFINITY => {
            let sizes = s.elementwise(Expr::In(0).abs(), &[x], dtype)?;
            return Ok(vec![Some(s.reduce("max", sizes, &axes, keep)?)]);
        }
        o => return Err(s.unsupported(format!("order {o}"))),
    };
    Ok(vec![Some(s.reduce(kind, x, &axes, keep)?)])
}

/// The variance of `x`, and the dimensions it is taken over.
fn spread(s: &mut Site, x: ContainerId) -> Result<(ContainerId, Vec<usize>), RuleError> {
    let axes = dims(s, s.rank(x))?;
    let correction = match s.node.target.ends_with(".dim") {
        true => f64::from(u8::from(!s.has("unbiased") || s.flag("unbiased")?)),
        false => s.float_or("correction", 1.0)?,
    };
    let a = attrs([
        ("axes", Attr::Ints(axes.iter().map(|a| *a as i64).collect())),
        ("keep", Attr::Bool(s.flag("keepdim")?)),
        ("correction", Attr::Float(correction)),
    ]);
    Ok((s.op1("variance", &[x], a)?, axes))
}

fn variance(s: &mut Site, root: bool) -> Results {
    let x = s.subject()?;
    if !root {
        return Ok(vec![Some(spread(s, x)?.0)]);
    }
    // Squares of 16-bit numbers may be too large or too small for their type.
    let dtype = s.builder.dtype(x);
    let wide = s.cast(x, dtype.arithmetic())?;
    let (var, _) = spread(s, wide)?;
    Ok(vec![Some(s.elementwise(deviation(), &[var], dtype)?)])
}

/// The root of a variance, with the gradient 0 where it is 0.
fn deviation() -> Expr {
    let x = || Expr::In(0);
    Expr::select(x().eq_(Expr::float(0.0)), Expr::float(0.0), x().sqrt())
}

fn variance_and_mean(s: &mut Site) -> Results {
    let (x, keep) = (s.subject()?, s.flag("keepdim")?);
    let (var, axes) = spread(s, x)?;
    let mean = s.reduce("mean", x, &axes, keep)?;
    Ok(vec![Some(var), Some(mean)])
}

/// Position of the extreme; without a dimension that of the flattened value.
fn position(s: &mut Site, kind: &str) -> Results {
    let mut x = s.subject()?;
    let axis = match s.has("dim") {
        true => s.axis("dim", s.rank(x))?,
        false => {
            let n = SymExpr::product(&s.builder.shape(x));
            x = s.reshape(x, vec![n])?;
            0
        }
    };
    let keep = s.flag("keepdim")?;
    let at = arg_reduce(s, kind, x, axis, keep)?;
    let shape = s.out_shape(0);
    Ok(vec![Some(s.reshape(at, shape)?)])
}

fn arg_reduce(
    s: &mut Site,
    kind: &str,
    x: ContainerId,
    axis: usize,
    keep: bool,
) -> Result<ContainerId, RuleError> {
    let a = attrs([
        ("kind", Attr::Str(kind.into())),
        ("axis", Attr::Int(axis as i64)),
        ("keep", Attr::Bool(keep)),
    ]);
    s.op1("arg_reduce", &[x], a)
}

/// The extreme along one axis and where it is. The gradient goes to that place alone.
fn extreme(s: &mut Site, kind: &str) -> Results {
    let x = s.subject()?;
    if s.rank(x) == 0 {
        let zero = s.elementwise(Expr::int(0).cast(DType::I64), &[x], DType::I64)?;
        return Ok(vec![Some(x), Some(zero)]);
    }
    let axis = s.axis("dim", s.rank(x))?;
    let at = arg_reduce(s, kind, x, axis, true)?;
    let a = attrs([("axis", Attr::Int(axis as i64))]);
    let value = s.op1("gather_elements", &[x, at], a)?;
    let shape = s.out_shape(0);
    let value = s.reshape(value, shape.clone())?;
    Ok(vec![Some(value), Some(s.reshape(at, shape)?)])
}

fn cumulative_sum(s: &mut Site) -> Results {
    let (x, dtype) = (s.subject()?, s.out_dtype(0));
    let x = s.cast(x, dtype)?;
    if s.rank(x) == 0 {
        return Ok(vec![Some(x)]);
    }
    let a = attrs([("axis", Attr::Int(s.axis("dim", s.rank(x))? as i64))]);
    Ok(vec![Some(s.op1("cumsum", &[x], a)?)])
}
