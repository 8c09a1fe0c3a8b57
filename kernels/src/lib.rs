//! Lowering to kernels, buffer planning, C emission, compilation, running.

pub mod cache;
pub mod compile;
pub mod features;
pub mod progress;
pub mod run;
pub mod toolchain;
