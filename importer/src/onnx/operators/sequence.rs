//! Operators of language models beside attention: rotary embedding, causal convolution and linear attention with a
//! state, caches written at positions that are data.

use super::attention::{merge_heads, share_heads};
use super::contraction::{contract, split_heads};
use super::indexing::scatter_set;
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("CausalConvWithState", causal_conv),
    ("LinearAttention", linear_attention),
    ("ReverseSequence", reverse_sequence),
    ("RotaryEmbedding", rotary),
    ("TensorScatter", tensor_scatter),
];

/// Steps over time that are written out, at most.
const MOST_STEPS: i64 = 256;

/// Pairs of elements turned by the angles of their positions: `(c·a − s·b, s·a + c·b)`. Inputs: x of
/// `[batch, heads, length, size]` or `[batch, length, heads·size]`, cosines, sines, positions.
fn rotary(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let given = cx.shape(x);
    let is_flat = given.len() == 3;
    let heads = cx.int("num_heads", 0)?;
    let x = match is_flat {
        true if heads < 1 => return Err("its attribute `num_heads` is missing".into()),
        true => split_heads(cx, x, heads)?,
        false => x,
    };
    let shape = cx.shape(x);
    let [_, _, _, size] = shape.as_slice() else {
        return Err("its input must have 3 or 4 dimensions".into());
    };
    let size = size.as_const().ok_or("the size of its heads is dynamic")?;
    let turned = match cx.int("rotary_embedding_dim", 0)? {
        0 => size,
        n => n,
    };
    if !(0..=size).contains(&turned) || turned % 2 != 0 {
        return Err(Refusal(format!(
            "{turned} of {size} elements cannot be turned"
        )));
    }
    let interleaved = cx.int("interleaved", 0)? != 0;
    let head = cx.part(x, 3, 0.into(), turned.into())?;
    let half = SymExpr::constant(turned / 2);
    let (a, b) = if interleaved {
        let mut pairs = cx.shape(head);
        pairs[3] = half.clone();
        pairs.push(2.into());
        let pairs = cx.reshape(head, pairs)?;
        (
            cx.part(pairs, 4, 0.into(), 1.into())?,
            cx.part(pairs, 4, 1.into(), 2.into())?,
        )
    } else {
        (
            cx.part(head, 3, 0.into(), half.clone())?,
            cx.part(head, 3, half, turned.into())?,
        )
    };
    let cos = angles(cx, 1, interleaved)?;
    let sin = angles(cx, 2, interleaved)?;
    let product = |n: usize, m: usize| Expr::In(n).mul(Expr::In(m));
    let inputs = [a, b, cos, sin];
    let first = cx.elementwise(product(2, 0).sub(product(3, 1)), &inputs)?;
    let second = cx.elementwise(product(3, 0).add(product(2, 1)), &inputs)?;
    let mut y = if interleaved {
        let pairs = cx.along("concat", &[first, second], 4)?;
        let shape = cx.shape(head);
        cx.reshape(pairs, shape)?
    } else {
        cx.along("concat", &[first, second], 3)?
    };
    if turned < size {
        let rest = cx.part(x, 3, turned.into(), size.into())?;
        y = cx.along("concat", &[y, rest], 3)?;
    }
    single(if is_flat { merge_heads(cx, y)? } else { y })
}

/// Cosines or sines as `[batch, 1, length, half]`, with a last dimension of 1 for pairs.
fn angles(cx: &mut NodeCx, position: usize, of_pairs: bool) -> Result<ContainerId, Refusal> {
    let mut table = cx.input(position)?;
    if let Some(positions) = cx.optional(3)? {
        let positions = cx.cast(positions, DType::I64)?;
        table = cx.along("gather", &[table, positions], 0)?;
    }
    let mut shape = cx.shape(table);
    if shape.len() != 3 {
        return Err("its angles do not fit its positions".into());
    }
    shape.insert(1, 1.into());
    if of_pairs {
        shape.push(1.into());
    }
    cx.reshape(table, shape)
}

/// A depthwise convolution over what came before and x; the last positions are kept for the next call.
fn causal_conv(cx: &mut NodeCx) -> Values {
    let (x, weight) = (cx.input(0)?, cx.input(1)?);
    let (shape, kernel) = (cx.shape(x), cx.shape(weight));
    let ([batch, channels, _], [_, _, k]) = (shape.as_slice(), kernel.as_slice()) else {
        return Err("its input and its weight must have 3 dimensions".into());
    };
    if k.as_const().is_none_or(|k| k < 1) {
        return Err("its weight has a dynamic size, or none".into());
    }
    let kept = k.clone() - 1;
    let n_channels = channels
        .as_const()
        .ok_or("its number of channels is dynamic")?;
    let past = match cx.optional(3)? {
        Some(past) => Some(past),
        None if kept.is_zero() => None,
        None => {
            let sizes = vec![batch.clone(), channels.clone(), kept.clone()];
            let dtype = cx.dtype(x);
            Some(cx.filled(sizes, dtype, 0.0)?)
        }
    };
    let all = match past.filter(|_| !kept.is_zero()) {
        Some(past) => cx.along("concat", &[past, x], 2)?,
        None => x,
    };
    let groups = attrs([("groups", Attr::Int(n_channels))]);
    let mut y = cx.op1("conv", &[all, weight], groups)?;
    if let Some(bias) = cx.optional(2)? {
        y = cx.add_channels(y, bias)?;
    }
    match cx.text("activation", "none")?.as_str() {
        "none" => {}
        "silu" | "swish" => {
            y = cx.elementwise(Expr::In(0).mul(Expr::In(0).sigmoid()), &[y])?;
        }
        other => return Err(Refusal(format!("its attribute `activation` is `{other}`"))),
    }
    let length = cx.shape(all)[2].clone();
    let next = match (cx.wants(1), kept.is_zero()) {
        (false, _) => None,
        (true, false) => Some(cx.part(all, 2, length.clone() - kept, length)?),
        (true, true) => {
            let dtype = cx.dtype(x);
            Some(cx.filled(vec![batch.clone(), channels.clone(), kept], dtype, 0.0)?)
        }
    };
    Ok([y].into_iter().chain(next).map(Value::Data).collect())
}

/// A matrix for each head, changed at every step by key and value and read by the query, written out step by step.
fn linear_attention(cx: &mut NodeCx) -> Values {
    cx.int("chunk_size", 64)?;
    let rule = cx.text("update_rule", "gated_delta")?;
    let (decays, corrects) = match rule.as_str() {
        "linear" => (false, false),
        "gated" => (true, false),
        "delta" => (false, true),
        "gated_delta" => (true, true),
        other => return Err(Refusal(format!("its attribute `update_rule` is `{other}`"))),
    };
    let (q_heads, heads) = (cx.int("q_num_heads", 0)?, cx.int("kv_num_heads", 0)?);
    let [q, k, v] = [(0, q_heads), (1, heads), (2, heads)];
    let [q, k, v] = [
        split_input(cx, q)?,
        split_input(cx, k)?,
        split_input(cx, v)?,
    ];
    let (k_shape, v_shape) = (cx.shape(k), cx.shape(v));
    let steps = k_shape[2].as_const().filter(|n| *n <= MOST_STEPS);
    let steps = steps.ok_or_else(|| {
        Refusal(format!(
            "its length must be a number of at most {MOST_STEPS}"
        ))
    })?;
    let scale = match cx.float("scale", 0.0)? {
        0.0 => {
            let width = k_shape[3]
                .as_const()
                .ok_or("the size of its heads is dynamic")?;
            1.0 / (width as f64).sqrt()
        }
        scale => scale,
    };
    let decay = match decays {
        true => Some(split_input(cx, (4, heads))?),
        false => None,
    };
    let beta = match corrects {
        true => {
            let beta = cx.input(5)?;
            let own = cx.shape(beta).last().and_then(SymExpr::as_const);
            Some(split_input(cx, (5, own.unwrap_or(heads)))?)
        }
        false => None,
    };
    let dtype = cx.dtype(q);
    let mut state = match cx.optional(3)? {
        Some(state) => state,
        None => {
            let sizes = [&k_shape[..2], &k_shape[3..], &v_shape[3..]].concat();
            cx.filled(sizes, dtype, 0.0)?
        }
    };
    let state_dtype = cx.dtype(state);
    let q_heads = SymExpr::constant(q_heads);
    let mut rows = Vec::new();
    for step in 0..steps {
        let at = |cx: &mut NodeCx, x| cx.part(x, 2, step.into(), (step + 1).into());
        // A row `[batch, heads, 1, size]`; a column for keys.
        let (key, mut value) = (at(cx, k)?, at(cx, v)?);
        if let Some(decay) = decay {
            let decay = at(cx, decay)?;
            let decay = cx.permute(decay, &[0, 1, 3, 2])?;
            state = cx.elementwise(Expr::In(0).mul(Expr::In(1).exp()), &[state, decay])?;
        }
        if let Some(beta) = beta {
            let beta = at(cx, beta)?;
            let known = contract(cx, "bhtd,bhdm->bhtm".to_string(), &[key, state])?;
            let new = Expr::In(2).mul(Expr::In(0).sub(Expr::In(1)));
            value = cx.elementwise(new, &[value, known, beta])?;
        }
        let column = cx.permute(key, &[0, 1, 3, 2])?;
        let written = Expr::In(0).add(Expr::In(1).mul(Expr::In(2)));
        state = cx.elementwise(written, &[state, column, value])?;
        let read = share_heads(cx, state, &q_heads)?;
        let query = at(cx, q)?;
        rows.push(contract(cx, "bhtd,bhdm->bhtm".to_string(), &[query, read])?);
    }
    let y = match rows.as_slice() {
        [] => return Err("it has no steps".into()),
        [one] => *one,
        all => cx.along("concat", all, 2)?,
    };
    let y = cx.elementwise(Expr::In(0).mul(Expr::float(scale)), &[y])?;
    let y = cx.cast(y, dtype)?;
    let y = merge_heads(cx, y)?;
    let state = cx.cast(state, state_dtype)?;
    Ok([y, state].map(Value::Data).to_vec())
}

fn split_input(cx: &mut NodeCx, (position, heads): (usize, i64)) -> Result<ContainerId, Refusal> {
    let x = cx.input(position)?;
    split_heads(cx, x, heads.max(1))
}

/// The first elements of each sequence in reverse order, as many as its length says.
fn reverse_sequence(cx: &mut NodeCx) -> Values {
    let (x, lengths) = (cx.input(0)?, cx.input(1)?);
    let shape = cx.shape(x);
    let batch = cx.axis(cx.int("batch_axis", 1)?, shape.len())?;
    let time = cx.axis(cx.int("time_axis", 0)?, shape.len())?;
    let mut sizes = vec![SymExpr::constant(1); shape.len()];
    sizes[batch] = shape[batch].clone();
    let lengths = cx.cast(lengths, DType::I64)?;
    let lengths = cx.reshape(lengths, sizes)?;
    let positions = cx.positions(&shape[time], time, shape.len())?;
    let (at, length) = (Expr::In(0), Expr::In(1));
    let turned = length.clone().sub(Expr::int(1)).sub(at.clone());
    let from = Expr::select(at.clone().lt(length), turned, at);
    let from = cx.elementwise(from, &[positions, lengths])?;
    let from = expanded(cx, from, shape)?;
    single(cx.along("gather_elements", &[x, from], time)?)
}

/// Elements of `update` along an axis put into a cache, from a position that each sequence has of its own.
fn tensor_scatter(cx: &mut NodeCx) -> Values {
    let (cache, update) = (cx.input(0)?, cx.input(1)?);
    let shape = cx.shape(update);
    let axis = cx.axis(cx.int("axis", -2)?, shape.len())?;
    let most = cx.shape(cache).get(axis).cloned();
    let most = most.ok_or("its cache and its update have different numbers of dimensions")?;
    let mut at = cx.positions(&shape[axis], axis, shape.len())?;
    if let Some(first) = cx.optional(2)? {
        let mut sizes = vec![SymExpr::constant(1); shape.len()];
        sizes[0] = shape[0].clone();
        let first = cx.cast(first, DType::I64)?;
        let first = cx.reshape(first, sizes)?;
        at = cx.elementwise(Expr::In(0).add(Expr::In(1)), &[at, first])?;
    }
    match cx.text("mode", "linear")?.as_str() {
        "linear" => {}
        "circular" => {
            let around = Expr::binary(graph::Binary::Mod, Expr::In(0), Expr::Index(most));
            at = cx.elementwise(around, &[at])?;
        }
        other => return Err(Refusal(format!("its attribute `mode` is `{other}`"))),
    }
    let at = expanded(cx, at, shape)?;
    single(scatter_set(cx, cache, at, update, axis)?)
}
