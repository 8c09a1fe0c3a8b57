//! Scaled dot-product attention, dropout and other random numbers.
//!
//! Random numbers are a function of the call's seed, the number of PyTorch's operator, the place within it
//! that draws, and the element's index: the backward pass asks for the same ones again.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Binary, ContainerId, DType, Expr, SymExpr};
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[
    ("aten.scaled_dot_product_attention.default", attention),
    ("aten.dropout.default", dropout),
    ("aten.native_dropout.default", dropout_with_mask),
    ("aten.feature_dropout.default", feature_dropout),
    ("aten.bernoulli.p", bernoulli),
    ("aten.rand_like.default", uniform),
    ("aten.rand.default", uniform),
    ("aten.randn_like.default", normal),
    ("aten.randn.default", normal),
];

/// `softmax(q·kᵀ·scale + mask)·v`, q `[…, L, E]`, k `[…, S, E]`, v `[…, S, F]`; leading dimensions
/// broadcast.
fn attention(s: &mut Site) -> Results {
    let mut qkv = [s.tensor("query")?, s.tensor("key")?, s.tensor("value")?];
    let ranks = qkv.map(|id| s.rank(id));
    if ranks.iter().any(|r| *r != ranks[0] || *r < 2) {
        return Err(s.unsupported("query, key and value of different ranks"));
    }
    let n_leading = ranks[0] - 2;
    let leading = s.out_shape(0)[..n_leading].to_vec();
    if s.flag("enable_gqa")? {
        let heads = leading[n_leading - 1].clone();
        for id in &mut qkv[1..] {
            *id = share_heads(s, *id, &heads)?;
        }
    }
    for id in &mut qkv {
        let shape = [&leading, &s.builder.shape(*id)[n_leading..]].concat();
        *id = s.expand(*id, shape)?;
    }
    let mut a = attrs([("causal", Attr::Bool(s.flag("is_causal")?))]);
    if s.has("scale") {
        a.insert("scale".into(), Attr::Float(s.float("scale")?));
    }
    let mut inputs: Vec<_> = qkv.iter().copied().map(Some).collect();
    inputs.push(s.optional_tensor("attn_mask")?);
    let p = s.float_or("dropout_p", 0.0)?;
    if p > 0.0 {
        let (seed, place) = s.random_place()?;
        a.insert("dropout".into(), Attr::Float(p));
        a.insert("id".into(), Attr::Int(place));
        inputs.push(Some(seed));
    }
    Ok(vec![Some(s.builder.op("attention", &inputs, a)?[0])])
}

/// `x` with each head repeated so that there are `heads`.
fn share_heads(s: &mut Site, x: ContainerId, heads: &SymExpr) -> Result<ContainerId, RuleError> {
    let shape = s.builder.shape(x);
    let axis = shape.len() - 3;
    let times = heads
        .divide_exactly(&shape[axis])
        .ok_or_else(|| s.unsupported("key heads that do not divide query heads"))?;
    let mut wide = shape.clone();
    wide.insert(axis + 1, SymExpr::constant(1));
    let x = s.reshape(x, wide.clone())?;
    wide[axis + 1] = times;
    let x = s.expand(x, wide)?;
    let mut whole = shape;
    whole[axis] = heads.clone();
    s.reshape(x, whole)
}

/// `x` with elements dropped with probability `p` and the others scaled by `1/(1 − p)`, and the mask
/// if asked for.
pub(super) fn dropped(
    s: &mut Site,
    x: ContainerId,
    p: f64,
    mask: bool,
) -> Result<Vec<ContainerId>, RuleError> {
    let (seed, place) = s.random_place()?;
    let a = attrs([
        ("p", Attr::Float(p)),
        ("id", Attr::Int(place)),
        ("mask", Attr::Bool(mask)),
    ]);
    Ok(s.builder.op("dropout", &[Some(x), Some(seed)], a)?)
}

fn dropout(s: &mut Site) -> Results {
    let (x, p) = (s.subject()?, s.float("p")?);
    if !s.flag("train")? || p == 0.0 {
        return Ok(vec![Some(x)]);
    }
    Ok(vec![Some(dropped(s, x, p, false)?[0])])
}

fn dropout_with_mask(s: &mut Site) -> Results {
    let (x, p) = (s.subject()?, s.float("p")?);
    if s.has("train") && !s.flag("train")? {
        let all = s.elementwise(Expr::Const(graph::Scalar::Bool(true)), &[x], DType::Bool)?;
        return Ok(vec![Some(x), Some(all)]);
    }
    Ok(dropped(s, x, p, true)?.into_iter().map(Some).collect())
}

/// Drops whole channels: one number for each of the first two dimensions.
fn feature_dropout(s: &mut Site) -> Results {
    let (x, p) = (s.subject()?, s.float("p")?);
    if !s.flag("train")? || p == 0.0 {
        return Ok(vec![Some(x)]);
    }
    let mut shape = s.builder.shape(x);
    shape
        .iter_mut()
        .skip(2)
        .for_each(|size| *size = SymExpr::constant(1));
    let dtype = s.builder.dtype(x);
    let (uniform, seed) = s.uniform(&shape, 1)?;
    let kept = Expr::binary(Binary::Ge, uniform, Expr::float(p));
    let scaled = Expr::In(0).mul(Expr::float(if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }));
    let expr = Expr::select(kept, scaled, Expr::float(0.0));
    Ok(vec![Some(s.elementwise(expr, &[x, seed], dtype)?)])
}

fn bernoulli(s: &mut Site) -> Results {
    let (x, p) = (s.subject()?, s.float("p")?);
    let (shape, dtype) = (s.builder.shape(x), s.out_dtype(0));
    let (uniform, seed) = s.uniform(&shape, 1)?;
    let drawn = Expr::binary(Binary::Lt, uniform, Expr::float(p));
    let expr = Expr::select(drawn, Expr::float(1.0), Expr::float(0.0));
    Ok(vec![Some(s.elementwise(expr, &[x, seed], dtype)?)])
}

/// Random numbers, one for each element of the result, from the uniform ones in `expr`.
fn drawn(s: &mut Site, expr: Expr, seed: ContainerId) -> Results {
    let dtype = s.out_dtype(0);
    let like = super::creation::constant(s, Expr::int(0))?;
    Ok(vec![Some(s.elementwise(expr, &[like, seed], dtype)?)])
}

fn uniform(s: &mut Site) -> Results {
    let (uniform, seed) = s.uniform(&s.out_shape(0), 1)?;
    drawn(s, uniform, seed)
}

/// `√(−2·ln(1 − u))·cos(2π·v)` of two uniform numbers (Box and Muller, 1958).
fn normal(s: &mut Site) -> Results {
    let shape = s.out_shape(0);
    let ((u, seed), (v, _)) = (s.uniform(&shape, 1)?, s.uniform(&shape, 1)?);
    let radius = Expr::float(1.0).sub(u).log().mul(Expr::float(-2.0)).sqrt();
    let angle = v.mul(Expr::float(std::f64::consts::TAU));
    drawn(s, radius.mul(angle.cos()), seed)
}
