//! Which guards skip a whole iteration when they fail: those whose failure leaves the statement only
//! the identity to combine.

use crate::emit::body::{Guard, Statement};
use crate::emit::values::Effect;
use graph::{Binary, DType, Expr, Scalar, Unary};
use std::collections::{BTreeMap, BTreeSet};

/// Guards whose failure makes the effect do nothing. The combined values have type `dtype`.
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

/// Whether the expression is the identity if the inputs have the values of `fills`.
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

/// The value of a condition, if `fills` decides it: a NaN equals nothing.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emit::body::{Body, kernel_of};
    use crate::emit::values::Values;
    use graph::Reduction;

    fn x() -> Expr {
        Expr::In(0)
    }

    fn y() -> Expr {
        Expr::In(1)
    }

    #[test]
    fn a_condition_is_decided_where_a_fill_says_so() {
        let nan_is_nan = truth(&x().is_nan(), &[(0, f64::NAN)].into());
        assert_eq!(nan_is_nan, Some(true));
        let zero_is_nan = truth(&x().is_nan(), &[(0, 0.0)].into());
        assert_eq!(zero_is_nan, Some(false));
        // Nothing equals NaN, on either side and whatever the other side is.
        for (nan, other) in [(0, 1), (1, 0)] {
            let alone = [(nan, f64::NAN)].into();
            let beside_a_number = [(nan, f64::NAN), (other, 2.0)].into();
            assert_eq!(truth(&x().eq_(y()), &alone), Some(false));
            assert_eq!(truth(&x().eq_(y()), &beside_a_number), Some(false));
        }
    }

    #[test]
    fn a_condition_is_undecided_where_no_fill_says_so() {
        let zeros = [(0, 0.0), (1, 0.0)].into();
        let nans = [(0, f64::NAN), (1, f64::NAN)].into();
        // Inputs without a fill may be anything.
        assert_eq!(truth(&x().is_nan(), &BTreeMap::new()), None);
        assert_eq!(truth(&y().is_nan(), &[(0, f64::NAN)].into()), None);
        // Numbers are not compared, and only inputs are looked up.
        assert_eq!(truth(&x().eq_(y()), &zeros), None);
        assert_eq!(truth(&x().add(y()).is_nan(), &nans), None);
        // NaN differs from everything, so only equality is decided by it.
        let ne = Expr::binary(Binary::Ne, x(), y());
        for condition in [x().gt(y()), ne, x().eq_(y()).not()] {
            assert_eq!(truth(&condition, &nans), None, "{condition:?}");
        }
    }

    /// Whether `e` is the identity of a reduction of f32 where its inputs are `fills`.
    fn is_identity<const N: usize>(
        e: Expr,
        reduction: Reduction,
        fills: [(usize, f64); N],
    ) -> bool {
        vanishes(&e, &fills.into(), reduction.identity(DType::F32))
    }

    #[test]
    fn what_is_read_vanishes_where_its_fill_is_the_identity() {
        for (reduction, identity) in [
            (Reduction::Sum, 0.0),
            (Reduction::Prod, 1.0),
            (Reduction::Max, f64::NEG_INFINITY),
            (Reduction::Min, f64::INFINITY),
        ] {
            assert!(is_identity(x(), reduction, [(0, identity)]));
            assert!(is_identity(Expr::float(identity), reduction, []));
            assert!(is_identity(
                x().cast(DType::F32),
                reduction,
                [(0, identity)]
            ));
            // Another number, and an input that no fill replaces.
            assert!(!is_identity(x(), reduction, [(0, 2.0)]));
            assert!(!is_identity(Expr::float(2.0), reduction, []));
            assert!(!is_identity(y(), reduction, [(0, identity)]));
            assert!(!is_identity(x(), reduction, [(0, f64::NAN)]));
        }
        // Rounded to an integer it would be the identity.
        assert!(!is_identity(Expr::float(0.5), Reduction::Sum, []));
        // Both are the same number in f64, but one is not the identity.
        let least = Reduction::Max.identity(DType::I64);
        let vanishes = |number| vanishes(&Expr::int(number), &BTreeMap::new(), least);
        assert!(vanishes(i64::MIN) && !vanishes(i64::MIN + 1));
    }

    #[test]
    fn arithmetic_vanishes_in_sums_only() {
        for e in [x().mul(y()), y().mul(x()), x().div(y()), x().neg()] {
            assert!(is_identity(e.clone(), Reduction::Sum, [(0, 0.0)]), "{e:?}");
            // Only a sum stays as it is where zero is combined into it.
            assert!(
                !is_identity(e.clone(), Reduction::Prod, [(0, 0.0)]),
                "{e:?}"
            );
            assert!(
                !is_identity(e.clone(), Reduction::Prod, [(0, 1.0)]),
                "{e:?}"
            );
            let least = [(0, f64::NEG_INFINITY)];
            assert!(!is_identity(e.clone(), Reduction::Max, least), "{e:?}");
            assert!(!is_identity(e.clone(), Reduction::Sum, [(0, 2.0)]), "{e:?}");
        }
        // Division by the fill, and what adds to it.
        for e in [y().div(x()), x().add(y()), y().sub(x()), x().exp()] {
            assert!(!is_identity(e.clone(), Reduction::Sum, [(0, 0.0)]), "{e:?}");
        }
    }

    #[test]
    fn of_a_choice_the_branches_that_may_be_taken_vanish() {
        let zero = || Expr::float(0.0);
        let sum = Reduction::Sum;
        let chosen = |c: Expr, a: Expr, b: Expr| Expr::select(c, a, b);
        // Always true: the first branch alone counts.
        let nan = [(0, f64::NAN)];
        assert!(is_identity(chosen(x().is_nan(), zero(), y()), sum, nan));
        assert!(!is_identity(chosen(x().is_nan(), y(), zero()), sum, nan));
        // Always false: the second.
        assert!(is_identity(chosen(x().eq_(y()), y(), zero()), sum, nan));
        assert!(!is_identity(chosen(x().eq_(y()), zero(), y()), sum, nan));
        let number = [(0, 2.0)];
        assert!(is_identity(chosen(x().is_nan(), y(), zero()), sum, number));
        assert!(!is_identity(chosen(x().is_nan(), zero(), y()), sum, number));
        // Undecided: both.
        let undecided = || x().gt(y());
        assert!(is_identity(chosen(undecided(), zero(), zero()), sum, nan));
        assert!(!is_identity(chosen(undecided(), zero(), y()), sum, nan));
        assert!(!is_identity(chosen(undecided(), y(), zero()), sum, nan));
    }

    /// The guards that skip an iteration of `tasklet %z...` under loops over i and k, as text.
    fn skips(tasklet: &str) -> Vec<String> {
        let text = format!(
            "graph \"g\" {{\n  %x: f32[4] input\n  %y: f32[4] input\n  %z: f32[4]\n  inputs %x, %y\n  \
             state {{\n    map [i < 4, k < 3] {{\n      tasklet {tasklet}\n    }}\n  }}\n  outputs %z\n}}\n"
        );
        let graph = graph::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let node = &graph.single_state().expect("one state").nodes[0];
        let kernel = kernel_of(&graph, node, false).expect("a kernel");
        let Body::Leaf(statements) = &kernel.phases[0].body else {
            panic!("{tasklet} is no leaf");
        };
        let values = Values::new(&kernel.phases[0].loops, statements, &kernel.arrays);
        let found = skippable(&values.effects[0], &statements[0], DType::F32);
        found.iter().map(|guard| guard.index.to_string()).collect()
    }

    #[test]
    fn guards_skip_iterations_that_combine_the_identity() {
        let cases: [(&str, &[&str]); 11] = [
            // Padding that is multiplied is absent.
            (
                "%z[i] (sum) = $0 * $1 from %x[i + k - 1 | 0.0], %y[k]",
                &["i + k - 1"],
            ),
            ("%z[i] (max) = $0 from %x[i + k - 1 | -inf]", &["i + k - 1"]),
            // Padding that counts.
            ("%z[i] (sum) = $0 * $1 from %x[i + k - 1 | 1.0], %y[k]", &[]),
            ("%z[i] (sum) = $0 + $1 from %x[i + k - 1 | 0.0], %y[k]", &[]),
            ("%z[i] (max) = $0 from %x[i + k - 1 | 0.0]", &[]),
            // A guard that always holds is none.
            ("%z[i] (sum) = $0 * $1 from %x[k | 0.0], %y[k]", &[]),
            // Two guards: only the one whose failure gives zero skips. If both read the same place, either fill does.
            (
                "%z[i] (sum) = $0 * $1 from %x[i + k - 1 | 0.0], %y[i - k | 1.0]",
                &["i + k - 1"],
            ),
            (
                "%z[i] (sum) = $0 * $1 from %x[i - k | 1.0], %y[i - k | 0.0]",
                &["i - k"],
            ),
            // A comparison with padding that equals nothing.
            (
                "%z[i] (sum) = select($0 == $1, $1, 0.0) from %x[i + k - 1 | nan], %y[k]",
                &["i + k - 1"],
            ),
            (
                "%z[i] (sum) = select($0 == $1, $1, 0.0) from %x[i + k - 1 | 0.0], %y[k]",
                &[],
            ),
            // What would be written outside is not written, whatever it is.
            (
                "%z[i - k | 0.0] (sum) = $0 + 1.0 from %x[i + k - 1 | 0.0]",
                &["i - k"],
            ),
        ];
        for (tasklet, expected) in cases {
            assert_eq!(skips(tasklet), expected, "{tasklet}");
        }
    }

    #[test]
    fn what_replaces_is_skipped_only_where_it_is_not_written() {
        let replaced = "%z[i - k | 0.0] = $0 * $1 from %x[i + k - 1 | 0.0], %y[k]";
        assert_eq!(skips(replaced), ["i - k"]);
    }
}
