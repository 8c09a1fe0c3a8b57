//! Constants that say sizes in terms of a node's own input: targets of Reshape and Expand, bounds of
//! Slice. Owns when such a constant means the same for every size.

use super::scope::Scope;
use crate::attributes::Attributes;
use crate::operators::symbolic::is_at_least;
use graph::SymExpr;

/// The target with which a Reshape makes sizes `to` of sizes `from`, which have the same product: for each size a
/// number, 0 for the size at the same place of `from`, or -1, at most once. Beside a -1 no size may be 0 in a run. A
/// copied size may be 0, unless the original has its -1 at that place (`open`): then the original fails as well. Sizes
/// whose products are known to differ have no target: such a node fails in every run, so the file is not well formed.
pub fn reshape_target(
    from: Option<&[SymExpr]>,
    to: &[SymExpr],
    open: Option<usize>,
) -> Option<Vec<i64>> {
    let n_elements = |sizes: &[SymExpr]| {
        sizes
            .iter()
            .try_fold(1i64, |p, n| p.checked_mul(n.as_const()?))
    };
    if let (Some(n_from), Some(n_to)) = (from.and_then(n_elements), n_elements(to))
        && n_from != n_to
    {
        return None;
    }
    let mut target = Vec::with_capacity(to.len());
    for (d, size) in to.iter().enumerate() {
        target.push(match size.as_const() {
            // In a target, 0 copies a size.
            Some(0) => return None,
            Some(n) => n,
            None if from.and_then(|f| f.get(d)) == Some(size) => 0,
            None => -1,
        });
    }
    let mut unsaid = (0..to.len()).filter(|d| target[*d] == -1);
    match (unsaid.next(), unsaid.next()) {
        (None, _) => Some(target),
        (Some(d), None) if open == Some(d) || !target.contains(&0) => Some(target),
        _ => None,
    }
}

/// [`reshape_target`] from one value to what node `n` gives, for a Reshape of the model's operator set.
pub fn target_between(scope: &Scope, from: &str, n: usize) -> Option<Vec<i64>> {
    let from = scope.fact(from)?.shape.as_deref();
    let to = scope
        .fact(scope.node(n).output.first()?)?
        .shape
        .as_deref()?;
    reshape_target(from, to, left_open(scope, n))
}

/// The position of the -1 in the target of a Reshape.
fn left_open(scope: &Scope, n: usize) -> Option<usize> {
    if !scope.is(n, "Reshape") {
        return None;
    }
    let target = match Attributes::new(scope.node(n)).ints("shape") {
        Some(target) => target.iter().copied().map(SymExpr::constant).collect(),
        None => scope.fact(scope.input(n, 1)?)?.ints()?,
    };
    target.iter().position(|e| e.as_const() == Some(-1))
}

/// The target that expands sizes `from` to `to`: for each size a number, or 1 for a size that stays.
pub fn expand_target(from: &[SymExpr], to: &[SymExpr]) -> Option<Vec<i64>> {
    let skip = to.len().checked_sub(from.len())?;
    let size = |(d, size): (usize, &SymExpr)| {
        let stays = d >= skip && from[d - skip] == *size;
        if stays { Some(1) } else { size.as_const() }
    };
    to.iter().enumerate().map(size).collect()
}

/// Where a forward slice begins or ends, as a constant: the number itself, its distance to the end as a negative
/// number, or `i64::MAX` for an end at or after that of the dimension (`None` for such a beginning).
pub fn bound(at: &SymExpr, size: &SymExpr, is_end: bool) -> Option<i64> {
    if let Some(n) = at.as_const() {
        return Some(n);
    }
    let before_end = size.clone() - at.clone();
    if is_end && is_at_least(&-before_end.clone(), 0) {
        return Some(i64::MAX);
    }
    // A position below 0 gets the size added once more and may end up inside: `n - 3` does for n = 2. `n - 1` and
    // `n - 2` never do.
    let inside = is_at_least(at, 0);
    before_end
        .as_const()
        .filter(|n| *n > 0 && (inside || *n <= 2))
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
        reshape_target(Some(&sizes(from)), &sizes(to), None)
    }

    #[test]
    fn one_size_is_left_open_and_sizes_in_place_are_copied() {
        assert_eq!(target("n t 12", "n t 3 4"), Some(vec![0, 0, 3, 4]));
        assert_eq!(target("n t 12", "t n 12"), None);
        assert_eq!(target("n 3 4", "3 n 4"), Some(vec![3, -1, 4]));
    }

    #[test]
    fn a_size_is_copied_beside_an_open_one_only_where_the_original_leaves_it_open() {
        let open = |d| reshape_target(Some(&sizes("n t 12")), &sizes("n 12 t"), d);
        assert_eq!(open(None), None);
        assert_eq!(open(Some(0)), None);
        assert_eq!(open(Some(2)), Some(vec![0, 12, -1]));
    }

    #[test]
    fn sizes_that_never_fit_are_not_said() {
        assert_eq!(target("2 3 4", ""), None);
        assert_eq!(target("2 3 4", "2 11"), None);
        assert_eq!(target("2 3 4", "2 12"), Some(vec![2, 12]));
        assert_eq!(target("1", ""), Some(vec![]));
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
        assert_eq!(bound(&(n.clone() - SymExpr::constant(3)), &n, true), None);
        assert_eq!(bound(&n, &n, false), None);
        assert_eq!(bound(&SymExpr::symbol("m"), &n, true), None);
    }
}
