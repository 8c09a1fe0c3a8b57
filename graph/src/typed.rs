//! The value of an expression in the arithmetic of its types, as kernels compute it.
//!
//! [`Expr::eval`] is the meaning in double precision, for the interpreter. What is folded before kernels exist must be
//! what they would compute: `t >= 0.7` of an `f32` compares with 0.7 rounded to `f32`.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::function::Unary;
use crate::scalar::Scalar;
use crate::size::{SizeError, Symbol};

/// Inputs and index values of an evaluation.
struct Given<'a> {
    inputs: &'a [Scalar],
    types: &'a [DType],
    value_of: &'a dyn Fn(&Symbol) -> Option<i64>,
}

impl DType {
    /// The type that values of this type are computed in: half precision is for memory only.
    pub fn arithmetic(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            d => d,
        }
    }
}

impl Expr {
    /// The value for inputs of `types`, as `wanted`: every operation rounds to the type that it computes in.
    ///
    /// # Errors
    /// A symbol in an `Index` without a value.
    pub fn eval_typed(
        &self,
        (inputs, types): (&[Scalar], &[DType]),
        wanted: DType,
        value_of: &dyn Fn(&Symbol) -> Option<i64>,
    ) -> Result<Scalar, SizeError> {
        let given = Given {
            inputs,
            types,
            value_of,
        };
        Ok(given.value(self, wanted.arithmetic())?.cast(wanted))
    }
}

impl Given<'_> {
    fn value(&self, e: &Expr, wanted: DType) -> Result<Scalar, SizeError> {
        let natural = e.natural_dtype(wanted, self.types).arithmetic();
        let value = match e {
            Expr::Const(_) | Expr::In(_) | Expr::Index(_) => e.eval(self.inputs, self.value_of)?,
            Expr::Cast(to, a) => self.value(a, *to)?.cast(*to),
            Expr::Uniform(k, n) => {
                let (k, n) = (self.value(k, DType::I64)?, self.value(n, DType::I64)?);
                Expr::Uniform(Expr::Const(k).into(), Expr::Const(n).into())
                    .eval(&[], self.value_of)?
            }
            Expr::Unary(f, a) => {
                let of = match f {
                    Unary::Not => DType::Bool,
                    Unary::IsNan => a.natural_dtype(DType::F32, self.types).arithmetic(),
                    _ => natural,
                };
                f.eval(self.value(a, of)?).cast(natural)
            }
            Expr::Binary(f, a, b) => {
                let of = Expr::operand_dtype(*f, (a, b), natural, self.types).arithmetic();
                f.eval(self.value(a, of)?, self.value(b, of)?).cast(natural)
            }
            Expr::Select(c, a, b) => {
                let taken = if self.value(c, DType::Bool)?.as_bool() {
                    a
                } else {
                    b
                };
                self.value(taken, natural)?
            }
        };
        Ok(value.cast(wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(e: &Expr, input: Scalar, dtype: DType) -> Scalar {
        let types = [dtype];
        let wanted = e.dtype(&types);
        e.eval_typed((&[input], &types), wanted, &|_| None).unwrap()
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
