//! Tasklet expressions: the scalar arithmetic inside maps, as immutable shared trees.
//!
//! An expression computes one scalar from the tasklet's inputs (`In(i)`), map parameters and
//! sizes (`Index`), and constants. Its meaning is [`Expr::eval`]; its derivative with respect to
//! an input is [`Expr::derivative`]. Random numbers are counter-based (Philox 4x32-10,
//! Salmon et al., SC'11): a pure function of key and counter, so they can be recomputed.

use crate::dtype::DType;
use crate::function::{Binary, Unary};
use crate::philox;
use crate::scalar::Scalar;
use crate::size::{SizeError, SymExpr, Symbol};
use std::sync::Arc;

/// A scalar expression.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Expr {
    /// A constant.
    Const(Scalar),
    /// The tasklet's input of that position.
    In(usize),
    /// An integer from map parameters and sizes.
    Index(SymExpr),
    /// A function of one operand.
    Unary(Unary, Arc<Expr>),
    /// A function of two operands.
    Binary(Binary, Arc<Expr>, Arc<Expr>),
    /// `condition ? then : otherwise`; the branch not taken has no effect.
    Select(Arc<Expr>, Arc<Expr>, Arc<Expr>),
    /// Conversion to a type.
    Cast(DType, Arc<Expr>),
    /// Uniform number in [0, 1) with 24 bits from (key, counter), both integers.
    Uniform(Arc<Expr>, Arc<Expr>),
}

/// Shorthand to build expressions: `x().mul(c(2.0))`.
impl Expr {
    /// A real constant.
    pub fn float(value: f64) -> Expr {
        Expr::Const(Scalar::Float(value))
    }
    /// An integer constant.
    pub fn int(value: i64) -> Expr {
        Expr::Const(Scalar::Int(value))
    }
    /// A function of one operand.
    pub fn unary(f: Unary, x: Expr) -> Expr {
        Expr::Unary(f, Arc::new(x))
    }
    /// A function of two operands.
    pub fn binary(f: Binary, a: Expr, b: Expr) -> Expr {
        Expr::Binary(f, Arc::new(a), Arc::new(b))
    }
    /// The type in which the expression is computed if its value is wanted as `wanted`: its own type,
    /// unless it is made of real constants only; then a wanted float type.
    pub fn natural_dtype(&self, wanted: DType, types: &[DType]) -> DType {
        let own = self.dtype(types);
        if own == DType::F32 && wanted.is_float() && self.is_weak(types) {
            return wanted;
        }
        own
    }

    /// The type to which the operands of `f` are converted, if its result has type `natural`.
    pub fn operand_dtype(
        f: Binary,
        (a, b): (&Expr, &Expr),
        natural: DType,
        types: &[DType],
    ) -> DType {
        match f {
            Binary::And | Binary::Or | Binary::Xor => DType::Bool,
            Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => {
                Expr::binary(Binary::Add, a.clone(), b.clone()).dtype(types)
            }
            _ => natural,
        }
    }

    /// Whether no operand decides the type. Then half precision, the narrowest float, prevails beside it.
    fn is_weak(&self, types: &[DType]) -> bool {
        let mut extended = types.to_vec();
        extended.push(DType::F16);
        let probe = Expr::binary(Binary::Add, self.clone(), Expr::In(types.len()));
        probe.dtype(&extended) == DType::F16
    }

    /// `condition ? then : otherwise`.
    pub fn select(condition: Expr, then: Expr, otherwise: Expr) -> Expr {
        Expr::Select(Arc::new(condition), Arc::new(then), Arc::new(otherwise))
    }
    /// Conversion.
    pub fn cast(self, dtype: DType) -> Expr {
        Expr::Cast(dtype, Arc::new(self))
    }

    /// The constant's value as a float, if it is a numeric constant.
    pub fn as_number(&self) -> Option<f64> {
        match self {
            Expr::Const(s @ (Scalar::Float(_) | Scalar::Int(_))) => Some(s.as_f64()),
            _ => None,
        }
    }

    /// Positions of inputs that occur, sorted, each once.
    pub fn inputs(&self) -> Vec<usize> {
        let mut found = Vec::new();
        self.visit(&mut |e| {
            if let Expr::In(i) = e {
                found.push(*i);
            }
        });
        found.sort_unstable();
        found.dedup();
        found
    }

    /// The operands, in order; for a `Select` the condition first.
    pub fn children(&self) -> impl Iterator<Item = &Expr> {
        let (a, b, c) = match self {
            Expr::Const(_) | Expr::In(_) | Expr::Index(_) => (None, None, None),
            Expr::Unary(_, a) | Expr::Cast(_, a) => (Some(a), None, None),
            Expr::Binary(_, a, b) | Expr::Uniform(a, b) => (Some(a), Some(b), None),
            Expr::Select(a, b, c) => (Some(a), Some(b), Some(c)),
        };
        [a, b, c].into_iter().flatten().map(Arc::as_ref)
    }

    /// The same function of `f` of each operand.
    pub fn map_children(&self, mut f: impl FnMut(&Expr) -> Expr) -> Expr {
        let mut go = |e: &Arc<Expr>| Arc::new(f(e));
        match self {
            Expr::Const(_) | Expr::In(_) | Expr::Index(_) => self.clone(),
            Expr::Unary(of, a) => Expr::Unary(*of, go(a)),
            Expr::Cast(to, a) => Expr::Cast(*to, go(a)),
            Expr::Binary(of, a, b) => Expr::Binary(*of, go(a), go(b)),
            Expr::Uniform(key, n) => Expr::Uniform(go(key), go(n)),
            Expr::Select(c, a, b) => Expr::Select(go(c), go(a), go(b)),
        }
    }

    /// Calls `f` on every node of the tree, parents first.
    pub fn visit(&self, f: &mut dyn FnMut(&Expr)) {
        f(self);
        self.children().for_each(|child| child.visit(f));
    }

    /// The tree with leaves (`In`, `Index`, `Const`) replaced where `leaf` gives something.
    pub fn map_leaves(&self, leaf: &dyn Fn(&Expr) -> Option<Expr>) -> Expr {
        match self {
            Expr::Const(_) | Expr::In(_) | Expr::Index(_) => {
                leaf(self).unwrap_or_else(|| self.clone())
            }
            _ => self.map_children(|child| child.map_leaves(leaf)),
        }
    }

    /// The type of the value, given the types of the inputs. Real constants take the type of
    /// what they meet (an `f32` times `2.0` stays `f32`); alone they are `f32`.
    pub fn dtype(&self, inputs: &[DType]) -> DType {
        self.dtype_or_weak(inputs).unwrap_or(DType::F32)
    }

    fn dtype_or_weak(&self, inputs: &[DType]) -> Option<DType> {
        use Binary::*;
        match self {
            Expr::Const(Scalar::Float(_)) => None,
            Expr::Const(Scalar::Int(_)) | Expr::Index(_) => Some(DType::I64),
            Expr::Const(Scalar::Bool(_)) => Some(DType::Bool),
            Expr::In(i) => inputs.get(*i).copied(),
            Expr::Cast(d, _) => Some(*d),
            Expr::Uniform(..) => Some(DType::F32),
            Expr::Unary(Unary::Not | Unary::IsNan, _) => Some(DType::Bool),
            Expr::Unary(Unary::Neg | Unary::Abs | Unary::Sign, a) => a.dtype_or_weak(inputs),
            Expr::Unary(_, a) => a.dtype_or_weak(inputs).filter(|d| d.is_float()),
            Expr::Binary(Eq | Ne | Lt | Le | Gt | Ge | And | Or | Xor, ..) => Some(DType::Bool),
            Expr::Binary(f, a, b) => {
                let joined = join(a.strength(inputs), b.strength(inputs));
                joined.filter(|d| !matches!(f, Div | Atan2) || d.is_float())
            }
            Expr::Select(_, a, b) => join(a.strength(inputs), b.strength(inputs)),
        }
    }

    /// Type with a mark for literals: an integer literal never widens a narrower operand.
    fn strength(&self, inputs: &[DType]) -> (Option<DType>, bool) {
        (self.dtype_or_weak(inputs), self.is_int_literal())
    }

    /// Whether it is an integer made of literals alone.
    pub(crate) fn is_int_literal(&self) -> bool {
        use Binary::*;
        match self {
            Expr::Const(Scalar::Int(_)) | Expr::Index(_) => true,
            Expr::Unary(Unary::Neg | Unary::Abs | Unary::Sign, a) => a.is_int_literal(),
            Expr::Binary(
                Add | Sub | Mul | FloorDiv | Mod | Pow | Min | Max | BitAnd | BitOr | BitXor | Shl
                | Shr,
                a,
                b,
            )
            | Expr::Select(_, a, b) => a.is_int_literal() && b.is_int_literal(),
            _ => false,
        }
    }

    /// Value for inputs and index values; `Uniform` follows [`philox::uniform`].
    ///
    /// # Errors
    /// A symbol in an `Index` without a value.
    pub fn eval(
        &self,
        inputs: &[Scalar],
        value_of: &dyn Fn(&Symbol) -> Option<i64>,
    ) -> Result<Scalar, SizeError> {
        Ok(match self {
            Expr::Const(s) => *s,
            Expr::In(i) => inputs[*i],
            Expr::Index(e) => Scalar::Int(e.eval_with(value_of)?),
            Expr::Unary(f, a) => f.eval(a.eval(inputs, value_of)?),
            Expr::Binary(f, a, b) => f.eval(a.eval(inputs, value_of)?, b.eval(inputs, value_of)?),
            Expr::Select(c, a, b) => {
                let taken = if c.eval(inputs, value_of)?.as_bool() {
                    a
                } else {
                    b
                };
                taken.eval(inputs, value_of)?
            }
            Expr::Cast(d, a) => {
                let v = a.eval(inputs, value_of)?;
                if d.is_float() {
                    Scalar::Float(v.as_f64())
                } else {
                    v.cast(*d)
                }
            }
            Expr::Uniform(k, n) => Scalar::Float(f64::from(philox::uniform(
                k.eval(inputs, value_of)?.as_i64() as u64,
                n.eval(inputs, value_of)?.as_i64() as u64,
            ))),
        })
    }
}

fn join(a: (Option<DType>, bool), b: (Option<DType>, bool)) -> Option<DType> {
    match (a, b) {
        ((Some(x), true), (Some(y), false)) if y != DType::Bool => Some(y).filter(|_| x.is_int()),
        ((Some(x), false), (Some(y), true)) if x != DType::Bool => Some(x).filter(|_| y.is_int()),
        ((Some(x), _), (Some(y), _)) => Some(x.promote(y)),
        ((Some(x), _), (None, _)) | ((None, _), (Some(x), _)) => x.is_float().then_some(x),
        ((None, _), (None, _)) => None,
    }
}

macro_rules! methods {
    ($($name:ident => $kind:ident),*) => { impl Expr { $(
        #[doc = concat!("`", stringify!($name), "(self, other)`, see [`Binary::", stringify!($kind), "`].")]
        #[allow(clippy::should_implement_trait)]
        pub fn $name(self, other: Expr) -> Expr { Expr::binary(Binary::$kind, self, other) }
    )* } };
}
methods!(add => Add, sub => Sub, mul => Mul, div => Div, pow => Pow, min => Min, max => Max,
         eq_ => Eq, lt => Lt, le => Le, gt => Gt, ge => Ge, and => And, or => Or);

macro_rules! unary_methods {
    ($($name:ident => $kind:ident),*) => { impl Expr { $(
        #[doc = concat!("See [`Unary::", stringify!($kind), "`].")]
        #[allow(clippy::should_implement_trait)]
        pub fn $name(self) -> Expr { Expr::unary(Unary::$kind, self) }
    )* } };
}
unary_methods!(neg => Neg, abs => Abs, exp => Exp, log => Log, log1p => Log1p, sqrt => Sqrt,
    rsqrt => Rsqrt, recip => Recip, tanh => Tanh, erf => Erf, sigmoid => Sigmoid, sin => Sin, cos => Cos,
    sign => Sign, not => Not, is_nan => IsNan, floor => Floor, expm1 => Expm1);
