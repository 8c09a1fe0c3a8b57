//! The networks, as graphs built in Rust: what the tests count bytes and kernels of; and small graphs from text.
//!
//! The same networks as PyTorch modules come from torchvision and the Python package.

pub mod convolutional;
mod from_text;
pub mod net;
pub mod transformer;

pub use from_text::{results, text_graph};
