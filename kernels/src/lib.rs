//! Kernels for the CPU: lowering, buffer planning, C emission, compilation, running; and the forms of loops and
//! contractions that the CUDA back end (`kernels/cuda`) shares.

pub mod assemble;
mod attention;
mod barrier;
pub mod cache;
pub mod compile;
pub mod contraction;
pub mod emit;
pub mod features;
pub mod halves;
pub mod host_threads;
pub mod lower;
pub mod lowering;
pub mod memory;
mod ordered;
pub mod plan;
pub mod pool;
pub mod prelude;
pub mod progress;
pub mod recognize;
mod recurrence;
pub mod run;
pub mod templates;
pub mod toolchain;
pub mod update;
