//! Scaled dot-product attention (since version 23).

use super::contraction::split_heads;
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Attr, ContainerId, DType, Expr, SymExpr, Symbol};
use ops::attrs;

pub static RULES: Rules = &[("Attention", attention)];

/// Q, K, V of `[batch, heads, rows, width]`, or of `[batch, rows, heads·width]` with the numbers of
/// heads in attributes; fewer key than query heads are shared.
fn attention(cx: &mut NodeCx) -> Values {
    for (position, what) in [(4, "past keys"), (5, "past values"), (6, "lengths of keys")] {
        if cx.given(position) {
            return Err(Refusal(format!("{what} are not supported")));
        }
    }
    if cx.float("softcap", 0.0)? != 0.0 {
        return Err("`softcap` is not supported".into());
    }
    if (1..cx.node.output.len()).any(|n| cx.wants(n)) {
        return Err("only its first output is supported".into());
    }
    let (mut q, mut k, mut v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let flat = cx.rank(q) == 3;
    if flat {
        q = split_heads(cx, q, cx.int("q_num_heads", 0)?.max(1))?;
        k = split_heads(cx, k, cx.int("kv_num_heads", 0)?.max(1))?;
        v = split_heads(cx, v, cx.int("kv_num_heads", 0)?.max(1))?;
    }
    let q_shape = cx.shape(q);
    let [_, heads, _, width] = q_shape.as_slice() else {
        return Err("its inputs must have 3 or 4 dimensions".into());
    };
    k = share_heads(cx, k, heads)?;
    v = share_heads(cx, v, heads)?;
    let scale = match cx.float("scale", 0.0)? {
        0.0 => {
            let width = width.as_const().ok_or("its width is dynamic")?;
            1.0 / (width as f64).sqrt()
        }
        scale => scale,
    };
    let causal = cx.int("is_causal", 0)? != 0;
    let list = attrs([
        ("scale", Attr::Float(scale)),
        ("causal", Attr::Bool(causal)),
    ]);
    let mask = cx.optional(3)?;
    let mut y = cx.op("attention", &[Some(q), Some(k), Some(v), mask], list)?[0];
    if let Some(mask) = mask.filter(|mask| cx.dtype(*mask) == DType::Bool) {
        let seen = rows_that_see(cx, mask, causal)?;
        let or_zero = Expr::select(Expr::In(1), Expr::In(0), Expr::float(0.0));
        y = cx.elementwise(or_zero, &[y, seen])?;
    }
    if !flat {
        return single(y);
    }
    let shape = cx.shape(y);
    let rows_first = cx.permute(y, &[0, 2, 1, 3])?;
    let columns = shape[1].clone() * shape[3].clone();
    single(cx.reshape(
        rows_first,
        vec![shape[0].clone(), shape[2].clone(), columns],
    )?)
}

/// Whether a row attends to anything: rows that do not are zero in ONNX.
fn rows_that_see(cx: &mut NodeCx, mask: ContainerId, causal: bool) -> Result<ContainerId, Refusal> {
    let rank = cx.rank(mask);
    if rank < 2 {
        return Err("its mask must have at least 2 dimensions".into());
    }
    let mut visible = mask;
    if causal {
        let index = |d: usize| SymExpr::symbol(Symbol::new(format!("i{d}")));
        let past = Expr::Index(index(rank - 1) - index(rank - 2)).le(Expr::int(0));
        visible = cx.elementwise(Expr::In(0).and(past), &[mask])?;
    }
    cx.reduce(visible, "any", &[rank - 1], true)
}

/// Each head of `x` repeated so that there are `heads`.
fn share_heads(cx: &mut NodeCx, x: ContainerId, heads: &SymExpr) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(x);
    let [batch, own, rows, width] = shape.as_slice() else {
        return Err(Refusal("its inputs must have 3 or 4 dimensions".into()));
    };
    if own == heads {
        return Ok(x);
    }
    let times = heads
        .divide_exactly(own)
        .ok_or_else(|| Refusal(format!("{own} key heads do not divide {heads} query heads")))?;
    let split = |n: SymExpr| vec![batch.clone(), own.clone(), n, rows.clone(), width.clone()];
    let x = cx.reshape(x, split(1.into()))?;
    let x = expanded(cx, x, split(times))?;
    cx.reshape(
        x,
        vec![batch.clone(), heads.clone(), rows.clone(), width.clone()],
    )
}
