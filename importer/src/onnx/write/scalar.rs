//! Scalar expressions as chains of element-wise nodes.

use super::nodes::{Nodes, Refusal, int, type_number};
use super::shifts;
use graph::{Binary, DType, Expr, Scalar, SymExpr, Symbol, Unary};

/// The operands of an expression and the shape it is computed for.
pub(super) struct Operands<'a> {
    /// Names of the inputs.
    pub(super) names: &'a [String],
    /// Their element types.
    pub(super) types: &'a [DType],
    /// Along how many dimensions each is larger than 1.
    pub(super) extents: &'a [usize],
    /// The result's sizes; `i0`, `i1`, … in the expression run over them.
    pub(super) shape: &'a [SymExpr],
}

impl Operands<'_> {
    /// Along how many dimensions the value of an expression may be larger than 1.
    fn extent(&self, e: &Expr) -> usize {
        match e {
            Expr::Const(_) => 0,
            Expr::In(i) => self.extents[*i],
            Expr::Index(_) | Expr::Uniform(..) => self.shape.len(),
            Expr::Cast(_, a) | Expr::Unary(_, a) => self.extent(a),
            Expr::Binary(_, a, b) => self.extent(a).max(self.extent(b)),
            Expr::Select(c, a, b) => self.extent(c).max(self.extent(a)).max(self.extent(b)),
        }
    }

    /// The operands of a chain of sums or products, those of least extent first, so that small values are
    /// combined before they meet large ones; and the result of the chain's numbers. `None`
    /// where order makes no difference.
    fn chain<'e>(
        &self,
        f: Binary,
        e: &'e Expr,
        dtype: DType,
    ) -> Option<(Option<f64>, Vec<&'e Expr>)> {
        if !matches!(f, Binary::Add | Binary::Mul) || !dtype.is_float() {
            return None;
        }
        let (mut open, mut parts, mut numbers) = (vec![e], Vec::new(), Vec::new());
        while let Some(e) = open.pop() {
            match e {
                Expr::Binary(own, a, b)
                    if *own == f && e.natural_dtype(dtype, self.types) == dtype =>
                {
                    open.extend([b.as_ref(), a.as_ref()]);
                }
                _ => match e.as_number() {
                    Some(number) => numbers.push(number),
                    None => parts.push(e),
                },
            }
        }
        let before: Vec<usize> = parts.iter().map(|e| self.extent(e)).collect();
        parts.sort_by_key(|e| self.extent(e));
        let is_sorted = before.windows(2).all(|pair| pair[0] <= pair[1]);
        let changes = numbers.len() > 1 || !is_sorted && parts.len() + numbers.len() > 2;
        let number = match f {
            Binary::Add => numbers.iter().copied().reduce(|a, b| a + b),
            _ => numbers.iter().copied().reduce(|a, b| a * b),
        };
        (changes && !parts.is_empty()).then_some((number, parts))
    }
}

/// Expressions that are one operator of the standard, or a mask; written literally they would be slow
/// selections.
enum Bounded<'e> {
    /// x where it is above 0.
    Relu(&'e Expr),
    /// x within bounds.
    Clip(&'e Expr, f64, f64),
    /// An operand where all comparisons hold, 0 elsewhere.
    Masked(Vec<(Binary, &'e Expr, f64)>, usize),
}

impl<'e> Bounded<'e> {
    fn new(e: &'e Expr) -> Option<Bounded<'e>> {
        Self::clip(e)
            .or_else(|| Self::relu(e))
            .or_else(|| Self::masked(e))
    }

    fn clip(e: &'e Expr) -> Option<Bounded<'e>> {
        if let Expr::Binary(Binary::Min, a, high) = e
            && let Expr::Binary(Binary::Max, x, low) = a.as_ref()
        {
            return Some(Bounded::Clip(x, low.as_number()?, high.as_number()?));
        }
        let (x, low, inside) = Self::above(e)?;
        let Expr::Select(c, limit, inner) = inside else {
            return None;
        };
        match c.as_ref() {
            Expr::Binary(Binary::Ge | Binary::Gt, y, high)
                if (y.as_ref(), inner.as_ref()) == (x, x)
                    && limit.as_number() == high.as_number() =>
            {
                Some(Bounded::Clip(x, low, high.as_number()?))
            }
            _ => None,
        }
    }

    fn relu(e: &'e Expr) -> Option<Bounded<'e>> {
        let (x, low, inside) = Self::above(e)?;
        (inside == x && low == 0.0).then_some(Bounded::Relu(x))
    }

    /// `x ≤ low ? low : inside`, or with `<`
    fn above(e: &'e Expr) -> Option<(&'e Expr, f64, &'e Expr)> {
        match e {
            Expr::Select(c, limit, inside) => match c.as_ref() {
                Expr::Binary(Binary::Le | Binary::Lt, x, low)
                    if low.as_number() == limit.as_number() =>
                {
                    Some((x, low.as_number()?, inside))
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn masked(e: &'e Expr) -> Option<Bounded<'e>> {
        let (mut kept, mut value) = (Vec::new(), e);
        while let Expr::Select(c, zero, inside) = value
            && zero.as_number() == Some(0.0)
            && let Expr::Binary(f, x, limit) = c.as_ref()
            && let (Some(limit), Some(f)) = (limit.as_number(), opposite(*f))
        {
            kept.push((f, x.as_ref(), limit));
            value = inside.as_ref();
        }
        match value {
            Expr::In(i) if !kept.is_empty() => Some(Bounded::Masked(kept, *i)),
            _ => None,
        }
    }
}

/// The comparison that holds where this one does not.
fn opposite(f: Binary) -> Option<Binary> {
    Some(match f {
        Binary::Le => Binary::Gt,
        Binary::Lt => Binary::Ge,
        Binary::Ge => Binary::Lt,
        Binary::Gt => Binary::Le,
        _ => return None,
    })
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
            Expr::Uniform(key, counter) => self.uniform(key, counter, of)?,
            Expr::Select(_, a, b) if a == b && of.extent(a) == of.shape.len() => {
                return self.expression(a, dtype, of);
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
            Expr::Binary(Binary::Min, ..) if natural.is_float() && self.is_bounded(e, of) => {
                return self.bounded(e, (natural, dtype), of);
            }
            Expr::Binary(f @ (Binary::Shl | Binary::Shr), a, b) if !natural.is_float() => {
                let moved = shifts::as_arithmetic(*f, a, b).cast(natural);
                return self.expression(&moved, dtype, of);
            }
            Expr::Binary(f, a, b) => {
                let inner = Expr::operand_dtype(*f, (a, b), natural, of.types);
                if let Some((number, parts)) = of.chain(*f, e, natural) {
                    let (first, rest) = match number {
                        Some(number) => (Expr::float(number), &parts[..]),
                        None => (parts[0].clone(), &parts[1..]),
                    };
                    let mut value = self.expression(&first, inner, of)?;
                    for part in rest {
                        let part = self.expression(part, inner, of)?;
                        value = self.binary(*f, &value, &part, inner)?;
                    }
                    return Ok(self.cast(value, natural, dtype));
                }
                let (a, b) = (
                    self.expression(a, inner, of)?,
                    self.expression(b, inner, of)?,
                );
                self.binary(*f, &a, &b, inner)?
            }
            Expr::Select(..) if natural.is_float() && self.is_bounded(e, of) => {
                return self.bounded(e, (natural, dtype), of);
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

    fn is_bounded(&self, e: &Expr, of: &Operands) -> bool {
        match Bounded::new(e) {
            Some(Bounded::Masked(_, value)) => {
                of.types[value].is_float() && self.is_tame(&of.names[value])
            }
            other => other.is_some(),
        }
    }

    /// An expression that [`Bounded`] recognizes. A mask becomes a factor where its zeros cannot meet an infinity: a
    /// product is several times as fast as a selection.
    fn bounded(
        &mut self,
        e: &Expr,
        (natural, dtype): (DType, DType),
        of: &Operands,
    ) -> Result<String, Refusal> {
        let number = |n: &mut Self, value: f64| n.number(Scalar::Float(value), natural);
        let value = match Bounded::new(e) {
            Some(Bounded::Relu(x)) => {
                let x = self.expression(x, natural, of)?;
                self.node("Relu", &[&x], Vec::new())
            }
            Some(Bounded::Clip(x, low, high)) => {
                let x = self.expression(x, natural, of)?;
                let (low, high) = (number(self, low), number(self, high));
                self.node("Clip", &[&x, &low, &high], Vec::new())
            }
            Some(Bounded::Masked(kept, value)) => {
                let mut mask: Option<String> = None;
                for (f, x, limit) in kept {
                    let dtype = x.natural_dtype(natural, of.types);
                    let x = self.expression(x, dtype, of)?;
                    let limit = self.number(Scalar::Float(limit).cast(dtype), dtype);
                    let holds = self.binary(f, &x, &limit, dtype)?;
                    mask = Some(match mask {
                        Some(others) => self.of2("And", &others, &holds),
                        None => holds,
                    });
                }
                let mask = mask.ok_or(Refusal("a mask without a condition".into()))?;
                let mask = self.cast(mask, DType::Bool, natural);
                let value = of.names[value].clone();
                self.of2("Mul", &value, &mask)
            }
            None => return Err(Refusal("an expression of another form".into())),
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
            // (eˣ + 1)·tanh(x/2): no difference of numbers that are almost equal.
            Unary::Expm1 => {
                let half = self.number(Scalar::Float(0.5), dtype);
                let half = self.of2("Mul", a, &half);
                let tanh = self.node("Tanh", &[&half], Vec::new());
                let e = self.node("Exp", &[a], Vec::new());
                let sum = self.of2("Add", &e, &one);
                self.of2("Mul", &sum, &tanh)
            }
            // Kahan: with u = 1 + x rounded, ln(u)·x/(u − 1) makes up for the rounding.
            Unary::Log1p => {
                let u = self.of2("Add", a, &one);
                let log = self.node("Log", &[&u], Vec::new());
                let kept = self.of2("Sub", &u, &one);
                let ratio = self.of2("Div", a, &kept);
                let mended = self.of2("Mul", &log, &ratio);
                let exact = self.of2("Equal", &kept, a);
                let value = self.node("Where", &[&exact, &log, &mended], Vec::new());
                let zero = self.number(Scalar::Float(0.0), dtype);
                let tiny = self.of2("Equal", &kept, &zero);
                self.node("Where", &[&tiny, a, &value], Vec::new())
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
            Binary::BitAnd | Binary::BitOr | Binary::BitXor | Binary::Shl | Binary::Shr
                if !dtype.is_int() =>
            {
                return Err(Refusal(format!("{dtype} has no bits to compute with")));
            }
            Binary::BitAnd => "BitwiseAnd",
            Binary::BitOr => "BitwiseOr",
            Binary::BitXor => "BitwiseXor",
            Binary::Shl | Binary::Shr => {
                return Err(Refusal("a shift of bits, not written as arithmetic".into()));
            }
            Binary::Atan2 => return Err(Refusal("the standard has no atan2".into())),
        };
        Ok(self.node(plain, &[a, b], Vec::new()))
    }

    /// A uniform number for each element of the result. An ONNX runtime draws its own, so they are drawn once and used
    /// wherever the same numbers occur again.
    fn uniform(&mut self, key: &Expr, counter: &Expr, of: &Operands) -> Result<String, Refusal> {
        let var = |d: usize| SymExpr::symbol(Symbol::new(format!("i{d}")));
        let row_major = (0..of.shape.len()).fold(SymExpr::constant(0), |at, d| {
            at * of.shape[d].clone() + var(d)
        });
        if !matches!(counter, Expr::Index(at) if *at == row_major) {
            return Err(Refusal(
                "random numbers that are not drawn in the order of the result's elements".into(),
            ));
        }
        // Two calls may read one seed at different positions.
        let inputs = key.inputs();
        let position = |i: &usize| inputs.iter().position(|own| own == i);
        let key = key.map_leaves(&|leaf| match leaf {
            Expr::In(i) => position(i).map(Expr::In),
            _ => None,
        });
        let seeds: Vec<&String> = inputs.iter().map(|i| &of.names[*i]).collect();
        let seeds = format!("{key:?} of {seeds:?}");
        let sizes = self.shape(of.shape)?;
        if let Some((known, value)) = self.drawn.get(&seeds) {
            return match *known == sizes {
                true => Ok(value.clone()),
                false => Err(Refusal("the same random numbers in two shapes".into())),
            };
        }
        let like = self.node("ConstantOfShape", &[&sizes], Vec::new());
        let dtype = int("dtype", type_number(DType::F32).into());
        let value = self.node("RandomUniformLike", &[&like], vec![dtype]);
        self.drawn.insert(seeds, (sizes, value.clone()));
        Ok(value)
    }

    /// A sum of positions and sizes, as i64 that broadcasts to the result's shape.
    fn positions(&mut self, e: &SymExpr, of: &Operands) -> Result<String, Refusal> {
        let rank = of.shape.len();
        let var = |d: usize| Symbol::new(format!("i{d}"));
        let mut rest = e.clone();
        let mut sum: Option<String> = None;
        // Sizes may be multiplied and divided; positions may not.
        for d in (0..rank).filter(|d| e.mentions(&var(*d))) {
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
