//! Reverse-mode differentiation of a graph.
//!
//! [`differentiate`] appends to a forward graph the nodes that compute gradients, so that forward
//! and backward are one graph and can be fused and laid out together. Operators are differentiated
//! by their own rule or, if they have none, by differentiating their expansion ([`map`]).
//! Nothing is marked as saved: the values that backward nodes read cross from forward to backward,
//! and the fusion room decides which of them to recompute. Dropout masks never cross, because the
//! gradient rule of dropout computes the same counter-based random numbers again.

mod error;
mod map;
mod reverse;

pub use error::AutodiffError;
pub use reverse::{Differentiated, Request, active, differentiate};
