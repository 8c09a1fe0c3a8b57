//! Attention of ONNX Runtime (domain `com.microsoft`): `Attention` and `MultiHeadAttention`, written with the
//! operator that the standard's `Attention` becomes.

use super::attention::merge_heads;
use super::contraction::{contract, split_heads};
use super::{Rules, Values};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, Expr, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("com.microsoft.Attention", merged),
    ("com.microsoft.MultiHeadAttention", separate),
];

/// One product gives queries, keys and values. Inputs: x `[batch, length, inner]`, weights, their bias, a mask,
/// keys and values from before, and what is added to the scores.
fn merged(cx: &mut NodeCx) -> Values {
    let (x, w) = (cx.input(0)?, cx.input(1)?);
    if cx.int("do_rotary", 0)? != 0 || cx.int("past_present_share_buffer", 0)? != 0 {
        return Err("rotary positions and shared buffers are not supported".into());
    }
    let heads = heads(cx)?;
    let mut projected = contract(cx, "bli,io->blo".to_string(), &[x, w])?;
    if let Some(bias) = cx.optional(2)? {
        projected = cx.elementwise(Expr::In(0).add(Expr::In(1)), &[projected, bias])?;
    }
    let width = cx.shape(projected)[2].as_const();
    let width = width.ok_or("its weights have a dynamic size")?;
    let sizes = cx.ints("qkv_hidden_sizes")?.filter(|s| !s.is_empty());
    let sizes = sizes.unwrap_or_else(|| vec![width / 3; 3]);
    let total = sizes.iter().try_fold(0i64, |sum, n| sum.checked_add(*n));
    if sizes.len() != 3 || sizes.iter().any(|n| *n < 1) || total != Some(width) {
        return Err(Refusal(format!(
            "its weights have {width} columns, which are not queries, keys and values"
        )));
    }
    let mut from = 0;
    let mut parts = Vec::new();
    for size in sizes {
        let part = cx.part(projected, 2, from.into(), (from + size).into())?;
        parts.push(split_heads(cx, part, heads)?);
        from += size;
    }
    let (q, mut k, mut v) = (parts[0], parts[1], parts[2]);
    let mut before = SymExpr::constant(0);
    if let Some(past) = cx.optional(4)? {
        let shape = cx.shape(past);
        if shape.len() != 5 {
            return Err("its past must have 5 dimensions".into());
        }
        before = shape[3].clone();
        for (n, now) in [&mut k, &mut v].into_iter().enumerate() {
            let n = n as i64;
            let half = cx.part(past, 0, n.into(), (n + 1).into())?;
            let half = cx.reshape(half, shape[1..].to_vec())?;
            *now = cx.along("concat", &[half, *now], 2)?;
        }
    }
    let mask = cx.optional(3)?;
    let bias = cx.optional(5)?;
    let y = attend(cx, [q, k, v], (mask, bias), before)?;
    let mut values = vec![Value::Data(y)];
    if cx.wants(1) {
        let mut halves = Vec::new();
        for half in [k, v] {
            let mut shape = cx.shape(half);
            shape.insert(0, 1.into());
            halves.push(cx.reshape(half, shape)?);
        }
        values.push(Value::Data(cx.along("concat", &halves, 0)?));
    }
    Ok(values)
}

/// Inputs: queries, keys and values `[batch, length, heads·width]` (keys and values also as heads), a bias of all
/// three, a mask, what is added to the scores, keys and values from before.
fn separate(cx: &mut NodeCx) -> Values {
    if !cx.given(1) || !cx.given(2) {
        return Err("packed keys and values are not supported".into());
    }
    if cx.n_inputs() > 8 && (8..cx.n_inputs()).any(|n| cx.given(n)) || cx.wants(3) {
        return Err("caches and scores as an output are not supported".into());
    }
    let n_heads = heads(cx)?;
    let bias = cx.optional(3)?;
    let mut from = 0i64;
    let mut all = Vec::new();
    for n in 0..3 {
        let mut x = cx.input(n)?;
        match cx.rank(x) {
            3 => {}
            4 if n > 0 => {
                all.push(x);
                continue;
            }
            _ => return Err("packed keys and values are not supported".into()),
        }
        if let Some(bias) = bias {
            let width = cx.shape(x)[2].as_const();
            let to = width.and_then(|width| from.checked_add(width));
            let to: i64 = to.ok_or("its inputs have a dynamic width")?;
            let own = cx.part(bias, 0, from.into(), to.into())?;
            x = cx.elementwise(Expr::In(0).add(Expr::In(1)), &[x, own])?;
            from = to;
        }
        all.push(split_heads(cx, x, n_heads)?);
    }
    let mut before = SymExpr::constant(0);
    for (n, now) in all.iter_mut().enumerate().skip(1) {
        if let Some(past) = cx.optional(5 + n)? {
            let length = cx.shape(past).get(2).cloned();
            before = length.ok_or("its past must have 4 dimensions")?;
            *now = cx.along("concat", &[past, *now], 2)?;
        }
    }
    let (mask, bias) = (cx.optional(4)?, cx.optional(5)?);
    let y = attend(cx, [all[0], all[1], all[2]], (mask, bias), before)?;
    Ok([y, all[1], all[2]].into_iter().map(Value::Data).collect())
}

fn heads(cx: &NodeCx) -> Result<i64, Refusal> {
    match cx.int("num_heads", 0)? {
        n if n > 0 => Ok(n),
        n => Err(Refusal(format!("its num_heads is {n}"))),
    }
}

fn attend(
    cx: &mut NodeCx,
    [q, k, v]: [ContainerId; 3],
    (mask, bias): (Option<ContainerId>, Option<ContainerId>),
    before: SymExpr,
) -> Result<ContainerId, Refusal> {
    let filter = cx.float("mask_filter_value", -10000.0)?;
    let is_causal = cx.int("unidirectional", 0)? != 0;
    let scale = match cx.float("scale", 0.0)? {
        0.0 => {
            let width = cx.shape(q)[3].as_const();
            1.0 / (width.ok_or("its width is dynamic")? as f64).sqrt()
        }
        scale => scale,
    };
    let mut added = bias;
    if let Some(mask) = mask {
        let dtype = cx.dtype(q);
        let (seen, is_length) = broadcastable(cx, mask, [q, k])?;
        let is_seen = match is_length {
            true => {
                let sizes = vec![1.into(), 1.into(), 1.into(), cx.shape(k)[2].clone()];
                let zeros = cx.filled(sizes, dtype, 0.0)?;
                let at = Expr::Index(SymExpr::symbol("i3"));
                let e = Expr::select(
                    at.lt(Expr::In(1)),
                    Expr::In(0),
                    Expr::float(filter).cast(dtype),
                );
                cx.elementwise(e, &[zeros, seen])?
            }
            false => {
                let e = Expr::select(
                    Expr::In(0).eq_(Expr::int(0)),
                    Expr::float(filter),
                    Expr::float(0.0),
                );
                cx.elementwise(e.cast(dtype), &[seen])?
            }
        };
        added = Some(match added {
            Some(bias) => cx.elementwise(Expr::In(0).add(Expr::In(1)), &[bias, is_seen])?,
            None => is_seen,
        });
    }
    let causal = is_causal && before.is_zero();
    if is_causal && !causal {
        let sizes = [q, k].map(|x| cx.shape(x)[2].clone());
        let shape = [1.into(), 1.into()].into_iter().chain(sizes).collect();
        let mut inputs = vec![cx.filled(shape, cx.dtype(q), 0.0)?];
        inputs.extend(added);
        let index = |d: usize| SymExpr::symbol(format!("i{d}").as_str());
        let ahead = Expr::Index(index(3) - index(2) - before);
        let rest = match added {
            Some(_) => Expr::In(0).add(Expr::In(1)),
            None => Expr::In(0),
        };
        let unseen = Expr::float(f64::NEG_INFINITY);
        let e = Expr::select(ahead.gt(Expr::int(0)), unseen, rest);
        added = Some(cx.elementwise(e, &inputs)?);
    }
    let list = attrs([
        ("scale", Attr::Float(scale)),
        ("causal", Attr::Bool(causal)),
    ]);
    let y = cx.op("attention", &[Some(q), Some(k), Some(v), added], list)?[0];
    merge_heads(cx, y)
}

/// A mask with 4 dimensions, and whether it holds the number of keys of each sequence.
fn broadcastable(
    cx: &mut NodeCx,
    mask: ContainerId,
    [q, k]: [ContainerId; 2],
) -> Result<(ContainerId, bool), Refusal> {
    let (shape, batch) = (cx.shape(mask), cx.shape(q)[0].clone());
    let (queries, keys) = (cx.shape(q)[2].clone(), cx.shape(k)[2].clone());
    let one = SymExpr::constant(1);
    let (to, is_length) = match shape.as_slice() {
        [n] if *n == batch => (vec![batch, one.clone(), one.clone(), one], true),
        [n, m] if *n == batch && *m == keys => (vec![batch, one.clone(), one, keys], false),
        [n, l, m] if *n == batch && *l == queries && *m == keys => {
            (vec![batch, one, queries, keys], false)
        }
        _ => {
            let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
            return Err(Refusal(format!(
                "a mask of sizes [{}] is not supported",
                sizes.join(", ")
            )));
        }
    };
    Ok((cx.reshape(mask, to)?, is_length))
}
