//! Activations that other operators name in their attributes: recurrent layers, fused operators.

use super::real::Real;

/// An activation with its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Activation<R> {
    name: &'static str,
    alpha: R,
    beta: R,
}

/// Activations with the defaults of alpha and beta, if they have them.
const KNOWN: [(&str, Option<f64>, Option<f64>); 13] = [
    ("Relu", None, None),
    ("Tanh", None, None),
    ("Sigmoid", None, None),
    ("Affine", Some(1.0), Some(0.0)),
    ("Clip", Some(f64::NEG_INFINITY), Some(f64::INFINITY)),
    ("LeakyRelu", Some(0.01), None),
    ("ThresholdedRelu", Some(1.0), None),
    ("ScaledTanh", Some(1.0), Some(1.0)),
    ("HardSigmoid", Some(0.2), Some(0.5)),
    ("Elu", Some(1.0), None),
    ("Softsign", None, None),
    ("Softplus", None, None),
    ("Identity", None, None),
];

/// The logistic function without overflow.
pub fn sigmoid<R: Real>(x: R) -> R {
    if x >= R::zero() {
        (R::one() + (-x).exp()).recip()
    } else {
        let e = x.exp();
        e / (R::one() + e)
    }
}

/// `x` between two bounds; NaN stays.
pub fn clipped<R: Real>(x: R, low: R, high: R) -> R {
    if x < low {
        low
    } else if x > high {
        high
    } else {
        x
    }
}

impl<R: Real> Activation<R> {
    /// The activation of that name. Takes the next of `alphas` and `betas` where it has such a parameter; the default
    /// if none is left.
    ///
    /// # Errors
    /// The name is not known.
    pub fn named<'p>(
        name: &str,
        alphas: &mut impl Iterator<Item = &'p f32>,
        betas: &mut impl Iterator<Item = &'p f32>,
    ) -> Result<Activation<R>, String> {
        let row = KNOWN.iter().find(|(n, _, _)| n.eq_ignore_ascii_case(name));
        let (name, alpha, beta) =
            *row.ok_or_else(|| format!("the activation `{name}` is not known"))?;
        let given = |default: Option<f64>, given: &mut dyn Iterator<Item = &'p f32>| match default {
            None => R::zero(),
            Some(default) => R::of(given.next().map_or(default, |x| f64::from(*x))),
        };
        Ok(Activation {
            name,
            alpha: given(alpha, alphas),
            beta: given(beta, betas),
        })
    }

    /// The function.
    pub fn of(&self, x: R) -> R {
        let (zero, one, alpha, beta) = (R::zero(), R::one(), self.alpha, self.beta);
        match self.name {
            "Relu" if x < zero => zero,
            "Tanh" => x.tanh(),
            "Sigmoid" => sigmoid(x),
            "Affine" => alpha * x + beta,
            "Clip" => clipped(x, alpha, beta),
            "LeakyRelu" if x < zero => alpha * x,
            "ThresholdedRelu" if x < alpha => zero,
            "ScaledTanh" => alpha * (beta * x).tanh(),
            "HardSigmoid" => clipped(alpha * x + beta, zero, one),
            "Elu" if x < zero => alpha * x.exp_m1(),
            "Softsign" => x / (one + x.abs()),
            "Softplus" if x > zero => x + (-x).exp().ln_1p(),
            "Softplus" => x.exp().ln_1p(),
            _ => x,
        }
    }
}
