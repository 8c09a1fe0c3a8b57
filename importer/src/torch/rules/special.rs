//! Functions whose gradient at special points is not what the derivative of their formula gives there.
//!
//! The gradients are those of PyTorch's `derivatives.yaml`.

use super::Table;
use super::arithmetic::Operands;
use crate::torch::site::{Results, Site};
use graph::{Binary, Expr};

pub(super) const RULES: Table = &[
    ("aten.sinc.default", sinc),
    ("aten.logit.default", logit),
    ("aten.special_entr.default", entropy),
    ("aten.hypot.default", hypotenuse),
    ("aten.copysign.Tensor", with_sign),
    ("aten.copysign.Scalar", with_sign),
    ("aten.xlogy.Tensor", |s| times_logarithm(s, false)),
    ("aten.xlogy.Scalar_Self", |s| times_logarithm(s, false)),
    ("aten.xlogy.Scalar_Other", |s| times_logarithm(s, false)),
    ("aten.special_xlog1py.default", |s| times_logarithm(s, true)),
    ("aten.special_xlog1py.self_scalar", |s| {
        times_logarithm(s, true)
    }),
    ("aten.special_xlog1py.other_scalar", |s| {
        times_logarithm(s, true)
    }),
];

fn number(value: f64) -> Expr {
    Expr::float(value)
}

/// `sin(πx) / (πx)`, and 1 at 0; gradient `(πx·cos(πx) − sin(πx)) / (πx²)`, and 0 where its divisor is.
fn sinc(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let x = operands.get("self")?;
    let angle = x.clone().mul(number(std::f64::consts::PI));
    let value = angle.clone().sin().div(angle.clone());
    let value = Expr::select(x.clone().eq_(number(0.0)), number(1.0), value);
    let divisor = x.clone().mul(angle.clone());
    let rise = angle.clone().mul(angle.clone().cos()).sub(angle.sin());
    let slope = operands.incoming().mul(rise.div(divisor.clone()));
    let gradient = Expr::select(divisor.eq_(number(0.0)), number(0.0), slope);
    operands.finish_with(value, [(x, gradient)])
}

/// The magnitude of `x` with the sign of `y`, also that of a zero. Gradients: `result / x` of `x`, 0 where x is 0;
/// and 0 of `y`.
fn with_sign(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (x, y) = (operands.get("self")?, operands.get("other")?);
    let dy = operands.incoming();
    let zero = || number(0.0);
    let of_zero = y.clone().eq_(zero()).and(y.clone().recip().lt(zero()));
    let is_negative = y.clone().lt(zero()).or(of_zero);
    let size = x.clone().abs();
    let value = Expr::select(is_negative, size.clone().neg(), size);
    let slope = dy.mul(value.clone().div(x.clone()));
    let by_x = Expr::select(x.clone().eq_(zero()), zero(), slope);
    // 0 for each element of y: no element is both below and above zero.
    let by_y = y.clone().lt(zero()).and(y.clone().gt(zero())).cast(dtype);
    operands.finish_with(value, [(x, by_x), (y, by_y)])
}

/// `ln(x / (1 − x))`, of `x` within `[eps, 1 − eps]`.
fn logit(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let eps = s.has("eps").then(|| s.float("eps")).transpose()?;
    let mut operands = Operands::new(s, dtype);
    let x = operands.get("self")?;
    let dy = operands.incoming();
    let (low, high, beyond) = match eps {
        Some(eps) => (number(eps), number(1.0 - eps), number(0.0)),
        None => (number(0.0), number(1.0), number(f64::NAN)),
    };
    let is_below = x.clone().lt(low.clone());
    let is_above = x.clone().gt(high.clone());
    let slope = dy.div(x.clone().mul(number(1.0).sub(x.clone())));
    let gradient = Expr::select(is_below.clone().or(is_above.clone()), beyond, slope);
    let inside = match eps {
        Some(_) => Expr::select(is_below, low, Expr::select(is_above, high, x.clone())),
        None => x.clone(),
    };
    let value = inside.clone().div(number(1.0).sub(inside)).log();
    operands.finish_with(value, [(x, gradient)])
}

/// `−x·ln x`: 0 at 0, and −∞ below.
fn entropy(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let x = operands.get("self")?;
    let dy = operands.incoming();
    let zero = || number(0.0);
    let gradient = dy.mul(x.clone().log().add(number(1.0))).neg();
    let below = Expr::select(
        x.clone().lt(zero()),
        number(f64::NEG_INFINITY),
        x.clone().log().mul(x.clone()).neg(),
    );
    let value = Expr::select(x.clone().eq_(zero()), zero(), below);
    operands.finish_with(value, [(x, gradient)])
}

/// `√(x² + y²)` without overflow, infinite where an operand is; gradients `x / result` and `y / result`.
fn hypotenuse(s: &mut Site) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (a, b) = (operands.get("self")?, operands.get("other")?);
    let dy = operands.incoming();
    let infinity = || number(f64::INFINITY);
    let (p, q) = (a.clone().abs(), b.clone().abs());
    let longer = Expr::binary(Binary::Max, p.clone(), q.clone());
    let ratio = Expr::binary(Binary::Min, p, q).div(longer.clone());
    let factor = number(1.0).add(ratio.clone().mul(ratio)).sqrt();
    let is_zero = longer.clone().eq_(number(0.0));
    let root = Expr::select(is_zero, longer.clone(), longer.mul(factor));
    let is_infinite = |e: &Expr| e.clone().abs().eq_(infinity());
    let value = Expr::select(is_infinite(&a).or(is_infinite(&b)), infinity(), root);
    let slope = |e: &Expr| dy.clone().mul(e.clone()).div(value.clone());
    let gradients = [(a.clone(), slope(&a)), (b.clone(), slope(&b))];
    operands.finish_with(value, gradients)
}

/// `x·ln y` or `x·ln(1 + y)`, 0 where x is 0 and y a number.
fn times_logarithm(s: &mut Site, plus_one: bool) -> Results {
    let dtype = s.out_dtype(0);
    let mut operands = Operands::new(s, dtype);
    let (x, y) = (operands.get("self")?, operands.get("other")?);
    let dy = operands.incoming();
    let zero = || number(0.0);
    let (logarithm, argument, end) = match plus_one {
        true => (y.clone().log1p(), y.clone().add(number(1.0)), -1.0),
        false => (y.clone().log(), y.clone(), 0.0),
    };
    let is_zero = x.clone().eq_(zero());
    // Nothing times an infinite logarithm is nothing, for the incoming gradient too.
    let times = |e: &Expr| {
        let product = e.clone().mul(logarithm.clone());
        let plain = Expr::select(e.clone().eq_(zero()), zero(), product);
        Expr::select(y.clone().is_nan(), y.clone(), plain)
    };
    let is_end = is_zero.and(y.clone().le(number(end)));
    let by_x = Expr::select(is_end, zero(), times(&dy));
    let by_y = dy.clone().mul(x.clone()).div(argument);
    let value = times(&x);
    operands.finish_with(value, [(x, by_x), (y, by_y)])
}
