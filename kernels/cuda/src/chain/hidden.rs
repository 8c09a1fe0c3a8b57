//! Columns that a block of rows need not go over: where every point is hidden by a comparison of row and
//! column, as later positions are in causal attention.
//!
//! Before: a block goes over all columns, and for `col > row` takes −∞ as score and 0 as probability.
//! After: it begins with the first and ends with the last block of columns in which a point is seen.
//! Legal where everything that a sweep takes from a hidden point changes nothing: 0 is added, −∞ is no
//! maximum, and nothing is stored. That holds where products and rows' numbers are finite and divisors
//! are not 0. A row whose numbers are not finite leaves them in what it sees, as fused attention elsewhere does.
//! One block of columns is always visited, so a row that sees nothing is what it is without this. Saves up to
//! half of causal attention's products.

use super::element::Elements;
use super::form::Form;
use graph::{Binary, Reduction, Scalar, SymExpr, Symbol, Unary};
use kernels::emit::text::CText;
use kernels::emit::values::{Op, ValueId};
use std::ops::Range;

/// Which points are hidden, by their column less their row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hidden {
    /// Smallest difference from which all points are hidden.
    from: Option<i64>,
    /// Largest difference up to which all points are hidden.
    up_to: Option<i64>,
}

/// What is known of a value at hidden points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Truth(bool),
    Zero,
    /// −∞.
    Least,
}

impl Hidden {
    /// The points that one sweep hides.
    pub(super) fn new(elements: &Elements<'_>) -> Hidden {
        let mut hidden = Hidden::default();
        let is_all_taken = elements.n_out() > 0 && !elements.plain_factors().is_empty();
        if is_all_taken || elements.stores() {
            return hidden;
        }
        for n in 0..elements.n_values() {
            for truth in [false, true] {
                let Some(region) = region(elements, ValueId(n), truth) else {
                    continue;
                };
                if is_neutral(elements, n, truth) {
                    hidden = hidden.or(region);
                }
            }
        }
        hidden
    }

    /// The points that either of both hides.
    fn or(self, other: Hidden) -> Hidden {
        let least = |a: Option<i64>, b: Option<i64>| a.into_iter().chain(b).min();
        Hidden {
            from: least(self.from, other.from),
            up_to: self.up_to.max(other.up_to),
        }
    }

    /// The points that both hide: what is hidden from two sweeps that go over the columns together.
    pub(super) fn and(self, other: Hidden) -> Hidden {
        let both = |a: Option<i64>, b: Option<i64>| Some((a?, b?));
        Hidden {
            from: both(self.from, other.from).map(|(a, b)| a.max(b)),
            up_to: both(self.up_to, other.up_to).map(|(a, b)| a.min(b)),
        }
    }

    /// Whether the first rows see fewer columns than the last, which should begin early then.
    pub(super) fn grows(self) -> bool {
        self.from.is_some()
    }

    /// Columns that a block of rows goes over, in blocks of `cols` of which the last may end earlier.
    pub(super) fn columns(self, form: &Form, rows: Range<i64>, cols: i64) -> Range<i64> {
        let size = form.col.size;
        let last = rows.end.min(form.row.size) - 1;
        let end = self.from.map_or(size, |n| (last + n).clamp(1, size));
        let begin = self.up_to.map_or(0, |n| (rows.start + n + 1).max(0));
        let begin = begin.min(end - 1) / cols * cols;
        begin..((end + cols - 1) / cols * cols).min(size)
    }

    /// Declares where the block of `rows` rows from `block_row` on begins and ends; returns the names of both.
    pub(super) fn declare(
        self,
        t: &mut CText,
        form: &Form,
        rows: i64,
        cols: i64,
    ) -> (String, String) {
        let (size, all) = (form.col.size, form.row.size);
        let end = match self.from {
            None => size.to_string(),
            Some(n) => {
                t.line(&format!(
                    "const int reach = (block_row + {rows} < {all} ? block_row + {rows} : {all}) - 1 + {n}; \
                     /* seen */"
                ));
                t.line(&format!(
                    "const int end = reach < 1 ? 1 : reach < {size} ? reach : {size};"
                ));
                "end".to_string()
            }
        };
        let begin = match self.up_to {
            None => "0".to_string(),
            Some(n) => {
                t.line(&format!(
                    "const int start = block_row + {}; /* seen */",
                    n + 1
                ));
                t.line(&format!(
                    "const int begin = (start < 0 ? 0 : start < {end} ? start : {end} - 1)/{cols}*{cols};"
                ));
                "begin".to_string()
            }
        };
        (begin, end)
    }
}

/// The points where a value is `truth`, if it compares row and column.
fn region(e: &Elements<'_>, v: ValueId, truth: bool) -> Option<Hidden> {
    let Op::Binary(compare, _, a, b) = e.op(v) else {
        return None;
    };
    let side = |v: &ValueId| match e.op(*v) {
        Op::Index(index) => Some(index.clone()),
        Op::Const(Scalar::Int(n)) => Some(SymExpr::constant(*n)),
        _ => None,
    };
    let (terms, first) = (side(a)? - side(b)?).as_affine()?;
    let factor = |name: &Symbol| terms.iter().find(|(s, _)| s == name).map(|(_, k)| *k);
    let form = e.form();
    // `sign * (col - row) + first` is compared with 0.
    let sign = match (factor(&form.col.var)?, factor(&form.row.var)?, terms.len()) {
        (1, -1, 2) => 1,
        (-1, 1, 2) => -1,
        _ => return None,
    };
    let at = -sign * first;
    let from = |n| Hidden {
        from: Some(n),
        up_to: None,
    };
    let up_to = |n| Hidden {
        from: None,
        up_to: Some(n),
    };
    let compare = match (compare, truth) {
        (_, true) => *compare,
        (Binary::Lt, _) => Binary::Ge,
        (Binary::Le, _) => Binary::Gt,
        (Binary::Gt, _) => Binary::Le,
        (Binary::Ge, _) => Binary::Lt,
        _ => return None,
    };
    Some(match (compare, sign) {
        (Binary::Le, 1) | (Binary::Ge, -1) => up_to(at),
        (Binary::Lt, 1) | (Binary::Gt, -1) => up_to(at - 1),
        (Binary::Ge, 1) | (Binary::Le, -1) => from(at),
        (Binary::Gt, 1) | (Binary::Lt, -1) => from(at + 1),
        _ => return None,
    })
}

/// Whether all that the sweep takes changes nothing where the `n`-th value is `truth`.
fn is_neutral(e: &Elements<'_>, n: usize, truth: bool) -> bool {
    let mut known: Vec<Option<Known>> = Vec::new();
    for at in 0..e.n_values() {
        let value = match at == n {
            true => Some(Known::Truth(truth)),
            // A value comes behind all that it is made of.
            false => of_value(e.op(ValueId(at)), &|v| known[v.0]),
        };
        known.push(value);
    }
    let changes_nothing = |(v, reduction): &(ValueId, Reduction)| match reduction {
        Reduction::Sum => known[v.0] == Some(Known::Zero),
        Reduction::Max => known[v.0] == Some(Known::Least),
        _ => false,
    };
    let taken = e.taken();
    !taken.is_empty() && taken.iter().all(changes_nothing)
}

/// What is known of a value, from what is known of its operands. Others are taken to be finite.
fn of_value(op: &Op, known: &dyn Fn(ValueId) -> Option<Known>) -> Option<Known> {
    use Known::{Least, Truth, Zero};
    match op {
        Op::Const(Scalar::Bool(truth)) => Some(Truth(*truth)),
        Op::Const(x) if x.as_f64() == 0.0 => Some(Zero),
        Op::Const(x) if x.as_f64() == f64::NEG_INFINITY => Some(Least),
        Op::Unary(Unary::Exp, x) => (known(*x)? == Least).then_some(Zero),
        Op::Unary(Unary::Neg | Unary::Abs, x) => (known(*x)? == Zero).then_some(Zero),
        Op::Unary(Unary::Not, x) => match known(*x)? {
            Truth(truth) => Some(Truth(!truth)),
            _ => None,
        },
        Op::Cast(x) => match known(*x)? {
            Truth(_) => None,
            number => Some(number),
        },
        Op::Select(c, a, b) => match (known(*c), known(*a), known(*b)) {
            (Some(Truth(true)), a, _) => a,
            (Some(Truth(false)), _, b) => b,
            (_, a, b) => a.filter(|_| a == b),
        },
        Op::Binary(f, _, a, b) => of_two(*f, known(*a), known(*b)),
        _ => None,
    }
}

fn of_two(f: Binary, a: Option<Known>, b: Option<Known>) -> Option<Known> {
    use Known::{Least, Truth, Zero};
    match (f, a, b) {
        (Binary::And, Some(Truth(false)), _) | (Binary::And, _, Some(Truth(false))) => {
            Some(Truth(false))
        }
        (Binary::Or, Some(Truth(true)), _) | (Binary::Or, _, Some(Truth(true))) => {
            Some(Truth(true))
        }
        (Binary::And, Some(Truth(true)), x) | (Binary::And, x, Some(Truth(true))) => x,
        (Binary::Or, Some(Truth(false)), x) | (Binary::Or, x, Some(Truth(false))) => x,
        (Binary::Mul, Some(Zero), None | Some(Zero)) | (Binary::Mul, None, Some(Zero)) => {
            Some(Zero)
        }
        (Binary::Div, Some(Zero), None) => Some(Zero),
        (Binary::Add | Binary::Sub, Some(Zero), Some(Zero)) => Some(Zero),
        (Binary::Add | Binary::Sub, Some(Least), None | Some(Zero))
        | (Binary::Add, None | Some(Zero), Some(Least)) => Some(Least),
        (Binary::Min, Some(Least), _) | (Binary::Min, _, Some(Least)) => Some(Least),
        (Binary::Min | Binary::Max, _, _) => a.filter(|_| a == b),
        _ => None,
    }
}
