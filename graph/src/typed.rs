//! The value of an expression in the arithmetic of its types, as kernels compute it.
//!
//! [`Expr::eval`] is the meaning in double precision, for the interpreter. What is folded before kernels exist must be
//! what they would compute: `t >= 0.7` of an `f32` compares with 0.7 rounded to `f32`.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::function::{Binary, Unary};
use crate::scalar::Scalar;
use crate::size::{SizeError, Symbol};

/// An expression of which every operation knows the type that it computes in.
#[derive(Debug)]
pub struct TypedExpr<'e> {
    step: Step<'e>,
    /// The type of the value before it is converted.
    natural: DType,
    wanted: DType,
}

#[derive(Debug)]
enum Step<'e> {
    Leaf(&'e Expr),
    Same(Box<TypedExpr<'e>>),
    Uniform(Box<[TypedExpr<'e>; 2]>),
    Unary(Unary, Box<TypedExpr<'e>>),
    Binary(Binary, Box<[TypedExpr<'e>; 2]>),
    Select(Box<[TypedExpr<'e>; 3]>),
}

impl Expr {
    /// The expression for inputs of `types`, with a value of type `wanted`.
    pub fn typed(&self, types: &[DType], wanted: DType) -> TypedExpr<'_> {
        let value = self.typed_within(types, wanted.arithmetic());
        TypedExpr {
            natural: wanted.arithmetic(),
            wanted,
            step: Step::Same(Box::new(value)),
        }
    }

    fn typed_within(&self, types: &[DType], wanted: DType) -> TypedExpr<'_> {
        let natural = self.natural_dtype(wanted, types).arithmetic();
        let (natural, step) = match self {
            Expr::Const(_) | Expr::In(_) | Expr::Index(_) => (wanted, Step::Leaf(self)),
            Expr::Cast(to, a) => (*to, Step::Same(Box::new(a.typed_within(types, *to)))),
            Expr::Uniform(k, n) => {
                let pair = [
                    k.typed_within(types, DType::I64),
                    n.typed_within(types, DType::I64),
                ];
                (DType::F32, Step::Uniform(Box::new(pair)))
            }
            Expr::Unary(f, a) => {
                let operand = match f {
                    Unary::Not => DType::Bool,
                    Unary::IsNan => a.natural_dtype(DType::F32, types).arithmetic(),
                    _ => natural,
                };
                let a = a.typed_within(types, operand);
                (natural, Step::Unary(*f, Box::new(a)))
            }
            Expr::Binary(f, a, b) => {
                let operands = Expr::operand_dtype(*f, (a, b), natural, types).arithmetic();
                let pair = [
                    a.typed_within(types, operands),
                    b.typed_within(types, operands),
                ];
                (natural, Step::Binary(*f, Box::new(pair)))
            }
            Expr::Select(c, a, b) => {
                let parts = [
                    c.typed_within(types, DType::Bool),
                    a.typed_within(types, natural),
                    b.typed_within(types, natural),
                ];
                (natural, Step::Select(Box::new(parts)))
            }
        };
        TypedExpr {
            step,
            natural,
            wanted,
        }
    }
}

impl TypedExpr<'_> {
    /// The value; every operation rounds to the type that it computes in.
    ///
    /// # Errors
    /// A symbol in an `Index` without a value.
    pub fn eval(
        &self,
        inputs: &[Scalar],
        value_of: &dyn Fn(&Symbol) -> Option<i64>,
    ) -> Result<Scalar, SizeError> {
        let of = |e: &TypedExpr<'_>| e.eval(inputs, value_of);
        let value = match &self.step {
            Step::Leaf(e) => e.eval(inputs, value_of)?,
            Step::Same(a) => of(a)?,
            Step::Uniform(pair) => {
                let [k, n] = &**pair;
                let (k, n) = (Expr::Const(of(k)?), Expr::Const(of(n)?));
                Expr::Uniform(k.into(), n.into()).eval(&[], value_of)?
            }
            Step::Unary(f, a) => f.eval(of(a)?),
            Step::Binary(f, pair) => f.eval(of(&pair[0])?, of(&pair[1])?),
            Step::Select(parts) => {
                let [c, a, b] = &**parts;
                if of(c)?.as_bool() { of(a)? } else { of(b)? }
            }
        };
        Ok(value.cast_on_x86(self.natural).cast_on_x86(self.wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(e: &Expr, input: Scalar, dtype: DType) -> Scalar {
        let types = [dtype];
        let typed = e.typed(&types, e.dtype(&types));
        typed.eval(&[input], &|_| None).unwrap()
    }

    #[test]
    fn numbers_are_rounded_to_what_they_meet() {
        let e = Expr::In(0).ge(Expr::float(0.7));
        let rounded = Scalar::Float(DType::F32.round(0.7));
        assert_eq!(value(&e, rounded, DType::F32), Scalar::Bool(true));
        assert_eq!(value(&e, rounded, DType::F64), Scalar::Bool(false));
    }

    #[test]
    fn every_operation_rounds() {
        let e = Expr::In(0).add(Expr::float(1.0)).sub(Expr::In(0));
        let large = Scalar::Float(16_777_216.0);
        assert_eq!(value(&e, large, DType::F32), Scalar::Float(0.0));
        assert_eq!(value(&e, large, DType::F64), Scalar::Float(1.0));
        let product = Expr::In(0).mul(Expr::In(0));
        let wrapped = value(&product, Scalar::Int(1 << 20), DType::I32);
        assert_eq!(wrapped, Scalar::Int(0));
    }

    #[test]
    fn a_cast_rounds_and_half_precision_is_computed_in_single() {
        let e = Expr::In(0).cast(DType::BF16).cast(DType::F32);
        let found = value(&e, Scalar::Float(1.001), DType::F32);
        assert_eq!(found, Scalar::Float(1.0));
        let e = Expr::In(0).add(Expr::float(0.001)).sub(Expr::In(0));
        let Scalar::Float(kept) = value(&e, Scalar::Float(1.0), DType::BF16) else {
            panic!("a float");
        };
        assert!((kept - 0.001).abs() < 1e-5, "{kept}");
    }
}
