//! Products that NVIDIA's cuBLASLt computes, and the choice between it and our own kernels.
//!
//! Owns the description of a product in cuBLASLt's terms, its meaning (executed on the host by tests
//! and by the emulator) and the tables of measured times that choices are read from. Never calls the
//! library, which is the device's; never decides what is a contraction.

mod gemm;
mod host;

pub use gemm::{Compute, Finish, Gemm, Matrix};
pub use host::{Operands, multiply};
