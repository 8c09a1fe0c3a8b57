//! Activations: element-wise functions of one value with parameters in attributes.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::Expr;
use ops::activations as act;

pub static RULES: Rules = &[
    ("Celu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| act::elu(x, 1.0, alpha, 1.0 / alpha))
    }),
    ("Elu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| act::elu(x, 1.0, alpha, 1.0))
    }),
    ("Gelu", gelu),
    ("HardSigmoid", |cx| {
        let (alpha, beta) = (cx.float("alpha", 0.2)?, cx.float("beta", 0.5)?);
        apply(cx, |x| act::hardsigmoid(x, alpha, beta))
    }),
    ("HardSwish", |cx| apply(cx, act::hardswish)),
    ("LeakyRelu", |cx| {
        let alpha = cx.float("alpha", 0.01)?;
        apply(cx, |x| act::leaky_relu(x, Expr::float(alpha)))
    }),
    ("Mish", |cx| apply(cx, act::mish)),
    ("PRelu", |cx| {
        let inputs = cx.all_inputs()?;
        let y = cx.elementwise(act::leaky_relu(Expr::In(0), Expr::In(1)), &inputs)?;
        single(y)
    }),
    ("Relu", relu),
    ("Selu", |cx| {
        let alpha = cx.float("alpha", 1.673_263_242_354_377_3)?;
        let gamma = cx.float("gamma", 1.050_700_987_355_480_5)?;
        apply(cx, |x| act::elu(x, gamma, alpha, 1.0))
    }),
    ("Shrink", |cx| {
        let (lambda, bias) = (cx.float("lambd", 0.5)?, cx.float("bias", 0.0)?);
        apply(cx, |x| shrink(x, lambda, bias))
    }),
    ("Sigmoid", |cx| apply(cx, Expr::sigmoid)),
    ("Softplus", |cx| apply(cx, act::softplus)),
    ("Softsign", |cx| {
        apply(cx, |x| x.clone().div(x.abs().add(Expr::float(1.0))))
    }),
    ("Swish", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| x.clone().mul(x.mul(Expr::float(alpha)).sigmoid()))
    }),
    ("Tanh", |cx| apply(cx, Expr::tanh)),
    ("ThresholdedRelu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| {
            Expr::select(x.clone().gt(Expr::float(alpha)), x, Expr::float(0.0))
        })
    }),
];

fn apply(cx: &mut NodeCx, f: impl FnOnce(Expr) -> Expr) -> Values {
    let x = cx.input(0)?;
    if !cx.dtype(x).is_float() {
        return Err(Refusal(format!(
            "its input has type {}, not a float",
            cx.dtype(x)
        )));
    }
    single(cx.elementwise(f(Expr::In(0)), &[x])?)
}

fn shrink(x: Expr, lambda: f64, bias: f64) -> Expr {
    let low = Expr::select(
        x.clone().lt(Expr::float(-lambda)),
        x.clone().add(Expr::float(bias)),
        Expr::float(0.0),
    );
    Expr::select(
        x.clone().gt(Expr::float(lambda)),
        x.sub(Expr::float(bias)),
        low,
    )
}

fn relu(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    let y = match cx.dtype(x).is_float() {
        true => act::relu(Expr::In(0)),
        false => Expr::In(0).max(Expr::int(0)),
    };
    single(cx.elementwise(y, &[x])?)
}

fn gelu(cx: &mut NodeCx) -> Values {
    match cx.text("approximate", "none")?.as_str() {
        "none" => apply(cx, act::gelu),
        "tanh" => apply(cx, act::gelu_tanh),
        other => Err(Refusal(format!("its attribute `approximate` is `{other}`"))),
    }
}
