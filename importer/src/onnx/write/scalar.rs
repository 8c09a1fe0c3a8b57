//! Scalar expressions as chains of element-wise nodes.

use super::nodes::{Nodes, Refusal, int, type_number};
use graph::{Binary, DType, Expr, Scalar, SymExpr, Symbol, Unary};

/// The operands of an expression and the shape it is computed for.
pub(super) struct Operands<'a> {
    /// Names of the inputs.
    pub(super) names: &'a [String],
    /// Their element types.
    pub(super) types: &'a [DType],
    /// The result's sizes; `i0`, `i1`, … in the expression run over them.
    pub(super) shape: &'a [SymExpr],
}

impl Nodes<'_> {
    /// The value of an expression as `dtype`.
    pub(super) fn expression(
        &mut self,
        e: &Expr,
        dtype: DType,
        of: &Operands,
    ) -> Result<String, Refusal> {
        let natural = e.natural_dtype(dtype, of.types);
        let value = match e {
            Expr::Const(s) => return Ok(self.number(s.cast(dtype), dtype)),
            Expr::In(i) => of.names[*i].clone(),
            Expr::Index(i) => self.positions(i, of)?,
            Expr::Cast(to, a) => self.expression(a, *to, of)?,
            Expr::Uniform(..) => {
                return Err(Refusal("random numbers exist as Dropout only".into()));
            }
            Expr::Unary(f, a) => {
                let inner = match f {
                    Unary::Not => DType::Bool,
                    Unary::IsNan => a.natural_dtype(DType::F32, of.types),
                    _ => natural,
                };
                let a = self.expression(a, inner, of)?;
                self.unary(*f, &a, inner)?
            }
            Expr::Binary(f, a, b) => {
                let inner = Expr::operand_dtype(*f, (a, b), natural, of.types);
                let (a, b) = (
                    self.expression(a, inner, of)?,
                    self.expression(b, inner, of)?,
                );
                self.binary(*f, &a, &b, inner)?
            }
            Expr::Select(c, a, b) => {
                let c = self.expression(c, DType::Bool, of)?;
                let (a, b) = (
                    self.expression(a, natural, of)?,
                    self.expression(b, natural, of)?,
                );
                self.node("Where", &[&c, &a, &b], Vec::new())
            }
        };
        Ok(self.cast(value, natural, dtype))
    }

    /// The value as another type.
    pub(super) fn cast(&mut self, value: String, from: DType, to: DType) -> String {
        if from == to {
            return value;
        }
        let to = int("to", type_number(to).into());
        self.node("Cast", &[&value], vec![to])
    }

    fn unary(&mut self, f: Unary, a: &str, dtype: DType) -> Result<String, Refusal> {
        let plain = match f {
            Unary::Neg => "Neg",
            Unary::Abs => "Abs",
            Unary::Exp => "Exp",
            Unary::Log => "Log",
            Unary::Sqrt => "Sqrt",
            Unary::Recip => "Reciprocal",
            Unary::Sin => "Sin",
            Unary::Cos => "Cos",
            Unary::Tan => "Tan",
            Unary::Tanh => "Tanh",
            Unary::Erf => "Erf",
            Unary::Sigmoid => "Sigmoid",
            Unary::Floor => "Floor",
            Unary::Ceil => "Ceil",
            Unary::Round => "Round",
            Unary::Sign => "Sign",
            Unary::Not => "Not",
            Unary::IsNan => "IsNaN",
            Unary::Atan => "Atan",
            Unary::Asin => "Asin",
            Unary::Acos => "Acos",
            Unary::Sinh => "Sinh",
            Unary::Cosh => "Cosh",
            Unary::Asinh => "Asinh",
            Unary::Acosh => "Acosh",
            Unary::Atanh => "Atanh",
            Unary::Expm1 | Unary::Log1p | Unary::Rsqrt | Unary::Trunc => "",
        };
        if !plain.is_empty() {
            return Ok(self.node(plain, &[a], Vec::new()));
        }
        let one = self.number(Scalar::Float(1.0), dtype);
        Ok(match f {
            Unary::Expm1 => {
                let e = self.node("Exp", &[a], Vec::new());
                self.node("Sub", &[&e, &one], Vec::new())
            }
            Unary::Log1p => {
                let sum = self.node("Add", &[a, &one], Vec::new());
                self.node("Log", &[&sum], Vec::new())
            }
            Unary::Rsqrt => {
                let root = self.node("Sqrt", &[a], Vec::new());
                self.node("Reciprocal", &[&root], Vec::new())
            }
            _ => {
                let (sign, size) = (
                    self.node("Sign", &[a], Vec::new()),
                    self.node("Abs", &[a], Vec::new()),
                );
                let whole = self.node("Floor", &[&size], Vec::new());
                self.node("Mul", &[&sign, &whole], Vec::new())
            }
        })
    }

    /// A function of two values of type `dtype`.
    pub(super) fn binary(
        &mut self,
        f: Binary,
        a: &str,
        b: &str,
        dtype: DType,
    ) -> Result<String, Refusal> {
        let plain = match f {
            Binary::Add => "Add",
            Binary::Sub => "Sub",
            Binary::Mul => "Mul",
            Binary::Div => "Div",
            Binary::Pow => "Pow",
            Binary::Min => "Min",
            Binary::Max => "Max",
            Binary::Eq => "Equal",
            Binary::Lt => "Less",
            Binary::Le => "LessOrEqual",
            Binary::Gt => "Greater",
            Binary::Ge => "GreaterOrEqual",
            Binary::And => "And",
            Binary::Or => "Or",
            Binary::Xor => "Xor",
            Binary::Mod if !dtype.is_float() => "Mod",
            Binary::Ne => {
                let equal = self.node("Equal", &[a, b], Vec::new());
                return Ok(self.node("Not", &[&equal], Vec::new()));
            }
            Binary::FloorDiv if dtype.is_float() => {
                let quotient = self.node("Div", &[a, b], Vec::new());
                return Ok(self.node("Floor", &[&quotient], Vec::new()));
            }
            Binary::FloorDiv => {
                let rest = self.node("Mod", &[a, b], Vec::new());
                let whole = self.node("Sub", &[a, &rest], Vec::new());
                return Ok(self.node("Div", &[&whole, b], Vec::new()));
            }
            Binary::Mod => {
                let floor = self.binary(Binary::FloorDiv, a, b, dtype)?;
                let whole = self.node("Mul", &[&floor, b], Vec::new());
                return Ok(self.node("Sub", &[a, &whole], Vec::new()));
            }
            Binary::Atan2 => return Err(Refusal("the standard has no atan2".into())),
        };
        Ok(self.node(plain, &[a, b], Vec::new()))
    }

    /// A sum of positions and sizes, as i64 that broadcasts to the result's shape.
    fn positions(&mut self, e: &SymExpr, of: &Operands) -> Result<String, Refusal> {
        let rank = of.shape.len();
        let var = |d: usize| Symbol::new(format!("i{d}"));
        let mut rest = e.clone();
        let mut sum: Option<String> = None;
        for d in 0..rank {
            let Some((terms, _)) = e.as_affine() else {
                return Err(Refusal(format!("the position `{e}` is not affine")));
            };
            let Some((_, factor)) = terms.into_iter().find(|(s, _)| *s == var(d)) else {
                continue;
            };
            rest = rest - SymExpr::symbol(var(d)) * factor;
            let (zero, one) = (
                self.number(Scalar::Int(0), DType::I64),
                self.number(Scalar::Int(1), DType::I64),
            );
            let size = self.size(&of.shape[d])?;
            let range = self.node("Range", &[&zero, &size, &one], Vec::new());
            let mut shape = vec![1; rank];
            shape[d] = -1;
            let shape = self.ints(&shape);
            let range = self.node("Reshape", &[&range, &shape], Vec::new());
            let factor = self.number(Scalar::Int(factor), DType::I64);
            let term = self.node("Mul", &[&range, &factor], Vec::new());
            sum = Some(match sum {
                Some(s) => self.node("Add", &[&s, &term], Vec::new()),
                None => term,
            });
        }
        let rest = self.size(&rest)?;
        Ok(match sum {
            Some(s) => self.node("Add", &[&s, &rest], Vec::new()),
            None => rest,
        })
    }
}
