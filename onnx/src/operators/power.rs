//! Powers: base and exponent may differ in type; the result has the base's.

use super::pointwise::joined;
use super::strided::zipped;
use crate::tensor::{Tensor, Values};
use half::{bf16, f16};

/// `a` to the power of `b`, with broadcasting.
///
/// # Errors
/// The shapes do not fit, or one is not of numbers.
pub fn pow(a: &Tensor, b: &Tensor) -> Result<Values, String> {
    let undefined = || format!("it is not defined on {} and {}", a.element(), b.element());
    let shape = joined(&a.shape, &b.shape)?;
    macro_rules! raised {
        ($x:expr, $y:expr, $f:expr) => {
            zipped(($x, &a.shape), ($y, &b.shape), &shape, $f)
        };
    }
    macro_rules! whole {
        ($kind:ident, $x:expr, $t:ty) => {
            Values::$kind(match b.to_i64() {
                Some(y) => raised!($x, &y, |x: $t, y: i64| whole_power(i128::from(x), y) as $t),
                None => {
                    let y = b.to_f64().ok_or_else(undefined)?;
                    raised!($x, &y, |x: $t, y: f64| (x as f64).powf(y) as $t)
                }
            })
        };
    }
    let exponents = b.to_f64().ok_or_else(undefined)?;
    let narrow: Vec<f32> = exponents.iter().map(|y| *y as f32).collect();
    Ok(match &*a.values {
        Values::F32(x) => Values::F32(match narrow.as_slice() {
            [2.0] => raised!(x, &narrow, |x: f32, _| x * x),
            _ => raised!(x, &narrow, f32::powf),
        }),
        Values::F64(x) => Values::F64(match exponents.as_slice() {
            [2.0] => raised!(x, &exponents, |x: f64, _| x * x),
            _ => raised!(x, &exponents, f64::powf),
        }),
        Values::F16(x) => Values::F16(raised!(x, &narrow, |x: f16, y: f32| f16::from_f32(
            x.to_f32().powf(y)
        ))),
        Values::BF16(x) => Values::BF16(raised!(x, &narrow, |x: bf16, y: f32| {
            bf16::from_f32(x.to_f32().powf(y))
        })),
        Values::I8(x) => whole!(I8, x, i8),
        Values::I16(x) => whole!(I16, x, i16),
        Values::I32(x) => whole!(I32, x, i32),
        Values::I64(x) => whole!(I64, x, i64),
        Values::U8(x) => whole!(U8, x, u8),
        Values::U16(x) => whole!(U16, x, u16),
        Values::U32(x) => whole!(U32, x, u32),
        Values::U64(x) => whole!(U64, x, u64),
        _ => return Err(undefined()),
    })
}

/// Wraps; with a negative exponent, what is left after rounding towards zero.
fn whole_power(x: i128, y: i64) -> i128 {
    if y < 0 {
        return match x {
            1 => 1,
            -1 if y % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut power, mut square, mut rest) = (1i128, x, y);
    while rest > 0 {
        if rest % 2 == 1 {
            power = power.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        rest /= 2;
    }
    power
}
