//! Lowering to kernels, buffer planning, C and CUDA emission, compilation, running, execution of CUDA text
//! on the CPU.

pub mod assemble;
mod barrier;
pub mod cache;
pub mod compile;
pub mod contraction;
pub mod cuda;
mod emit;
pub mod features;
pub mod halves;
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
pub mod templates;
pub mod toolchain;
