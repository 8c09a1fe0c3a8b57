//! How decomposed operators are found: factors of a product in any order, and whether what is taken
//! together is read from nowhere else.

use super::scope::Scope;
use crate::attributes::Attributes;
use crate::operators::axis;
use std::collections::BTreeSet;

/// Nodes that one operator is to replace.
pub type Taken = BTreeSet<usize>;

/// Whether nothing but these nodes reads what they compute, except for what `last` gives.
pub fn is_closed(scope: &Scope, taken: &Taken, last: usize) -> bool {
    let inside = |name: &String| {
        let readers = scope.readers(name);
        let direct = |r: &usize| taken.contains(r) && scope.node(*r).input.contains(name);
        !scope.is_output(name) && readers.iter().all(direct)
    };
    let others = taken.iter().filter(|n| **n != last);
    others
        .into_iter()
        .all(|n| scope.node(*n).output.iter().all(inside))
}

/// Whether a constant is the one that a pattern means. Files round constants to `f32`, and exporters to a few more
/// digits than the patterns have.
pub fn is_close(found: f64, meant: f64) -> bool {
    (found - meant).abs() <= 2e-6 * meant.abs()
}

/// The node of operator `op` that computes a value; adds it to `taken`.
pub fn take(scope: &Scope, name: &str, op: &str, taken: &mut Taken) -> Option<usize> {
    let n = scope.made_by(name, op)?;
    taken.insert(n);
    Some(n)
}

/// The two operands of node `n` if one is a constant number, which comes second.
pub fn with_number<'a>(scope: &Scope<'a>, n: usize) -> Option<(&'a str, f64)> {
    let (a, b) = (scope.input(n, 0)?, scope.input(n, 1)?);
    match (scope.scalar(a), scope.scalar(b)) {
        (None, Some(number)) => Some((a, number)),
        (Some(number), None) => Some((b, number)),
        _ => None,
    }
}

/// A product: a number times values.
#[derive(Debug, Default)]
pub struct ScaledProduct<'a> {
    /// The product of all constants that are numbers.
    pub number: f64,
    /// The other factors.
    pub factors: Vec<&'a str>,
    /// The nodes that multiply.
    pub taken: Taken,
}

/// The factors of what node `n` multiplies (Mul, and Div by a number), through products that only this
/// one reads.
pub fn product<'a>(scope: &Scope<'a>, n: usize) -> Option<ScaledProduct<'a>> {
    let mut product = ScaledProduct {
        number: 1.0,
        ..ScaledProduct::default()
    };
    let output = scope.node(n).output.first()?;
    if !multiply(scope, n, &mut product) {
        return None;
    }
    debug_assert!(scope.producer(output) == Some(n));
    Some(product)
}

fn multiply<'a>(scope: &Scope<'a>, n: usize, product: &mut ScaledProduct<'a>) -> bool {
    let (Some(a), Some(b)) = (scope.input(n, 0), scope.input(n, 1)) else {
        return false;
    };
    if scope.is(n, "Div") {
        let Some(number) = scope.scalar(b).filter(|b| *b != 0.0) else {
            return false;
        };
        product.number /= number;
        product.taken.insert(n);
        factor(scope, n, a, product);
        return true;
    }
    if !scope.is(n, "Mul") {
        return false;
    }
    product.taken.insert(n);
    factor(scope, n, a, product);
    factor(scope, n, b, product);
    true
}

/// Nodes of one product; the rest of a longer one is a factor of its own.
const MAX_FACTORS: usize = 16;

fn factor<'a>(scope: &Scope<'a>, n: usize, name: &'a str, product: &mut ScaledProduct<'a>) {
    if let Some(number) = scope.scalar(name) {
        product.number *= number;
        return;
    }
    let inner = scope
        .producer(name)
        .filter(|_| scope.sole_reader(name) == Some(n));
    let is_long = product.taken.len() >= MAX_FACTORS;
    if is_long || !inner.is_some_and(|m| multiply(scope, m, product)) {
        product.factors.push(name);
    }
}

/// The axes of a reduction that keeps them as sizes of 1, in order.
pub fn reduced_axes(scope: &Scope, n: usize) -> Option<Vec<usize>> {
    let a = Attributes::new(scope.node(n));
    let rank = scope.fact(scope.input(n, 0)?)?.rank()?;
    let given = match (a.ints("axes"), scope.input(n, 1)) {
        (Some(axes), _) => axes.to_vec(),
        (None, Some(name)) => scope.fact(name)?.known_ints()?,
        (None, None) => return None,
    };
    let mut axes: Vec<usize> = given
        .iter()
        .map(|d| axis(*d, rank))
        .collect::<Option<_>>()?;
    axes.sort_unstable();
    (a.int("keepdims").unwrap_or(1) != 0).then_some(axes)
}
