//! Whether two sizes are the same number, where one divides in two steps what the other divides in one.
//!
//! PyTorch writes `⌊⌊x / 2⌋ / 2⌋` as `⌊x / 4⌋`; shape rules, which see one operator at a time, divide twice.
//! Owns this comparison alone: sizes in the graph stay as the rules gave them.

use graph::{Atom, SymExpr};

/// Whether shapes are the same for all values of their symbols, as far as division in steps goes.
pub(super) fn are_equal(one: &[SymExpr], other: &[SymExpr]) -> bool {
    let same = |(a, b): (&SymExpr, &SymExpr)| a == b || merged(a) == merged(b);
    one.len() == other.len() && one.iter().zip(other).all(same)
}

/// The same size with `⌊(⌊x / c⌋ + k) / d⌋` written as `⌊(x + k·c) / (c·d)⌋`, for positive `c` and `d`.
fn merged(size: &SymExpr) -> SymExpr {
    let term = |(atoms, factor): &(Vec<Atom>, i64)| {
        let product = atoms.iter().map(merged_atom);
        product.fold(SymExpr::constant(*factor), |all, atom| all * atom)
    };
    let terms = size.terms().iter().map(term);
    terms.fold(SymExpr::constant(0), |all, term| all + term)
}

fn merged_atom(atom: &Atom) -> SymExpr {
    match atom {
        Atom::Symbol(symbol) => SymExpr::from(symbol),
        Atom::FloorDiv(a, b) => divided(&merged(a), &merged(b)),
        Atom::Mod(a, b) => merged(a).modulo(&merged(b)),
        Atom::Min(a, b) => merged(a).min_with(&merged(b)),
        Atom::Max(a, b) => merged(a).max_with(&merged(b)),
    }
}

fn divided(size: &SymExpr, by: &SymExpr) -> SymExpr {
    let merged_once = || {
        let d = by.as_const().filter(|d| *d > 0)?;
        let (x, c) = quotient(size)?;
        Some(divided(&x, &SymExpr::constant(c.checked_mul(d)?)))
    };
    merged_once().unwrap_or_else(|| size.floor_div(by))
}

/// A size that is `⌊x / c⌋ + k`, as `x + k·c` and `c`.
fn quotient(size: &SymExpr) -> Option<(SymExpr, i64)> {
    let is_number = |(atoms, _): &&(Vec<Atom>, i64)| atoms.is_empty();
    let mut rest = size.terms().iter().filter(|term| !is_number(term));
    let (atoms, factor) = rest.next()?;
    let ([Atom::FloorDiv(x, c)], 1) = (atoms.as_slice(), *factor) else {
        return None;
    };
    let c = c.as_const().filter(|c| *c > 0)?;
    let k = size.terms().iter().find(is_number).map_or(0, |(_, k)| *k);
    let none_left = rest.next().is_none();
    none_left.then(|| ((**x).clone() + k * c, c))
}

#[cfg(test)]
mod tests {
    use super::{are_equal, merged};
    use graph::SymExpr;

    #[test]
    fn two_divisions_are_one() {
        let s = SymExpr::symbol("s");
        let by = SymExpr::constant;
        let conv = (s.clone() - 3).floor_div(&by(2)) + 1;
        let ours = (conv - 2).floor_div(&by(2)) + 1;
        let theirs = (s.clone() - 5).floor_div(&by(4)) + 1;
        assert_ne!(ours, theirs);
        assert!(are_equal(std::slice::from_ref(&ours), &[theirs]));
        let other = (s.clone() - 4).floor_div(&by(4)) + 1;
        assert!(!are_equal(std::slice::from_ref(&ours), &[other]));
        for n in 5..40 {
            let value = |e: &SymExpr| e.eval_with(&|_| Some(n)).expect("is bound");
            assert_eq!(value(&ours), value(&merged(&ours)));
        }
    }

    #[test]
    fn a_division_of_something_else_stays() {
        let s = SymExpr::symbol("s");
        let half = s.floor_div(&SymExpr::constant(2));
        let sum = (half + s.clone()).floor_div(&SymExpr::constant(3));
        assert_eq!(merged(&sum), sum);
    }
}
