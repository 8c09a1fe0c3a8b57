//! Operators of the standard's domain for classical machine learning that are arithmetic on tensors.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{DType, Expr, SymExpr, Tensor};

pub static RULES: Rules = &[
    ("ai.onnx.ml.ArrayFeatureExtractor", extract),
    ("ai.onnx.ml.Binarizer", binarize),
    ("ai.onnx.ml.Scaler", scale),
];

/// Elements of the last dimension.
fn extract(cx: &mut NodeCx) -> Values {
    let (mut x, index) = (cx.input(0)?, cx.input(1)?);
    if cx.rank(x) == 1 {
        let n = cx.shape(x)[0].clone();
        x = cx.reshape(x, vec![1.into(), n])?;
    }
    let n = SymExpr::product(&cx.shape(index));
    let index = cx.cast(index, DType::I64)?;
    let index = cx.reshape(index, vec![n])?;
    let last = cx
        .rank(x)
        .checked_sub(1)
        .ok_or("its input is a single number")?;
    single(cx.along("gather", &[x, index], last)?)
}

fn binarize(cx: &mut NodeCx) -> Values {
    let threshold = Expr::float(cx.float("threshold", 0.0)?);
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    single(cx.elementwise(Expr::In(0).gt(threshold).cast(dtype), &[x])?)
}

/// `(x − offset)·scale`, one number or one for each element of the last dimension.
fn scale(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let mut inputs = vec![cx.cast(x, DType::F32)?];
    let mut y = Expr::In(0);
    for (name, is_factor) in [("offset", false), ("scale", true)] {
        let Some(values) = cx.floats(name) else {
            continue;
        };
        let fits = match cx.shape(x).last().and_then(SymExpr::as_const) {
            _ if values.len() == 1 => true,
            size => size.is_none_or(|n| n == values.len() as i64),
        };
        if !fits {
            return Err(Refusal(format!(
                "its attribute `{name}` does not fit its input"
            )));
        }
        let of = Expr::In(inputs.len());
        inputs.push(cx.constant(Tensor::from_f64(DType::F32, &[values.len()], values)));
        y = if is_factor { y.mul(of) } else { y.sub(of) };
    }
    single(cx.elementwise(y, &inputs)?)
}
