//! Scaled dot-product attention, written as its two products with a softmax between them, and
//! dropout.
//!
//! Random numbers are a function of the call's seed, the position of the drawing operator among the
//! drawing ones, and the element's index: the backward pass asks for the same ones again.

use super::Table;
use super::contraction::contract;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site, element_index};
use graph::{Attr, Binary, ContainerId, DType, Expr, SymExpr};
use ops::{OpBuilder, attrs};

pub(super) const RULES: Table = &[
    ("aten.scaled_dot_product_attention.default", attention),
    ("aten.dropout.default", dropout),
    ("aten.native_dropout.default", dropout_with_mask),
    ("aten.feature_dropout.default", feature_dropout),
    ("aten.bernoulli.p", bernoulli),
    ("aten.rand_like.default", uniform_like),
];

/// `softmax(q·kᵀ·scale + mask)·v`, q `[…, L, E]`, k `[…, S, E]`, v `[…, S, F]`.
fn attention(s: &mut Site) -> Results {
    let (q, k, v) = (s.tensor("query")?, s.tensor("key")?, s.tensor("value")?);
    let rank = s.rank(q);
    if s.rank(k) != rank || s.rank(v) != rank || rank < 2 {
        return Err(s.unsupported("query, key and value of different ranks"));
    }
    if s.flag("enable_gqa")? {
        return Err(s.unsupported("grouped queries"));
    }
    let lead = &"ABCDEFGHIJKLMNOPQRSTUVWXYZ"[..(rank - 2).min(26)];
    let scores = contract(s, format!("{lead}id,{lead}jd->{lead}ij"), &[q, k])?;
    let scores = masked(s, q, scores)?;
    let axis = attrs([("axis", Attr::Int(rank as i64 - 1))]);
    let mut weights = s.op1("softmax", &[scores], axis)?;
    let p = s.float_or("dropout_p", 0.0)?;
    if p > 0.0 {
        weights = dropped(s, weights, p, false)?[0];
    }
    Ok(vec![Some(contract(
        s,
        format!("{lead}ij,{lead}jd->{lead}id"),
        &[weights, v],
    )?)])
}

/// Scores scaled, with −∞ where the mask forbids.
fn masked(s: &mut Site, q: ContainerId, scores: ContainerId) -> Result<ContainerId, RuleError> {
    let rank = s.rank(q);
    let width = s.builder.shape(q)[rank - 1].clone();
    let dtype = s.builder.dtype(scores);
    let scale = match (s.has("scale"), width.as_const()) {
        (true, _) => Expr::float(s.float("scale")?),
        (false, Some(n)) => Expr::float(1.0 / (n as f64).sqrt()),
        (false, None) => Expr::Index(width).cast(dtype).rsqrt(),
    };
    let mut expr = Expr::In(0).mul(scale);
    let mut inputs = vec![scores];
    let never = || Expr::float(f64::NEG_INFINITY);
    if s.flag("is_causal")? {
        let (row, column) = (element_index(rank - 2), element_index(rank - 1));
        let allowed = Expr::binary(Binary::Le, Expr::Index(column), Expr::Index(row));
        expr = Expr::select(allowed, expr, never());
    }
    if let Some(mask) = s.optional_tensor("attn_mask")? {
        inputs.push(mask);
        expr = match s.builder.dtype(mask) {
            DType::Bool => Expr::select(Expr::In(1), expr, never()),
            _ => expr.add(Expr::In(1)),
        };
    }
    s.elementwise(expr, &inputs, dtype)
}

/// `x` with elements dropped with probability `p` and the others scaled by `1/(1 − p)`, and the mask
/// if asked for.
fn dropped(
    s: &mut Site,
    x: ContainerId,
    p: f64,
    mask: bool,
) -> Result<Vec<ContainerId>, RuleError> {
    let (seed, place) = s.random_place();
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
    let (uniform, seed) = s.uniform(&shape, 1);
    let kept = Expr::binary(Binary::Ge, uniform, Expr::float(p));
    let scaled = Expr::In(0).mul(Expr::float(if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }));
    let expr = Expr::select(kept, scaled, Expr::float(0.0));
    Ok(vec![Some(s.elementwise(expr, &[x, seed], dtype)?)])
}

fn bernoulli(s: &mut Site) -> Results {
    let (x, p) = (s.subject()?, s.float("p")?);
    let (shape, dtype) = (s.builder.shape(x), s.out_dtype(0));
    let (uniform, seed) = s.uniform(&shape, 1);
    let drawn = Expr::binary(Binary::Lt, uniform, Expr::float(p));
    let expr = Expr::select(drawn, Expr::float(1.0), Expr::float(0.0));
    Ok(vec![Some(s.elementwise(expr, &[x, seed], dtype)?)])
}

fn uniform_like(s: &mut Site) -> Results {
    let x = s.subject()?;
    let (shape, dtype) = (s.builder.shape(x), s.out_dtype(0));
    let (uniform, seed) = s.uniform(&shape, 1);
    Ok(vec![Some(s.elementwise(uniform, &[x, seed], dtype)?)])
}
