//! Operators, one file per family: shape rule, reference meaning, gradient, expansions, samples.
//!
//! The registry maps the name in a library node to its [`op::Op`]. Nothing outside this room knows
//! what an operator does except through that trait.

pub mod contraction;
pub mod convolution;
pub mod elementwise;
mod expand;
pub mod op;
pub mod registry;
pub mod window;

pub use expand::expand_all;
pub use op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
