//! Scaled dot-product attention (since version 23), with keys and values from before, windows and a softcap.

use super::contraction::{contract, split_heads};
use super::shape::expanded;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("Attention", attention),
    ("ai.onnx.preview.FlexAttention", flex_attention),
];

/// Q, K, V of `[batch, heads, rows, width]`, or of `[batch, rows, heads·width]` with the numbers of
/// heads in attributes; fewer key than query heads are shared.
fn attention(cx: &mut NodeCx) -> Values {
    let (mut q, mut k, mut v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let flat = cx.rank(q) == 3;
    if flat {
        q = split_heads(cx, q, cx.int("q_num_heads", 0)?.max(1))?;
        k = split_heads(cx, k, cx.int("kv_num_heads", 0)?.max(1))?;
        v = split_heads(cx, v, cx.int("kv_num_heads", 0)?.max(1))?;
    }
    let mut before = SymExpr::constant(0);
    if let Some(past) = cx.optional(4)? {
        let length = cx.shape(past).get(2).cloned();
        before = length.ok_or("its past keys must have 4 dimensions")?;
        k = cx.along("concat", &[past, k], 2)?;
    }
    if let Some(past) = cx.optional(5)? {
        if cx.rank(past) != 4 {
            return Err("its past values must have 4 dimensions".into());
        }
        v = cx.along("concat", &[past, v], 2)?;
    }
    let present = [k, v];
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
    let softcap = cx.float("softcap", 0.0)?;
    let kept = cx.int("qk_matmul_output_mode", 0)?;
    let masking = Masking::of(cx, (q, k), before)?;
    let (y, scores) = if softcap == 0.0 && !cx.wants(3) {
        let (mask, causal) = masking.for_operator(cx)?;
        let list = attrs([
            ("scale", Attr::Float(scale)),
            ("causal", Attr::Bool(causal)),
        ]);
        let y = cx.op("attention", &[Some(q), Some(k), Some(v), mask], list)?[0];
        (y, None)
    } else {
        let bias = masking.bias(cx)?;
        let steps = step_by_step(cx, [q, k, v], (scale, softcap), bias)?;
        let scores = usize::try_from(kept).ok().and_then(|n| steps.1.get(n));
        let scores = scores.ok_or("its `qk_matmul_output_mode` is not one of 0 to 3")?;
        (steps.0, Some(*scores))
    };
    let y = if flat { merge_heads(cx, y)? } else { y };
    let all = [y, present[0], present[1]].into_iter().chain(scores);
    Ok(all.map(Value::Data).collect())
}

/// Attention whose scores and weights may be changed by graphs of the node.
fn flex_attention(cx: &mut NodeCx) -> Values {
    let (q, k, v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let shape = cx.shape(q);
    let [_, heads, _, width] = shape.as_slice() else {
        return Err("its inputs must have 4 dimensions".into());
    };
    let (k, v) = (share_heads(cx, k, heads)?, share_heads(cx, v, heads)?);
    let scale = match cx.float("scale", 0.0)? {
        0.0 => {
            let width = width.as_const().ok_or("its width is dynamic")?;
            1.0 / (width as f64).sqrt()
        }
        scale => scale,
    };
    if !cx.has("score_mod") && !cx.has("prob_mod") {
        let list = attrs([("scale", Attr::Float(scale))]);
        return single(cx.op1("attention", &[q, k, v], list)?);
    }
    let product = contract(cx, "bhld,bhmd->bhlm".to_string(), &[q, k])?;
    let scores = cx.elementwise(Expr::In(0).mul(Expr::float(scale)), &[product])?;
    let scores = changed(cx, "score_mod", scores)?;
    let list = attrs([("axis", Attr::Int(3)), ("safe", Attr::Bool(true))]);
    let weights = cx.op1("softmax", &[scores], list)?;
    let weights = changed(cx, "prob_mod", weights)?;
    single(contract(cx, "bhlm,bhme->bhle".to_string(), &[weights, v])?)
}

/// What a graph of the node with one input and one output makes of `x`.
fn changed(cx: &mut NodeCx, name: &str, x: ContainerId) -> Result<ContainerId, Refusal> {
    match cx.body(name, &[x])?.as_deref() {
        None => Ok(x),
        Some([one]) => Ok(*one),
        Some(all) => Err(Refusal(format!("`{name}` has {} outputs", all.len()))),
    }
}

/// The result, and the scores as multiplied, after the softcap, after the mask and after softmax.
fn step_by_step(
    cx: &mut NodeCx,
    [q, k, v]: [ContainerId; 3],
    (scale, softcap): (f64, f64),
    bias: Option<ContainerId>,
) -> Result<(ContainerId, [ContainerId; 4]), Refusal> {
    let product = contract(cx, "bhld,bhmd->bhlm".to_string(), &[q, k])?;
    let scaled = cx.elementwise(Expr::In(0).mul(Expr::float(scale)), &[product])?;
    let capped = match softcap {
        0.0 => scaled,
        cap => {
            let small = Expr::In(0).mul(Expr::float(1.0 / cap)).tanh();
            cx.elementwise(small.mul(Expr::float(cap)), &[scaled])?
        }
    };
    let masked = match bias {
        Some(bias) => cx.elementwise(Expr::In(0).add(Expr::In(1)), &[capped, bias])?,
        None => capped,
    };
    let list = attrs([("axis", Attr::Int(3)), ("safe", Attr::Bool(true))]);
    let weights = cx.op1("softmax", &[masked], list)?;
    let y = contract(cx, "bhlm,bhme->bhle".to_string(), &[weights, v])?;
    Ok((y, [scaled, capped, masked, weights]))
}

/// Which keys a query sees.
struct Masking {
    dtype: DType,
    /// Numbers of queries and keys.
    rows: SymExpr,
    columns: SymExpr,
    /// The mask of the node, of truth values or to be added, with a column for each key.
    mask: Option<ContainerId>,
    /// Number of keys of each sequence, `[batch, 1, 1, 1]`.
    lengths: Option<ContainerId>,
    /// Keys before the first query's own.
    before: SymExpr,
    causal: bool,
    /// Keys that are seen before and after a query's own.
    left: Option<i64>,
    right: Option<i64>,
}

impl Masking {
    fn of(
        cx: &mut NodeCx,
        (q, k): (ContainerId, ContainerId),
        before: SymExpr,
    ) -> Result<Masking, Refusal> {
        let (rows, columns) = (cx.shape(q)[2].clone(), cx.shape(k)[2].clone());
        let lengths = match cx.optional(6)? {
            Some(lengths) => {
                let mut shape = cx.shape(lengths);
                shape.resize(4, 1.into());
                let lengths = cx.cast(lengths, DType::I64)?;
                Some(cx.reshape(lengths, shape)?)
            }
            None => None,
        };
        let mask = match cx.optional(3)? {
            Some(mask) => Some(as_wide(cx, mask, &columns)?),
            None => None,
        };
        let window = |n: i64| (n >= 0).then_some(n);
        Ok(Masking {
            dtype: cx.dtype(q),
            rows,
            columns,
            mask,
            lengths,
            before,
            causal: cx.int("is_causal", 0)? != 0,
            left: window(cx.int("left_window_size", -1)?),
            right: window(cx.int("right_window_size", -1)?),
        })
    }

    /// The mask and whether row l sees columns up to l, as the operator takes them.
    fn for_operator(&self, cx: &mut NodeCx) -> Result<(Option<ContainerId>, bool), Refusal> {
        let is_plain = self.lengths.is_none()
            && self.left.is_none()
            && self.right.is_none()
            && (!self.causal || self.before.is_zero());
        match is_plain {
            true => Ok((self.mask, self.causal)),
            false => Ok((self.bias(cx)?, false)),
        }
    }

    /// What is added to the scores: −∞ where a query does not see a key.
    fn bias(&self, cx: &mut NodeCx) -> Result<Option<ContainerId>, Refusal> {
        let index = |d: usize| SymExpr::symbol(format!("i{d}").as_str());
        let one = SymExpr::constant(1);
        let sizes = vec![one.clone(), one, self.rows.clone(), self.columns.clone()];
        let mut inputs = vec![cx.filled(sizes, self.dtype, 0.0)?];
        let mut bias = Expr::In(0);
        if let Some(mask) = self.mask {
            inputs.push(mask);
            bias = match cx.dtype(mask) {
                DType::Bool => unseen(Expr::In(1).not(), bias),
                _ => bias.add(Expr::In(1)),
            };
        }
        // How far a key is ahead of its query's own.
        let mut ahead = Expr::Index(index(3) - index(2) - self.before.clone());
        if let Some(lengths) = self.lengths {
            inputs.push(lengths);
            let length = Expr::In(inputs.len() - 1);
            bias = unseen(Expr::Index(index(3)).ge(length.clone()), bias);
            ahead = Expr::Index(index(3) - index(2) + self.rows.clone()).sub(length);
        }
        let most = match (self.causal, self.right) {
            (true, _) => Some(0),
            (false, right) => right,
        };
        if let Some(most) = most {
            bias = unseen(ahead.clone().gt(Expr::int(most)), bias);
        }
        if let Some(left) = self.left {
            bias = unseen(ahead.lt(Expr::int(-left)), bias);
        }
        match bias {
            Expr::In(0) => Ok(None),
            bias => cx.elementwise(bias, &inputs).map(Some),
        }
    }
}

fn unseen(condition: Expr, bias: Expr) -> Expr {
    Expr::select(condition, Expr::float(f64::NEG_INFINITY), bias)
}

/// A mask with a column for each key: a shorter one masks the rest.
fn as_wide(cx: &mut NodeCx, mask: ContainerId, columns: &SymExpr) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(mask);
    let Some(own) = shape.last().filter(|n| *n != columns) else {
        return Ok(mask);
    };
    if own.as_const() == Some(1) {
        return Ok(mask);
    }
    let mut high = vec![SymExpr::constant(0); shape.len()];
    high[shape.len() - 1] = columns.clone() - own.clone();
    let value = match cx.dtype(mask) {
        DType::Bool => 0.0,
        _ => f64::NEG_INFINITY,
    };
    let low = vec![0.into(); shape.len()];
    cx.padded(mask, (low, high), value)
}

/// `[batch, heads, rows, width]` as `[batch, rows, heads·width]`.
pub fn merge_heads(cx: &mut NodeCx, y: ContainerId) -> Result<ContainerId, Refusal> {
    let shape = cx.shape(y);
    let rows_first = cx.permute(y, &[0, 2, 1, 3])?;
    let columns = shape[1].clone() * shape[3].clone();
    let to = vec![shape[0].clone(), shape[2].clone(), columns];
    cx.reshape(rows_first, to)
}

/// Each head of `x` repeated so that there are `heads`.
pub fn share_heads(
    cx: &mut NodeCx,
    x: ContainerId,
    heads: &SymExpr,
) -> Result<ContainerId, Refusal> {
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
