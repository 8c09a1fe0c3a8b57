//! Losses over classes.

use super::{Rules, Values};
use crate::onnx::node::NodeCx;
use crate::onnx::value::Value;
use graph::{Attr, DType};
use ops::attrs;

pub static RULES: Rules = &[
    ("NegativeLogLikelihoodLoss", |cx| loss(cx, "nll_loss")),
    ("SoftmaxCrossEntropyLoss", |cx| loss(cx, "cross_entropy")),
];

/// PyTorch's number for targets that do not count: no class has it, as ONNX's default demands.
const NO_CLASS: i64 = -100;

fn loss(cx: &mut NodeCx, op: &str) -> Values {
    let (scores, target) = (cx.input(0)?, cx.input(1)?);
    let target = cx.cast(target, DType::I64)?;
    let weight = cx.optional(2)?;
    let mut list = attrs([
        ("reduction", Attr::Str(cx.text("reduction", "mean")?)),
        ("ignore_index", Attr::Int(cx.int("ignore_index", NO_CLASS)?)),
    ]);
    if op == "cross_entropy" {
        list.insert("label_smoothing".into(), Attr::Float(0.0));
    }
    let loss = cx.op(op, &[Some(scores), Some(target), weight], list)?[0];
    let mut values = vec![Value::Data(loss)];
    if cx.wants(1) {
        let log = cx.op1("log_softmax", &[scores], attrs([("axis", Attr::Int(1))]))?;
        values.push(Value::Data(log));
    }
    Ok(values)
}
