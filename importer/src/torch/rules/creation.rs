//! Tensors made from nothing: constants, ranges, triangles.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site, element_index};
use graph::{Attr, Binary, ContainerId, Expr, Scalar};
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[
    ("aten.zeros.default", |s| filled(s, Expr::int(0))),
    ("aten.zeros_like.default", |s| filled(s, Expr::int(0))),
    ("aten.new_zeros.default", |s| filled(s, Expr::int(0))),
    ("aten.zero.default", |s| filled(s, Expr::int(0))),
    // The elements are never read, so they may be anything.
    ("aten.empty.memory_format", |s| filled(s, Expr::int(0))),
    ("aten.empty_like.default", |s| filled(s, Expr::int(0))),
    ("aten.ones.default", |s| filled(s, Expr::int(1))),
    ("aten.ones_like.default", |s| filled(s, Expr::int(1))),
    ("aten.new_ones.default", |s| filled(s, Expr::int(1))),
    ("aten.full.default", |s| filled_with(s, "fill_value")),
    ("aten.full_like.default", |s| filled_with(s, "fill_value")),
    ("aten.new_full.default", |s| filled_with(s, "fill_value")),
    ("aten.fill.Scalar", |s| filled_with(s, "value")),
    ("aten.scalar_tensor.default", |s| filled_with(s, "s")),
    ("aten.arange.default", range),
    ("aten.arange.start", range),
    ("aten.arange.start_step", range),
    ("aten.tril.default", |s| triangle(s, Binary::Le)),
    ("aten.triu.default", |s| triangle(s, Binary::Ge)),
];

/// A tensor of the documented shape with every element `value`.
pub(super) fn constant(s: &mut Site, value: Expr) -> Result<ContainerId, RuleError> {
    let (dtype, shape) = (s.out_dtype(0), s.out_shape(0));
    let a = attrs([
        ("expr", Attr::Expr(value.cast(dtype))),
        ("dtype", Attr::DType(dtype)),
    ]);
    let scalar = s.builder.op("elementwise", &[], a)?[0];
    s.expand(scalar, shape)
}

fn filled(s: &mut Site, value: Expr) -> Results {
    Ok(vec![Some(constant(s, value)?)])
}

fn filled_with(s: &mut Site, name: &str) -> Results {
    let value = s.scalar(name)?;
    filled(s, value)
}

/// `start + step·i`.
fn range(s: &mut Site) -> Results {
    let start = if s.has("start") {
        s.scalar("start")?
    } else {
        Expr::int(0)
    };
    let step = if s.has("step") {
        s.scalar("step")?
    } else {
        Expr::int(1)
    };
    let dtype = s.out_dtype(0);
    let zeros = constant(s, Expr::int(0))?;
    // Integers count with a whole start and step.
    let whole = |e: Expr| match e {
        Expr::Const(n @ Scalar::Float(_)) if dtype.is_int() => Expr::Const(n.cast(dtype)),
        e => e,
    };
    let (start, step) = (whole(start), whole(step));
    let value = start
        .add(step.mul(Expr::Index(element_index(0))))
        .cast(dtype);
    Ok(vec![Some(s.elementwise(value, &[zeros], dtype)?)])
}

/// The elements whose column − row compares with `diagonal` as `kept` says; zero elsewhere.
fn triangle(s: &mut Site, kept: Binary) -> Results {
    let x = s.subject()?;
    let (rank, dtype) = (s.rank(x), s.builder.dtype(x));
    let diagonal = s.int_or("diagonal", 0)?;
    let offset = element_index(rank - 1) - element_index(rank - 2);
    let inside = Expr::binary(kept, Expr::Index(offset), Expr::int(diagonal));
    let expr = Expr::select(inside, Expr::In(0), Expr::int(0).cast(dtype));
    Ok(vec![Some(s.elementwise(expr, &[x], dtype)?)])
}
