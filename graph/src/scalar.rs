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
    /// Converted to a type: floats rounded to it, integers wrapped to its width.
    pub fn cast(self, dtype: DType) -> Scalar {
        match dtype {
            DType::Bool => Scalar::Bool(self.as_bool()),
            d if d.is_float() => Scalar::Float(d.round(self.as_f64())),
            DType::U8 => Scalar::Int(i64::from(self.as_i64() as u8)),
            DType::I8 => Scalar::Int(i64::from(self.as_i64() as i8)),
            DType::I16 => Scalar::Int(i64::from(self.as_i64() as i16)),
            DType::I32 => Scalar::Int(i64::from(self.as_i64() as i32)),
            _ => Scalar::Int(self.as_i64()),
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
