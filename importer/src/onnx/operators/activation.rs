//! Activations: element-wise functions of one value with parameters in attributes.
//!
//! Activations that PyTorch has too are written down once, in [`ops::activations`].

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::Expr;
use ops::activations as f;

pub static RULES: Rules = &[
    ("Celu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| f::elu(x, 1.0, alpha, 1.0 / alpha))
    }),
    ("Elu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| f::elu(x, 1.0, alpha, 1.0))
    }),
    ("Gelu", gelu),
    ("HardSigmoid", |cx| {
        let (alpha, beta) = (cx.float("alpha", 0.2)?, cx.float("beta", 0.5)?);
        apply(cx, |x| bounded_line(x, alpha, beta))
    }),
    ("HardSwish", |cx| {
        apply(cx, |x| x.clone().mul(bounded_line(x, 1.0 / 6.0, 0.5)))
    }),
    ("LeakyRelu", |cx| {
        let alpha = cx.float("alpha", 0.01)?;
        apply(cx, |x| f::leaky_relu(x, Expr::float(alpha)))
    }),
    ("Mish", |cx| apply(cx, f::mish)),
    ("PRelu", prelu),
    ("Relu", relu),
    ("Selu", |cx| {
        let (scale, alpha) = (cx.float("gamma", f::SELU.0)?, cx.float("alpha", f::SELU.1)?);
        apply(cx, |x| f::elu(x, scale, alpha, 1.0))
    }),
    ("Shrink", |cx| {
        let (lambda, bias) = (cx.float("lambd", 0.5)?, cx.float("bias", 0.0)?);
        apply(cx, |x| shrink(x, lambda, bias))
    }),
    ("Sigmoid", |cx| apply(cx, Expr::sigmoid)),
    ("Softplus", |cx| apply(cx, f::softplus)),
    ("Softsign", |cx| {
        apply(cx, |x| x.clone().div(x.abs().add(Expr::float(1.0))))
    }),
    ("SwiGLU", swiglu),
    ("Swish", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| x.clone().mul(x.mul(Expr::float(alpha)).sigmoid()))
    }),
    ("Tanh", |cx| apply(cx, Expr::tanh)),
    ("ThresholdedRelu", |cx| {
        let alpha = Expr::float(cx.float("alpha", 1.0)?);
        apply(cx, |x| {
            Expr::select(x.clone().gt(alpha), x, Expr::float(0.0))
        })
    }),
];

/// `min(max(alpha·x + beta, 0), 1)`, in the form that training files store as `Clip`.
fn bounded_line(x: Expr, alpha: f64, beta: f64) -> Expr {
    let line = x.mul(Expr::float(alpha)).add(Expr::float(beta));
    f::hardtanh(line, 0.0, 1.0)
}

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

fn relu(cx: &mut NodeCx) -> Values {
    let x = cx.input(0)?;
    if cx.dtype(x).is_float() {
        return single(cx.elementwise(f::relu(Expr::In(0)), &[x])?);
    }
    single(cx.elementwise(Expr::In(0).max(Expr::int(0)), &[x])?)
}

/// The slope is an input and broadcasts to x.
fn prelu(cx: &mut NodeCx) -> Values {
    let inputs = cx.all_inputs()?;
    let integers = inputs.iter().any(|id| !cx.dtype(*id).is_float());
    let (x, slope) = (Expr::In(0), Expr::In(1));
    let y = if integers {
        Expr::select(x.clone().lt(Expr::int(0)), x.clone().mul(slope), x)
    } else {
        f::leaky_relu(x, slope)
    };
    single(cx.elementwise(y, &inputs)?)
}

/// A gate under Swish times a value.
fn swiglu(cx: &mut NodeCx) -> Values {
    let alpha = cx.float("alpha", 1.0)?;
    let inputs = [cx.input(0)?, cx.input(1)?];
    let gate = Expr::In(0).mul(Expr::In(0).mul(Expr::float(alpha)).sigmoid());
    single(cx.elementwise(gate.mul(Expr::In(1)), &inputs)?)
}

fn shrink(x: Expr, lambda: f64, bias: f64) -> Expr {
    let low = Expr::select(
        x.clone().lt(Expr::float(-lambda)),
        x.clone().add(Expr::float(bias)),
        Expr::float(0.0),
    );
    let high = x.clone().sub(Expr::float(bias));
    Expr::select(x.gt(Expr::float(lambda)), high, low)
}

fn gelu(cx: &mut NodeCx) -> Values {
    match cx.text("approximate", "none")?.as_str() {
        "none" => apply(cx, f::gelu),
        "tanh" => apply(cx, f::gelu_tanh),
        other => Err(Refusal(format!("its attribute `approximate` is `{other}`"))),
    }
}
