//! Activations: element-wise functions of one value with parameters in attributes.

use super::{Rules, Values, single};
use crate::onnx::node::{NodeCx, Refusal};
use graph::{Binary, Expr, Unary};

pub static RULES: Rules = &[
    ("Celu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| scaled_exp(x, 1.0, alpha, 1.0 / alpha))
    }),
    ("Elu", |cx| {
        let alpha = cx.float("alpha", 1.0)?;
        apply(cx, |x| scaled_exp(x, 1.0, alpha, 1.0))
    }),
    ("Gelu", gelu),
    ("HardSigmoid", |cx| {
        let (alpha, beta) = (cx.float("alpha", 0.2)?, cx.float("beta", 0.5)?);
        apply(cx, |x| hard_sigmoid(x, alpha, beta))
    }),
    ("HardSwish", |cx| {
        apply(cx, |x| x.clone().mul(hard_sigmoid(x, 1.0 / 6.0, 0.5)))
    }),
    ("LeakyRelu", |cx| {
        let alpha = cx.float("alpha", 0.01)?;
        apply(cx, |x| leaky(x, Expr::float(alpha)))
    }),
    ("Mish", |cx| {
        apply(cx, |x| x.clone().mul(softplus(x).tanh()))
    }),
    ("PRelu", |cx| {
        let inputs = cx.all_inputs()?;
        let y = cx.elementwise(leaky(Expr::In(0), Expr::In(1)), &inputs)?;
        single(y)
    }),
    ("Relu", relu),
    ("Selu", |cx| {
        let alpha = cx.float("alpha", 1.673_263_242_354_377_3)?;
        let gamma = cx.float("gamma", 1.050_700_987_355_480_5)?;
        apply(cx, |x| scaled_exp(x, gamma, gamma * alpha, 1.0))
    }),
    ("Shrink", |cx| {
        let (lambda, bias) = (cx.float("lambd", 0.5)?, cx.float("bias", 0.0)?);
        apply(cx, |x| shrink(x, lambda, bias))
    }),
    ("Sigmoid", |cx| apply(cx, Expr::sigmoid)),
    ("Softplus", |cx| apply(cx, softplus)),
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

/// `above·x` above zero, `below·(e^(rate·x) − 1)` below.
fn scaled_exp(x: Expr, above: f64, below: f64, rate: f64) -> Expr {
    let curve = x
        .clone()
        .mul(Expr::float(rate))
        .expm1()
        .mul(Expr::float(below));
    let line = x.clone().mul(Expr::float(above));
    Expr::select(x.gt(Expr::float(0.0)), line, curve)
}

fn hard_sigmoid(x: Expr, alpha: f64, beta: f64) -> Expr {
    let line = x.mul(Expr::float(alpha)).add(Expr::float(beta));
    line.max(Expr::float(0.0)).min(Expr::float(1.0))
}

fn leaky(x: Expr, slope: Expr) -> Expr {
    Expr::select(x.clone().lt(Expr::int(0)), x.clone().mul(slope), x)
}

/// `max(x, 0) + ln(1 + e^−|x|)`: ln(1 + eˣ) without overflow.
fn softplus(x: Expr) -> Expr {
    let tail = x.clone().abs().neg().exp().log1p();
    x.max(Expr::float(0.0)).add(tail)
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
    // Written so that NaN passes, as in PyTorch.
    let y = Expr::select(Expr::In(0).le(Expr::int(0)), Expr::int(0), Expr::In(0));
    single(cx.elementwise(y, &[x])?)
}

fn gelu(cx: &mut NodeCx) -> Values {
    let half = |x: Expr, f: Expr| x.mul(Expr::float(0.5)).mul(f.add(Expr::float(1.0)));
    match cx.text("approximate", "none")?.as_str() {
        "none" => apply(cx, |x| {
            let scaled = x.clone().mul(Expr::float(std::f64::consts::FRAC_1_SQRT_2));
            half(x, Expr::unary(Unary::Erf, scaled))
        }),
        "tanh" => apply(cx, |x| {
            let cube = Expr::binary(Binary::Mul, x.clone().mul(x.clone()), x.clone());
            let inner = cube.mul(Expr::float(0.044715)).add(x.clone());
            let scale = (2.0 / std::f64::consts::PI).sqrt();
            half(x, inner.mul(Expr::float(scale)).tanh())
        }),
        other => Err(Refusal(format!("its attribute `approximate` is `{other}`"))),
    }
}
