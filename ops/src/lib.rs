//! Operators, one file per family: shape rule, reference meaning, gradient, expansions, samples.
//!
//! The registry maps the name in a library node to its [`op::Op`]. Nothing outside this room knows
//! what an operator does except through that trait.

pub mod activations;
pub mod adaptive_pool;
pub mod arg_reduce;
pub mod attention;
pub mod attention_lse;
pub mod average_pool;
pub mod binary_loss;
pub mod check;
pub mod contraction;
pub mod convolution;
pub mod creation;
pub mod cumsum;
pub mod elementwise;
mod expand;
pub mod index;
pub mod index_space;
pub mod loops;
pub mod loss;
pub mod meaning;
pub mod movement;
pub mod norm;
pub mod norm_gradient;
mod norm_plan;
pub mod op;
pub mod pool;
pub mod random;
pub mod recurrence;
pub mod reduce;
pub mod reference;
pub mod registry;
pub mod scatter_extreme;
pub mod shape_rules;
pub mod slicing;
pub mod softmax;
pub mod stop_gradient;
pub mod topk;
pub mod variance;
pub mod window;

pub use expand::expand_all;
pub use loops::{LOOP, keep_loops};
pub use meaning::Meaning;
pub use op::{Call, Gradient, GradientCall, Op, OpBuilder, OpError, Sample, TensorType, attrs};
