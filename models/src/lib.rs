//! Networks as graphs built in Rust, whose bytes and kernels tests count; and small graphs from text.
//!
//! The same networks as PyTorch modules come from torchvision, transformers and the Python package.
//! `torch-bridge/tests/test_rust_networks.py` gives both the same weights and compares values and gradients.

pub mod convolutional;
mod from_text;
pub mod grids;
pub mod net;
pub mod recommendation;
pub mod sequences;
pub mod small;
pub mod transformer;

pub use from_text::{results, text_graph};
