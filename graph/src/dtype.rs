//! Element types and their promotion.

use std::fmt;

/// The type of one element.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum DType {
    /// Truth value, one byte.
    Bool,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 10] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];

    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            DType::Bool | DType::U8 | DType::I8 => 1,
            DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        self >= DType::F16
    }

    /// Whether it is an integer type (not `bool`).
    pub fn is_int(self) -> bool {
        !self.is_float() && self != DType::Bool
    }

    /// The name used in text form (`f32`, `i64`, `bool`).
    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::U8 => "u8",
            DType::I8 => "i8",
            DType::I16 => "i16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            DType::F64 => "f64",
        }
    }

    /// The type of that name.
    pub fn parse(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// The type two operands are brought to: floats win over integers, wide over narrow,
    /// f16 with bf16 gives f32, unsigned with signed gives the next wider signed (as PyTorch does).
    pub fn promote(self, other: DType) -> DType {
        use DType::*;
        match (self.min(other), self.max(other)) {
            (a, b) if a == b => a,
            (F16, BF16) => F32,
            (U8, I8) => I16,
            (_, b) => b,
        }
    }

    /// The type that values of this type are computed in: half precision is for memory only.
    pub fn arithmetic(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            d => d,
        }
    }

    /// The value rounded to this type, held in an `f64`.
    pub fn round(self, value: f64) -> f64 {
        match self {
            DType::F32 => f64::from(value as f32),
            DType::BF16 => round_to_bits(value as f32, 16),
            DType::F16 => round_to_half(value as f32),
            _ => value,
        }
    }
}

/// `value` with the low `dropped` mantissa bits rounded to nearest even.
fn round_to_bits(value: f32, dropped: u32) -> f64 {
    if !value.is_finite() {
        return f64::from(value);
    }
    let bits = value.to_bits();
    let half = (1u32 << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
    f64::from(f32::from_bits(
        bits.wrapping_add(half) & !((1u32 << dropped) - 1),
    ))
}

fn round_to_half(value: f32) -> f64 {
    if !value.is_finite() || value == 0.0 {
        return f64::from(value);
    }
    let magnitude = f64::from(value.abs());
    let exponent = magnitude.log2().floor().max(-14.0);
    let step = (exponent - 10.0).exp2();
    let rounded = (magnitude / step).round_ties_even() * step;
    let clipped = if rounded >= 65520.0 {
        f64::INFINITY
    } else {
        rounded
    };
    clipped.copysign(f64::from(value))
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::DType;

    #[test]
    fn rounding_matches_known_values() {
        assert_eq!(DType::BF16.round(1.003_906_25), 1.0);
        assert_eq!(DType::BF16.round(1.01), 1.007_812_5);
        assert_eq!(DType::F16.round(65519.0), 65504.0);
        assert_eq!(DType::F16.round(65520.0), f64::INFINITY);
        assert_eq!(DType::F16.round(6e-8), (-24f64).exp2());
    }
}
