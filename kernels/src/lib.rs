//! Lowering to kernels, buffer planning, C emission, compilation, running.

pub mod cache;
pub mod compile;
pub mod contraction;
pub mod features;
pub mod memory;
pub mod plan;
pub mod pool;
pub mod progress;
pub mod run;
pub mod toolchain;
