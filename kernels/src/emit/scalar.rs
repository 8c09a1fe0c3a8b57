//! Scalar C: types, literals and the text of every tasklet operation.
//!
//! Owns the spelling only; the functions `sh_*` are in the C prelude. A value of a half-precision type
//! is held as its bits, which nothing computes with: casts widen and round it.

use crate::halves;
use graph::{Binary, DType, Reduction, Scalar, Unary};

/// Functions on indices and integers that the kernels of this room share, in C. `ix_floordiv0` and `ix_mod0` take
/// the user's numbers: a quotient by 0 is 0, as in the interpreter. The smallest number divided by -1 wraps; the
/// processor would raise a signal.
pub const INTEGER_SUPPORT: &str = "\
static inline long ix_floordiv(long a, long b) { long q = a / b; return q - (a % b != 0 && (a < 0) != (b < 0)); }
static inline long ix_ceildiv(long a, long b) { return -ix_floordiv(-a, b); }
static inline long ix_mod(long a, long b) { return a - b * ix_floordiv(a, b); }
static inline long ix_min(long a, long b) { return a < b ? a : b; }
static inline long ix_max(long a, long b) { return a > b ? a : b; }
static inline int ix_min32(int a, int b) { return a < b ? a : b; }
static inline int ix_max32(int a, int b) { return a > b ? a : b; }
static inline int ix_int(float a) { return a >= -0x1p31f && a < 0x1p31f ? (int)a : (-2147483647 - 1); }
static inline int ix_int_f64(double a) { return a > -0x1.00000002p31 && a < 0x1p31 ? (int)a : (-2147483647 - 1); }
static inline long ix_long(float a) { return a >= -0x1p63f && a < 0x1p63f ? (long)a : (-0x7fffffffffffffffL - 1); }
static inline long ix_long_f64(double a) { return a >= -0x1p63 && a < 0x1p63 ? (long)a : (-0x7fffffffffffffffL - 1); }
static inline long ix_abs(long a) { return a < 0 ? (long)(0 - (unsigned long)a) : a; }
static inline long ix_sign(long a) { return (a > 0) - (a < 0); }
static inline int ix_isnan(double a) { return a != a; }
static inline int ix_isnanf(float a) { return a != a; }
static inline long ix_floordiv0(long a, long b) {
  if (b == 0) return 0;
  return b == -1 ? (long)(0 - (unsigned long)a) : ix_floordiv(a, b);
}
static inline long ix_mod0(long a, long b) {
  if (b == 0 || b == -1) return 0;
  long r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
static inline long ix_shl(long a, long n) { return n < 0 || n > 63 ? 0 : (long)((unsigned long)a << n); }
static inline long ix_shr(long a, long n) { return a >> (n < 0 || n > 63 ? 63 : n); }
static inline long ix_pow(long a, long n) {
  if (n < 0) return a == -1 ? 1 - 2 * (n & 1) : a == 1;
  unsigned long r = 1, b = (unsigned long)a;
  for (; n > 0; n >>= 1, b *= b) if (n & 1) r *= b;
  return (long)r;
}
";

/// The C type that holds an element in memory.
pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool | DType::U8 => "unsigned char",
        DType::I8 => "signed char",
        DType::I16 => "short",
        DType::F16 | DType::BF16 => "unsigned short",
        DType::I32 => "int",
        DType::I64 => "long",
        DType::F32 => "float",
        DType::F64 => "double",
    }
}

/// The C type of a value in a register.
pub fn value_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "int",
        d => c_type(d),
    }
}

/// The type in which a sum over many elements is kept between blocks.
pub fn wide_type(dtype: DType, reduction: Reduction) -> DType {
    match (dtype, reduction) {
        (DType::F32, Reduction::Sum | Reduction::Prod) => DType::F64,
        (d, _) => d,
    }
}

/// A literal of type `dtype`.
pub fn literal(s: Scalar, dtype: DType) -> String {
    match dtype {
        DType::F32 => float_literal(f64::from(s.as_f64() as f32), "f"),
        DType::F64 => float_literal(s.as_f64(), ""),
        DType::F16 | DType::BF16 => halves::bits(dtype, s.as_f64()).to_string(),
        DType::Bool => i64::from(s.as_bool()).to_string(),
        DType::I64 if s.as_i64() == i64::MIN => "(-9223372036854775807L - 1)".to_string(),
        DType::I64 => format!("{}L", s.as_i64()),
        _ => s.cast(dtype).as_i64().to_string(),
    }
}

fn float_literal(v: f64, suffix: &str) -> String {
    if v.is_nan() {
        return format!("__builtin_nan{suffix}(\"\")");
    }
    if v.is_infinite() {
        let sign = if v < 0.0 { "-" } else { "" };
        return format!("({sign}__builtin_inf{suffix}())");
    }
    let text = if suffix == "f" {
        format!("{:?}", v as f32)
    } else {
        format!("{v:?}")
    };
    if v.is_sign_negative() {
        format!("({text}{suffix})")
    } else {
        format!("{text}{suffix}")
    }
}

/// Conversion of a value.
pub fn cast(text: &str, from: DType, to: DType) -> String {
    match (from, to) {
        (a, b) if a == b => text.to_string(),
        (DType::F16 | DType::BF16, _) => {
            let single = format!("sh_from_{}({text})", from.name());
            cast(&single, DType::F32, to)
        }
        (_, DType::F16 | DType::BF16) => {
            let single = cast(text, from, DType::F32);
            format!("sh_to_{}({single})", to.name())
        }
        (_, DType::Bool) => format!("({text} != 0)"),
        // As PyTorch does: by way of 64 bits, of which a double may use more than 32.
        (DType::F64, d @ DType::U8) => {
            format!("({})(unsigned char)ix_long_f64({text})", value_type(d))
        }
        // A number outside of the range becomes the smallest integer, as on x86. A compiler may turn
        // a plain cast to an integer and back into a rounding, which has no range.
        (DType::F32, DType::I64) => format!("ix_long({text})"),
        (DType::F64, DType::I64) => format!("ix_long_f64({text})"),
        (DType::F32, d) if !d.is_float() => narrowed(&format!("ix_int({text})"), d),
        (DType::F64, d) if !d.is_float() => narrowed(&format!("ix_int_f64({text})"), d),
        (_, d) => format!("({}){text}", value_type(d)),
    }
}

/// An `int` as a value of a narrower type of integers, of which only the lowest bits stay.
fn narrowed(int: &str, to: DType) -> String {
    let stored = match to {
        DType::U8 => "(unsigned char)",
        DType::I8 => "(signed char)",
        DType::I16 => "(short)",
        _ => "",
    };
    format!("({}){stored}{int}", value_type(to))
}

/// `f(a)` computed in `dtype`; the result of `Not` and `IsNan` is `int`.
pub fn unary(f: Unary, a: &str, of: DType) -> String {
    use Unary::*;
    if !of.is_float() {
        return match f {
            Neg => wrapping("-", "0", a, of),
            Abs => format!("(({})ix_abs({a}))", value_type(of)),
            Sign => format!("ix_sign({a})"),
            Not => format!("!{a}"),
            _ => "0".to_string(),
        };
    }
    let (suffix, one) = if of == DType::F32 {
        ("f", "1.0f")
    } else {
        ("", "1.0")
    };
    let builtin = |name: &str| format!("__builtin_{name}{suffix}({a})");
    match f {
        Neg => format!("(-{a})"),
        Not => format!("({a} == 0)"),
        IsNan => format!("ix_isnan{suffix}({a})"),
        Recip => format!("({one} / {a})"),
        Rsqrt => format!("({one} / __builtin_sqrt{suffix}({a}))"),
        Abs => builtin("fabs"),
        Sqrt => builtin("sqrt"),
        Floor => builtin("floor"),
        Ceil => builtin("ceil"),
        Round => builtin("rint"),
        Trunc => builtin("trunc"),
        _ => format!("sh_{}{}({a})", f.name(), prelude_suffix(of)),
    }
}

/// What ends the names of the prelude's functions of a type.
pub fn prelude_suffix(of: DType) -> &'static str {
    if of == DType::F64 { "_f64" } else { "" }
}

/// `a op b` on integers, modulo their width as in PyTorch: C promotes narrow ones to `int` and leaves
/// the overflow of signed ones undefined.
fn wrapping(op: &str, a: &str, b: &str, of: DType) -> String {
    let unsigned = match of {
        DType::I64 => "unsigned long",
        _ => "unsigned int",
    };
    let result = value_type(of);
    format!("(({result})(({unsigned}){a} {op} ({unsigned}){b}))")
}

/// `f(a, b)` with operands of type `of`; the result of comparisons and logic is `int`.
pub fn binary(f: Binary, a: &str, b: &str, of: DType) -> String {
    use Binary::*;
    let float = of.is_float();
    let call = |name: &str| format!("{name}{}({a}, {b})", prelude_suffix(of));
    match f {
        Add if !float => wrapping("+", a, b, of),
        Sub if !float => wrapping("-", a, b, of),
        Mul if !float => wrapping("*", a, b, of),
        Add => format!("({a} + {b})"),
        Sub => format!("({a} - {b})"),
        Mul => format!("({a} * {b})"),
        Div => format!("({a} / {b})"),
        FloorDiv if float => call("sh_floordiv"),
        Mod if float => call("sh_mod"),
        FloorDiv if of == DType::I64 => format!("ix_floordiv0({a}, {b})"),
        FloorDiv => format!("(({})ix_floordiv0({a}, {b}))", value_type(of)),
        Mod => format!("ix_mod0({a}, {b})"),
        Pow if float => call("sh_pow"),
        Pow => format!("(({})ix_pow({a}, {b}))", value_type(of)),
        Min if float => call("sh_min"),
        Max if float => call("sh_max"),
        Min if of != DType::I64 => format!("ix_min32({a}, {b})"),
        Max if of != DType::I64 => format!("ix_max32({a}, {b})"),
        Min => format!("ix_min({a}, {b})"),
        Max => format!("ix_max({a}, {b})"),
        Eq => format!("({a} == {b})"),
        Ne => format!("({a} != {b})"),
        Lt => format!("({a} < {b})"),
        Le => format!("({a} <= {b})"),
        Gt => format!("({a} > {b})"),
        Ge => format!("({a} >= {b})"),
        And => format!("({a} & {b})"),
        Or => format!("({a} | {b})"),
        Xor => format!("({a} ^ {b})"),
        Atan2 => call("sh_atan2"),
        BitAnd | BitOr | BitXor | Shl | Shr if float => literal(Scalar::Float(0.0), of),
        BitAnd => wrapping("&", a, b, of),
        BitOr => wrapping("|", a, b, of),
        BitXor => wrapping("^", a, b, of),
        Shl => format!("(({})ix_shl({a}, {b}))", value_type(of)),
        Shr => format!("(({})ix_shr({a}, {b}))", value_type(of)),
    }
}

/// The clause that makes a vector loop reduce into `acc`, of type `dtype`.
pub fn simd_clause(reduction: Reduction, dtype: DType, acc: &str) -> String {
    let op = match (reduction, dtype.is_float()) {
        (Reduction::Sum, _) => "+",
        (Reduction::Prod, _) => "*",
        (Reduction::Max, true) => "sh_max",
        (Reduction::Min, true) => "sh_min",
        (Reduction::Max, false) => "max",
        (Reduction::Min, false) => "min",
    };
    format!(" reduction({op}:{acc})")
}
