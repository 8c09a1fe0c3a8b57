//! Symbolic derivatives of tasklet expressions.
//!
//! [`Expr::derivative`] is the partial derivative with respect to one input;
//! [`Expr::pullback`] is that derivative times a given factor (the incoming gradient), with the
//! factor pushed inside so that a branch not taken contributes an exact zero, never `∞·0`.
//! This file never decides what to differentiate; that is the `autodiff` room.
//!
//! # Conventions where a function has no derivative (as PyTorch)
//! - `abs'` is 0 at 0 and at NaN; `sign`, `floor`, `ceil`, `round`, `trunc`, `floordiv`, comparisons, logic,
//!   conversions to integers and truth values, and random numbers have derivative 0.
//! - `max(a, b)` of two values: the larger one gets 1, at a tie both get 0.5 (`torch.maximum`).
//!   With a constant operand the other one gets 0 at the tie (`relu`, `relu6`, `hardtanh`); an
//!   operator whose derivative is 1 there (`torch.clamp`) is written with `select`. `min` alike.
//!   NaN passes the gradient, as in PyTorch's `threshold_backward` and `maximum`.
//! - `pow(a, b)`: with respect to `a`, 0 where `b = 0`, else `b·a^(b−1)`; with respect to `b`,
//!   0 where `a = 0` and `b ≥ 0`, else `aᵇ·ln a`.
//! - `atan2(0, 0)`: 0 with respect to both.
//! - `mod(a, b)`: 1 with respect to `a`, `−⌊a/b⌋` with respect to `b`.
//! - A conversion to a floating-point type passes the derivative on.

use crate::expr::Expr;
use crate::function::{Binary, Unary};
use crate::scalar::Scalar;
use std::sync::Arc;

impl Expr {
    /// The partial derivative with respect to `In(input)`; the constant 0 if it does not depend
    /// on it. The derivative uses the same inputs.
    pub fn derivative(&self, input: usize) -> Expr {
        self.pullback(input, &Expr::float(1.0))
            .unwrap_or_else(|| Expr::float(0.0))
    }

    /// `factor · ∂self/∂In(input)`; `None` if the derivative is zero everywhere. `factor` may use
    /// inputs of its own and must mean the same wherever it is evaluated.
    pub fn pullback(&self, input: usize, factor: &Expr) -> Option<Expr> {
        match self {
            Expr::In(i) => (*i == input).then(|| factor.clone()),
            Expr::Const(_) | Expr::Index(_) | Expr::Uniform(..) => None,
            Expr::Cast(d, a) if d.is_float() => a.pullback(input, factor),
            Expr::Cast(..) => None,
            Expr::Unary(f, a) => {
                let da = a.pullback(input, factor)?;
                unary(*f, a, da)
            }
            Expr::Binary(f, a, b) => {
                if !differentiable(*f) {
                    return None;
                }
                match (a.pullback(input, factor), b.pullback(input, factor)) {
                    (None, None) => None,
                    (da, db) => binary(*f, self, (a, b), (da, db)),
                }
            }
            Expr::Select(c, a, b) => choose(
                c.as_ref().clone(),
                a.pullback(input, factor),
                b.pullback(input, factor),
            ),
        }
    }

    /// Whether the derivative with respect to `In(input)` can be other than zero.
    pub fn depends_on(&self, input: usize) -> bool {
        match self {
            Expr::In(i) => *i == input,
            Expr::Const(_) | Expr::Index(_) | Expr::Uniform(..) => false,
            Expr::Cast(d, a) => d.is_float() && a.depends_on(input),
            Expr::Unary(f, a) => !is_step(*f) && a.depends_on(input),
            Expr::Binary(f, a, b) => {
                differentiable(*f) && (a.depends_on(input) || b.depends_on(input))
            }
            Expr::Select(_, a, b) => a.depends_on(input) || b.depends_on(input),
        }
    }

    /// −1, 0 or 1, and 0 of NaN, unlike [`Expr::sign`].
    pub fn slope_of_abs(self) -> Expr {
        let zero = || Expr::float(0.0);
        let below = Expr::select(self.clone().lt(zero()), Expr::float(-1.0), zero());
        Expr::select(self.gt(zero()), Expr::float(1.0), below)
    }

    /// The expression with every `In(i)` replaced by `replace(i)`.
    pub fn substitute_inputs(&self, replace: &dyn Fn(usize) -> Expr) -> Expr {
        self.map_leaves(&|leaf| match leaf {
            Expr::In(i) => Some(replace(*i)),
            _ => None,
        })
    }
}

/// Piecewise constant functions.
fn is_step(f: Unary) -> bool {
    use Unary::*;
    matches!(f, Sign | Floor | Ceil | Round | Trunc | Not | IsNan)
}

fn differentiable(f: Binary) -> bool {
    use Binary::*;
    matches!(f, Add | Sub | Mul | Div | Mod | Pow | Min | Max | Atan2)
}

/// `f'(a) · da`.
fn unary(f: Unary, a: &Arc<Expr>, da: Expr) -> Option<Expr> {
    use Unary::*;
    let x = || a.as_ref().clone();
    let value = || Expr::Unary(f, a.clone());
    let square = |e: Expr| times(e.clone(), e);
    let one_plus_square = || Expr::float(1.0).add(square(x()));
    let one_minus_square = || Expr::float(1.0).sub(square(x()));
    Some(match f {
        Neg => negated(da),
        Abs => times(da, x().slope_of_abs()),
        Exp => times(da, value()),
        Log => over(da, x()),
        Expm1 => times(da, x().exp()),
        Log1p => over(da, Expr::float(1.0).add(x())),
        Sqrt => over(da, times(Expr::float(2.0), value())),
        Rsqrt => times(
            times(da, Expr::float(-0.5)),
            times(value(), square(value())),
        ),
        Recip => negated(times(da, square(value()))),
        Sin => times(da, x().cos()),
        Cos => negated(times(da, x().sin())),
        Tan => times(da, Expr::float(1.0).add(square(value()))),
        Tanh => times(da, Expr::float(1.0).sub(square(value()))),
        Erf => times(
            times(da, Expr::float(std::f64::consts::FRAC_2_SQRT_PI)),
            negated(square(x())).exp(),
        ),
        Sigmoid => times(da, times(value(), Expr::float(1.0).sub(value()))),
        Atan => over(da, one_plus_square()),
        Asin => times(da, one_minus_square().rsqrt()),
        Acos => negated(times(da, one_minus_square().rsqrt())),
        Sinh => times(da, Expr::unary(Cosh, x())),
        Cosh => times(da, Expr::unary(Sinh, x())),
        Asinh => times(da, one_plus_square().rsqrt()),
        // Not x² − 1, which loses digits near 1.
        Acosh => {
            let size = || x().abs();
            let (less, more) = (size().sub(Expr::float(1.0)), size().add(Expr::float(1.0)));
            times(da, times(less, more).rsqrt())
        }
        Atanh => over(da, one_minus_square()),
        Sign | Floor | Ceil | Round | Trunc | Not | IsNan => return None,
    })
}

/// `∂f/∂a · da + ∂f/∂b · db`; `whole` is `f(a, b)` itself.
fn binary(
    f: Binary,
    whole: &Expr,
    (a, b): (&Arc<Expr>, &Arc<Expr>),
    (da, db): (Option<Expr>, Option<Expr>),
) -> Option<Expr> {
    let (x, y) = (|| a.as_ref().clone(), || b.as_ref().clone());
    match f {
        Binary::Add => sum(da, db),
        Binary::Sub => sum(da, db.map(negated)),
        Binary::Mul => sum(da.map(|d| times(d, y())), db.map(|d| times(d, x()))),
        Binary::Div => sum(
            da.map(|d| over(d, y())),
            db.map(|d| negated(times(d, over(whole.clone(), y())))),
        ),
        Binary::Mod => sum(
            da,
            db.map(|d| negated(times(d, Expr::binary(Binary::FloorDiv, x(), y())))),
        ),
        Binary::Pow => sum(
            da.and_then(|d| power_by_base(x(), y(), d)),
            db.and_then(|d| power_by_exponent(whole, x(), y(), d)),
        ),
        Binary::Max => extremum(|p, q| p.lt(q), |p, q| p.le(q), (a, b), (da, db)),
        Binary::Min => extremum(|p, q| p.gt(q), |p, q| p.ge(q), (a, b), (da, db)),
        Binary::Atan2 => {
            let norm = || times(x(), x()).add(times(y(), y()));
            let slopes = sum(
                da.map(|d| times(d, over(y(), norm()))),
                db.map(|d| negated(times(d, over(x(), norm())))),
            );
            choose(norm().eq_(Expr::float(0.0)), None, slopes)
        }
        _ => None,
    }
}

/// `b·a^(b−1)·d`, zero where `b` is.
fn power_by_base(a: Expr, b: Expr, d: Expr) -> Option<Expr> {
    match b.as_number() {
        Some(0.0) => None,
        Some(1.0) => Some(d),
        Some(2.0) => Some(times(d, times(Expr::float(2.0), a))),
        Some(n) => {
            let power = match n - 1.0 {
                0.5 => a.sqrt(),
                lower => a.pow(Expr::float(lower)),
            };
            let slope = times(Expr::float(n), power);
            Some(times(d, slope))
        }
        None => {
            let slope = times(b.clone(), a.pow(b.clone().sub(Expr::float(1.0))));
            choose(b.eq_(Expr::float(0.0)), None, Some(times(d, slope)))
        }
    }
}

/// `aᵇ·ln(a)·d`, zero where `a = 0` and `b ≥ 0`.
fn power_by_exponent(whole: &Expr, a: Expr, b: Expr, d: Expr) -> Option<Expr> {
    let slope = times(whole.clone(), a.clone().log());
    if a.as_number().is_some_and(|n| n > 0.0) {
        return Some(times(d, slope));
    }
    let flat = a.eq_(Expr::float(0.0)).and(b.ge(Expr::float(0.0)));
    choose(flat, None, Some(times(d, slope)))
}

/// Derivative of `max` or `min`: `loses(p, q)` says that `p` is strictly not the result,
/// `loses_or_ties` that it is not or equals the other.
fn extremum(
    loses: impl Fn(Expr, Expr) -> Expr,
    loses_or_ties: impl Fn(Expr, Expr) -> Expr,
    (a, b): (&Arc<Expr>, &Arc<Expr>),
    (da, db): (Option<Expr>, Option<Expr>),
) -> Option<Expr> {
    let side = |p: &Expr, q: &Expr, d: Expr| -> Option<Expr> {
        if q.as_number().is_some() {
            return choose(loses_or_ties(p.clone(), q.clone()), None, Some(d));
        }
        let tie = p.clone().eq_(q.clone());
        let wins = choose(tie, Some(times(d.clone(), Expr::float(0.5))), Some(d));
        choose(loses(p.clone(), q.clone()), None, wins)
    };
    sum(
        da.and_then(|d| side(a, b, d)),
        db.and_then(|d| side(b, a, d)),
    )
}

/// `condition ? a : b` with `None` for zero.
fn choose(condition: Expr, a: Option<Expr>, b: Option<Expr>) -> Option<Expr> {
    if a.is_none() && b.is_none() {
        return None;
    }
    let zero = || Expr::float(0.0);
    Some(Expr::select(
        condition,
        a.unwrap_or_else(zero),
        b.unwrap_or_else(zero),
    ))
}

fn sum(a: Option<Expr>, b: Option<Expr>) -> Option<Expr> {
    match (a, b) {
        (Some(a), Some(Expr::Unary(Unary::Neg, b))) => Some(a.sub(b.as_ref().clone())),
        (Some(a), Some(b)) => Some(a.add(b)),
        (a, b) => a.or(b),
    }
}

fn times(a: Expr, b: Expr) -> Expr {
    let is_one = |e: &Expr| matches!(e, Expr::Const(Scalar::Float(x)) if *x == 1.0);
    match (a, b) {
        (a, b) if is_one(&a) => b,
        (a, b) if is_one(&b) => a,
        (Expr::Const(Scalar::Float(x)), Expr::Const(Scalar::Float(y))) => Expr::float(x * y),
        (Expr::Unary(Unary::Neg, a), b) => a.as_ref().clone().mul(b).neg(),
        (a, Expr::Unary(Unary::Neg, b)) => a.mul(b.as_ref().clone()).neg(),
        (a, b) => a.mul(b),
    }
}

fn over(a: Expr, b: Expr) -> Expr {
    match a {
        Expr::Const(Scalar::Float(1.0)) => b.recip(),
        a => a.div(b),
    }
}

fn negated(a: Expr) -> Expr {
    match a {
        Expr::Unary(Unary::Neg, inner) => inner.as_ref().clone(),
        Expr::Const(Scalar::Float(x)) => Expr::float(-x),
        a => a.neg(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox;
    use crate::{DType, SymExpr};

    fn value(e: &Expr, at: &[f64]) -> f64 {
        let inputs: Vec<Scalar> = at.iter().map(|x| Scalar::Float(*x)).collect();
        e.eval(&inputs, &|_| None).unwrap().as_f64()
    }

    fn finite_difference(e: &Expr, at: &[f64], input: usize) -> f64 {
        let h = 1e-6 * at[input].abs().max(0.1);
        let moved = |by: f64| {
            let mut p = at.to_vec();
            p[input] += by;
            value(e, &p)
        };
        // Fourth order, so that the truncation error stays below the rounding error.
        let step = 100.0 * h;
        (8.0 * (moved(step) - moved(-step)) - (moved(2.0 * step) - moved(-2.0 * step)))
            / (12.0 * step)
    }

    /// Points where the function is smooth, by domain.
    fn domain(f: Unary) -> (f64, f64) {
        use Unary::*;
        match f {
            Log | Sqrt | Rsqrt | Recip => (0.2, 4.0),
            Log1p => (-0.8, 4.0),
            Tan => (-1.3, 1.3),
            Asin | Acos | Atanh => (-0.9, 0.9),
            Acosh => (1.2, 4.0),
            _ => (-3.0, 3.0),
        }
    }

    /// Relative to the size of the derivative; 1e-7 is what central differences in f64 reach.
    fn assert_close(name: &str, at: &[f64], got: f64, want: f64) {
        let scale = want.abs().max(1.0);
        assert!(
            (got - want).abs() <= 1e-7 * scale,
            "{name} at {at:?}: derivative {got}, finite difference {want}"
        );
    }

    fn point(seed: u64, k: u64, (low, high): (f64, f64)) -> f64 {
        low + (high - low) * f64::from(philox::uniform(seed, k))
    }

    /// Distance from the steps and kinks of piecewise functions.
    fn near_kink(x: f64) -> bool {
        (2.0 * x - (2.0 * x).round()).abs() < 2e-3
    }

    #[test]
    fn unary_derivatives_match_finite_differences() {
        for (n, f) in Unary::ALL.into_iter().enumerate() {
            // The inner product makes the chain rule part of the test.
            let e = Expr::unary(f, Expr::In(0).mul(Expr::In(1)));
            let (d0, d1) = (e.derivative(0), e.derivative(1));
            for k in 0..50 {
                let x = point(n as u64, 2 * k, domain(f));
                let y = point(n as u64, 2 * k + 1, (0.5, 1.0));
                if near_kink(x) {
                    continue;
                }
                let at = [x / y, y];
                assert_close(
                    f.name(),
                    &at,
                    value(&d0, &at),
                    finite_difference(&e, &at, 0),
                );
                assert_close(
                    f.name(),
                    &at,
                    value(&d1, &at),
                    finite_difference(&e, &at, 1),
                );
            }
        }
    }

    #[test]
    fn binary_derivatives_match_finite_differences() {
        for (n, f) in Binary::ALL.into_iter().enumerate() {
            let e = Expr::binary(f, Expr::In(0), Expr::In(1));
            for k in 0..50 {
                let range = if f == Binary::Pow {
                    (0.3, 3.0)
                } else {
                    (-3.0, 3.0)
                };
                let x = point(100 + n as u64, 2 * k, range);
                let y = point(100 + n as u64, 2 * k + 1, (-3.0, 3.0));
                if (x - y).abs() < 0.01 || y.abs() < 0.3 || near_kink(x / y / 2.0) {
                    continue;
                }
                let at = [x, y];
                for input in 0..2 {
                    let got = value(&e.derivative(input), &at);
                    assert_close(f.name(), &at, got, finite_difference(&e, &at, input));
                }
            }
        }
    }

    #[test]
    fn constants_on_either_side_of_a_power() {
        for n in [0.0, 1.0, 2.0, 3.0, 0.5, -1.5] {
            let by_base = Expr::In(0).pow(Expr::float(n));
            let at = [1.7];
            let got = value(&by_base.derivative(0), &at);
            assert_close("pow", &at, got, finite_difference(&by_base, &at, 0));
        }
        let by_exponent = Expr::float(2.5).pow(Expr::In(0));
        let got = value(&by_exponent.derivative(0), &[0.7]);
        assert_close(
            "pow",
            &[0.7],
            got,
            finite_difference(&by_exponent, &[0.7], 0),
        );
    }

    #[test]
    fn a_branch_not_taken_contributes_an_exact_zero() {
        let relu = Expr::select(
            Expr::In(0).gt(Expr::float(0.0)),
            Expr::In(0),
            Expr::float(0.0),
        );
        let back = relu.pullback(0, &Expr::In(1)).unwrap();
        assert_eq!(value(&back, &[-1.0, f64::INFINITY]), 0.0);
        assert_eq!(value(&back, &[0.0, 3.0]), 0.0);
        assert_eq!(value(&back, &[2.0, 3.0]), 3.0);
    }

    #[test]
    fn conventions_at_kinks_are_pytorchs() {
        let d = |e: &Expr, at: &[f64]| value(&e.derivative(0), at);
        let relu = Expr::In(0).max(Expr::float(0.0));
        assert_eq!(d(&relu, &[0.0]), 0.0);
        assert_eq!(d(&relu, &[1.0]), 1.0);
        assert_eq!(d(&relu, &[f64::NAN]), 1.0);
        let relu6 = relu.clone().min(Expr::float(6.0));
        assert_eq!(d(&relu6, &[6.0]), 0.0);
        let maximum = Expr::In(0).max(Expr::In(1));
        assert_eq!(d(&maximum, &[2.0, 2.0]), 0.5);
        assert_eq!(d(&maximum, &[1.0, 2.0]), 0.0);
        let abs = Expr::unary(Unary::Abs, Expr::In(0));
        assert_eq!(d(&abs, &[0.0]), 0.0);
        assert_eq!(d(&abs, &[f64::NAN]), 0.0);
        let angle = Expr::binary(Binary::Atan2, Expr::In(0), Expr::In(1));
        assert_eq!(d(&angle, &[0.0, 0.0]), 0.0);
        assert_eq!(value(&angle.derivative(1), &[0.0, 0.0]), 0.0);
        let acosh = Expr::unary(Unary::Acosh, Expr::In(0));
        assert_eq!(d(&acosh, &[1.0]), f64::INFINITY);
        assert_eq!(d(&acosh, &[-1.0]), f64::INFINITY);
        let power = Expr::In(0).pow(Expr::float(1.5));
        assert!(d(&power, &[f64::NEG_INFINITY]).is_nan());
        let power = Expr::In(0).pow(Expr::In(1));
        assert_eq!(d(&power, &[0.0, 0.0]), 0.0);
        assert_eq!(value(&power.derivative(1), &[0.0, 2.0]), 0.0);
        assert!(value(&power.derivative(1), &[0.0, -1.0]).is_infinite());
    }

    #[test]
    fn casts_pass_floats_and_stop_integers() {
        let square = Expr::In(0).mul(Expr::In(0));
        assert_eq!(
            value(&square.clone().cast(DType::BF16).derivative(0), &[3.0]),
            6.0
        );
        assert!(
            square
                .clone()
                .cast(DType::I32)
                .pullback(0, &Expr::float(1.0))
                .is_none()
        );
        assert!(!square.cast(DType::I32).depends_on(0));
    }

    #[test]
    fn substitution_renumbers_inputs() {
        let e = Expr::In(0)
            .mul(Expr::Index(SymExpr::symbol("i")))
            .add(Expr::In(1));
        let swapped = e.substitute_inputs(&|i| Expr::In(1 - i));
        assert_eq!(
            swapped,
            Expr::In(1)
                .mul(Expr::Index(SymExpr::symbol("i")))
                .add(Expr::In(0))
        );
    }
}
