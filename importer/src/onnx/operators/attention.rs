//! Scaled dot-product attention (since version 23).

use super::contraction::split_heads;
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Attr, ContainerId, SymExpr};
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
    let y = cx.op("attention", &[Some(q), Some(k), Some(v), mask], list)?[0];
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
