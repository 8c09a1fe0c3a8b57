//! ONNX Runtime's own operators (domain `com.microsoft`) that stand for several of the standard's, written with
//! these: forms of Gelu, sums before a normalization, products and convolutions with what follows them.
//!
//! Attention is in `runtime_attention.rs`.

use super::contraction::{contract, gemm, product_equation};
use super::convolution::conv;
use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr};
use ops::activations as f;
use ops::attrs;

pub static RULES: Rules = &[
    ("com.microsoft.BiasGelu", |cx| biased(cx, f::gelu)),
    ("com.microsoft.EmbedLayerNormalization", embed),
    ("com.microsoft.FastGelu", |cx| biased(cx, f::gelu_tanh)),
    ("com.microsoft.FusedConv", fused_conv),
    ("com.microsoft.FusedGemm", fused_gemm),
    ("com.microsoft.FusedMatMul", product),
    ("com.microsoft.Gelu", |cx| biased(cx, f::gelu)),
    ("com.microsoft.QuickGelu", |cx| {
        let alpha = cx.float("alpha", 1.702)?;
        biased(cx, |x| x.clone().mul(x.mul(Expr::float(alpha)).sigmoid()))
    }),
    ("com.microsoft.SimplifiedLayerNormalization", simplified),
    ("com.microsoft.SkipLayerNormalization", |cx| skip(cx, true)),
    ("com.microsoft.SkipSimplifiedLayerNormalization", |cx| {
        skip(cx, false)
    }),
    ("com.microsoft.TransposeMatMul", product),
    // ONNX Runtime keeps it among the standard's operators.
    ("SimplifiedLayerNormalization", simplified),
];

/// The sum of two values; the second one broadcasts.
fn sum(cx: &mut NodeCx, x: ContainerId, more: ContainerId) -> Result<ContainerId, Refusal> {
    cx.elementwise(Expr::In(0).add(Expr::In(1)), &[x, more])
}

/// A function of `x`, after an optional bias along the last dimension is added.
fn biased(cx: &mut NodeCx, f: impl FnOnce(Expr) -> Expr) -> Values {
    let mut x = cx.input(0)?;
    if let Some(bias) = cx.optional(1)? {
        x = sum(cx, x, bias)?;
    }
    single(cx.elementwise(f(Expr::In(0)), &[x])?)
}

/// A normalization of rows: the result, and mean and reciprocal deviation of each row if it is `centered`.
fn normalized(
    cx: &mut NodeCx,
    x: ContainerId,
    weights: [Option<ContainerId>; 2],
    (epsilon, centered): (f64, bool),
) -> Result<Vec<ContainerId>, Refusal> {
    let list = attrs([("eps", Attr::Float(epsilon)), ("axes", Attr::Int(1))]);
    let [scale, bias] = weights;
    match centered {
        true => cx.op("layer_norm", &[Some(x), scale, bias], list),
        false => cx.op("rms_norm", &[Some(x), scale], list),
    }
}

/// Normalizes `input + skip + bias`; the sum is the fourth output.
fn skip(cx: &mut NodeCx, centered: bool) -> Values {
    let (x, more) = (cx.input(0)?, cx.input(1)?);
    let scale = cx.input(2)?;
    let (shift, bias) = match centered {
        true => (cx.optional(3)?, cx.optional(4)?),
        false => (None, cx.optional(3)?),
    };
    let mut total = sum(cx, x, more)?;
    if let Some(bias) = bias {
        total = sum(cx, total, bias)?;
    }
    if (cx.wants(1) || cx.wants(2)) && !centered {
        return Err("statistics as outputs are not supported".into());
    }
    let epsilon = cx.float("epsilon", 1e-12)?;
    let outputs = normalized(cx, total, [Some(scale), shift], (epsilon, centered))?;
    let y = outputs[0];
    let mut kept = cx.shape(total);
    if let Some(last) = kept.last_mut() {
        *last = SymExpr::constant(1);
    }
    let mut values = vec![Value::Data(y)];
    for n in 1..3 {
        values.push(Value::Data(match outputs.get(n) {
            Some(statistic) if cx.wants(n) => cx.reshape(*statistic, kept.clone())?,
            _ => y,
        }));
    }
    values.push(Value::Data(total));
    Ok(values)
}

/// Rows divided by the root of their mean square.
fn simplified(cx: &mut NodeCx) -> Values {
    let (x, scale) = (cx.input(0)?, cx.input(1)?);
    let rank = cx.rank(x);
    if cx.axis(cx.int("axis", -1)?, rank)? + 1 != rank {
        return Err("only the last dimension can be normalized".into());
    }
    if cx.wants(1) {
        return Err("statistics as outputs are not supported".into());
    }
    let epsilon = cx.float("epsilon", 1e-5)?;
    single(normalized(cx, x, [Some(scale), None], (epsilon, false))?[0])
}

/// Rows of up to three tables, added and normalized. Inputs: ids, segments, tables of words, positions and
/// segments, scale, bias, a mask of words, positions. Outputs: the rows, how many words each mask has, the sums.
fn embed(cx: &mut NodeCx) -> Values {
    let (ids, words, places) = (cx.input(0)?, cx.input(2)?, cx.input(3)?);
    let (segments, kinds) = (cx.optional(1)?, cx.optional(4)?);
    let (scale, shift) = (cx.input(5)?, cx.input(6)?);
    if cx.int("mask_index_type", 1)? == 0 || cx.rank(ids) != 2 {
        return Err("only ids of 2 dimensions and counted masks are supported".into());
    }
    let rows = |cx: &mut NodeCx, table: ContainerId, at: ContainerId| {
        let at = cx.cast(at, DType::I64)?;
        cx.along("gather", &[table, at], 0)
    };
    let own = rows(cx, words, ids)?;
    let at = match cx.optional(8)? {
        Some(at) => at,
        None => {
            let length = cx.shape(ids)[1].clone();
            cx.positions(&length, 1, 2)?
        }
    };
    let place = rows(cx, places, at)?;
    let mut total = sum(cx, own, place)?;
    match (segments, kinds) {
        (Some(segments), Some(kinds)) => {
            let kind = rows(cx, kinds, segments)?;
            total = sum(cx, total, kind)?;
        }
        (None, None) => {}
        _ => return Err("segments and their table must both be given".into()),
    }
    let epsilon = cx.float("epsilon", 1e-12)?;
    let y = normalized(cx, total, [Some(scale), Some(shift)], (epsilon, true))?[0];
    let mask = match cx.optional(7)? {
        Some(mask) if cx.wants(1) => {
            // A sum of 32 bits has 64.
            let counted = cx.reduce(mask, "sum", &[1], false)?;
            cx.cast(counted, DType::I32)?
        }
        _ => {
            let batch = cx.shape(ids)[0].clone();
            cx.filled(vec![batch], DType::I32, 0.0)?
        }
    };
    Ok([y, mask, total].into_iter().map(Value::Data).collect())
}

/// `alpha·A'·B'`, each operand transposed in its last two dimensions if its attribute says so.
fn product(cx: &mut NodeCx) -> Values {
    if cx.int("transBatchA", 0)? != 0 || cx.int("transBatchB", 0)? != 0 {
        return Err("operands with transposed batches are not supported".into());
    }
    let operand = |cx: &mut NodeCx, at: usize, name: &str| {
        let x = cx.input(at)?;
        let mut order: Vec<usize> = (0..cx.rank(x)).collect();
        if cx.int(name, 0)? != 0 && order.len() > 1 {
            let last = order.len() - 1;
            order.swap(last - 1, last);
        }
        cx.permute(x, &order)
    };
    let (a, b) = (operand(cx, 0, "transA")?, operand(cx, 1, "transB")?);
    let equation = product_equation(cx.rank(a), cx.rank(b))?;
    let y = contract(cx, equation, &[a, b])?;
    match cx.float("alpha", 1.0)? {
        1.0 => single(y),
        alpha => single(cx.elementwise(Expr::In(0).mul(Expr::float(alpha)), &[y])?),
    }
}

/// A convolution, a fourth input that is added, then an activation.
fn fused_conv(cx: &mut NodeCx) -> Values {
    let mut y = only(conv(cx)?)?;
    if let Some(more) = cx.optional(3)? {
        y = sum(cx, y, more)?;
    }
    let given = cx.floats("activation_params").unwrap_or_default();
    let given = [given.first().copied(), given.get(1).copied()];
    single(activated(cx, y, given)?)
}

fn fused_gemm(cx: &mut NodeCx) -> Values {
    let y = only(gemm(cx)?)?;
    let mut given = [None; 2];
    for (given, name) in given
        .iter_mut()
        .zip(["activation_alpha", "activation_beta"])
    {
        if cx.has(name) {
            *given = Some(cx.float(name, 0.0)?);
        }
    }
    single(activated(cx, y, given)?)
}

fn only(values: Vec<Value>) -> Result<ContainerId, Refusal> {
    match values.as_slice() {
        [Value::Data(id)] => Ok(*id),
        _ => Err("it has several results".into()),
    }
}

/// The activation that the node names, with its two parameters where they are given.
fn activated(
    cx: &mut NodeCx,
    y: ContainerId,
    [first, second]: [Option<f64>; 2],
) -> Result<ContainerId, Refusal> {
    let x = Expr::In(0);
    let e = match cx.text("activation", "")?.as_str() {
        "" => return Ok(y),
        "Relu" => f::relu(x),
        "Sigmoid" => x.sigmoid(),
        "Tanh" => x.tanh(),
        "LeakyRelu" => f::leaky_relu(x, Expr::float(first.unwrap_or(0.01))),
        "HardSigmoid" => {
            let (slope, start) = (first.unwrap_or(0.2), second.unwrap_or(0.5));
            let line = x.mul(Expr::float(slope)).add(Expr::float(start));
            f::hardtanh(line, 0.0, 1.0)
        }
        "Clip" => {
            let (Some(least), Some(most)) = (first, second) else {
                return Err("its activation `Clip` has no limits".into());
            };
            f::hardtanh(x, least, most)
        }
        other => {
            return Err(Refusal(format!(
                "its activation `{other}` is not supported"
            )));
        }
    };
    cx.elementwise(e, &[y])
}
