//! The networks, as graphs built in Rust: what the tests count bytes and kernels of.
//!
//! The same networks as PyTorch modules come from torchvision and the Python package.

pub mod convolutional;
pub mod net;
pub mod transformer;
