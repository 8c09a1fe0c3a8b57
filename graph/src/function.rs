//! The functions of tasklet expressions: their names in text form and their values.

use crate::scalar::Scalar;

/// One-operand functions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Unary {
    /// −x
    Neg,
    /// |x|
    Abs,
    /// eˣ
    Exp,
    /// ln x
    Log,
    /// eˣ − 1
    Expm1,
    /// ln(1 + x)
    Log1p,
    /// √x
    Sqrt,
    /// 1/√x
    Rsqrt,
    /// 1/x
    Recip,
    /// sin x
    Sin,
    /// cos x
    Cos,
    /// tan x
    Tan,
    /// tanh x
    Tanh,
    /// error function
    Erf,
    /// 1/(1 + e⁻ˣ)
    Sigmoid,
    /// largest integer not above x
    Floor,
    /// smallest integer not below x
    Ceil,
    /// nearest integer, ties to even
    Round,
    /// x without its fraction
    Trunc,
    /// −1, 0 or 1 (NaN stays NaN)
    Sign,
    /// logical not
    Not,
    /// whether x is NaN
    IsNan,
    /// arctan
    Atan,
    /// arcsin
    Asin,
    /// arccos
    Acos,
    /// sinh
    Sinh,
    /// cosh
    Cosh,
    /// inverse of sinh
    Asinh,
    /// inverse of cosh
    Acosh,
    /// inverse of tanh
    Atanh,
}

/// Two-operand functions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Binary {
    /// a + b
    Add,
    /// a − b
    Sub,
    /// a · b
    Mul,
    /// a / b (real division, also of integers)
    Div,
    /// ⌊a / b⌋
    FloorDiv,
    /// a − b·⌊a/b⌋
    Mod,
    /// aᵇ
    Pow,
    /// the smaller; NaN if either is NaN
    Min,
    /// the larger; NaN if either is NaN
    Max,
    /// a = b
    Eq,
    /// a ≠ b
    Ne,
    /// a < b
    Lt,
    /// a ≤ b
    Le,
    /// a > b
    Gt,
    /// a ≥ b
    Ge,
    /// logical and
    And,
    /// logical or
    Or,
    /// logical exclusive or
    Xor,
    /// angle of (b, a)
    Atan2,
    /// bitwise and of integers; 0 of real numbers
    BitAnd,
    /// bitwise or of integers; 0 of real numbers
    BitOr,
    /// bitwise exclusive or of integers; 0 of real numbers
    BitXor,
    /// a·2ᵇ of integers, without the bits that their type has no room for; 0 if b < 0 or b > 63; 0 of real numbers
    Shl,
    /// ⌊a / 2ᵇ⌋ of integers; if b < 0 or b > 63: 0, or −1 if a < 0; 0 of real numbers
    Shr,
}

impl Unary {
    /// Every function.
    pub const ALL: [Unary; 30] = {
        use Unary::*;
        [
            Neg, Abs, Exp, Log, Expm1, Log1p, Sqrt, Rsqrt, Recip, Sin, Cos, Tan, Tanh, Erf,
            Sigmoid, Floor, Ceil, Round, Trunc, Sign, Not, IsNan, Atan, Asin, Acos, Sinh, Cosh,
            Asinh, Acosh, Atanh,
        ]
    };

    /// The name in text form.
    pub fn name(self) -> &'static str {
        use Unary::*;
        match self {
            Neg => "neg",
            Abs => "abs",
            Exp => "exp",
            Log => "log",
            Expm1 => "expm1",
            Log1p => "log1p",
            Sqrt => "sqrt",
            Rsqrt => "rsqrt",
            Recip => "recip",
            Sin => "sin",
            Cos => "cos",
            Tan => "tan",
            Tanh => "tanh",
            Erf => "erf",
            Sigmoid => "sigmoid",
            Floor => "floor",
            Ceil => "ceil",
            Round => "round",
            Trunc => "trunc",
            Sign => "sign",
            Not => "not",
            IsNan => "isnan",
            Atan => "atan",
            Asin => "asin",
            Acos => "acos",
            Sinh => "sinh",
            Cosh => "cosh",
            Asinh => "asinh",
            Acosh => "acosh",
            Atanh => "atanh",
        }
    }

    pub(crate) fn eval(self, x: Scalar) -> Scalar {
        use Unary::*;
        match (self, x) {
            (Neg, Scalar::Int(i)) => return Scalar::Int(i.wrapping_neg()),
            (Abs, Scalar::Int(i)) => return Scalar::Int(i.wrapping_abs()),
            (Sign, Scalar::Int(i)) => return Scalar::Int(i.signum()),
            (Not, x) => return Scalar::Bool(!x.as_bool()),
            (IsNan, x) => return Scalar::Bool(x.as_f64().is_nan()),
            _ => {}
        }
        let v = x.as_f64();
        Scalar::Float(match self {
            Neg => -v,
            Abs => v.abs(),
            Exp => v.exp(),
            Log => v.ln(),
            Expm1 => v.exp_m1(),
            Log1p => v.ln_1p(),
            Sqrt => v.sqrt(),
            Rsqrt => v.sqrt().recip(),
            Recip => v.recip(),
            Sin => v.sin(),
            Cos => v.cos(),
            Tan => v.tan(),
            Tanh => v.tanh(),
            Erf => libm::erf(v),
            Sigmoid => (1.0 + (-v).exp()).recip(),
            Floor => v.floor(),
            Ceil => v.ceil(),
            Round => v.round_ties_even(),
            Trunc => v.trunc(),
            Sign if v == 0.0 || v.is_nan() => v,
            Sign => v.signum(),
            Atan => v.atan(),
            Asin => v.asin(),
            Acos => v.acos(),
            Sinh => v.sinh(),
            Cosh => v.cosh(),
            Asinh => v.asinh(),
            Acosh => v.acosh(),
            Atanh => v.atanh(),
            Not | IsNan => f64::NAN,
        })
    }
}

impl Binary {
    /// Every function.
    pub const ALL: [Binary; 24] = {
        use Binary::*;
        [
            Add, Sub, Mul, Div, FloorDiv, Mod, Pow, Min, Max, Eq, Ne, Lt, Le, Gt, Ge, And, Or, Xor,
            Atan2, BitAnd, BitOr, BitXor, Shl, Shr,
        ]
    };

    /// The name in text form.
    pub fn name(self) -> &'static str {
        use Binary::*;
        match self {
            Add => "add",
            Sub => "sub",
            Mul => "mul",
            Div => "div",
            FloorDiv => "floordiv",
            Mod => "mod",
            Pow => "pow",
            Min => "min",
            Max => "max",
            Eq => "eq",
            Ne => "ne",
            Lt => "lt",
            Le => "le",
            Gt => "gt",
            Ge => "ge",
            And => "and",
            Or => "or",
            Xor => "xor",
            Atan2 => "atan2",
            BitAnd => "bitand",
            BitOr => "bitor",
            BitXor => "bitxor",
            Shl => "shl",
            Shr => "shr",
        }
    }

    /// The value of the function; also the meaning of conflict resolutions.
    pub fn eval(self, a: Scalar, b: Scalar) -> Scalar {
        use Binary::*;
        if let (Scalar::Float(_), _) | (_, Scalar::Float(_)) = (a, b) {
            return self.eval_float(a.as_f64(), b.as_f64());
        }
        let (x, y) = (a.as_i64(), b.as_i64());
        Scalar::Int(match self {
            Add => x.wrapping_add(y),
            Sub => x.wrapping_sub(y),
            Mul => x.wrapping_mul(y),
            Div | Atan2 => return self.eval_float(x as f64, y as f64),
            FloorDiv if y == 0 => 0,
            FloorDiv => {
                let is_below = y < 0 && x.wrapping_rem_euclid(y) != 0;
                x.wrapping_div_euclid(y).wrapping_sub(i64::from(is_below))
            }
            Mod if y == 0 => 0,
            Mod => {
                let r = x.wrapping_rem_euclid(y);
                if r != 0 && y < 0 { r + y } else { r }
            }
            Pow if y < 0 && x == -1 => 1 - 2 * (y & 1),
            Pow if y < 0 => i64::from(x == 1),
            Pow => x.wrapping_pow(y.min(i64::from(u32::MAX)) as u32),
            Min => x.min(y),
            Max => x.max(y),
            Eq => return Scalar::Bool(x == y),
            Ne => return Scalar::Bool(x != y),
            Lt => return Scalar::Bool(x < y),
            Le => return Scalar::Bool(x <= y),
            Gt => return Scalar::Bool(x > y),
            Ge => return Scalar::Bool(x >= y),
            And => return Scalar::Bool(x != 0 && y != 0),
            Or => return Scalar::Bool(x != 0 || y != 0),
            Xor => return Scalar::Bool((x != 0) != (y != 0)),
            BitAnd => x & y,
            BitOr => x | y,
            BitXor => x ^ y,
            Shl if (0..64).contains(&y) => x.wrapping_shl(y as u32),
            Shl => 0,
            Shr if (0..64).contains(&y) => x.wrapping_shr(y as u32),
            Shr => x >> 63,
        })
    }

    fn eval_float(self, x: f64, y: f64) -> Scalar {
        use Binary::*;
        let nan_or = |v: f64| {
            if x.is_nan() || y.is_nan() {
                f64::NAN
            } else {
                v
            }
        };
        Scalar::Float(match self {
            Add => x + y,
            Sub => x - y,
            Mul => x * y,
            Div => x / y,
            FloorDiv => (x / y).floor(),
            Mod => {
                let r = x % y;
                if r != 0.0 && (r < 0.0) != (y < 0.0) {
                    r + y
                } else {
                    r
                }
            }
            Pow => x.powf(y),
            // If both are zeros with different signs, the first is the result.
            Min => nan_or(if y < x { y } else { x }),
            Max => nan_or(if y > x { y } else { x }),
            Atan2 => x.atan2(y),
            Eq => return Scalar::Bool(x == y),
            Ne => return Scalar::Bool(x != y),
            Lt => return Scalar::Bool(x < y),
            Le => return Scalar::Bool(x <= y),
            Gt => return Scalar::Bool(x > y),
            Ge => return Scalar::Bool(x >= y),
            And => return Scalar::Bool(x != 0.0 && y != 0.0),
            Or => return Scalar::Bool(x != 0.0 || y != 0.0),
            Xor => return Scalar::Bool((x != 0.0) != (y != 0.0)),
            BitAnd | BitOr | BitXor | Shl | Shr => 0.0,
        })
    }
}
