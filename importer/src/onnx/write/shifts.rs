//! Shifts of integers in operators of the standard, whose `BitShift` takes only unsigned ones.

use graph::{Binary, DType, Expr};

/// `a << b` or `a >> b` as arithmetic on `i64`, with the meaning of [`Binary::Shl`] and [`Binary::Shr`].
pub(super) fn as_arithmetic(f: Binary, a: &Expr, b: &Expr) -> Expr {
    let (x, n) = (a.clone().cast(DType::I64), b.clone().cast(DType::I64));
    let is_within = (n.clone().ge(Expr::int(0))).and(n.clone().lt(Expr::int(64)));
    // In two steps, since 2⁶³ is no number of 64 bits.
    let first = n.clone().max(Expr::int(0)).min(Expr::int(62));
    let power = Expr::int(2).pow(first);
    let more = Expr::select(n.ge(Expr::int(63)), Expr::int(2), Expr::int(1));
    let (moved, rest) = match f {
        Binary::Shl => (x.mul(power).mul(more), Expr::int(0)),
        _ => {
            let quotient = Expr::binary(Binary::FloorDiv, x.clone(), power);
            let sign = Expr::select(x.lt(Expr::int(0)), Expr::int(-1), Expr::int(0));
            (Expr::binary(Binary::FloorDiv, quotient, more), sign)
        }
    };
    Expr::select(is_within, moved, rest)
}
