//! Attention and rotary position embedding.

use super::movement::Broadcast;
use super::products::{broadcast_sizes, matrix, matrix_mut, multiply_here};
use super::real::{Real, in_real};
use super::softmax::softmax;
use super::{Call, Inference, Operator, threads};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::Tensor;
use graph::SymExpr;

pub const ROWS: &[Operator] = &[
    Operator::new(
        "Attention",
        infer_attention,
        |call| in_real!(call.input(0)?.element(), R => attention::<R>(call)),
    ),
    Operator::new(
        "RotaryEmbedding",
        super::movement::same,
        |call| in_real!(call.input(0)?.element(), R => rotary::<R>(call, [1, 2, 3])),
    ),
    // In ONNX Runtime's own operator, positions come before cosines and sines.
    Operator::new(
        "RotaryEmbedding",
        super::movement::same,
        |call| in_real!(call.input(0)?.element(), R => rotary::<R>(call, [2, 3, 1])),
    )
    .domain("com.microsoft"),
];

/// Vectors `[batch, heads, length, size]`.
pub struct Heads<R> {
    /// How many sequences.
    pub batch: usize,
    /// Heads of each.
    pub heads: usize,
    /// Vectors of each head.
    pub length: usize,
    /// Elements of a vector.
    pub size: usize,
    /// Elements, row-major.
    pub values: Vec<R>,
}

impl<R: Real> Heads<R> {
    /// A tensor of those four dimensions, or `[batch, length, heads·size]` of that many heads.
    ///
    /// # Errors
    /// Sizes that do not fit.
    pub fn new(x: &Tensor, heads: Option<usize>) -> Result<Heads<R>, String> {
        let v = R::read(x)?;
        match (&x.shape[..], heads) {
            (&[batch, heads, length, size], _) => Ok(Heads {
                batch,
                heads,
                length,
                size,
                values: v.into_owned(),
            }),
            (&[batch, length, hidden], Some(heads))
                if heads > 0 && hidden.is_multiple_of(heads) =>
            {
                let merged = Heads {
                    batch,
                    heads: length,
                    length: heads,
                    size: hidden / heads,
                    values: v.into_owned(),
                };
                Ok(merged.exchanged())
            }
            _ => Err(format!(
                "{:?} are not the sizes of {heads:?} heads",
                x.shape
            )),
        }
    }

    /// Returns the heads with heads and length exchanged.
    pub fn exchanged(self) -> Heads<R> {
        let mut values = Vec::with_capacity(self.values.len());
        for b in 0..self.batch {
            for l in 0..self.length {
                for h in 0..self.heads {
                    let at = ((b * self.heads + h) * self.length + l) * self.size;
                    values.extend_from_slice(&self.values[at..at + self.size]);
                }
            }
        }
        Heads {
            heads: self.length,
            length: self.heads,
            values,
            ..self
        }
    }

    /// Returns the heads with the vectors of `past` before each head's own.
    ///
    /// # Errors
    /// Sizes that do not fit.
    pub fn after(self, past: Option<Heads<R>>) -> Result<Heads<R>, String> {
        let Some(past) = past else { return Ok(self) };
        if (past.batch, past.heads, past.size) != (self.batch, self.heads, self.size) {
            return Err("what is kept from before does not fit".to_string());
        }
        let mut values = Vec::with_capacity(past.values.len() + self.values.len());
        for at in 0..self.batch * self.heads {
            let (old, new) = (past.length * past.size, self.length * self.size);
            values.extend_from_slice(&past.values[at * old..][..old]);
            values.extend_from_slice(&self.values[at * new..][..new]);
        }
        Ok(Heads {
            length: past.length + self.length,
            values,
            ..self
        })
    }

    /// Returns a tensor of four dimensions, or of three with merged heads.
    ///
    /// # Errors
    /// `element` is no float type.
    pub fn tensor(self, element: Element, merged: bool) -> Result<Tensor, String> {
        if !merged {
            let shape = [self.batch, self.heads, self.length, self.size];
            return R::tensor(element, &shape, self.values);
        }
        let shape = [self.batch, self.length, self.heads * self.size];
        R::tensor(element, &shape, self.exchanged().values)
    }

    fn head(&self, at: usize) -> &[R] {
        let n = self.length * self.size;
        &self.values[at * n..][..n]
    }
}

/// What happens to scores.
pub struct Scoring<'a, R> {
    /// Factor of every product.
    pub scale: R,
    /// Bound of `softcap·tanh(x/softcap)`, 0 for none.
    pub softcap: R,
    /// What is added for (sequence, head, query, key).
    pub bias: &'a (dyn Fn(usize, usize, usize, usize) -> R + Sync),
    /// Which scores are given: 0 as multiplied, 1 after the softcap, 2 after the bias, 3 after softmax.
    pub keep: Option<i64>,
}

/// `softmax(q·kᵀ·scale + bias)·v` and the scores asked for. Heads of `k` and `v` are shared by equal
/// runs of heads of `q`.
///
/// # Errors
/// Sizes that do not fit.
pub fn attend<R: Real>(
    q: &Heads<R>,
    k: &Heads<R>,
    v: &Heads<R>,
    how: &Scoring<R>,
) -> Result<(Heads<R>, Vec<R>), String> {
    let fits = q.batch == k.batch
        && k.batch == v.batch
        && k.heads == v.heads
        && k.heads > 0
        && q.heads.is_multiple_of(k.heads)
        && q.size == k.size
        && k.length == v.length;
    if !fits {
        return Err("its queries, keys and values do not fit".to_string());
    }
    let (rows, columns) = (q.length, k.length);
    let n_heads = q.batch * q.heads;
    let mut y = vec![R::zero(); n_heads * rows * v.size];
    let mut kept = vec![
        R::zero();
        if how.keep.is_some() {
            n_heads * rows * columns
        } else {
            0
        }
    ];
    let mut kept_heads = kept.chunks_mut((rows * columns).max(1));
    let all = y.chunks_mut((rows * v.size).max(1)).enumerate();
    let pieces: Vec<_> = all.map(|(at, y)| (at, y, kept_heads.next())).collect();
    let head = |at: usize, y: &mut [R], mut kept: Option<&mut [R]>| -> Result<(), String> {
        let (batch, head) = (at / q.heads, at % q.heads);
        let shared = batch * k.heads + head / (q.heads / k.heads);
        let mut scores = vec![R::zero(); rows * columns];
        let mut keep = |stage: i64, scores: &[R]| {
            if let (true, Some(kept)) = (how.keep == Some(stage), &mut kept) {
                kept.copy_from_slice(scores);
            }
        };
        let keys = matrix(k.head(shared), columns, k.size)?;
        let mut to = matrix_mut(&mut scores, rows, columns)?;
        multiply_here(matrix(q.head(at), rows, q.size)?, keys.t(), &mut to);
        scores.iter_mut().for_each(|x| *x *= how.scale);
        keep(0, &scores);
        if how.softcap != R::zero() {
            let cap = how.softcap;
            scores.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        keep(1, &scores);
        let mut empty = vec![true; rows];
        for (row, scores) in scores.chunks_mut(columns.max(1)).enumerate() {
            for (column, score) in scores.iter_mut().enumerate() {
                let bias = (how.bias)(batch, head, row, column);
                empty[row] &= bias == R::neg_infinity();
                *score += bias;
            }
        }
        keep(2, &scores);
        for (row, scores) in scores.chunks_mut(columns.max(1)).enumerate() {
            match empty[row] {
                // A query that may look at no key gives zeros.
                true => scores.fill(R::zero()),
                false => softmax(scores),
            }
        }
        keep(3, &scores);
        let values = matrix(v.head(shared), columns, v.size)?;
        let mut y = matrix_mut(y, rows, v.size)?;
        multiply_here(matrix(&scores, rows, columns)?, values, &mut y);
        Ok(())
    };
    let problem = std::sync::Mutex::new(None);
    threads::each(
        pieces.into_iter(),
        || (),
        |(), (at, y, kept)| {
            if let (Err(what), Ok(mut problem)) = (head(at, y, kept), problem.lock()) {
                *problem = Some(what);
            }
        },
    );
    if let Some(what) = problem.into_inner().ok().flatten() {
        return Err(what);
    }
    let y = Heads {
        batch: q.batch,
        heads: q.heads,
        length: rows,
        size: v.size,
        values: y,
    };
    Ok((y, kept))
}

/// An additive mask: `-∞` where a mask of truth values is false.
///
/// # Errors
/// It is neither of truth values nor of floats.
pub fn additive<R: Real>(mask: &Tensor) -> Result<Vec<R>, String> {
    match (mask.element(), mask.to_i64()) {
        (Element::Bool, Some(v)) => {
            let value = |x: &i64| {
                if *x == 0 {
                    R::neg_infinity()
                } else {
                    R::zero()
                }
            };
            Ok(v.iter().map(value).collect())
        }
        _ => Ok(R::read(mask)?.into_owned()),
    }
}

/// The scale a node gives, or one over the root of a vector's size.
pub fn scale_of<R: Real>(call: &Call, size: usize) -> R {
    match call.attributes.float("scale") {
        Some(scale) => R::of(f64::from(scale)),
        None => R::of((size as f64).sqrt().recip()),
    }
}

fn heads_of(call: &Call, name: &str) -> Option<usize> {
    call.attributes
        .int(name)
        .and_then(|n| usize::try_from(n).ok())
}

fn attention<R: Real>(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let merged = x.shape.len() == 3;
    let kv_heads = heads_of(call, "kv_num_heads");
    let q = Heads::<R>::new(x, heads_of(call, "q_num_heads"))?;
    let past = |at: usize| {
        call.optional(at)
            .map(|t| Heads::<R>::new(t, None))
            .transpose()
    };
    let past_length = call
        .optional(4)
        .map_or(0, |t| t.shape.get(2).copied().unwrap_or(0));
    let k = Heads::<R>::new(call.input(1)?, kv_heads)?.after(past(4)?)?;
    let v = Heads::<R>::new(call.input(2)?, kv_heads)?.after(past(5)?)?;
    let lengths = match call.optional(6) {
        Some(_) => Some(call.ints(6)?),
        None => None,
    };
    if lengths.as_ref().is_some_and(|l| l.len() != q.batch) {
        return Err("its lengths are not one for each sequence".to_string());
    }
    let mask = match call.optional(3) {
        None => None,
        Some(mask) => {
            let columns = mask.shape.last().copied().unwrap_or(1);
            let to = [
                q.batch,
                q.heads,
                q.length,
                if columns == 1 { k.length } else { columns },
            ];
            if broadcast_sizes(&[&mask.shape, &to]).as_deref() != Some(&to[..]) {
                return Err(format!("its mask {:?} does not fit {to:?}", mask.shape));
            }
            Some((additive::<R>(mask)?, Broadcast::new(&mask.shape, &to), to))
        }
    };
    let causal = call.attributes.flag("is_causal");
    let window = |name: &str| {
        call.attributes
            .int(name)
            .filter(|n| *n >= 0)
            .unwrap_or(i64::MAX)
    };
    let (left, right) = (window("left_window_size"), window("right_window_size"));
    let n_rows = q.length as i64;
    let bias = |b: usize, h: usize, row: usize, column: usize| {
        let length = lengths.as_ref().map(|l| l[b]);
        let offset = length.map_or(past_length as i64, |n| n.saturating_sub(n_rows));
        let ahead = (column as i64 - row as i64).saturating_sub(offset);
        let out = (causal && ahead > 0)
            || ahead > right
            || ahead.saturating_neg() > left
            || length.is_some_and(|n| column as i64 >= n);
        match &mask {
            _ if out => R::neg_infinity(),
            None => R::zero(),
            // A mask may be shorter than the keys; the rest is masked.
            Some((_, _, to)) if column >= to[3] => R::neg_infinity(),
            Some((mask, from, to)) => {
                mask[from.at(((b * to[1] + h) * to[2] + row) * to[3] + column)]
            }
        }
    };
    let softcap = call.attributes.float("softcap").unwrap_or(0.0);
    let wants_scores = call.node.output.get(3).is_some_and(|o| !o.is_empty());
    let mode = call.attributes.int("qk_matmul_output_mode").unwrap_or(0);
    let how = Scoring {
        scale: scale_of::<R>(call, q.size),
        softcap: R::of(f64::from(softcap)),
        bias: &bias,
        keep: wants_scores.then_some(mode),
    };
    let (y, scores) = attend(&q, &k, &v, &how)?;
    let element = x.element();
    let mut outputs = vec![y.tensor(element, merged)?];
    if call.node.output.len() > 1 {
        let shape = [q.batch, q.heads, q.length, k.length];
        outputs.push(k.tensor(element, false)?);
        outputs.push(v.tensor(element, false)?);
        if wants_scores {
            outputs.push(R::tensor(element, &shape, scores)?);
        }
    }
    Ok(outputs)
}

/// Sizes `[batch, heads, length, size]` of an input of an attention.
fn infer_heads(cx: &Inference, at: usize, attribute: &str) -> Option<[SymExpr; 4]> {
    match cx.shape(at)? {
        [b, h, l, s] => Some([b, h, l, s].map(SymExpr::clone)),
        [b, l, hidden] => {
            let heads = SymExpr::constant(cx.attributes.int(attribute)?);
            let size = hidden
                .divide_exactly(&heads)
                .unwrap_or_else(|| cx.unknown());
            Some([b.clone(), heads, l.clone(), size])
        }
        _ => None,
    }
}

fn infer_attention(cx: &Inference) -> Option<Vec<Fact>> {
    let q = infer_heads(cx, 0, "q_num_heads")?;
    let mut k = infer_heads(cx, 1, "kv_num_heads")?;
    let mut v = infer_heads(cx, 2, "kv_num_heads")?;
    for (at, now) in [(4, &mut k), (5, &mut v)] {
        match (cx.fact(at), cx.shape(at)) {
            (None, _) => {}
            (_, Some([_, _, past, _])) => now[2] = now[2].clone() + past.clone(),
            _ => now[2] = cx.unknown(),
        }
    }
    let y = match cx.rank(0) {
        Some(3) => vec![q[0].clone(), q[2].clone(), q[1].clone() * v[3].clone()],
        _ => vec![q[0].clone(), q[1].clone(), q[2].clone(), v[3].clone()],
    };
    let [batch, heads, length, _] = q;
    let scores = vec![batch, heads, length, k[2].clone()];
    let shapes = [y, k.to_vec(), v.to_vec(), scores];
    let facts = shapes.map(|s| Fact::new(cx.element(0), Some(s)));
    Some(facts.into_iter().take(cx.node.output.len()).collect())
}

/// Rotates pairs of elements by the angles of their positions; `at` says which inputs hold cosines,
/// sines and positions.
fn rotary<R: Real>(call: &Call, at: [usize; 3]) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let flag = |name: &str| call.attributes.flag(name);
    let merged = x.shape.len() == 3;
    if flag("is_packed_batching") {
        return Err("packed batches are not supported".to_string());
    }
    let (cosines, sines) = (call.input(at[0])?, call.input(at[1])?);
    let given = |name: &str| heads_of(call, name).filter(|n| *n > 0);
    let half = cosines.shape.last().copied().unwrap_or(0);
    let by_size = || Some(x.shape.last()?.checked_div(2 * half)?.max(1));
    let heads = given("num_heads").or_else(by_size);
    let mut y = Heads::<R>::new(x, heads)?;
    let rotated = given("rotary_embedding_dim").unwrap_or(y.size);
    if rotated != 2 * half {
        return Err(format!(
            "{rotated} elements cannot be rotated by {:?}",
            cosines.shape
        ));
    }
    let positions = match call.optional(at[2]) {
        None => None,
        Some(_) => Some(call.ints(at[2])?),
    };
    let rows = cosines.shape.iter().product::<usize>() / half.max(1);
    let length = y.length;
    let position = |batch: usize, l: usize| match &positions {
        // One batch of angles serves all batches.
        None if rows == length => Some(l),
        None => Some(batch * length + l),
        // One first position for all vectors, or a position for each vector.
        Some(p) if p.len() == 1 => usize::try_from(p[0].checked_add(l as i64)?).ok(),
        Some(p) => usize::try_from(*p.get(batch * length + l)?).ok(),
    };
    rotate(&mut y, [cosines, sines], flag("interleaved"), &position)?;
    Ok(vec![y.tensor(x.element(), merged)?])
}

/// Rotates pairs of elements of each vector: by the row of `cosines` and `sines` that `position` gives for its sequence
/// and its place there.
///
/// # Errors
/// Sizes that do not fit, and positions without angles.
pub fn rotate<R: Real>(
    y: &mut Heads<R>,
    [cosines, sines]: [&Tensor; 2],
    interleaved: bool,
    position: &dyn Fn(usize, usize) -> Option<usize>,
) -> Result<(), String> {
    let half = cosines.shape.last().copied().unwrap_or(0);
    if half * 2 > y.size || cosines.shape != sines.shape {
        return Err(format!(
            "{} elements cannot be rotated by {:?}",
            y.size, cosines.shape
        ));
    }
    let (cos, sin) = (R::read(cosines)?, R::read(sines)?);
    let rows = cos.len() / half.max(1);
    for n in 0..y.batch * y.heads * y.length {
        let (batch, l) = (n / (y.heads * y.length), n % y.length);
        let row = position(batch, l).filter(|row| *row < rows);
        let row = row.ok_or("a position is beyond the angles")?;
        let x = &mut y.values[n * y.size..][..2 * half];
        for i in 0..half {
            let (a, b) = match interleaved {
                true => (2 * i, 2 * i + 1),
                false => (i, half + i),
            };
            let (c, s) = (cos[row * half + i], sin[row * half + i]);
            (x[a], x[b]) = (c * x[a] - s * x[b], s * x[a] + c * x[b]);
        }
    }
    Ok(())
}
