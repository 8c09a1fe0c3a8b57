//! What values indices can have: exact ranges of affine indices over map parameters, and whether a
//! subset addresses each element at most once.
//!
//! Sizes may be symbolic; every symbol that is no map parameter is at least 1. Answers are proofs:
//! "not known" is a possible answer and never means "yes".

use crate::size::{Atom, SymExpr, Symbol};
use std::collections::BTreeMap;

/// Map parameters in scope with their sizes: each runs over `[0, size)`.
pub type Ranges = BTreeMap<Symbol, SymExpr>;

/// `Σ coefficient·parameter + rest`, coefficients and rest free of parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Coefficients by parameter, none zero.
    pub coefficients: BTreeMap<Symbol, SymExpr>,
    /// What does not depend on parameters.
    pub rest: SymExpr,
}

/// The index as a linear function of the parameters; `None` if it is not one.
pub fn linear_in(index: &SymExpr, ranges: &Ranges) -> Option<Linear> {
    let mut coefficients: BTreeMap<Symbol, SymExpr> = BTreeMap::new();
    let mut rest = SymExpr::default();
    for (atoms, c) in index.terms() {
        let mut factor = SymExpr::constant(*c);
        let mut param = None;
        for atom in atoms {
            match atom {
                Atom::Symbol(s) if ranges.contains_key(s) => {
                    if param.replace(s.clone()).is_some() {
                        return None;
                    }
                }
                Atom::Symbol(s) => factor = factor * SymExpr::from(s),
                atom => {
                    let whole = atom.as_expr();
                    if whole.symbols().iter().any(|s| ranges.contains_key(s)) {
                        return None;
                    }
                    factor = factor * whole;
                }
            }
        }
        match param {
            Some(p) => {
                let sum = coefficients.remove(&p).unwrap_or_default() + factor;
                coefficients.insert(p, sum);
            }
            None => rest = rest + factor,
        }
    }
    coefficients.retain(|_, c| !c.is_zero());
    Some(Linear { coefficients, rest })
}

impl Atom {
    /// The atom as an expression of its own.
    pub fn as_expr(&self) -> SymExpr {
        match self {
            Atom::Symbol(s) => SymExpr::from(s),
            Atom::FloorDiv(a, b) => a.floor_div(b),
            Atom::Mod(a, b) => a.modulo(b),
            Atom::Min(a, b) => a.min_with(b),
            Atom::Max(a, b) => a.max_with(b),
        }
    }
}

/// The smallest and the largest value of the index, both attained; `None` if they are not known (the
/// index is not linear, the sign of a coefficient is not known, or a size depends on a parameter).
pub fn index_range(index: &SymExpr, ranges: &Ranges) -> Option<(SymExpr, SymExpr)> {
    let linear = linear_in(index, ranges)?;
    let (mut low, mut high) = (linear.rest.clone(), linear.rest);
    for (param, c) in &linear.coefficients {
        let size = &ranges[param];
        if size.symbols().iter().any(|s| ranges.contains_key(s)) {
            return None;
        }
        let span = c.clone() * (size.clone() - 1);
        if is_nonnegative(c) {
            high = high + span;
        } else if is_nonnegative(&-c.clone()) {
            low = low + span;
        } else {
            return None;
        }
    }
    Some((low, high))
}

/// Whether the expression is at least 0 for all values of its symbols (each at least 1).
pub fn is_nonnegative(e: &SymExpr) -> bool {
    // With s = 1 + t every t is at least 0, so nonnegative coefficients suffice.
    let shifted = e.substitute(&|s| Some(SymExpr::from(s) + 1));
    shifted_nonnegative(&shifted)
}

fn shifted_nonnegative(e: &SymExpr) -> bool {
    let positive = |d: &SymExpr| d.as_const().is_some_and(|d| d > 0);
    e.terms().iter().all(|(atoms, c)| {
        *c >= 0
            && atoms.iter().all(|a| match a {
                Atom::Symbol(_) => true,
                Atom::Mod(_, d) => positive(d),
                Atom::FloorDiv(a, d) => positive(d) && shifted_nonnegative(a),
                Atom::Max(a, b) => shifted_nonnegative(a) || shifted_nonnegative(b),
                Atom::Min(a, b) => shifted_nonnegative(a) && shifted_nonnegative(b),
            })
    })
}

/// The parameters that the subset does not determine: none if different points certainly address
/// different elements. Parameters of size 1 count as determined.
///
/// A dimension determines the parameters it is a mixed-radix number of (`4*i + j` with `j < 4`);
/// a pair of dimensions `floordiv(e, d)`, `mod(e, d)` counts as a dimension `e`.
pub fn undetermined_params(subset: &[SymExpr], ranges: &Ranges) -> Vec<Symbol> {
    let mut open: Vec<Symbol> = ranges
        .iter()
        .filter(|(_, size)| size.as_const() != Some(1))
        .map(|(p, _)| p.clone())
        .collect();
    let mut dims = subset.to_vec();
    dims.extend(divided_indices(subset));
    let linear: Vec<Linear> = dims.iter().filter_map(|d| linear_in(d, ranges)).collect();
    loop {
        let before = open.len();
        for dim in &linear {
            determine(dim, ranges, &mut open);
        }
        if open.len() == before {
            return open;
        }
    }
}

/// Removes from `open` the parameters the value of `dim` determines, the others being known.
fn determine(dim: &Linear, ranges: &Ranges, open: &mut Vec<Symbol>) {
    let magnitude = |c: &SymExpr| {
        let negative = is_nonnegative(&-c.clone());
        if negative { -c.clone() } else { c.clone() }
    };
    let mut left: Vec<(Symbol, SymExpr)> = dim
        .coefficients
        .iter()
        .filter(|(p, _)| open.contains(p))
        .map(|(p, c)| (p.clone(), magnitude(c)))
        .collect();
    let mut found = Vec::new();
    while !left.is_empty() {
        // The leading digit: its weight exceeds everything the others can add up to.
        let leads = |at: usize| {
            let others = left.iter().enumerate().filter(|(i, _)| *i != at);
            let span = others.fold(SymExpr::default(), |sum, (_, (p, c))| {
                sum + c.clone() * (ranges[p].clone() - 1)
            });
            is_nonnegative(&(left[at].1.clone() - span - 1))
        };
        let Some(at) = (0..left.len()).find(|at| leads(*at)) else {
            return;
        };
        found.push(left.remove(at).0);
    }
    open.retain(|p| !found.contains(p));
}

/// `e` for every pair of indices `floordiv(e, d)` and `mod(e, d)`.
fn divided_indices(subset: &[SymExpr]) -> Vec<SymExpr> {
    let mut whole = Vec::new();
    for index in subset {
        let [(atoms, 1)] = index.terms() else {
            continue;
        };
        let [Atom::Mod(e, d)] = atoms.as_slice() else {
            continue;
        };
        if subset.contains(&e.floor_div(d)) {
            whole.push(e.as_ref().clone());
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(name: &str) -> SymExpr {
        SymExpr::symbol(name)
    }

    fn ranges(list: &[(&str, SymExpr)]) -> Ranges {
        list.iter()
            .map(|(n, e)| (Symbol::new(n), e.clone()))
            .collect()
    }

    #[test]
    fn ranges_of_linear_indices_are_exact() {
        let r = ranges(&[("oh", s("h")), ("r", 3.into())]);
        let (low, high) = index_range(&(s("oh") * 2 + s("r") - 1), &r).unwrap();
        assert_eq!((low, high), ((-1).into(), s("h") * 2 - 1));
        let (low, high) = index_range(&(s("h") - 1 - s("oh")), &r).unwrap();
        assert_eq!((low, high), (0.into(), s("h") - 1));
        assert_eq!(index_range(&(s("oh") * s("r")), &r), None);
        assert_eq!(index_range(&s("oh").modulo(&2.into()), &r), None);
    }

    #[test]
    fn signs_hold_for_all_sizes() {
        assert!(is_nonnegative(&(s("n") * s("n") - s("n"))));
        assert!(is_nonnegative(&(s("n") * s("m") - 1)));
        assert!(!is_nonnegative(&(s("n") - s("m"))));
        assert!(!is_nonnegative(&(s("n") - 2)));
        assert!(is_nonnegative(&(s("n") - 1).floor_div(&2.into())));
    }

    #[test]
    fn mixed_radix_numbers_determine_their_digits() {
        let open = |subset: &[SymExpr], r: &[(&str, SymExpr)]| {
            let names = undetermined_params(subset, &ranges(r));
            names.iter().map(Symbol::to_string).collect::<Vec<_>>()
        };
        let (i, j) = (s("i"), s("j"));
        let two = [("i", 5.into()), ("j", 4.into())];
        assert!(open(&[i.clone() * 4 + j.clone()], &two).is_empty());
        assert!(open(&[-(i.clone() * 4) - j.clone()], &two).is_empty());
        assert_eq!(open(&[i.clone() * 3 + j.clone()], &two), ["i", "j"]);
        assert!(open(&[i.clone() * 3 + j.clone(), j.clone()], &two).is_empty());
        assert_eq!(open(std::slice::from_ref(&i), &two), ["j"]);
        let symbolic = [("i", s("m")), ("j", s("n"))];
        assert!(open(&[i.clone() * s("n") + j.clone()], &symbolic).is_empty());
        assert_eq!(
            open(&[i.clone() * s("m") + j.clone()], &symbolic),
            ["i", "j"]
        );
        let flat = [("i", s("n"))];
        let halves = [i.floor_div(&8.into()), i.modulo(&8.into())];
        assert!(open(&halves, &flat).is_empty());
        assert_eq!(open(&halves[..1], &flat), ["i"]);
        assert!(open(&[], &[("i", 1.into())]).is_empty());
    }
}
