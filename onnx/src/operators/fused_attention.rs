//! Attention of ONNX Runtime (domain `com.microsoft`): MultiHeadAttention and Attention.

use super::attention::{Heads, Scoring, attend, scale_of};
use super::products::{broadcast_sizes, matrix, matrix_mut, multiply};
use super::real::{Real, in_real};
use super::{Call, Inference, Operator};
use crate::fact::Fact;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new(
        "MultiHeadAttention",
        infer_separate,
        |call| in_real!(call.input(0)?.element(), R => separate::<R>(call)),
    )
    .domain("com.microsoft"),
    Operator::new(
        "Attention",
        infer_merged,
        |call| in_real!(call.input(0)?.element(), R => merged::<R>(call)),
    )
    .domain("com.microsoft"),
];

/// Which keys a query may look at, and what is added to scores.
struct Mask<R> {
    /// Sizes `[batch or 1, heads or 1, queries, keys]` and what is added.
    bias: Option<([usize; 4], Vec<R>)>,
    /// Sizes `[batch, queries or 1, keys]` and whether the key counts.
    keys: Option<([usize; 3], Vec<bool>)>,
    filter: R,
    causal: bool,
    past: usize,
}

impl<R: Real> Mask<R> {
    /// `mask` is a mask of keys or the number of keys of each sequence.
    fn new(
        call: &Call,
        (batch, queries, keys, past): (usize, usize, usize, usize),
        mask: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> Result<Mask<R>, String> {
        let filter = call
            .attributes
            .float("mask_filter_value")
            .unwrap_or(-10000.0);
        let keys_of = |mask: &Tensor| {
            let refuse = || format!("a mask of sizes {:?} is not supported", mask.shape);
            let v = mask.to_i64().ok_or_else(refuse)?;
            let counts = |v: &[i64]| v.iter().map(|x| *x != 0).collect();
            match mask.shape[..] {
                [n] if n == batch => {
                    let all = v.iter().flat_map(|n| (0..keys as i64).map(move |k| k < *n));
                    Ok(([batch, 1, keys], all.collect()))
                }
                // All ends, then all starts.
                [n] if n == 2 * batch => {
                    let (ends, starts) = v.split_at(batch);
                    let one = |(end, start): (&i64, &i64)| {
                        let range = *start..*end;
                        (0..keys as i64).map(move |k| range.contains(&k))
                    };
                    Ok((
                        [batch, 1, keys],
                        ends.iter().zip(starts).flat_map(one).collect(),
                    ))
                }
                [b, n] if (b, n) == (batch, keys) => Ok(([batch, 1, keys], counts(&v))),
                [b, q, n] if (b, q, n) == (batch, queries, keys) => {
                    Ok(([batch, queries, keys], counts(&v)))
                }
                _ => Err(refuse()),
            }
        };
        let added = |bias: &Tensor| {
            let [b, h, q, k] = bias.shape[..] else {
                return Err(format!("a bias of sizes {:?} is not supported", bias.shape));
            };
            match (b == 1 || b == batch) && (q, k) == (queries, keys) {
                true => Ok(([b, h, q, k], R::read(bias)?.into_owned())),
                false => Err(format!("a bias of sizes {:?} does not fit", bias.shape)),
            }
        };
        Ok(Mask {
            bias: bias.map(added).transpose()?,
            keys: mask.map(keys_of).transpose()?,
            filter: R::of(f64::from(filter)),
            causal: call.attributes.flag("unidirectional"),
            past,
        })
    }

    fn at(&self, batch: usize, head: usize, query: usize, key: usize) -> R {
        if self.causal && key > query + self.past {
            return R::neg_infinity();
        }
        let mut sum = R::zero();
        if let Some(([_, queries, keys], counts)) = &self.keys {
            let row = batch * queries + if *queries == 1 { 0 } else { query };
            if !counts[row * keys + key] {
                sum += self.filter;
            }
        }
        if let Some(([b, h, queries, keys], bias)) = &self.bias {
            let at = batch % b * h + head % h;
            sum += bias[(at * queries + query) * keys + key];
        }
        sum
    }
}

/// `[batch, length, hidden]` with a part of a bias added, as heads.
fn biased<R: Real>(x: &Tensor, bias: Option<&[R]>, heads: usize) -> Result<Heads<R>, String> {
    let [batch, length, hidden] = x.shape[..] else {
        // These are heads already, from another attention.
        return Heads::new(x, None);
    };
    let mut values = R::read(x)?.into_owned();
    if let Some(bias) = bias {
        for row in values.chunks_mut(hidden.max(1)) {
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += *b);
        }
    }
    if !hidden.is_multiple_of(heads) {
        return Err(format!("{hidden} elements are not {heads} heads"));
    }
    let heads = Heads {
        batch,
        heads: length,
        length: heads,
        size: hidden / heads,
        values,
    };
    Ok(heads.exchanged())
}

fn separate<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let n_heads = call.positive("num_heads")?;
    let (Some(key), Some(value)) = (call.optional(1), call.optional(2)) else {
        return Err("packed keys and values are not supported".to_string());
    };
    if x.shape.len() != 3 || key.shape.len() == 5 {
        return Err("packed keys and values are not supported".to_string());
    }
    let bias = call.optional(3).map(|b| R::read(b)).transpose()?;
    let (hidden, total) = (x.shape[2], bias.as_ref().map_or(0, |b| b.len()));
    if bias.is_some() && total < 2 * hidden {
        return Err(format!("a bias of {total} elements does not fit"));
    }
    let part = |from: usize, to: usize| bias.as_ref().map(|b| &b[from..to]);
    let past = |at: usize| {
        call.optional(at)
            .map(|t| Heads::<R>::new(t, None))
            .transpose()
    };
    let past_length = call
        .optional(6)
        .map_or(0, |t| t.shape.get(2).copied().unwrap_or(0));
    let q = biased::<R>(x, part(0, hidden), n_heads)?;
    let k = biased::<R>(key, part(hidden, 2 * hidden), n_heads)?.after(past(6)?)?;
    let v = biased::<R>(value, part(2 * hidden, total), n_heads)?.after(past(7)?)?;
    let sizes = (q.batch, q.length, k.length, past_length);
    let mask = Mask::<R>::new(call, sizes, call.optional(4), call.optional(5))?;
    let element = x.element();
    let y = weighted(call, &q, &k, &v, &mask)?;
    let mut outputs = vec![y.tensor(element, true)?];
    if call.node.output.len() > 3 {
        return Err("scores as an output are not supported".to_string());
    }
    if call.node.output.len() > 1 {
        outputs.push(k.tensor(element, false)?);
        outputs.push(v.tensor(element, false)?);
    }
    Ok(outputs)
}

fn weighted<R: Real>(
    call: &Call,
    q: &Heads<R>,
    k: &Heads<R>,
    v: &Heads<R>,
    mask: &Mask<R>,
) -> Result<Heads<R>, String> {
    let how = Scoring {
        scale: scale_of::<R>(call, q.size),
        softcap: R::zero(),
        bias: &|b, h, i, j| mask.at(b, h, i, j),
        keep: None,
    };
    attend(q, k, v, &how).map(|(y, _)| y)
}

/// One product gives queries, keys and values.
fn merged<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let (x, w) = (call.input(0)?, call.input(1)?);
    let n_heads = call.positive("num_heads")?;
    let ([batch, length, inner], [rows, width]) = (&x.shape[..], &w.shape[..]) else {
        return Err("its input or weights have other dimensions".to_string());
    };
    let sizes = call
        .attributes
        .ints("qkv_hidden_sizes")
        .filter(|s| s.len() == 3);
    let [a, b, c] = match sizes {
        Some(sizes) => [0, 1, 2].map(|n| usize::try_from(sizes[n]).unwrap_or(0)),
        None => [width / 3; 3],
    };
    if rows != inner || a + b + c != *width || call.attributes.flag("do_rotary") {
        return Err(format!("weights of sizes {:?} do not fit", w.shape));
    }
    if call.attributes.flag("past_present_share_buffer") {
        return Err("shared buffers are not supported".to_string());
    }
    let mut projected = vec![R::zero(); batch * length * width];
    let (vx, vw) = (R::read(x)?, R::read(w)?);
    if !projected.is_empty() && *inner > 0 {
        let to = matrix_mut(&mut projected, batch * length, *width)?;
        multiply(
            matrix(&vx, batch * length, *inner)?,
            matrix(&vw, *rows, *width)?,
            to,
        );
    }
    if let Some(bias) = call.optional(2) {
        let bias = R::read(bias)?;
        if broadcast_sizes(&[&[bias.len()], &[*width]]).is_none() {
            return Err("its bias does not fit".to_string());
        }
        for row in projected.chunks_mut(*width) {
            row.iter_mut().zip(bias.iter()).for_each(|(x, b)| *x += *b);
        }
    }
    let part = |from: usize, size: usize| -> Result<Heads<R>, String> {
        if size == 0 || !size.is_multiple_of(n_heads) {
            return Err(format!("{size} elements are not {n_heads} heads"));
        }
        let rows = projected
            .chunks(*width)
            .flat_map(|row| row[from..from + size].to_vec());
        let heads = Heads {
            batch: *batch,
            heads: *length,
            length: n_heads,
            size: size / n_heads,
            values: rows.collect(),
        };
        Ok(heads.exchanged())
    };
    let (q, mut k, mut v) = (part(0, a)?, part(a, b)?, part(a + b, c)?);
    let mut past_length = 0;
    if let Some(past) = call.optional(4) {
        let [2, _, _, l, _] = past.shape[..] else {
            return Err(format!("{:?} is not a past", past.shape));
        };
        past_length = l;
        let values = R::read(past)?;
        let (keys, before) = values.split_at(values.len() / 2);
        let heads = |values: &[R]| -> Result<Heads<R>, String> {
            Heads::new(
                &R::tensor(past.element(), &past.shape[1..], values.to_vec())?,
                None,
            )
        };
        (k, v) = (k.after(Some(heads(keys)?))?, v.after(Some(heads(before)?))?);
    }
    let mask = (q.batch, q.length, k.length, past_length);
    let mask = Mask::<R>::new(call, mask, call.optional(3), call.optional(5))?;
    let y = weighted(call, &q, &k, &v, &mask)?;
    let mut outputs = vec![y.tensor(x.element(), true)?];
    if call.node.output.len() > 1 {
        let shape = [2, k.batch, k.heads, k.length, k.size];
        let values = [k.values, v.values].concat();
        outputs.push(R::tensor(x.element(), &shape, values)?);
    }
    Ok(outputs)
}

fn infer_separate(cx: &Inference) -> Option<Vec<Fact>> {
    let (q, v) = (cx.shape(0)?, cx.shape(2)?);
    let [batch, length, _] = q else { return None };
    let heads = SymExpr::constant(cx.attributes.int("num_heads")?);
    let size_of = |n: &SymExpr| n.divide_exactly(&heads).unwrap_or_else(|| cx.unknown());
    let (hidden, value_size, keys) = match v {
        [_, keys, hidden] => (hidden.clone(), size_of(hidden), keys.clone()),
        [_, h, keys, size] => (h.clone() * size.clone(), size.clone(), keys.clone()),
        _ => return None,
    };
    let shape = vec![batch.clone(), length.clone(), hidden];
    let total = match cx.fact(6) {
        None => keys,
        Some(_) => cx.shape(6)?.get(2)?.clone() + keys,
    };
    let state = |size: SymExpr| vec![batch.clone(), heads.clone(), total.clone(), size];
    let shapes = [shape, state(size_of(&q[2])), state(value_size)];
    let facts = shapes
        .into_iter()
        .map(|s| Fact::new(cx.element(0), Some(s)));
    Some(facts.take(cx.node.output.len()).collect())
}

fn infer_merged(cx: &Inference) -> Option<Vec<Fact>> {
    let [batch, length, _] = cx.shape(0)? else {
        return None;
    };
    let [_, width] = cx.shape(1)? else {
        return None;
    };
    let hidden = match cx.attributes.ints("qkv_hidden_sizes") {
        Some([_, _, last]) => Some(SymExpr::constant(*last)),
        _ => width.divide_exactly(&SymExpr::constant(3)),
    };
    let hidden = hidden.unwrap_or_else(|| cx.unknown());
    let shape = vec![batch.clone(), length.clone(), hidden.clone()];
    let mut outputs = vec![Fact::new(cx.element(0), Some(shape))];
    if cx.node.output.len() > 1 {
        let heads = SymExpr::constant(cx.attributes.int("num_heads")?);
        let past = match cx.fact(4) {
            None => SymExpr::constant(0),
            Some(_) => cx.shape(4)?.get(3)?.clone(),
        };
        let size = hidden
            .divide_exactly(&heads)
            .unwrap_or_else(|| cx.unknown());
        let shape = vec![2.into(), batch.clone(), heads, past + length.clone(), size];
        outputs.push(Fact::new(cx.element(0), Some(shape)));
    }
    Some(outputs)
}
