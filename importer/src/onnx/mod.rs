//! ONNX files become graphs of library nodes.
//!
//! [`File::read`] decodes a file, [`File::import`] makes a [`Model`] of it. Dynamic sizes stay
//! symbols, initializers used as data become parameters, and integers that follow from shapes are
//! computed here, symbolically, so that shapes in the graph are expressions over those symbols.
//! Operator sets 13 to 28 are read; older ones are raised. A rule for each operator is in [`operators`]; this room
//! never gives an operator a meaning of its own, it composes those of the `ops` room.

mod bodies;
mod constants;
mod error;
mod file;
mod given_sizes;
mod import;
mod mode;
mod names;
mod node;
mod normalize;
mod operators;
use onnx::proto;
mod shape_values;
mod sparse;
mod tensor;
mod value;
mod write;

pub use error::{NEWEST_OPSET, OLDEST_OPSET, OnnxError, Problem, UnsupportedOperator};
pub use file::{About, Declared, DynamicSize, File, Initializers};
pub use import::{Model, Options, Parameter, Port};
pub use mode::Mode;
pub use tensor::{Stored, dtype_of, element_of};
pub use write::{Names, WRITTEN_OPSET, WriteError, write};

/// The operators of the standard that are imported, ordered by name.
pub fn supported_operators() -> Vec<&'static str> {
    operators::names()
}

/// Tensors in protobuf form, as test data stores them: `TensorProto` to a tensor.
///
/// # Errors
/// A sentence about what does not fit.
pub fn decode_tensor(bytes: bytes::Bytes) -> Result<graph::Tensor, String> {
    let proto = <proto::TensorProto as prost::Message>::decode(bytes).map_err(|e| e.to_string())?;
    let stored = Stored::new(&proto, std::path::Path::new("."))?;
    stored.tensor().map_err(|e| e.to_string())
}
