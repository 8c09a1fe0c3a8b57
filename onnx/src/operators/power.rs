//! Powers: base and exponent may differ in type; the result has the base's.

use super::pointwise::{joined, long, narrowed, single};
use super::strided::zipped;
use crate::tensor::{Tensor, Values};

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
    let exponents = b.to_f64().ok_or_else(undefined)?;
    let narrow: Vec<f32> = exponents.iter().map(|y| *y as f32).collect();
    let power = |x: &[f32]| match narrow.as_slice() {
        [2.0] => raised!(x, &narrow, |x: f32, _| x * x),
        _ => raised!(x, &narrow, f32::powf),
    };
    Ok(match (&*a.values, b.to_i64()) {
        (Values::F32(x), _) => Values::F32(power(x)),
        (Values::F64(x), _) => Values::F64(match exponents.as_slice() {
            [2.0] => raised!(x, &exponents, |x: f64, _| x * x),
            _ => raised!(x, &exponents, f64::powf),
        }),
        (values, _) if values.element().is_float() => match &*single(a).values {
            Values::F32(x) => narrowed(a, Values::F32(power(x))),
            _ => return Err(undefined()),
        },
        (Values::U64(x), Some(y)) => Values::U64(raised!(x, &y, |x: u64, y: i64| whole_power(
            i128::from(x),
            y
        ) as u64)),
        (Values::U64(x), None) => {
            Values::U64(raised!(x, &exponents, |x: u64, y: f64| (x as f64).powf(y) as u64))
        }
        (values, y) if values.element().is_int() => match (&*long(a).values, y) {
            (Values::I64(x), Some(y)) => {
                let f = |x: i64, y: i64| whole_power(i128::from(x), y) as i64;
                narrowed(a, Values::I64(raised!(x, &y, f)))
            }
            (Values::I64(x), None) => {
                let f = |x: i64, y: f64| (x as f64).powf(y) as i64;
                narrowed(a, Values::I64(raised!(x, &exponents, f)))
            }
            _ => return Err(undefined()),
        },
        _ => return Err(undefined()),
    })
}

/// A power of integers, which wraps on overflow; with a negative exponent, rounded towards zero.
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
