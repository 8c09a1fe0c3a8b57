//! Arithmetic on integers that follow from sizes, as far as it holds for every size.
//!
//! Sizes are at least 0: a batch may be empty, and so is what a decoder remembers at first. What is
//! not decided for all of them is `None`.

use super::{Inference, axis};
use crate::element::Element;
use graph::{Atom, SymExpr};

type Decided = Option<SymExpr>;

pub fn add(x: &[&SymExpr]) -> Decided {
    fold(x, |a, b| Some(a + b.clone()))
}

pub fn sub(x: &[&SymExpr]) -> Decided {
    fold(x, |a, b| Some(a - b.clone()))
}

pub fn mul(x: &[&SymExpr]) -> Decided {
    fold(x, |a, b| Some(a * b.clone()))
}

pub fn min(x: &[&SymExpr]) -> Decided {
    fold(x, |a, b| Some(smaller(&a, b)))
}

pub fn max(x: &[&SymExpr]) -> Decided {
    fold(x, |a, b| Some(larger(&a, b)))
}

fn fold(x: &[&SymExpr], f: impl Fn(SymExpr, &SymExpr) -> Decided) -> Decided {
    let (first, rest) = x.split_first()?;
    rest.iter().try_fold((*first).clone(), |a, b| f(a, b))
}

/// Rounds towards zero. For values that are not negative, this is downwards.
pub fn div(x: &[&SymExpr]) -> Decided {
    let [a, b] = x else { return None };
    match (a.as_const(), b.as_const()) {
        (_, Some(0)) => None,
        (Some(a), Some(b)) => Some(SymExpr::constant(a.wrapping_div(b))),
        _ if is_at_least(a, 0) && is_at_least(b, 1) => Some(a.floor_div(b)),
        _ => None,
    }
}

/// The remainder where both definitions of it agree.
pub fn modulo(x: &[&SymExpr]) -> Decided {
    let [a, b] = x else { return None };
    (is_at_least(a, 0) && is_at_least(b, 1)).then(|| a.modulo(b))
}

pub fn neg(x: &[&SymExpr]) -> Decided {
    Some(-(*x.first()?).clone())
}

pub fn abs(x: &[&SymExpr]) -> Decided {
    let x = *x.first()?;
    match x.as_const() {
        Some(x) => Some(SymExpr::constant(x.wrapping_abs())),
        None => Some(larger(x, &-x.clone())),
    }
}

pub fn not(x: &[&SymExpr]) -> Decided {
    x.first()?.as_const().map(|x| truth(x == 0))
}

pub fn and(x: &[&SymExpr]) -> Decided {
    let [a, b] = x else { return None };
    match (a.as_const(), b.as_const()) {
        (Some(0), _) | (_, Some(0)) => Some(truth(false)),
        (Some(_), _) => Some((*b).clone()),
        (_, Some(_)) => Some((*a).clone()),
        _ => None,
    }
}

pub fn or(x: &[&SymExpr]) -> Decided {
    let [a, b] = x else { return None };
    match (a.as_const(), b.as_const()) {
        (Some(0), _) => Some((*b).clone()),
        (_, Some(0)) => Some((*a).clone()),
        (Some(_), _) | (_, Some(_)) => Some(truth(true)),
        _ => None,
    }
}

pub fn equal(x: &[&SymExpr]) -> Decided {
    compare(x, |sign| sign == 0)
}

pub fn less(x: &[&SymExpr]) -> Decided {
    compare(x, |sign| sign < 0)
}

pub fn less_or_equal(x: &[&SymExpr]) -> Decided {
    compare(x, |sign| sign <= 0)
}

pub fn greater(x: &[&SymExpr]) -> Decided {
    compare(x, |sign| sign > 0)
}

pub fn greater_or_equal(x: &[&SymExpr]) -> Decided {
    compare(x, |sign| sign >= 0)
}

/// The comparison, if it comes out the same for the least and the greatest difference.
fn compare(x: &[&SymExpr], holds: fn(i64) -> bool) -> Decided {
    let [a, b] = x else { return None };
    let (low, high) = match (a.as_const(), b.as_const()) {
        (Some(a), Some(b)) => (a.cmp(&b) as i64, a.cmp(&b) as i64),
        _ => {
            let low = |a, b| least(&difference(a, b)?).map(i64::signum);
            (low(a, b).unwrap_or(-1), low(b, a).map_or(1, |sign| -sign))
        }
    };
    // The sign of the difference is between `low` and `high`.
    let first = holds(low);
    (low..=high)
        .all(|s| holds(s) == first)
        .then(|| truth(first))
}

/// Numbers from here on may wrap around in a difference.
const LARGE: u64 = 1 << 40;

/// `a - b`, if no number in it comes near the ends of its type.
fn difference(a: &SymExpr, b: &SymExpr) -> Option<SymExpr> {
    let mut terms = a.terms().iter().chain(b.terms());
    let small = terms.all(|(_, factor)| factor.unsigned_abs() < LARGE);
    small.then(|| a.clone() - b.clone())
}

/// Whether `a` is never below `b`.
fn reaches(a: &SymExpr, b: &SymExpr) -> bool {
    match (a.as_const(), b.as_const()) {
        (Some(a), Some(b)) => a >= b,
        _ => difference(a, b).is_some_and(|d| is_at_least(&d, 0)),
    }
}

/// The side that a constant condition takes; without one, both sides if they are the same.
pub fn choose(x: &[&SymExpr]) -> Decided {
    let [condition, a, b] = x else { return None };
    match condition.as_const() {
        Some(0) => Some((*b).clone()),
        Some(_) => Some((*a).clone()),
        None => (a == b).then(|| (*a).clone()),
    }
}

/// Elements cast between integers that hold any size, and to truth values.
pub fn cast(cx: &Inference) -> Option<Vec<SymExpr>> {
    let elements = cx.ints(0)?;
    match Element::of_number(cx.attributes.int("to")? as i32)? {
        Element::I64 | Element::I32 => Some(elements),
        Element::Bool => elements
            .iter()
            .map(|e| Some(truth(equal(&[e, &SymExpr::constant(0)])?.is_zero())))
            .collect(),
        _ => None,
    }
}

/// Elements of a reduction by `f` of integers over known axes.
pub fn reduced(cx: &Inference, f: fn(&[&SymExpr]) -> Decided) -> Option<Vec<SymExpr>> {
    let shape = cx.fact(0)?.sizes()?;
    let elements = cx.ints(0).filter(|e| !e.is_empty())?;
    let axes = cx.ints_of("axes", 1).or(match cx.fact(1) {
        None => Some(Vec::new()),
        Some(_) => None,
    })?;
    if axes.is_empty() && cx.attributes.flag("noop_with_empty_axes") {
        return Some(elements);
    }
    let mut is_reduced = vec![axes.is_empty(); shape.len()];
    for d in axes {
        is_reduced[axis(d, shape.len())?] = true;
    }
    let mut results: Vec<Option<SymExpr>> = Vec::new();
    for (n, element) in elements.iter().enumerate() {
        let (mut rest, mut place, mut step) = (n, 0, 1);
        for d in (0..shape.len()).rev() {
            if !is_reduced[d] {
                place += rest % shape[d] * step;
                step *= shape[d];
            }
            rest /= shape[d];
        }
        results.resize(results.len().max(step), None);
        results[place] = Some(match results[place].take() {
            None => element.clone(),
            Some(so_far) => f(&[&so_far, element])?,
        });
    }
    results.into_iter().collect()
}

fn truth(value: bool) -> SymExpr {
    SymExpr::constant(i64::from(value))
}

/// The smaller of two, decided where one never is the larger.
pub fn smaller(a: &SymExpr, b: &SymExpr) -> SymExpr {
    if reaches(b, a) {
        a.clone()
    } else if reaches(a, b) {
        b.clone()
    } else {
        a.min_with(b)
    }
}

/// The larger of two, decided where one never is the smaller.
pub fn larger(a: &SymExpr, b: &SymExpr) -> SymExpr {
    if reaches(a, b) {
        a.clone()
    } else if reaches(b, a) {
        b.clone()
    } else {
        a.max_with(b)
    }
}

/// Whether the value is at least `n` for all sizes.
pub fn is_at_least(e: &SymExpr, n: i64) -> bool {
    least(e).is_some_and(|low| low >= n)
}

/// A lower bound of the value, from the least value of every factor.
fn least(e: &SymExpr) -> Option<i64> {
    let mut sum: i64 = 0;
    for (atoms, factor) in e.terms() {
        let mut low = *factor;
        if !atoms.is_empty() && low < 0 {
            return None;
        }
        for atom in atoms {
            low = low.checked_mul(least_of_atom(atom).filter(|n| *n >= 0)?)?;
        }
        sum = sum.checked_add(low)?;
    }
    Some(sum)
}

fn least_of_atom(atom: &Atom) -> Option<i64> {
    match atom {
        Atom::Symbol(_) => Some(0),
        Atom::FloorDiv(a, b) => match b.as_const().filter(|b| *b > 0) {
            Some(b) => Some(least(a)?.div_euclid(b)),
            None => (is_at_least(a, 0) && is_at_least(b, 1)).then_some(0),
        },
        Atom::Mod(_, b) => is_at_least(b, 1).then_some(0),
        Atom::Min(a, b) => Some(least(a)?.min(least(b)?)),
        Atom::Max(a, b) => match (least(a), least(b)) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n() -> SymExpr {
        SymExpr::symbol("n")
    }

    fn of(value: i64) -> SymExpr {
        SymExpr::constant(value)
    }

    #[test]
    fn comparisons_are_decided_only_where_every_size_agrees() {
        let more = n() + of(1);
        assert_eq!(greater(&[&more, &of(0)]), Some(of(1)));
        assert_eq!(less_or_equal(&[&more, &of(0)]), Some(of(0)));
        assert_eq!(greater_or_equal(&[&n(), &of(0)]), Some(of(1)));
        // A size may be 0.
        assert_eq!(greater(&[&n(), &of(0)]), None);
        assert_eq!(equal(&[&n(), &of(0)]), None);
        assert_eq!(equal(&[&n(), &of(1)]), None);
        assert_eq!(equal(&[&n(), &of(-1)]), Some(of(0)));
        assert_eq!(less_or_equal(&[&of(0), &n()]), Some(of(1)));
        assert_eq!(equal(&[&n(), &n()]), Some(of(1)));
        // A count of elements found at run time may be none.
        let unknown = SymExpr::symbol("?1");
        assert_eq!(greater(&[&unknown, &of(0)]), None);
        assert_eq!(greater(&[&unknown, &of(-1)]), Some(of(1)));
    }

    #[test]
    fn division_rounds_towards_zero_or_is_refused() {
        assert_eq!(div(&[&of(-7), &of(2)]), Some(of(-3)));
        assert_eq!(div(&[&n(), &of(0)]), None);
        assert_eq!(div(&[&(-n()), &of(2)]), None);
        assert_eq!(div(&[&n(), &of(2)]), Some(n().floor_div(&of(2))));
        assert_eq!(div(&[&(n() - of(1)), &of(2)]), None);
    }

    #[test]
    fn the_smaller_of_two_is_decided_where_it_is_always_the_same() {
        assert_eq!(smaller(&n(), &of(0)), of(0));
        assert_eq!(larger(&n(), &of(0)), n());
        assert_eq!(larger(&n(), &of(1)), n().max_with(&of(1)));
    }
}
