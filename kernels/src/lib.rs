//! Lowering to kernels, buffer planning, C emission, compilation, running.

pub mod assemble;
mod barrier;
pub mod cache;
pub mod compile;
pub mod contraction;
pub mod cuda;
mod emit;
pub mod features;
pub mod host_threads;
pub mod lower;
pub mod lowering;
pub mod memory;
pub mod plan;
pub mod pool;
pub mod prelude;
pub mod progress;
pub mod recognize;
pub mod run;
pub mod toolchain;
