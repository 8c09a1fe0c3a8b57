//! Activations as expressions, with PyTorch's values, and with its choice of gradient where a function
//! has no derivative. Importers give them to `elementwise`.
//!
//! NaN passes through all of them. Functions that are smooth are written so that their symbolic
//! derivative is right everywhere, at 0 too.

use graph::Expr;

fn number(value: f64) -> Expr {
    Expr::float(value)
}

/// `max(x, 0)`; gradient 0 at 0. Source: ONNX Relu-14, `torch.relu`.
pub fn relu(x: Expr) -> Expr {
    Expr::select(x.clone().le(number(0.0)), number(0.0), x)
}

/// x within `[low, high]`; gradient 0 at both ends. Source: `torch.nn.functional.hardtanh`, `relu6`.
pub fn hardtanh(x: Expr, low: f64, high: f64) -> Expr {
    let above = Expr::select(x.clone().ge(number(high)), number(high), x.clone());
    Expr::select(x.le(number(low)), number(low), above)
}

/// `min(max(alpha·x + beta, 0), 1)`; gradient 0 at both ends. `torch.nn.functional.hardsigmoid` has
/// alpha 1/6 and beta 1/2, ONNX HardSigmoid-6 alpha 0.2.
pub fn hardsigmoid(x: Expr, alpha: f64, beta: f64) -> Expr {
    let line = x.clone().mul(number(alpha)).add(number(beta));
    if alpha <= 0.0 {
        return hardtanh(line, 0.0, 1.0);
    }
    // Compared before the line is rounded, so that both ends are exact.
    let (low, high) = (-beta / alpha, (1.0 - beta) / alpha);
    let above = Expr::select(x.clone().ge(number(high)), number(1.0), line);
    Expr::select(x.le(number(low)), number(0.0), above)
}

/// `x · hardsigmoid(x)`; gradient 0 at −3 and 1 at 3. Source: ONNX HardSwish-14, arXiv 1905.02244.
pub fn hardswish(x: Expr) -> Expr {
    let line = x.clone().mul(number(1.0 / 6.0)).add(number(0.5));
    let above = Expr::select(x.clone().ge(number(3.0)), x.clone(), x.clone().mul(line));
    Expr::select(x.clone().le(number(-3.0)), x.mul(number(0.0)), above)
}

/// x above 0, `slope·x` elsewhere. Source: ONNX LeakyRelu-16, PRelu-16.
pub fn leaky_relu(x: Expr, slope: Expr) -> Expr {
    Expr::select(x.clone().gt(number(0.0)), x.clone(), x.mul(slope))
}

/// `scale·x` above 0, `scale·alpha·(e^(rate·x) − 1)` elsewhere: ELU, SELU, CELU.
/// Source: ONNX Elu-6, Selu-6, Celu-12.
pub fn elu(x: Expr, scale: f64, alpha: f64, rate: f64) -> Expr {
    let curve = x.clone().mul(number(rate)).expm1();
    Expr::select(
        x.clone().gt(number(0.0)),
        x.mul(number(scale)),
        curve.mul(number(scale * alpha)),
    )
}

/// Constants of SELU, arXiv 1706.02515: scale and alpha.
pub const SELU: (f64, f64) = (1.050_700_987_355_480_5, 1.673_263_242_354_377_2);

/// ELU with the constants of arXiv 1706.02515.
pub fn selu(x: Expr) -> Expr {
    elu(x, SELU.0, SELU.1, 1.0)
}

/// `ln(1 + eˣ)` without overflow. Source: ONNX Softplus-1, `torch.nn.functional.softplus`.
pub fn softplus(x: Expr) -> Expr {
    // max(x, 0) + ln(1 + e^−∣x∣), with selects that agree at 0: there both terms have a kink, and slopes of 0 for each
    // would give a derivative of 0 instead of 1/2.
    let is_positive = || x.clone().gt(number(0.0));
    let above = Expr::select(is_positive(), x.clone(), number(0.0));
    let below = Expr::select(is_positive(), x.clone().neg(), x.clone());
    above.add(below.exp().log1p())
}

/// `−ln(1 + e⁻ˣ)`. Source: `torch.nn.functional.logsigmoid`.
pub fn log_sigmoid(x: Expr) -> Expr {
    softplus(x.neg()).neg()
}

/// `x · sigmoid(x)`. Source: `torch.nn.functional.silu`, arXiv 1702.03118.
pub fn silu(x: Expr) -> Expr {
    x.clone().mul(x.sigmoid())
}

/// `x · tanh(softplus(x))`. Source: ONNX Mish-18, arXiv 1908.08681.
pub fn mish(x: Expr) -> Expr {
    x.clone().mul(softplus(x).tanh())
}

/// `x · Φ(x)` with the error function. Source: ONNX Gelu-20, arXiv 1606.08415.
pub fn gelu(x: Expr) -> Expr {
    let cumulative = x.clone().mul(number(std::f64::consts::FRAC_1_SQRT_2)).erf();
    x.mul(number(0.5)).mul(cumulative.add(number(1.0)))
}

/// [`gelu`] approximated by `tanh(√(2/π)·(x + 0.044715·x³))`.
pub fn gelu_tanh(x: Expr) -> Expr {
    let cube = x.clone().mul(x.clone()).mul(x.clone());
    let inner = x.clone().add(cube.mul(number(0.044715)));
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    let cumulative = inner.mul(number(scale)).tanh();
    x.mul(number(0.5)).mul(cumulative.add(number(1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::Scalar;

    fn at(e: &Expr, x: f64) -> f64 {
        e.eval(&[Scalar::Float(x)], &|_| None).unwrap().as_f64()
    }

    fn functions() -> Vec<(&'static str, Expr)> {
        let x = || Expr::In(0);
        vec![
            ("relu", relu(x())),
            ("relu6", hardtanh(x(), 0.0, 6.0)),
            ("hardsigmoid", hardsigmoid(x(), 1.0 / 6.0, 0.5)),
            ("hardswish", hardswish(x())),
            ("leaky_relu", leaky_relu(x(), Expr::float(0.01))),
            ("elu", elu(x(), 1.0, 1.0, 1.0)),
            ("selu", selu(x())),
            ("softplus", softplus(x())),
            ("logsigmoid", log_sigmoid(x())),
            ("silu", silu(x())),
            ("mish", mish(x())),
            ("gelu", gelu(x())),
            ("gelu_tanh", gelu_tanh(x())),
        ]
    }

    /// `torch.nn.functional` in double precision at −1.5 and 0.75, and its gradient at 0.
    const TORCH: [(&str, f64, f64, f64); 13] = [
        ("relu", 0.0, 0.75, 0.0),
        ("relu6", 0.0, 0.75, 0.0),
        ("hardsigmoid", 0.25, 0.625, 0.1666666716337204),
        ("hardswish", -0.375, 0.46875, 0.5),
        ("leaky_relu", -0.015, 0.75, 0.01),
        ("elu", -0.7768698398515702, 0.75, 1.0),
        (
            "selu",
            -1.3658143533672527,
            0.7880257405166103,
            1.7580993408473766,
        ),
        ("softplus", 0.2014132779827524, 1.1368710061148999, 0.5),
        ("logsigmoid", -1.7014132779827524, -0.38687100611489994, 0.5),
        ("silu", -0.2736382857095345, 0.5093840243815447, 0.5),
        ("mish", -0.29809974216680674, 0.6100183352182934, 0.6),
        ("gelu", -0.10021080190328704, 0.5800294857173489, 0.5),
        ("gelu_tanh", -0.10042842301976707, 0.5799605551656203, 0.5),
    ];

    #[test]
    fn values_and_gradients_at_zero_are_those_of_torch() {
        for ((name, f), (torch, low, high, slope)) in functions().iter().zip(TORCH) {
            assert_eq!(*name, torch);
            let close = |found: f64, expected: f64, tolerance: f64, what: &str| {
                let off = (found - expected).abs();
                assert!(
                    off < tolerance,
                    "{name} {what}: {found}, expected {expected}"
                );
            };
            close(at(f, -1.5), low, 1e-12, "at -1.5");
            close(at(f, 0.75), high, 1e-12, "at 0.75");
            // PyTorch holds the 1/6 of hardsigmoid's gradient in single precision.
            close(at(&f.derivative(0), 0.0), slope, 1e-8, "slope at 0");
        }
    }

    #[test]
    fn ends_of_pieces_are_exact() {
        let x = || Expr::In(0);
        let slope = |f: &Expr, x: f64| at(&f.derivative(0), x);
        let (sigmoid, swish) = (hardsigmoid(x(), 1.0 / 6.0, 0.5), hardswish(x()));
        assert_eq!((slope(&sigmoid, -3.0), slope(&sigmoid, 3.0)), (0.0, 0.0));
        assert_eq!((slope(&swish, -3.0), slope(&swish, 3.0)), (0.0, 1.0));
        assert_eq!((at(&sigmoid, -3.0), at(&sigmoid, 3.0)), (0.0, 1.0));
        assert_eq!((at(&swish, -3.0), at(&swish, 3.0)), (0.0, 3.0));
    }

    #[test]
    fn nan_passes_and_extremes_stay_finite() {
        for (name, f) in functions() {
            assert!(at(&f, f64::NAN).is_nan(), "{name} of NaN");
            for x in [-800.0, 800.0] {
                assert!(at(&f, x).is_finite(), "{name} of {x}");
                assert!(
                    at(&f.derivative(0), x).is_finite(),
                    "slope of {name} at {x}"
                );
            }
        }
    }
}
