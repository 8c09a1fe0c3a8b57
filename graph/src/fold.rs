//! Simplification of tasklet expressions: constant folding and identities.
//!
//! Every rule keeps the value for all inputs, NaN and infinities included, and keeps the type.
//! The one exception: `x + 0` becomes `x`, which keeps a negative zero that the sum would have
//! made positive. `x * 0` is never folded (the product is NaN for NaN and infinite `x`), nor is
//! anything reassociated. This file never looks at a graph.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::function::{Binary, Unary};
use crate::scalar::Scalar;
use crate::size::SymExpr;
use std::sync::Arc;

impl Expr {
    /// Simplified, knowing nothing of the inputs' types: an identity with a literal
    /// (`In(0) * 1.0`) stays where it may convert an integer.
    pub fn simplify(&self) -> Expr {
        rewrite(self, &Types(None))
    }

    /// Simplified for inputs of those types.
    pub fn simplify_typed(&self, inputs: &[DType]) -> Expr {
        rewrite(self, &Types(Some(inputs)))
    }
}

/// What kind of scalar an expression evaluates to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bool,
    Int,
    Float,
}

struct Types<'a>(Option<&'a [DType]>);

impl Types<'_> {
    fn dtype(&self, e: &Expr) -> Option<DType> {
        match (e, self.0) {
            (Expr::Cast(d, _), _) => Some(*d),
            // A literal adapts to what it meets, so it has no type of its own here.
            (Expr::Const(_), _) => None,
            (e, _) if e.is_int_literal() => None,
            (Expr::In(i), Some(inputs)) => inputs.get(*i).copied(),
            (e, Some(inputs)) => {
                let strong = e.inputs().iter().all(|i| *i < inputs.len());
                strong
                    .then(|| e.dtype(inputs))
                    .filter(|_| !is_weak(e, inputs))
            }
            _ => None,
        }
    }

    fn kind(&self, e: &Expr) -> Option<Kind> {
        let of = |d: DType| match d {
            DType::Bool => Kind::Bool,
            d if d.is_float() => Kind::Float,
            _ => Kind::Int,
        };
        match e {
            Expr::Const(Scalar::Float(_)) | Expr::Uniform(..) => Some(Kind::Float),
            Expr::Const(Scalar::Int(_)) | Expr::Index(_) => Some(Kind::Int),
            Expr::Const(Scalar::Bool(_)) => Some(Kind::Bool),
            Expr::In(i) => self.0.and_then(|t| t.get(*i)).map(|d| of(*d)),
            Expr::Cast(d, _) => Some(of(*d)),
            Expr::Unary(Unary::Not | Unary::IsNan, _) => Some(Kind::Bool),
            Expr::Unary(Unary::Neg | Unary::Abs | Unary::Sign, a) => {
                self.kind(a).filter(|k| *k != Kind::Bool)
            }
            Expr::Unary(..) => Some(Kind::Float),
            Expr::Binary(f, ..) if f.is_predicate() => Some(Kind::Bool),
            Expr::Binary(Binary::Div | Binary::Atan2, ..) => Some(Kind::Float),
            Expr::Binary(_, a, b) => match (self.kind(a), self.kind(b)) {
                (Some(Kind::Float), _) | (_, Some(Kind::Float)) => Some(Kind::Float),
                (Some(Kind::Int), Some(_)) | (Some(_), Some(Kind::Int)) => Some(Kind::Int),
                _ => None,
            },
            Expr::Select(_, a, b) => self.kind(a).filter(|k| self.kind(b) == Some(*k)),
        }
    }

    /// Whether `x`, met by a literal of kind `other`, keeps its own type.
    fn keeps(&self, x: &Expr, other: &Expr) -> bool {
        matches!(
            (self.kind(x), self.kind(other)),
            (Some(Kind::Float), Some(_)) | (Some(Kind::Int), Some(Kind::Int))
        )
    }
}

/// Whether the type comes from literals alone, so that it adapts to what it meets.
fn is_weak(e: &Expr, inputs: &[DType]) -> bool {
    // Next to an f16 a weak expression is f16, a strong one its own type.
    let probe = Expr::binary(Binary::Add, e.clone(), Expr::In(inputs.len()));
    let with = |d: DType| {
        let mut types = inputs.to_vec();
        types.push(d);
        probe.dtype(&types)
    };
    e.dtype(inputs).is_float() && with(DType::F16) == DType::F16 && e.dtype(inputs) != DType::F16
}

impl Binary {
    /// Whether the result is a truth value.
    pub fn is_predicate(self) -> bool {
        use Binary::*;
        matches!(self, Eq | Ne | Lt | Le | Gt | Ge | And | Or | Xor)
    }
}

fn rewrite(e: &Expr, types: &Types<'_>) -> Expr {
    let mut now = e.map_children(|child| rewrite(child, types));
    // Every rule makes the tree smaller or replaces a node by one that no rule undoes.
    while let Some(next) = head(&now, types) {
        now = next;
    }
    now
}

/// One rule at the root; `None` if none applies.
fn head(e: &Expr, types: &Types<'_>) -> Option<Expr> {
    match e {
        Expr::Index(i) => i.as_const().map(Expr::int),
        Expr::Unary(f, a) => unary(*f, a, types),
        Expr::Binary(f, a, b) => constants(*f, a, b)
            .or_else(|| indices(*f, a, b))
            .or_else(|| binary(*f, a, b, types)),
        Expr::Select(c, a, b) => select(c, a, b, types),
        Expr::Cast(d, a) => cast(*d, a, types),
        Expr::Const(_) | Expr::In(_) | Expr::Uniform(..) => None,
    }
}

fn constants(f: Binary, a: &Expr, b: &Expr) -> Option<Expr> {
    match (a, b) {
        (Expr::Const(_), Expr::Const(_)) => constant(&Expr::binary(f, a.clone(), b.clone())),
        _ => None,
    }
}

/// The value of an expression of constants, unless it would change the type (arithmetic with
/// truth values gives integers).
fn constant(whole: &Expr) -> Option<Expr> {
    let value = whole.eval(&[], &|_| None).ok()?;
    let dtype = whole.dtype(&[]);
    let same_kind = match value {
        Scalar::Float(_) => dtype.is_float(),
        Scalar::Int(_) => whole.is_int_literal(),
        Scalar::Bool(_) => dtype == DType::Bool,
    };
    same_kind.then_some(Expr::Const(value))
}

fn unary(f: Unary, a: &Expr, types: &Types<'_>) -> Option<Expr> {
    use Unary::*;
    match (f, a) {
        (f, Expr::Const(_)) => constant(&Expr::unary(f, a.clone())),
        (Neg, Expr::Unary(Neg, x)) => Some(x.as_ref().clone()),
        (Neg, Expr::Index(i)) => Some(Expr::Index(-i.clone())),
        (Abs, Expr::Unary(Abs, _)) => Some(a.clone()),
        // An unsigned number is not the size of its negative.
        (Abs, Expr::Unary(Neg, x))
            if types.kind(x).is_some() && types.dtype(x) != Some(DType::U8) =>
        {
            Some(Expr::Unary(Abs, x.clone()))
        }
        (Not, Expr::Unary(Not, x)) if types.kind(x) == Some(Kind::Bool) => Some(x.as_ref().clone()),
        (Not, Expr::Binary(Binary::Eq, x, y)) => {
            Some(Expr::Binary(Binary::Ne, x.clone(), y.clone()))
        }
        (Not, Expr::Binary(Binary::Ne, x, y)) => {
            Some(Expr::Binary(Binary::Eq, x.clone(), y.clone()))
        }
        _ => None,
    }
}

/// Arithmetic and comparisons of index expressions.
fn indices(f: Binary, a: &Expr, b: &Expr) -> Option<Expr> {
    let index = |e: &Expr| match e {
        Expr::Index(i) => Some(i.clone()),
        Expr::Const(Scalar::Int(n)) => Some(SymExpr::constant(*n)),
        _ => None,
    };
    let (x, y) = (index(a)?, index(b)?);
    let difference = (x.clone() - y.clone()).as_const();
    let decided = |holds: fn(i64) -> bool| difference.map(|d| Expr::Const(Scalar::Bool(holds(d))));
    let positive = y.as_const().is_some_and(|n| n > 0);
    Some(match f {
        Binary::Add => Expr::Index(x + y),
        Binary::Sub => Expr::Index(x - y),
        Binary::Mul => Expr::Index(x * y),
        Binary::FloorDiv if positive => Expr::Index(x.floor_div(&y)),
        Binary::Mod if positive => Expr::Index(x.modulo(&y)),
        Binary::Min => Expr::Index(x.min_with(&y)),
        Binary::Max => Expr::Index(x.max_with(&y)),
        Binary::Eq => return decided(|d| d == 0),
        Binary::Ne => return decided(|d| d != 0),
        Binary::Lt => return decided(|d| d < 0),
        Binary::Le => return decided(|d| d <= 0),
        Binary::Gt => return decided(|d| d > 0),
        Binary::Ge => return decided(|d| d >= 0),
        _ => return None,
    })
}

fn binary(f: Binary, a: &Arc<Expr>, b: &Arc<Expr>, types: &Types<'_>) -> Option<Expr> {
    use Binary::*;
    let number = |e: &Expr, n: f64| e.as_number() == Some(n);
    let (x, y) = (|| a.as_ref().clone(), || b.as_ref().clone());
    let float = |e: &Expr| types.kind(e) == Some(Kind::Float);
    let left = |n: f64| number(b, n) && types.keeps(a, b);
    let right = |n: f64| number(a, n) && types.keeps(b, a);
    match f {
        Add | Sub if left(0.0) => Some(x()),
        Add if right(0.0) => Some(y()),
        Add | Sub => signs(f, a, b),
        Mul if left(1.0) => Some(x()),
        Mul if right(1.0) => Some(y()),
        Mul if left(-1.0) => Some(x().neg()),
        Mul if right(-1.0) => Some(y().neg()),
        Mul => match (a.as_ref(), b.as_ref()) {
            (Expr::Unary(Unary::Neg, p), Expr::Unary(Unary::Neg, q)) => {
                Some(Expr::Binary(Mul, p.clone(), q.clone()))
            }
            _ => None,
        },
        Div if number(b, 1.0) && float(a) => Some(x()),
        Div if number(b, -1.0) && float(a) => Some(x().neg()),
        Pow if number(b, 1.0) && float(a) => Some(x()),
        Max if number(b, f64::NEG_INFINITY) && float(a) => Some(x()),
        Max if number(a, f64::NEG_INFINITY) && float(b) => Some(y()),
        Min if number(b, f64::INFINITY) && float(a) => Some(x()),
        Min if number(a, f64::INFINITY) && float(b) => Some(y()),
        Max | Min if a == b && types.kind(a).is_some_and(|k| k != Kind::Bool) => Some(x()),
        And | Or => logic(f, a, b, types).or_else(|| logic(f, b, a, types)),
        _ => None,
    }
}

/// Sums and differences with negated operands.
fn signs(f: Binary, a: &Arc<Expr>, b: &Arc<Expr>) -> Option<Expr> {
    match (f, a.as_ref(), b.as_ref()) {
        (Binary::Add, _, Expr::Unary(Unary::Neg, y)) => {
            Some(Expr::Binary(Binary::Sub, a.clone(), y.clone()))
        }
        (Binary::Add, Expr::Unary(Unary::Neg, x), _) => {
            Some(Expr::Binary(Binary::Sub, b.clone(), x.clone()))
        }
        (Binary::Sub, _, Expr::Unary(Unary::Neg, y)) => {
            Some(Expr::Binary(Binary::Add, a.clone(), y.clone()))
        }
        _ => None,
    }
}

/// `and`, `or` with a constant on the right.
fn logic(f: Binary, a: &Expr, b: &Expr, types: &Types<'_>) -> Option<Expr> {
    let Expr::Const(Scalar::Bool(known)) = b else {
        return None;
    };
    let absorbs = (f == Binary::Or) == *known;
    if absorbs {
        return Some(b.clone());
    }
    (types.kind(a) == Some(Kind::Bool)).then(|| a.clone())
}

fn select(c: &Expr, a: &Arc<Expr>, b: &Arc<Expr>, types: &Types<'_>) -> Option<Expr> {
    if a == b {
        return Some(a.as_ref().clone());
    }
    if let Expr::Unary(Unary::Not, inner) = c {
        return Some(Expr::Select(inner.clone(), b.clone(), a.clone()));
    }
    let Expr::Const(known) = c else { return None };
    let (taken, other) = if known.as_bool() { (a, b) } else { (b, a) };
    let same_kind = types.kind(taken).is_some() && types.kind(taken) == types.kind(other);
    let literal = matches!(other.as_ref(), Expr::Const(_));
    let same_type = types.dtype(taken).is_some() && types.dtype(taken) == types.dtype(other);
    (same_kind && (literal || same_type)).then(|| taken.as_ref().clone())
}

fn cast(d: DType, a: &Expr, types: &Types<'_>) -> Option<Expr> {
    // A choice between a truth value and a number has a type, but values of both kinds.
    let of_kind = types.kind(a).is_some();
    if types.dtype(a) == Some(d) && of_kind && is_rounded(d, a) {
        return Some(a.clone());
    }
    let Expr::Cast(inner, x) = a else { return None };
    let lossless = types.dtype(x).is_some_and(|from| {
        from != DType::Bool && holds_all_of(*inner, from) && (from != *inner || is_rounded(from, x))
    });
    lossless.then(|| Expr::Cast(d, x.clone()))
}

/// Whether an expression of type `d` has only values of that type: arithmetic of half precision is done
/// in single precision, and only a cast after it rounds the result.
fn is_rounded(d: DType, e: &Expr) -> bool {
    if !matches!(d, DType::F16 | DType::BF16) {
        return true;
    }
    match e {
        Expr::In(_) | Expr::Cast(..) => true,
        Expr::Unary(Unary::Neg | Unary::Abs | Unary::Sign, a) => is_rounded(d, a),
        Expr::Binary(Binary::Max | Binary::Min, a, b) | Expr::Select(_, a, b) => {
            is_rounded(d, a) && is_rounded(d, b)
        }
        _ => false,
    }
}

/// Whether every value of `from` is a value of `to`.
fn holds_all_of(to: DType, from: DType) -> bool {
    use DType::*;
    if to == from {
        return true;
    }
    match from {
        Bool => true,
        U8 => matches!(to, I16 | I32 | I64 | F16 | BF16 | F32 | F64),
        I8 => matches!(to, I16 | I32 | I64 | F16 | BF16 | F32 | F64),
        I16 => matches!(to, I32 | I64 | F32 | F64),
        I32 => matches!(to, I64 | F64),
        I64 | F64 => false,
        F16 | BF16 => matches!(to, F32 | F64),
        F32 => to == F64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn x() -> Expr {
        Expr::In(0)
    }

    #[test]
    fn identities_vanish_for_floats_only() {
        let e = x().mul(Expr::float(1.0)).add(Expr::float(0.0));
        assert_eq!(e.simplify_typed(&[DType::F32]), x());
        // For an integer input, the product is real already.
        let product = x().mul(Expr::float(1.0));
        assert_eq!(e.simplify_typed(&[DType::I32]), product);
        assert_eq!(e.simplify(), x().mul(Expr::float(1.0)));
        assert_eq!(x().exp().mul(Expr::float(1.0)).simplify(), x().exp());
        assert_eq!(x().neg().neg().simplify(), x());
        assert_eq!(x().add(x().sin().neg()).simplify(), x().sub(x().sin()));
    }

    #[test]
    fn a_product_with_zero_stays() {
        let e = x().mul(Expr::float(0.0));
        assert_eq!(e.simplify_typed(&[DType::F32]), e);
    }

    #[test]
    fn constants_fold_through_trees() {
        let e = Expr::float(2.0)
            .mul(Expr::float(3.0))
            .sub(Expr::int(1))
            .exp();
        assert_eq!(e.simplify(), Expr::float(5f64.exp()));
        assert_eq!(
            Expr::float(1.0).div(Expr::float(0.0)).simplify(),
            Expr::float(f64::INFINITY)
        );
    }

    #[test]
    fn conditions_on_indices_are_decided() {
        let i = || Expr::Index(SymExpr::symbol("i"));
        let e = Expr::select(i().lt(i().add(Expr::int(1))), x(), Expr::float(0.0));
        assert_eq!(e.simplify_typed(&[DType::F32]), x());
    }

    #[test]
    fn a_constant_condition_does_not_change_the_type() {
        let truth = Expr::Const(Scalar::Bool(true));
        let e = Expr::select(truth, x(), Expr::In(1));
        assert_eq!(e.simplify_typed(&[DType::F16, DType::F32]), e);
        assert_eq!(e.simplify_typed(&[DType::F32, DType::F32]), x());
    }

    #[test]
    fn the_size_of_an_unsigned_negative_stays() {
        let e = x().neg().abs();
        assert_eq!(e.simplify_typed(&[DType::U8]), e);
        assert_eq!(e.simplify_typed(&[DType::I8]), x().abs());
        assert_eq!(e.clone().abs().simplify_typed(&[DType::U8]), e);
    }

    #[test]
    fn only_lossless_casts_vanish() {
        let there_and_back = x().cast(DType::F32).cast(DType::BF16);
        assert_eq!(there_and_back.simplify_typed(&[DType::BF16]), x());
        let rounding = x().cast(DType::BF16).cast(DType::F32);
        assert_eq!(rounding.simplify_typed(&[DType::F32]), rounding);
        assert_eq!(
            x().cast(DType::F32).cast(DType::F32).simplify(),
            x().cast(DType::F32)
        );
    }

    #[test]
    fn folding_keeps_the_value() {
        let samples = [
            0.0,
            -0.0,
            1.5,
            -2.0,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ];
        let trees = [
            x().neg().neg().sub(Expr::In(1).neg()),
            x().max(Expr::float(f64::NEG_INFINITY)).min(Expr::In(1)),
            Expr::select(
                x().lt(Expr::In(1)).not(),
                x().mul(Expr::float(-1.0)),
                Expr::In(1),
            ),
            x().pow(Expr::float(1.0))
                .div(Expr::float(1.0))
                .neg()
                .mul(Expr::In(1).neg()),
        ];
        for e in &trees {
            let s = e.simplify_typed(&[DType::F64, DType::F64]);
            assert_ne!(s, *e);
            for a in samples {
                for b in samples {
                    let at = [Scalar::Float(a), Scalar::Float(b)];
                    let of = |e: &Expr| e.eval(&at, &|_| None).unwrap().as_f64();
                    let (was, is) = (of(e), of(&s));
                    assert!(
                        was == is || (was.is_nan() && is.is_nan()),
                        "{e:?} at ({a}, {b}): {was} became {is}"
                    );
                }
            }
        }
    }
}
