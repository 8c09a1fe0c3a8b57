//! Functions of one value: activations and elementary functions.

use super::Table;
use crate::torch::error::RuleError;
use crate::torch::site::{Results, Site};
use graph::{Attr, Binary, DType, Expr, Unary};
use ops::activations as act;
use ops::attrs;
use ops::elementwise::gradient_attr;

pub(super) const RULES: Table = &[
    ("aten.abs.default", |s| unary(s, Unary::Abs)),
    ("aten.acos.default", |s| unary(s, Unary::Acos)),
    ("aten.acosh.default", |s| unary(s, Unary::Acosh)),
    ("aten.asin.default", |s| unary(s, Unary::Asin)),
    ("aten.asinh.default", |s| unary(s, Unary::Asinh)),
    ("aten.atan.default", |s| unary(s, Unary::Atan)),
    ("aten.atanh.default", |s| unary(s, Unary::Atanh)),
    ("aten.ceil.default", |s| unary(s, Unary::Ceil)),
    ("aten.cos.default", |s| unary(s, Unary::Cos)),
    ("aten.cosh.default", |s| unary(s, Unary::Cosh)),
    ("aten.erf.default", |s| unary(s, Unary::Erf)),
    ("aten.exp.default", |s| unary(s, Unary::Exp)),
    // A power is exact where the exponent is whole.
    ("aten.exp2.default", |s| of(s, Expr::float(2.0).pow(x()))),
    ("aten.expm1.default", |s| unary(s, Unary::Expm1)),
    ("aten.floor.default", |s| unary(s, Unary::Floor)),
    ("aten.isnan.default", |s| unary(s, Unary::IsNan)),
    ("aten.isinf.default", |s| of(s, x().abs().eq_(infinity()))),
    ("aten.isfinite.default", |s| of(s, x().abs().lt(infinity()))),
    ("aten.log.default", |s| unary(s, Unary::Log)),
    ("aten.log1p.default", |s| unary(s, Unary::Log1p)),
    ("aten.logical_not.default", |s| unary(s, Unary::Not)),
    ("aten.bitwise_not.default", bitwise_not),
    ("aten.neg.default", |s| unary(s, Unary::Neg)),
    ("aten.reciprocal.default", |s| unary(s, Unary::Recip)),
    ("aten.round.default", |s| unary(s, Unary::Round)),
    ("aten.rsqrt.default", |s| unary(s, Unary::Rsqrt)),
    ("aten.sigmoid.default", |s| unary(s, Unary::Sigmoid)),
    ("aten.sign.default", sign),
    ("aten.sgn.default", sign),
    ("aten.sin.default", |s| unary(s, Unary::Sin)),
    ("aten.sinh.default", |s| unary(s, Unary::Sinh)),
    ("aten.sqrt.default", |s| unary(s, Unary::Sqrt)),
    ("aten.tan.default", |s| unary(s, Unary::Tan)),
    ("aten.tanh.default", |s| unary(s, Unary::Tanh)),
    ("aten.trunc.default", |s| unary(s, Unary::Trunc)),
    ("aten.square.default", |s| of(s, x().mul(x()))),
    ("aten.log2.default", |s| {
        log_of_base(s, 2.0, std::f64::consts::LOG2_E)
    }),
    ("aten.log10.default", |s| {
        log_of_base(s, 10.0, std::f64::consts::LOG10_E)
    }),
    ("aten.relu.default", |s| {
        let value = Expr::select(x().lt(Expr::float(0.0)), Expr::float(0.0), x());
        of_slope(s, value, act::relu(x()))
    }),
    ("aten.relu6.default", |s| within(s, 0.0, 6.0)),
    ("aten.silu.default", |s| of(s, act::silu(x()))),
    ("aten.mish.default", |s| of(s, act::mish(x()))),
    ("aten.hardsigmoid.default", |s| {
        let expr = act::hardsigmoid(x(), 1.0 / 6.0, 0.5);
        of(s, without_gradient_of_nan(expr))
    }),
    ("aten.hardswish.default", |s| of(s, act::hardswish(x()))),
    ("aten.log_sigmoid.default", |s| of(s, act::log_sigmoid(x()))),
    ("aten.softsign.default", |s| {
        of(s, x().div(x().abs().add(Expr::float(1.0))))
    }),
    ("aten.tanhshrink.default", |s| of(s, x().sub(x().tanh()))),
    ("aten.gelu.default", gelu),
    ("aten.hardtanh.default", hardtanh),
    ("aten.leaky_relu.default", leaky_relu),
    ("aten.elu.default", elu),
    ("aten.selu.default", selu),
    ("aten.celu.default", celu),
    ("aten.softplus.default", softplus_scaled),
    ("aten.threshold.default", threshold),
    ("aten.clamp.default", clamp),
    ("aten.clip.default", clamp),
    ("aten.clamp_min.default", clamp),
    ("aten.clamp_max.default", clamp),
    ("aten.prelu.default", prelu),
];

fn x() -> Expr {
    Expr::In(0)
}

fn infinity() -> Expr {
    Expr::float(f64::INFINITY)
}

fn unary(s: &mut Site, f: Unary) -> Results {
    let rounds = matches!(f, Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc);
    match rounds && !s.out_dtype(0).is_float() {
        true => of(s, x()),
        false => of(s, Expr::unary(f, x())),
    }
}

/// `expr` of the first argument, computed in the result's type.
fn of(s: &mut Site, expr: Expr) -> Results {
    let (input, dtype) = (s.subject()?, s.out_dtype(0));
    let given = s.builder.dtype(input);
    let converted = dtype.is_float() && given != dtype;
    let expr = match converted {
        true => expr.map_leaves(&|leaf| matches!(leaf, Expr::In(0)).then(|| x().cast(dtype))),
        false => expr,
    };
    if dtype.is_int() && expr.dtype(&[given]).is_float() {
        return Err(RuleError::Unsupported("integers".into()));
    }
    Ok(vec![Some(s.elementwise(expr, &[input], dtype)?)])
}

/// `expr` with its numbers in the result's type if that is an integer type: without fractions, and within its range.
fn with_whole_numbers(s: &Site, expr: Expr) -> Expr {
    let dtype = s.out_dtype(0);
    let (low, high) = match dtype {
        DType::U8 => (0, i64::from(u8::MAX)),
        DType::I8 => (i64::from(i8::MIN), i64::from(i8::MAX)),
        DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    };
    expr.map_leaves(&|leaf| match leaf {
        Expr::Const(number) if dtype.is_int() => Some(Expr::int(number.as_i64().clamp(low, high))),
        _ => None,
    })
}

/// The logarithm to a base, exact for powers of the base: `log(8192) · log2(e)` may be just below 13.
fn log_of_base(s: &mut Site, base: f64, per_e: f64) -> Results {
    let log = x().log().mul(Expr::float(per_e));
    let near = Expr::unary(Unary::Round, log.clone());
    let is_exact = Expr::float(base).pow(near.clone()).eq_(x());
    let exact = Expr::select(is_exact, near, log.clone());
    match s.builder.dtype(s.subject()?) == s.out_dtype(0) {
        true => of_slope(s, exact, log),
        // Integers have no gradient.
        false => of(s, exact),
    }
}

/// `value` of the first argument with the gradient of `like`, which has the same values but may lose
/// the sign of a zero that equals a bound.
fn of_slope(s: &mut Site, value: Expr, like: Expr) -> Results {
    let (input, dtype) = (s.subject()?, s.out_dtype(0));
    if !dtype.is_float() || s.builder.dtype(input) != dtype {
        let like = with_whole_numbers(s, like);
        return of(s, like);
    }
    let slope = like.pullback(0, &Expr::In(1));
    let list = attrs([
        ("expr", Attr::Expr(value)),
        ("dtype", Attr::DType(dtype)),
        (
            &gradient_attr(0),
            Attr::Expr(slope.unwrap_or(Expr::float(0.0))),
        ),
    ]);
    Ok(vec![Some(s.op1("elementwise", &[input], list)?)])
}

/// −1, 0 or 1, and 0 for NaN.
fn sign(s: &mut Site) -> Results {
    let (zero, is) = (
        || Expr::int(0),
        |f, value| Expr::select(f, Expr::int(value), Expr::int(0)),
    );
    let below = is(x().lt(zero()), -1);
    of(s, Expr::select(x().gt(zero()), Expr::int(1), below))
}

fn bitwise_not(s: &mut Site) -> Results {
    let input = s.subject()?;
    match s.builder.dtype(input) {
        graph::DType::Bool => unary(s, Unary::Not),
        dtype if dtype.is_int() => {
            let flipped = Expr::binary(Binary::BitXor, x().cast(DType::I64), Expr::int(-1));
            of(s, flipped.cast(dtype))
        }
        dtype => Err(s.unsupported(format!("of {dtype}"))),
    }
}

fn gelu(s: &mut Site) -> Results {
    let expr = match s.text_or("approximate", "none")?.as_str() {
        "tanh" => act::gelu_tanh(x()),
        _ => act::gelu(x()),
    };
    of(s, expr)
}

fn hardtanh(s: &mut Site) -> Results {
    let (low, high) = (s.float_or("min_val", -1.0)?, s.float_or("max_val", 1.0)?);
    within(s, low, high)
}

/// `x` within `[low, high]`, with gradient 0 at both.
fn within(s: &mut Site, low: f64, high: f64) -> Results {
    let (below, above) = (x().lt(Expr::float(low)), x().gt(Expr::float(high)));
    let value = Expr::select(above, Expr::float(high), x());
    let value = Expr::select(below, Expr::float(low), value);
    of_slope(s, value, act::hardtanh(x(), low, high))
}

fn leaky_relu(s: &mut Site) -> Results {
    let slope = Expr::float(s.float_or("negative_slope", 0.01)?);
    of(s, act::leaky_relu(x(), slope))
}

fn elu(s: &mut Site) -> Results {
    let (alpha, scale) = (s.float_or("alpha", 1.0)?, s.float_or("scale", 1.0)?);
    let rate = s.float_or("input_scale", 1.0)?;
    of(s, act::elu(x(), scale, alpha, rate))
}

fn selu(s: &mut Site) -> Results {
    of(s, act::selu(x()))
}

fn celu(s: &mut Site) -> Results {
    let alpha = s.float_or("alpha", 1.0)?;
    of(s, act::elu(x(), 1.0, alpha, 1.0 / alpha))
}

fn softplus_scaled(s: &mut Site) -> Results {
    let (beta, threshold) = (s.float_or("beta", 1.0)?, s.float_or("threshold", 20.0)?);
    let scaled = x().mul(Expr::float(beta));
    let linear = Expr::binary(Binary::Gt, scaled.clone(), Expr::float(threshold));
    of(
        s,
        Expr::select(
            linear,
            x(),
            act::softplus(scaled).mul(Expr::float(1.0 / beta)),
        ),
    )
}

fn threshold(s: &mut Site) -> Results {
    // Compared so that NaN stays NaN.
    let below = Expr::binary(Binary::Le, x(), s.scalar("threshold")?);
    let value = s.scalar("value")?;
    let expr = with_whole_numbers(s, Expr::select(below, value, x()));
    of(s, expr)
}

/// Gradient 0 at the bounds and of NaN. If the bounds cross, all values are the upper one.
fn clamp(s: &mut Site) -> Results {
    let bound = |s: &Site, name: &str| s.has(name).then(|| s.scalar(name)).transpose();
    let (min, max) = (bound(s, "min")?, bound(s, "max")?);
    let number = |e: &Option<Expr>| e.as_ref().and_then(Expr::as_number);
    let bounded = |above: Binary, below: Binary| {
        let mut expr = x();
        if let Some(max) = max.clone() {
            expr = Expr::select(Expr::binary(above, x(), max.clone()), max, expr);
        }
        if let Some(min) = min.clone() {
            expr = Expr::select(Expr::binary(below, x(), min.clone()), min, expr);
        }
        expr
    };
    let constant = match (number(&min), number(&max)) {
        (Some(low), _) if low.is_nan() => min,
        (_, Some(high)) if high.is_nan() => max,
        (Some(low), Some(high)) if low > high => max,
        _ => {
            let like = without_gradient_of_nan(bounded(Binary::Ge, Binary::Le));
            return match s.out_dtype(0).is_float() {
                true => of_slope(s, bounded(Binary::Gt, Binary::Lt), like),
                false => {
                    let expr = with_whole_numbers(s, bounded(Binary::Ge, Binary::Le));
                    of(s, expr)
                }
            };
        }
    };
    let constant = constant.unwrap_or_else(x);
    match s.out_dtype(0).is_float() {
        true => of(s, without_gradient_of_nan(constant)),
        false => of(s, constant),
    }
}

/// `expr` of `x`, NaN where `x` is, but without a gradient there: `floor` keeps NaN and has none.
fn without_gradient_of_nan(expr: Expr) -> Expr {
    Expr::select(x().is_nan(), x().floor(), expr)
}

fn prelu(s: &mut Site) -> Results {
    let (input, mut weight) = (s.tensor("self")?, s.tensor("weight")?);
    let rank = s.rank(input);
    if rank > 2 {
        let mut shape = s.builder.shape(weight);
        shape.resize(rank - 1, graph::SymExpr::constant(1));
        weight = s.reshape(weight, shape)?;
    }
    let expr = act::leaky_relu(x(), Expr::In(1));
    let dtype = s.out_dtype(0);
    Ok(vec![Some(s.elementwise(expr, &[input, weight], dtype)?)])
}
