//! Which guards skip a whole iteration when they fail: those after which the statement would combine
//! nothing but the identity.

use crate::emit::body::{Guard, Statement};
use crate::emit::values::Effect;
use graph::{Binary, DType, Expr, Scalar, Unary};
use std::collections::{BTreeMap, BTreeSet};

/// Guards whose failure leaves the effect without effect; what is combined there has type `dtype`.
pub(super) fn skippable(e: &Effect, s: &Statement, dtype: DType) -> BTreeSet<Guard> {
    let mut skips: BTreeSet<_> = e.address.guards.iter().cloned().collect();
    let Some(reduction) = e.conflict else {
        return skips;
    };
    let identity = reduction.identity(dtype);
    for guard in s.reads.iter().flat_map(|read| &read.guards) {
        let filled = s.reads.iter().enumerate();
        let filled = filled.filter(|(_, read)| read.guards.contains(guard));
        let fills = filled
            .map(|(i, read)| (i, read.fill.map_or(f64::NAN, Scalar::as_f64)))
            .collect();
        if vanishes(&e.write.expr, &fills, identity) {
            skips.insert(guard.clone());
        }
    }
    skips
}

/// Whether the expression is the identity where the inputs are what `fills` gives for them.
fn vanishes(e: &Expr, fills: &BTreeMap<usize, f64>, identity: Scalar) -> bool {
    let go = |e: &Expr| vanishes(e, fills, identity);
    let (real, whole) = (identity.as_f64(), identity.as_i64());
    match e {
        Expr::In(n) => fills.get(n) == Some(&real),
        Expr::Const(number) => number.as_f64() == real && number.as_i64() == whole,
        Expr::Cast(_, a) => go(a),
        Expr::Unary(Unary::Neg, a) => real == 0.0 && go(a),
        // The padding of a convolution is absent, not a number times zero.
        Expr::Binary(Binary::Mul, a, b) => real == 0.0 && (go(a) || go(b)),
        Expr::Binary(Binary::Div, a, _) => real == 0.0 && go(a),
        Expr::Select(c, a, b) => match truth(c, fills) {
            Some(true) => go(a),
            Some(false) => go(b),
            None => go(a) && go(b),
        },
        _ => false,
    }
}

/// What a condition is where `fills` says so: a NaN equals nothing.
fn truth(condition: &Expr, fills: &BTreeMap<usize, f64>) -> Option<bool> {
    let fill = |e: &Expr| match e {
        Expr::In(i) => fills.get(i).copied(),
        _ => None,
    };
    match condition {
        Expr::Unary(Unary::IsNan, a) => fill(a).map(f64::is_nan),
        Expr::Binary(Binary::Eq, a, b) => {
            let is_nan = |e: &Expr| fill(e).is_some_and(f64::is_nan);
            (is_nan(a) || is_nan(b)).then_some(false)
        }
        _ => None,
    }
}
