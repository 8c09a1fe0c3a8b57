//! Normalizations, softmax among them.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use crate::onnx::value::Value;
use graph::{Attr, ContainerId, DType, Expr, SymExpr};
use ops::attrs;

pub static RULES: Rules = &[
    ("BatchNormalization", batch),
    ("GroupNormalization", group),
    ("InstanceNormalization", instance),
    ("LayerNormalization", layer),
    ("LRN", local_response),
    ("LogSoftmax", |cx| softmax(cx, "log_softmax")),
    ("LpNormalization", lp),
    ("MeanVarianceNormalization", mean_variance),
    ("RMSNormalization", rms),
    ("Softmax", |cx| softmax(cx, "softmax")),
];

fn eps(value: f64) -> (&'static str, Attr) {
    ("eps", Attr::Float(value))
}

/// Inference uses running statistics. Training (`training_mode`) returns them updated, with `momentum` as
/// the share of the old ones, and with the population variance. The running statistics that training
/// leaves hold PyTorch's unbiased variance.
fn batch(cx: &mut NodeCx) -> Values {
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let (mean, var) = (cx.input(3)?, cx.input(4)?);
    cx.not_trainable(mean);
    cx.not_trainable(var);
    let epsilon = cx.float("epsilon", 1e-5)?;
    let training = cx.int("training_mode", 0)? != 0;
    if !cx.trains(training) {
        cx.freeze();
        let inputs = [x, scale, bias, mean, var];
        let y = cx.op1("batch_norm_inference", &inputs, attrs([eps(epsilon)]))?;
        let same = [mean, var].into_iter().filter(|_| training);
        return Ok([y].into_iter().chain(same).map(Value::Data).collect());
    }
    let momentum = cx.float("momentum", 0.9)?;
    let inputs = [Some(x), Some(scale), Some(bias)];
    let outputs = cx.op("batch_norm", &inputs, attrs([eps(epsilon)]))?;
    let mixed = |batch: Expr| {
        let kept = Expr::In(0).mul(Expr::float(momentum));
        kept.add(batch.mul(Expr::float(1.0 - momentum)))
    };
    let mut values = vec![Value::Data(outputs[0])];
    for (n, (old, new)) in [(mean, outputs[1]), (var, outputs[3])]
        .into_iter()
        .enumerate()
    {
        if cx.wants(n + 1) {
            let dtype = cx.dtype(old);
            let updated = cx.elementwise(mixed(Expr::In(1)).cast(dtype), &[old, new])?;
            values.push(Value::Data(updated));
        }
    }
    cx.follow_statistic(mean, outputs[1], mixed(Expr::In(1)))?;
    let unbiased = Expr::In(1).mul(unbiased(&cx.shape(x), cx.dtype(outputs[3])));
    cx.follow_statistic(var, outputs[3], mixed(unbiased))?;
    Ok(values)
}

/// `n / (n − 1)` for the n elements of a channel.
fn unbiased(shape: &[SymExpr], dtype: DType) -> Expr {
    let others = shape.iter().enumerate().filter(|(d, _)| *d != 1);
    let count = SymExpr::product(others.map(|(_, size)| size));
    let n = Expr::Index(count).cast(DType::F64);
    n.clone().div(n.sub(Expr::float(1.0))).cast(dtype)
}

/// Number of dimensions from `axis` to the last.
fn trailing(cx: &NodeCx, rank: usize, default: i64) -> Result<i64, Refusal> {
    let axis = cx.axis(cx.int("axis", default)?, rank)?;
    Ok((rank - axis) as i64)
}

fn layer(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let rank = cx.rank(x);
    let axes = trailing(cx, rank, -1)?;
    let row = cx.shape(x)[rank - axes as usize..].to_vec();
    let scale = row_shaped(cx, 1, &row)?;
    let bias = row_shaped(cx, 2, &row)?;
    let list = attrs([eps(cx.float("epsilon", 1e-5)?), ("axes", Attr::Int(axes))]);
    let outputs = cx.op("layer_norm", &[Some(x), scale, bias], list)?;
    let mut values = vec![Value::Data(outputs[0])];
    // ONNX keeps the reduced dimensions of the statistics, with size 1.
    let mut kept = cx.shape(x);
    kept[rank - axes as usize..].fill(SymExpr::constant(1));
    for (n, output) in outputs.iter().enumerate().skip(1) {
        // What is not wanted keeps its place: the file may want only the second statistic.
        let value = match cx.wants(n) {
            true => cx.reshape(*output, kept.clone())?,
            false => outputs[0],
        };
        values.push(Value::Data(value));
    }
    Ok(values)
}

/// An optional scale or bias, expanded to the normalized dimensions where it is smaller.
fn row_shaped(
    cx: &mut NodeCx,
    position: usize,
    row: &[SymExpr],
) -> Result<Option<ContainerId>, Refusal> {
    let Some(v) = cx.optional(position)? else {
        return Ok(None);
    };
    if cx.shape(v) == row {
        return Ok(Some(v));
    }
    let list = attrs([("shape", Attr::Sizes(row.to_vec()))]);
    cx.op1("expand", &[v], list).map(Some)
}

fn rms(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let rank = cx.rank(x);
    let axes = trailing(cx, rank, -1)?;
    let row = cx.shape(x)[rank - axes as usize..].to_vec();
    let scale = row_shaped(cx, 1, &row)?;
    let list = attrs([eps(cx.float("epsilon", 1e-5)?), ("axes", Attr::Int(axes))]);
    single(cx.op("rms_norm", &[Some(x), scale], list)?[0])
}

/// Before version 21, scale and bias have one element per group; since then one per channel.
fn group(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let groups = cx.int("num_groups", 0)?;
    if groups < 1 {
        return Err(Refusal("its attribute `num_groups` is missing".into()));
    }
    let channels = cx.shape(x).get(1).cloned().unwrap_or_else(|| 1.into());
    let mut weights = [cx.input(1)?, cx.input(2)?];
    if cx.opset() < 21 && channels != SymExpr::constant(groups) {
        let each = channels
            .divide_exactly(&SymExpr::constant(groups))
            .ok_or_else(|| Refusal(format!("{channels} channels do not divide into {groups}")))?;
        for v in &mut weights {
            let column = cx.reshape(*v, vec![groups.into(), 1.into()])?;
            let to = Attr::Sizes(vec![groups.into(), each.clone()]);
            let wide = cx.op1("expand", &[column], attrs([("shape", to)]))?;
            *v = cx.reshape(wide, vec![channels.clone()])?;
        }
    }
    group_norm(cx, x, weights, groups, cx.float("epsilon", 1e-5)?)
}

fn group_norm(
    cx: &mut NodeCx,
    x: ContainerId,
    [scale, bias]: [ContainerId; 2],
    groups: i64,
    epsilon: f64,
) -> Values {
    let list = attrs([eps(epsilon), ("groups", Attr::Int(groups))]);
    single(cx.op("group_norm", &[Some(x), Some(scale), Some(bias)], list)?[0])
}

/// Every channel is a group of its own.
fn instance(cx: &mut NodeCx) -> Values {
    let (x, scale, bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let channels = cx.shape(x).get(1).and_then(SymExpr::as_const);
    let channels = channels.ok_or("its number of channels is dynamic")?;
    group_norm(cx, x, [scale, bias], channels, cx.float("epsilon", 1e-5)?)
}

/// More than the channels of any window.
const MOST_CHANNELS: i64 = 1 << 24;

/// `x / (bias + alpha/size · Σx²)^beta`, the sum over `size` neighbouring channels: a pool over
/// channels of `[N, 1, C, rest]`, whose mean takes padding for zeros.
fn local_response(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let shape = cx.shape(x);
    let size = cx.int("size", 0)?;
    if shape.len() < 3 || !(1..MOST_CHANNELS).contains(&size) {
        return Err(Refusal(format!(
            "it needs an input with spatial dimensions and a `size` from 1 to below {MOST_CHANNELS}"
        )));
    }
    let (alpha, beta) = (cx.float("alpha", 1e-4)?, cx.float("beta", 0.75)?);
    let bias = cx.float("bias", 1.0)?;
    let square = cx.elementwise(Expr::In(0).mul(Expr::In(0)), &[x])?;
    let rest = SymExpr::product(&shape[2..]);
    let planes = vec![shape[0].clone(), 1.into(), shape[1].clone(), rest];
    let square = cx.reshape(square, planes)?;
    let list = attrs([
        ("kernel", Attr::Ints(vec![size, 1])),
        ("pad_low", Attr::Ints(vec![(size - 1) / 2, 0])),
        ("pad_high", Attr::Ints(vec![size / 2, 0])),
        ("count_include_pad", Attr::Bool(true)),
    ]);
    let mean = cx.op1("average_pool", &[square], list)?;
    let mean = cx.reshape(mean, shape)?;
    let base = Expr::In(1).mul(Expr::float(alpha)).add(Expr::float(bias));
    let y = Expr::In(0).mul(base.pow(Expr::float(-beta)));
    single(cx.elementwise(y, &[x, mean])?)
}

/// `x / ‖x‖` along an axis; 0 where the norm is 0.
fn lp(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let axis = cx.axis(cx.int("axis", -1)?, cx.rank(x))?;
    let kind = match cx.int("p", 2)? {
        1 => "l1",
        2 => "l2",
        p => {
            return Err(Refusal(format!(
                "its attribute `p` is {p}; only 1 and 2 are defined"
            )));
        }
    };
    let norm = cx.reduce(x, kind, &[axis], true)?;
    let zero = Expr::In(1).eq_(Expr::float(0.0));
    let y = Expr::select(zero, Expr::float(0.0), Expr::In(0).div(Expr::In(1)));
    single(cx.elementwise(y, &[x, norm])?)
}

/// `(x − mean) / (√var + 1e-9)`
fn mean_variance(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let axes = cx.ints("axes")?.unwrap_or_else(|| vec![0, 2, 3]);
    let axes = cx.axes(&axes, cx.rank(x))?;
    let mean = cx.reduce(x, "mean", &axes, true)?;
    let d = Expr::In(0).sub(Expr::In(1));
    let square = cx.elementwise(d.clone().mul(d.clone()), &[x, mean])?;
    let var = cx.reduce(square, "mean", &axes, true)?;
    let y = d.div(Expr::In(2).sqrt().add(Expr::float(1e-9)));
    single(cx.elementwise(y, &[x, mean, var])?)
}

fn softmax(cx: &mut NodeCx, op: &str) -> Values {
    let x = cx.input(0)?;
    if !cx.dtype(x).is_float() {
        return Err(Refusal(format!(
            "its input has type {}, not a float",
            DType::name(cx.dtype(x))
        )));
    }
    let axis = cx.axis(cx.int("axis", -1)?, cx.rank(x))?;
    single(cx.op1(op, &[x], attrs([("axis", Attr::Int(axis as i64))]))?)
}
