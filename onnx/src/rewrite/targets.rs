//! Constants that say sizes in terms of a node's own input: targets of Reshape and Expand, bounds of
//! Slice. Owns when such a constant means the same for every size.

use super::scope::Scope;
use crate::infer::is_unknown;
use crate::operators::symbolic::is_at_least;
use graph::SymExpr;

/// The target that makes sizes `from` into `to`, which have the same product: a number, 0 for the size
/// at the same place, -1 once. Beside a -1 no size may be 0, so none that nothing is known of.
pub fn reshape_target(from: Option<&[SymExpr]>, to: &[SymExpr]) -> Option<Vec<i64>> {
    let mut target = Vec::with_capacity(to.len());
    let mut open = Vec::new();
    for (d, size) in to.iter().enumerate() {
        target.push(match size.as_const() {
            // 0 would copy.
            Some(0) => return None,
            Some(n) => n,
            None if from.and_then(|f| f.get(d)) == Some(size) => 0,
            None => {
                open.push(d);
                -1
            }
        });
    }
    let unknown = |d: usize| {
        to[d]
            .symbols()
            .into_iter()
            .any(|s| is_unknown(&SymExpr::from(&s)))
    };
    match open.as_slice() {
        [] => Some(target),
        [_] if (0..to.len()).any(|d| target[d] == 0 && unknown(d)) => None,
        [_] => Some(target),
        _ => None,
    }
}

/// [`reshape_target`] from one value to another, for a Reshape of the model's operator set.
pub fn target_between(scope: &Scope, from: &str, to: &str) -> Option<Vec<i64>> {
    let from = scope.fact(from)?.shape.as_deref();
    let to = scope.fact(to)?.shape.as_deref()?;
    reshape_target(from, to)
}

/// The target that expands sizes `from` to `to`: a number, 1 for a size that stays.
pub fn expand_target(from: &[SymExpr], to: &[SymExpr]) -> Option<Vec<i64>> {
    let skip = to.len().checked_sub(from.len())?;
    let size = |(d, size): (usize, &SymExpr)| {
        let stays = d >= skip && from[d - skip] == *size;
        if stays { Some(1) } else { size.as_const() }
    };
    to.iter().enumerate().map(size).collect()
}

/// Where a slice forwards begins or ends, as a constant: the number, what is left of `size` counted
/// from the end, or `i64::MAX` at and beyond the end (`None` for a beginning there).
pub fn bound(at: &SymExpr, size: &SymExpr, is_end: bool) -> Option<i64> {
    if let Some(n) = at.as_const() {
        return Some(n);
    }
    let before_end = size.clone() - at.clone();
    if is_end && is_at_least(&-before_end.clone(), 0) {
        return Some(i64::MAX);
    }
    // Below 0 the size would be added once more.
    let inside = is_at_least(at, 0);
    before_end
        .as_const()
        .filter(|n| inside && *n > 0)
        .map(|n| -n)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(text: &str) -> Vec<SymExpr> {
        let size = |t: &str| match t.parse::<i64>() {
            Ok(n) => SymExpr::constant(n),
            Err(_) => SymExpr::symbol(t),
        };
        text.split_whitespace().map(size).collect()
    }

    fn target(from: &str, to: &str) -> Option<Vec<i64>> {
        reshape_target(Some(&sizes(from)), &sizes(to))
    }

    #[test]
    fn one_size_is_left_open_and_sizes_in_place_are_copied() {
        assert_eq!(target("n t 12", "n t 3 4"), Some(vec![0, 0, 3, 4]));
        assert_eq!(target("n t 12", "t n 12"), None);
        assert_eq!(target("n t 12", "n 12 t"), Some(vec![0, 12, -1]));
    }

    #[test]
    fn a_size_that_may_be_none_is_not_copied_beside_an_open_one() {
        assert_eq!(target("?1 t 12", "?1 12 t"), None);
        assert_eq!(target("?1 t 12", "?1 t 3 4"), Some(vec![0, 0, 3, 4]));
    }

    #[test]
    fn a_size_of_0_is_not_said() {
        assert_eq!(target("n 0", "n 0 4"), None);
    }

    #[test]
    fn bounds_count_from_the_end_only_inside() {
        let n = SymExpr::symbol("n");
        let one = SymExpr::constant(1);
        assert_eq!(bound(&n, &n, true), Some(i64::MAX));
        assert_eq!(bound(&(n.clone() - one.clone()), &n, true), Some(-1));
        assert_eq!(bound(&(n.clone() - SymExpr::constant(2)), &n, true), None);
        assert_eq!(bound(&n, &n, false), None);
        assert_eq!(bound(&SymExpr::symbol("m"), &n, true), None);
    }
}
