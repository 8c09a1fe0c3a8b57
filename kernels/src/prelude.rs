//! C text that emitted kernels begin with: vector mathematics, random numbers, 16-bit numbers.
//!
//! Owns accuracy: every function states its error and the tests hold it to that.
//! Never includes a system header, so a compiler without them serves too.

/// Mathematics: `sh_NAME(float) -> float` and `sh_NAME_f64(double) -> double` for
/// every function of tasklet expressions, written to vectorize inside
/// `#pragma omp simd` loops.
pub const MATH: &str = concat!(
    include_str!("prelude/math.h"),
    include_str!("prelude/doubles.h"),
    include_str!("prelude/trigonometry.h")
);

/// The part of [`MATH`] that GPU kernels use too.
pub const TRIGONOMETRY: &str = include_str!("prelude/trigonometry.h");

/// `float sh_philox_uniform(sh_u64 key, sh_u64 counter)`; needs [`MATH`] before it.
pub const PHILOX: &str = include_str!("prelude/philox.h");

/// Conversions of 16-bit numbers, `sh_from_bf16`, `sh_to_bf16` and the same for f16; needs [`MATH`] before it.
pub const HALVES: &str = include_str!("prelude/halves.h");

/// Products of blocks of bf16 numbers in pairs; needs [`HALVES`] before it.
pub(crate) const PAIRS: &str = include_str!("prelude/pairs.h");

/// [`MATH`], [`PHILOX`] and [`HALVES`]: what an emitted file starts with.
pub const ALL: &str = concat!(
    include_str!("prelude/math.h"),
    include_str!("prelude/doubles.h"),
    include_str!("prelude/trigonometry.h"),
    include_str!("prelude/philox.h"),
    include_str!("prelude/halves.h")
);
