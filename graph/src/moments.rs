//! The second moment about a mean, read off the expressions of two sums.
//!
//! Owns the one definition by which fusion and kernels recognize a variance. Never looks at maps.

use crate::{Binary, Expr};

/// Whether `square` is `(v − m)²·k` where `mean` is `v·k`, with `k` the inverse of `points`.
///
/// `m` is the position of the mean among the inputs of `square`; `same(i, j)` says whether input `i` of
/// `mean` and input `j` of `square` are one element. The sum of `square` may then be computed in parts, each
/// about its own mean: `Σ (v − m)²·k = Σ over parts of (Σ (v − a)²·k + n·(a − m)²·k)`, with `a` the mean of
/// a part and `n` its number of points (Chan, Golub, LeVeque 1983).
pub fn is_second_moment(
    mean: &Expr,
    square: &Expr,
    m: usize,
    points: i64,
    same: &dyn Fn(usize, usize) -> bool,
) -> bool {
    let Expr::Binary(Binary::Mul, v, k) = mean else {
        return false;
    };
    let Expr::Binary(Binary::Mul, squared, same_k) = square else {
        return false;
    };
    let Expr::Binary(Binary::Mul, left, right) = &**squared else {
        return false;
    };
    let n_inputs = v.inputs().into_iter().max().map_or(0, |i| i + 1);
    let as_in_mean = |e: &Expr| {
        e.map_leaves(&|leaf| match leaf {
            Expr::In(j) => {
                let known = (0..n_inputs).find(|i| same(*i, *j));
                Some(Expr::In(known.unwrap_or(usize::MAX)))
            }
            _ => None,
        })
    };
    let is_centered = |d: &Expr| match d {
        Expr::Binary(Binary::Sub, w, n) => **n == Expr::In(m) && as_in_mean(w) == **v,
        _ => false,
    };
    let inverse = match &**k {
        Expr::Const(k) => (k.as_f64() * points as f64 - 1.0).abs() < 1e-6,
        _ => false,
    };
    inverse && k == same_k && is_centered(left) && is_centered(right)
}

#[cfg(test)]
mod tests {
    use super::is_second_moment;
    use crate::Expr;

    fn mean() -> Expr {
        Expr::In(0).mul(Expr::float(0.25))
    }

    /// `(in1 − in0)·(in1 − in2)·k`: input 1 is the mean's input 0.
    fn square(second: usize, k: f64) -> Expr {
        let d = |m| Expr::In(1).sub(Expr::In(m));
        d(0).mul(d(second)).mul(Expr::float(k))
    }

    fn found(mean: &Expr, square: &Expr, points: i64) -> bool {
        is_second_moment(mean, square, 0, points, &|i, j| i == 0 && j == 1)
    }

    #[test]
    fn a_square_about_the_mean_is_one() {
        assert!(found(&mean(), &square(0, 0.25), 4));
    }

    #[test]
    fn each_condition_refuses_alone() {
        let other_factor = square(0, 0.5);
        let two_means = square(2, 0.25);
        let shifted = Expr::In(0).add(Expr::float(1.0)).mul(Expr::float(0.25));
        assert!(!found(&mean(), &other_factor, 4));
        assert!(!found(&mean(), &two_means, 4));
        assert!(!found(&mean(), &square(0, 0.25), 5));
        assert!(!found(&shifted, &square(0, 0.25), 4));
        let unrelated = |_, _| false;
        assert!(!is_second_moment(
            &mean(),
            &square(0, 0.25),
            0,
            4,
            &unrelated
        ));
    }
}
