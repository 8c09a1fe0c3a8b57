//! Functions of one element: mathematics, activations, Clip, Dropout.

use super::movement::same;
use super::symbolic;
use super::{Call, Inference, Operator, Symbolic};
use crate::element::Element;
use crate::fact::Fact;
use crate::tensor::{Tensor, Values};
use half::{bf16, f16};

/// Applies an expression to every element of a float tensor. `$t` is the type it is computed in: `f32`
/// for `f32` and halves, `f64` for `f64`.
macro_rules! reals {
    ($call:expr, $t:ident, $x:ident => $body:expr) => {{
        let tensor = $call.input(0)?;
        let values = match &*tensor.values {
            Values::F32(v) => {
                #[allow(dead_code)]
                type $t = f32;
                Values::F32(
                    v.iter()
                        .map(|$x| {
                            let $x = *$x;
                            $body
                        })
                        .collect(),
                )
            }
            Values::F64(v) => {
                #[allow(dead_code)]
                type $t = f64;
                Values::F64(
                    v.iter()
                        .map(|$x| {
                            let $x = *$x;
                            $body
                        })
                        .collect(),
                )
            }
            Values::F16(v) => {
                #[allow(dead_code)]
                type $t = f32;
                let f = |$x: f16| {
                    let $x = $x.to_f32();
                    f16::from_f32($body)
                };
                Values::F16(v.iter().map(|x| f(*x)).collect())
            }
            Values::BF16(v) => {
                #[allow(dead_code)]
                type $t = f32;
                let f = |$x: bf16| {
                    let $x = $x.to_f32();
                    bf16::from_f32($body)
                };
                Values::BF16(v.iter().map(|x| f(*x)).collect())
            }
            _ => return Err(undefined(tensor)),
        };
        Ok(vec![Tensor::new(&tensor.shape, values)])
    }};
}

fn undefined(x: &Tensor) -> String {
    format!("it is not defined on {}", x.element())
}

pub const ROWS: &[Operator] = &[
    Operator::new("Relu", same, relu),
    Operator::new("Abs", same, abs).symbolic(Symbolic::Pointwise(symbolic::abs)),
    Operator::new("Neg", same, neg).symbolic(Symbolic::Pointwise(symbolic::neg)),
    Operator::new("Sign", same, sign),
    Operator::new("Not", same, not).symbolic(Symbolic::Pointwise(symbolic::not)),
    Operator::new("BitwiseNot", same, bit_not),
    Operator::new("Sqrt", same, |c| reals!(c, T, x => x.sqrt())),
    Operator::new("Reciprocal", same, |c| reals!(c, T, x => 1.0 / x)),
    Operator::new("Exp", same, |c| reals!(c, T, x => x.exp())),
    Operator::new("Log", same, |c| reals!(c, T, x => x.ln())),
    Operator::new("Floor", same, |c| reals!(c, T, x => x.floor())),
    Operator::new("Ceil", same, |c| reals!(c, T, x => x.ceil())),
    Operator::new("Round", same, |c| reals!(c, T, x => x.round_ties_even())),
    Operator::new("Sin", same, |c| reals!(c, T, x => x.sin())),
    Operator::new("Cos", same, |c| reals!(c, T, x => x.cos())),
    Operator::new("Tan", same, |c| reals!(c, T, x => x.tan())),
    Operator::new("Asin", same, |c| reals!(c, T, x => x.asin())),
    Operator::new("Acos", same, |c| reals!(c, T, x => x.acos())),
    Operator::new("Atan", same, |c| reals!(c, T, x => x.atan())),
    Operator::new("Sinh", same, |c| reals!(c, T, x => x.sinh())),
    Operator::new("Cosh", same, |c| reals!(c, T, x => x.cosh())),
    Operator::new("Tanh", same, |c| reals!(c, T, x => x.tanh())),
    Operator::new("Asinh", same, |c| reals!(c, T, x => x.asinh())),
    Operator::new("Acosh", same, |c| reals!(c, T, x => x.acosh())),
    Operator::new("Atanh", same, |c| reals!(c, T, x => x.atanh())),
    Operator::new("Erf", same, |c| reals!(c, T, x => x.widely(libm::erf))),
    Operator::new("Sigmoid", same, |c| reals!(c, T, x => x.logistic())),
    Operator::new("Softplus", same, |c| reals!(c, T, x => x.softplus())),
    Operator::new("Softsign", same, |c| reals!(c, T, x => x / (1.0 + x.abs()))),
    Operator::new("Mish", same, |c| reals!(c, T, x => x * x.softplus().tanh())),
    Operator::new(
        "HardSwish",
        same,
        |c| reals!(c, T, x => x * (x / 6.0 + 0.5).clamp(0.0, 1.0)),
    ),
    Operator::new("HardSigmoid", same, |c| {
        let (a, b) = (c.real("alpha", 0.2), c.real("beta", 0.5));
        reals!(c, T, x => (a as T * x + b as T).clamp(0.0, 1.0))
    }),
    Operator::new("LeakyRelu", same, |c| {
        let a = c.real("alpha", 0.01);
        reals!(c, T, x => if x < 0.0 { a as T * x } else { x })
    }),
    Operator::new("ThresholdedRelu", same, |c| {
        let a = c.real("alpha", 1.0);
        reals!(c, T, x => if x > a as T { x } else { 0.0 })
    }),
    Operator::new("Elu", same, |c| {
        let a = c.real("alpha", 1.0);
        reals!(c, T, x => if x < 0.0 { a as T * x.exp_m1() } else { x })
    }),
    Operator::new("Celu", same, |c| {
        let a = c.real("alpha", 1.0);
        reals!(c, T, x => if x < 0.0 { a as T * (x / a as T).exp_m1() } else { x })
    }),
    Operator::new("Selu", same, |c| {
        // Defaults as the standard gives them, which are these after rounding to `f32`.
        let a = c.real("alpha", 1.673_263_2);
        let g = c.real("gamma", 1.050_701);
        reals!(c, T, x => g as T * if x <= 0.0 { a as T * x.exp_m1() } else { x })
    }),
    Operator::new("Swish", same, |c| {
        let a = c.real("alpha", 1.0);
        reals!(c, T, x => x * (a as T * x).logistic())
    }),
    Operator::new("Shrink", same, |c| {
        let (bias, limit) = (c.real("bias", 0.0), c.real("lambd", 0.5));
        reals!(c, T, x => {
            if x < -(limit as T) { x + bias as T } else if x > limit as T { x - bias as T } else { 0.0 }
        })
    }),
    Operator::new("Gelu", same, gelu),
    Operator::new("IsNaN", truth, is_nan),
    Operator::new("IsInf", truth, is_inf),
    Operator::new("Clip", same, clip),
    Operator::new("Dropout", infer_dropout, dropout),
];

impl Call<'_> {
    /// A real attribute with its default.
    fn real(&self, name: &str, default: f32) -> f32 {
        self.attributes.float(name).unwrap_or(default)
    }
}

/// Functions of a real number that neither overflow nor lose digits on the way.
pub trait Smooth: num_traits::Float {
    /// `1 / (1 + e⁻ˣ)`.
    fn logistic(self) -> Self {
        if self < Self::zero() {
            let e = self.exp();
            e / (Self::one() + e)
        } else {
            Self::one() / (Self::one() + (-self).exp())
        }
    }

    /// `f`, computed in `f64`.
    fn widely(self, f: impl Fn(f64) -> f64) -> Self {
        let wide = self.to_f64().map(f);
        wide.and_then(Self::from).unwrap_or_else(Self::nan)
    }

    /// `ln(1 + eˣ)`.
    fn softplus(self) -> Self {
        if self > Self::zero() {
            self + (-self).exp().ln_1p()
        } else {
            self.exp().ln_1p()
        }
    }
}

impl Smooth for f32 {}
impl Smooth for f64 {}

fn truth(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).map(<[_]>::to_vec);
    Some(vec![Fact::new(Some(Element::Bool), shape)])
}

/// Integers by `$f`, floats by `$g`.
macro_rules! signed {
    ($call:expr, |$x:ident| int $f:expr; float $g:expr) => {{
        let tensor = $call.input(0)?;
        let values = match &*tensor.values {
            Values::I8(v) => Values::I8(v.iter().map(|$x| { let $x = *$x; $f }).collect()),
            Values::I16(v) => Values::I16(v.iter().map(|$x| { let $x = *$x; $f }).collect()),
            Values::I32(v) => Values::I32(v.iter().map(|$x| { let $x = *$x; $f }).collect()),
            Values::I64(v) => Values::I64(v.iter().map(|$x| { let $x = *$x; $f }).collect()),
            _ => return reals!($call, T, $x => $g),
        };
        Ok(vec![Tensor::new(&tensor.shape, values)])
    }};
}

fn relu(call: &Call) -> Result<Vec<Tensor>, String> {
    signed!(call, |x| int x.max(0); float if x < 0.0 { 0.0 } else { x })
}

fn abs(call: &Call) -> Result<Vec<Tensor>, String> {
    if is_unsigned(call.input(0)?) {
        return Ok(vec![call.input(0)?.clone()]);
    }
    signed!(call, |x| int x.wrapping_abs(); float x.abs())
}

fn neg(call: &Call) -> Result<Vec<Tensor>, String> {
    signed!(call, |x| int x.wrapping_neg(); float -x)
}

fn is_unsigned(x: &Tensor) -> bool {
    matches!(
        x.element(),
        Element::U8 | Element::U16 | Element::U32 | Element::U64
    )
}

fn sign(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    if is_unsigned(x) {
        let ones: Option<Vec<i64>> = x
            .to_f64()
            .map(|v| v.iter().map(|x| i64::from(*x > 0.0)).collect());
        let ones = ones.and_then(|v| Tensor::of_ints(x.element(), &x.shape, &v));
        return Ok(vec![ones.ok_or_else(|| undefined(x))?]);
    }
    signed!(call, |x| int x.signum(); float if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x })
}

fn not(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let Values::Bool(v) = &*x.values else {
        return Err(undefined(x));
    };
    let v = v.iter().map(|x| !x).collect();
    Ok(vec![Tensor::new(&x.shape, Values::Bool(v))])
}

fn bit_not(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let values = match &*x.values {
        Values::I8(v) => Values::I8(v.iter().map(|x| !x).collect()),
        Values::I16(v) => Values::I16(v.iter().map(|x| !x).collect()),
        Values::I32(v) => Values::I32(v.iter().map(|x| !x).collect()),
        Values::I64(v) => Values::I64(v.iter().map(|x| !x).collect()),
        Values::U8(v) => Values::U8(v.iter().map(|x| !x).collect()),
        Values::U16(v) => Values::U16(v.iter().map(|x| !x).collect()),
        Values::U32(v) => Values::U32(v.iter().map(|x| !x).collect()),
        Values::U64(v) => Values::U64(v.iter().map(|x| !x).collect()),
        _ => return Err(undefined(x)),
    };
    Ok(vec![Tensor::new(&x.shape, values)])
}

fn gelu(call: &Call) -> Result<Vec<Tensor>, String> {
    match call.attributes.text("approximate").unwrap_or("none") {
        "none" => reals!(call, T, x => x.widely(|x| {
            x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) / 2.0
        })),
        "tanh" => reals!(call, T, x => x.widely(|x| {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        })),
        other => Err(format!("its approximation `{other}` is not known")),
    }
}

fn is_nan(call: &Call) -> Result<Vec<Tensor>, String> {
    classified(call, f64::is_nan)
}

fn is_inf(call: &Call) -> Result<Vec<Tensor>, String> {
    let side = |name| call.attributes.int(name).unwrap_or(1) != 0;
    let (up, down) = (side("detect_positive"), side("detect_negative"));
    classified(call, |x| {
        (up && x == f64::INFINITY) || (down && x == f64::NEG_INFINITY)
    })
}

fn classified(call: &Call, f: impl Fn(f64) -> bool) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let wide = x.to_f64().filter(|_| x.element().is_float());
    let truths = wide
        .ok_or_else(|| undefined(x))?
        .into_iter()
        .map(f)
        .collect();
    Ok(vec![Tensor::new(&x.shape, Values::Bool(truths))])
}

/// A bound of Clip: attribute, or input. From version 6 to 10 an attribute has a default.
fn bound(call: &Call, name: &str, at: usize, default: f32) -> Result<Option<Tensor>, String> {
    let default = (6..11).contains(&call.opset).then_some(default);
    if let Some(x) = call.attributes.float(name).or(default) {
        let x = Tensor::floats(call.input(0)?.element(), &[], &[f64::from(x)]);
        return Ok(Some(x.ok_or("its bounds are of another type")?));
    }
    match call.optional(at) {
        Some(x) if x.len() != 1 => Err(format!("its bound of shape {:?} is no scalar", x.shape)),
        x => Ok(x.cloned()),
    }
}

fn clip(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let (low, high) = (
        bound(call, "min", 1, f32::MIN)?,
        bound(call, "max", 2, f32::MAX)?,
    );
    /// Above `high` wins over below `low`; NaN stays.
    fn clipped<T: PartialOrd + Copy>(v: &[T], low: Option<T>, high: Option<T>) -> Vec<T> {
        let raised = |x: T| low.filter(|low| x < *low).unwrap_or(x);
        let lowered = |x: T| high.filter(|high| x > *high).unwrap_or(x);
        v.iter().map(|x| lowered(raised(*x))).collect()
    }
    macro_rules! each {
        ($($kind:ident)*) => {
            match &*x.values {
                $(Values::$kind(v) => {
                    let one = |bound: &Option<Tensor>| match bound.as_ref().map(|b| &*b.values) {
                        None => Ok(None),
                        Some(Values::$kind(b)) => Ok(Some(b[0])),
                        Some(_) => Err("its bounds are of another type".to_string()),
                    };
                    Values::$kind(clipped(v, one(&low)?, one(&high)?))
                })*
                _ => return Err(undefined(x)),
            }
        };
    }
    let values = each!(F32 F64 F16 BF16 I8 I16 I32 I64 U8 U16 U32 U64);
    Ok(vec![Tensor::new(&x.shape, values)])
}

fn infer_dropout(cx: &Inference) -> Option<Vec<Fact>> {
    let shape = cx.shape(0).map(<[_]>::to_vec);
    // Before version 10 the mask has the type of the data.
    let mask = if cx.opset < 10 {
        cx.element(0)
    } else {
        Some(Element::Bool)
    };
    Some(vec![
        Fact::new(cx.element(0), shape.clone()),
        Fact::new(mask, shape),
    ])
}

fn dropout(call: &Call) -> Result<Vec<Tensor>, String> {
    let x = call.input(0)?;
    let one = |at: usize| call.optional(at).and_then(Tensor::scalar);
    let trains = one(2).unwrap_or(0.0) != 0.0;
    if trains && one(1).unwrap_or(0.5) != 0.0 {
        return Err("it drops elements at random".to_string());
    }
    let mask = match call.opset {
        ..10 => Tensor::floats(x.element(), &x.shape, &vec![1.0; x.len()])
            .ok_or_else(|| undefined(x))?,
        _ => Tensor::new(&x.shape, Values::Bool(vec![true; x.len()])),
    };
    let n = call.node.output.len().min(2);
    Ok(vec![x.clone(), mask].into_iter().take(n).collect())
}
