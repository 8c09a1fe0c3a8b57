//! GroupQueryAttention of ONNX Runtime (domain `com.microsoft`): causal attention with a cache of keys and values, which
//! runs of query heads share.
//!
//! Follows ONNX Runtime's `ContribOperators.md` and its kernel for the CPU. The cache has zeros after the last key.
//! Refused are quantized caches, a shared cache without new keys, scores as an output, and attributes that are not known
//! here.

use super::attention::{Heads, Scoring, attend, rotate, scale_of};
use super::real::{Real, in_real};
use super::{Call, Inference, Operator};
use crate::fact::Fact;
use crate::tensor::{Tensor, room};
use graph::SymExpr;

pub const ROWS: &[Operator] = &[Operator::new(
    "GroupQueryAttention",
    infer,
    |call| in_real!(call.input(0)?.element(), R => evaluate::<R>(call)),
)
.domain("com.microsoft")];

/// Attributes that are computed with.
const ATTRIBUTES: [&str; 8] = [
    "do_rotary",
    "kv_num_heads",
    "local_window_size",
    "num_heads",
    "rotary_interleaved",
    "scale",
    "smooth_softmax",
    "softcap",
];
/// Other attributes with the integer that changes nothing, which ONNX Runtime writes into files.
const HARMLESS: [(&str, i64); 3] = [("causal", 1), ("qk_output", 0), ("sliding_window_cache", 0)];
/// Other attributes of which a text, or any number, changes nothing without quantized caches and norms of queries.
const HARMLESS_TEXTS: [(&str, &str); 2] = [("k_quant_type", "NONE"), ("v_quant_type", "NONE")];

/// An attribute that is not computed with, if there is one.
fn unknown_attribute<'a>(call: &Call<'a>) -> Option<&'a str> {
    let a = call.attributes;
    let is_known = |name: &str| {
        let is_harmless = HARMLESS
            .iter()
            .any(|(own, n)| *own == name && a.int(name) == Some(*n));
        let is_harmless_text =
            (HARMLESS_TEXTS.iter()).any(|(own, text)| *own == name && a.text(name) == Some(*text));
        ATTRIBUTES.contains(&name) || is_harmless || is_harmless_text || name == "qk_norm_epsilon"
    };
    let names = call.node.attribute.iter().map(|a| a.name.as_str());
    names.into_iter().find(|name| !is_known(name))
}

/// Whether an attribute is 1. Others have defaults of -1.
fn is_on(call: &Call, name: &str) -> bool {
    call.attributes.int(name) == Some(1)
}

/// How many keys each sequence has before and after this call.
struct Lengths {
    past: Vec<usize>,
    total: Vec<usize>,
    /// Keys that the new cache has room for.
    room: usize,
    /// Whether the new keys begin at position 0.
    is_prompt: bool,
}

impl Lengths {
    /// The lengths of sequences of `steps` new keys and at most `kept` old ones.
    fn new(call: &Call, (batch, steps): (usize, usize), kept: usize) -> Result<Lengths, String> {
        let longest = call.ints(6)?.first().copied().unwrap_or(0);
        let longest = usize::try_from(longest).map_err(|_| "its total length is negative")?;
        let is_prompt = longest == steps;
        if longest < steps || longest - steps > kept {
            return Err(format!(
                "{kept} kept keys and {steps} new ones are not {longest} in all"
            ));
        }
        let last = call.ints(5)?;
        if last.len() != batch {
            return Err("its lengths are not one for each sequence".to_string());
        }
        let total: Option<Vec<usize>> = (last.iter())
            .map(|n| {
                usize::try_from(*n)
                    .ok()?
                    .checked_add(1)
                    .filter(|n| *n <= longest)
            })
            .collect();
        let total = total.ok_or("a length is negative or more than the total length")?;
        let before = |n: &usize| match is_prompt {
            true => Some(0),
            false => n.checked_sub(steps).filter(|past| *past <= kept),
        };
        let past: Option<Vec<usize>> = total.iter().map(before).collect();
        Ok(Lengths {
            past: past.ok_or("its lengths do not fit the kept keys")?,
            total,
            room: longest.max(kept),
            is_prompt,
        })
    }

    /// The cache with `new` vectors behind those that `past` has, zeros behind them. Both fit each other and the
    /// lengths.
    fn cached<R: Real>(&self, past: Option<&Heads<R>>, new: &Heads<R>) -> Result<Heads<R>, String> {
        let (row, old) = (new.size, past.map_or(0, |past| past.length));
        let n = room(&[new.batch, new.heads, self.room, row])?;
        let mut values = vec![R::zero(); n];
        for at in 0..new.batch * new.heads {
            let n_kept = self.past[at / new.heads] * row;
            let to = &mut values[at * self.room * row..][..self.room * row];
            if let Some(past) = past {
                to[..n_kept].copy_from_slice(&past.values[at * old * row..][..n_kept]);
            }
            let n_new = new.length * row;
            to[n_kept..][..n_new].copy_from_slice(&new.values[at * n_new..][..n_new]);
        }
        Ok(Heads {
            batch: new.batch,
            heads: new.heads,
            length: self.room,
            size: row,
            values,
        })
    }
}

/// Queries, keys and values, which may be one tensor.
fn parts<R: Real>(call: &Call) -> Result<[Heads<R>; 3], String> {
    let x = call.input(0)?;
    let (n, n_shared) = (call.positive("num_heads")?, call.positive("kv_num_heads")?);
    if (0..3).any(|at| call.optional(at).is_some_and(|t| t.shape.len() != 3)) {
        return Err("its queries, keys and values do not have three dimensions".to_string());
    }
    if let (Some(k), Some(v)) = (call.optional(1), call.optional(2)) {
        let shared = Some(n_shared);
        return Ok([
            Heads::new(x, Some(n))?,
            Heads::new(k, shared)?,
            Heads::new(v, shared)?,
        ]);
    }
    let n_all = n_shared
        .checked_mul(2)
        .and_then(|shared| shared.checked_add(n));
    let all = Heads::<R>::new(x, Some(n_all.ok_or("it has too many heads")?))?;
    let block = all.length * all.size;
    let some = |from: usize, heads: usize| {
        let sequences = all.values.chunks((all.heads * block).max(1));
        let values = sequences.flat_map(|own| own[from * block..][..heads * block].to_vec());
        Heads {
            batch: all.batch,
            heads,
            length: all.length,
            size: all.size,
            values: values.collect(),
        }
    };
    Ok([some(0, n), some(n, n_shared), some(n + n_shared, n_shared)])
}

fn evaluate<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    if let Some(name) = unknown_attribute(call) {
        return Err(format!("its attribute `{name}` is not supported"));
    }
    let wants = |at: usize| {
        let name = call.node.output.get(at);
        name.is_some_and(|name| !name.is_empty())
    };
    if wants(3) || (12..call.inputs.len()).any(|at| call.optional(at).is_some()) {
        return Err("scores as an output and quantized caches are not supported".to_string());
    }
    let [mut q, mut k, v] = parts::<R>(call)?;
    let past = |at: usize| {
        let tensor = call.optional(at);
        tensor.map(|t| Heads::<R>::new(t, None)).transpose()
    };
    let past = [past(3)?, past(4)?];
    let kept = past[0].as_ref().map_or(0, |past| past.length);
    let fits = |new: &Heads<R>, past: Option<&Heads<R>>| {
        let is_like = |past: &Heads<R>| {
            let own = (past.batch, past.heads, past.size, past.length);
            own == (new.batch, new.heads, new.size, kept)
        };
        (new.batch, new.length, new.size) == (q.batch, q.length, q.size) && past.is_none_or(is_like)
    };
    let is_paired = past[0].is_some() == past[1].is_some();
    if !is_paired || !fits(&k, past[0].as_ref()) || !fits(&v, past[1].as_ref()) {
        return Err("its queries, keys, values and those kept from before do not fit".to_string());
    }
    let lengths = Lengths::new(call, (q.batch, q.length), kept)?;
    if is_on(call, "do_rotary") {
        turn(call, &lengths, [&mut q, &mut k])?;
    }
    let keys = lengths.cached(past[0].as_ref(), &k)?;
    let values = lengths.cached(past[1].as_ref(), &v)?;
    let element = call.input(0)?.element();
    let y = attended(call, &lengths, &q, [&keys, &values])?;
    let mut outputs = vec![y.tensor(element, true)?];
    if call.node.output.len() > 1 {
        outputs.push(keys.tensor(element, false)?);
        outputs.push(values.tensor(element, false)?);
    }
    Ok(outputs)
}

/// Rotates queries and keys by the angles of their positions.
fn turn<R: Real>(call: &Call, lengths: &Lengths, heads: [&mut Heads<R>; 2]) -> Result<(), String> {
    let angles = [call.input(7)?, call.input(8)?];
    let given = match call.optional(9) {
        Some(_) => Some(call.ints(9)?),
        None => None,
    };
    let interleaved = is_on(call, "rotary_interleaved");
    for own in heads {
        let steps = own.length;
        let position = |batch: usize, step: usize| match &given {
            // The first of all positions, and the following ones.
            Some(given) if lengths.is_prompt => {
                usize::try_from(given.first()?.checked_add(step as i64)?).ok()
            }
            Some(given) => usize::try_from(*given.get(batch * steps + step)?).ok(),
            None => Some(lengths.past[batch] + step),
        };
        rotate(own, angles, interleaved, &position)?;
    }
    Ok(())
}

/// Attention over the cache: a query sees the keys up to its own.
fn attended<R: Real>(
    call: &Call,
    lengths: &Lengths,
    q: &Heads<R>,
    [keys, values]: [&Heads<R>; 2],
) -> Result<Heads<R>, String> {
    let room = lengths.room;
    let bias = call
        .optional(10)
        .map(|t| added::<R>(t, q, room))
        .transpose()?;
    let window = call.attributes.int("local_window_size").filter(|n| *n >= 0);
    let window = window.map_or(usize::MAX, |n| n as usize);
    let sinks = match call.optional(11) {
        Some(sinks) => Some(R::read(sinks)?.into_owned()),
        None => is_on(call, "smooth_softmax").then(|| vec![R::zero(); q.heads]),
    };
    if sinks.as_ref().is_some_and(|sinks| sinks.len() != q.heads) {
        return Err("its sinks are not one for each head".to_string());
    }
    let seen = |batch: usize, head: usize, row: usize, column: usize| {
        // Behind the keys stands the sink: a key and a value of zeros.
        if let (true, Some(sinks)) = (column == room, &sinks) {
            return sinks[head];
        }
        let own = lengths.past[batch] + row;
        let last = own.min(lengths.total[batch].saturating_sub(1));
        if column > last || own - column >= window {
            return R::neg_infinity();
        }
        let at = |([b, h], values): &([usize; 2], Vec<R>)| {
            let part = (batch % b * h + head % h) * q.length + row;
            values[part * room + column]
        };
        bias.as_ref().map_or(R::zero(), at)
    };
    let softcap = call.attributes.float("softcap").unwrap_or(0.0).max(0.0);
    let scale = match call.attributes.float("scale").filter(|scale| *scale != 0.0) {
        Some(_) => scale_of::<R>(call, q.size),
        None => R::of((q.size as f64).sqrt().recip()),
    };
    let how = Scoring {
        scale,
        softcap: R::of(f64::from(softcap)),
        bias: &seen,
        keep: None,
    };
    let (y, _) = match sinks {
        None => attend(q, keys, values, &how)?,
        Some(_) => attend(q, &with_zeros(keys), &with_zeros(values), &how)?,
    };
    Ok(y)
}

/// What is added to scores: its first two sizes, 1 or as many as there are, and its values for `room` keys.
fn added<R: Real>(
    bias: &Tensor,
    q: &Heads<R>,
    room: usize,
) -> Result<([usize; 2], Vec<R>), String> {
    let refuse = || format!("a bias of sizes {:?} does not fit", bias.shape);
    let [b, h, rows, columns] = bias.shape[..] else {
        return Err(refuse());
    };
    let is_one_of = |n: usize, all: usize| n == 1 || n == all;
    if !is_one_of(b, q.batch) || !is_one_of(h, q.heads) || rows != q.length || columns > room {
        return Err(refuse());
    }
    let mut values = vec![R::zero(); crate::tensor::room(&[b, h, rows, room])?];
    let given = R::read(bias)?;
    for (to, from) in (values.chunks_mut(room.max(1))).zip(given.chunks(columns.max(1))) {
        to[..columns].copy_from_slice(from);
    }
    Ok(([b, h], values))
}

/// The heads with a vector of zeros after the others.
fn with_zeros<R: Real>(heads: &Heads<R>) -> Heads<R> {
    let mut values =
        Vec::with_capacity(heads.values.len() + heads.batch * heads.heads * heads.size);
    for at in 0..heads.batch * heads.heads {
        let n = heads.length * heads.size;
        values.extend_from_slice(&heads.values[at * n..][..n]);
        values.resize(values.len() + heads.size, R::zero());
    }
    Heads {
        length: heads.length + 1,
        values,
        ..*heads
    }
}

fn infer(cx: &Inference) -> Option<Vec<Fact>> {
    let [batch, length, width] = cx.shape(0)? else {
        return None;
    };
    let heads = |name: &str| cx.attributes.int(name).map(SymExpr::constant);
    let (n, n_shared) = (heads("num_heads")?, heads("kv_num_heads")?);
    let all = match cx.fact(1) {
        Some(_) => n.clone(),
        None => n.clone() + n_shared.clone() * 2,
    };
    let size = width.divide_exactly(&all).unwrap_or_else(|| cx.unknown());
    // The longest sequence, if the cache that is given has no more room.
    let total = cx.ints(6).and_then(|all| all.into_iter().next());
    let kept = match cx.fact(3) {
        None => Some(SymExpr::constant(0)),
        Some(_) => cx.shape(3).and_then(|shape| shape.get(2).cloned()),
    };
    let room = match (total, kept) {
        (Some(total), Some(kept)) => match (total.clone() - kept.clone()).as_const() {
            Some(n) if n < 0 => kept,
            Some(_) => total,
            None if kept == SymExpr::constant(0) => total,
            None => cx.unknown(),
        },
        _ => cx.unknown(),
    };
    let cache = vec![batch.clone(), n_shared, room, size.clone()];
    let shapes = [
        vec![batch.clone(), length.clone(), n * size],
        cache.clone(),
        cache,
    ];
    let facts = (shapes.into_iter()).map(|shape| Fact::new(cx.element(0), Some(shape)));
    Some(facts.take(cx.node.output.len()).collect())
}
