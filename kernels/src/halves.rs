//! Numbers of 16 bits as memory holds them: conversions from and to the values that the graph knows.
//!
//! Owns conversions inside the compiler: of constants, literals, tests. Those that kernels run are in
//! the C prelude (`prelude/halves.h`). Rounds to nearest even; every NaN is the one that PyTorch makes.

use graph::DType;

/// Whether elements of this type are converted to single precision for arithmetic.
pub fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// The bits of a value in f16 or bf16; rounds first.
pub fn bits(dtype: DType, value: f64) -> u16 {
    let rounded = dtype.round(value) as f32;
    if dtype == DType::BF16 {
        return match rounded.is_nan() {
            true => 0x7fc0,
            false => (rounded.to_bits() >> 16) as u16,
        };
    }
    let sign = ((rounded.to_bits() >> 16) & 0x8000) as u16;
    let magnitude = rounded.abs();
    // Below 2^-14: multiples of the smallest f16 number. Above: the exponent's bias changes from 127 to 15.
    let positive = match magnitude {
        m if m.is_nan() => return 0x7e00,
        m if m.is_infinite() => 0x7c00,
        m if m < 2f32.powi(-14) => (m * 2f32.powi(24)) as u16,
        m => ((m.to_bits() - (112 << 23)) >> 13) as u16,
    };
    sign | positive
}

/// The value of bits in f16 or bf16.
pub fn value(dtype: DType, bits: u16) -> f64 {
    if dtype == DType::BF16 {
        return f64::from(f32::from_bits(u32::from(bits) << 16));
    }
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        e => (1024.0 + mantissa) * 2f64.powi(e - 25),
    }
}

#[cfg(test)]
mod tests {
    use super::{bits, value};
    use graph::DType;

    #[test]
    fn every_pattern_survives_the_way_through_its_value() {
        for dtype in [DType::F16, DType::BF16] {
            for pattern in 0..=u16::MAX {
                let x = value(dtype, pattern);
                let back = bits(dtype, x);
                assert!(
                    back == pattern || x.is_nan() && value(dtype, back).is_nan(),
                    "{dtype}: {pattern:#x} is {x}, which is {back:#x}"
                );
            }
        }
    }
}
