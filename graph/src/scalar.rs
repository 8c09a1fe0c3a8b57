//! A number written in a tasklet, and its conversions between types.

use crate::dtype::DType;

/// A number written in a tasklet. Floats compare by bits, so expressions can be keys.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// A real number.
    Float(f64),
    /// An integer.
    Int(i64),
    /// A truth value.
    Bool(bool),
}

impl Scalar {
    /// Returns the value as a real number; truth values are 0 and 1.
    pub fn as_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(i) => i as f64,
            Scalar::Bool(b) => f64::from(u8::from(b)),
        }
    }
    /// Returns the value as an integer, rounded towards zero.
    pub fn as_i64(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Int(i) => i,
            Scalar::Bool(b) => i64::from(b),
        }
    }
    /// Whether it is not zero.
    pub fn as_bool(self) -> bool {
        match self {
            Scalar::Float(x) => x != 0.0,
            Scalar::Int(i) => i != 0,
            Scalar::Bool(b) => b,
        }
    }
    /// Converts to a type: rounds floats to it, and wraps integers to its width. A float first becomes the nearest
    /// integer of 64 bits, as on GPUs; NaN becomes 0.
    pub fn cast(self, dtype: DType) -> Scalar {
        let whole = self.as_i64();
        match dtype {
            DType::Bool => Scalar::Bool(self.as_bool()),
            d if d.is_float() => Scalar::Float(d.round(self.as_f64())),
            DType::U8 => Scalar::Int(i64::from(whole as u8)),
            DType::I8 => Scalar::Int(i64::from(whole as i8)),
            DType::I16 => Scalar::Int(i64::from(whole as i16)),
            DType::I32 => Scalar::Int(i64::from(whole as i32)),
            _ => Scalar::Int(whole),
        }
    }

    /// Like [`Scalar::cast`], except for floats that the integers cannot hold, and NaN. These become the same integers
    /// as on x86, and so in PyTorch on x86: the smallest integer of 64 bits for `I64` and `U8`, of 32 bits for other
    /// types. A narrower type takes its low bits.
    pub fn cast_on_x86(self, dtype: DType) -> Scalar {
        let is_long = matches!(dtype, DType::I64 | DType::U8);
        match self {
            Scalar::Float(x) if dtype.is_int() && is_long && !is_within(x, 63) => {
                Scalar::Int(i64::MIN).cast(dtype)
            }
            Scalar::Float(x) if dtype.is_int() && !is_long && !is_within(x, 31) => {
                Scalar::Int(i64::from(i32::MIN)).cast(dtype)
            }
            _ => self.cast(dtype),
        }
    }
    fn key(self) -> (u8, u64) {
        match self {
            Scalar::Float(x) => (0, x.to_bits()),
            Scalar::Int(i) => (1, i as u64),
            Scalar::Bool(b) => (2, u64::from(b)),
        }
    }
}

/// Whether the integer part of `x` fits into `bits` bits and a sign.
fn is_within(x: f64, bits: i32) -> bool {
    let limit = 2f64.powi(bits);
    x.trunc() >= -limit && x < limit
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Scalar {}
impl PartialOrd for Scalar {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scalar {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}
impl std::hash::Hash for Scalar {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_that_integers_do_not_hold_become_what_x86_makes_of_them() {
        let cast = |x: f64, dtype| Scalar::Float(x).cast_on_x86(dtype).as_i64();
        for x in [f64::NAN, f64::INFINITY, -f64::INFINITY, 1e30] {
            assert_eq!(cast(x, DType::I64), i64::MIN);
            assert_eq!(cast(x, DType::I32), i64::from(i32::MIN));
            assert_eq!(cast(x, DType::U8), 0);
        }
        assert_eq!(cast(300.9, DType::U8), 44);
        assert_eq!(cast(3_000_000_005.0, DType::U8), 5);
        assert_eq!(cast(3_000_000_005.0, DType::I16), 0);
        assert_eq!(cast(-1.9, DType::I8), -1);
        assert_eq!(cast(-2147483648.5, DType::I32), i64::from(i32::MIN));
        assert_eq!(cast(2147483647.5, DType::I32), i64::from(i32::MAX));
        assert_eq!(
            Scalar::Float(f64::NAN).cast_on_x86(DType::Bool),
            Scalar::Bool(true)
        );
    }
}
