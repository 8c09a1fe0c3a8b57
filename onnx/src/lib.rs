//! ONNX files as they are: read whole, understood as far as possible, evaluated, made better, proven
//! and written.
//!
//! Owns the messages of the format, tensors, the facts about each value, the meaning of the
//! standard's operators on tensors, rewrites of a file and their verification. A file's names, types
//! and metadata survive. Never differentiates and never emits kernels: other rooms do this with graphs.

pub mod attributes;
pub mod check;
pub mod cost;
pub mod diff;
pub mod edit;
pub mod element;
pub mod evaluate;
pub mod fact;
pub mod file;
pub mod functions;
pub mod infer;
mod interface;
pub mod near;
pub mod npy;
pub mod operators;
pub mod optimize;
pub mod ort;
pub mod parameters;
pub mod proto;
pub mod rewrite;
pub mod set_shape;
pub mod stored;
pub mod tensor;
pub mod verify;
