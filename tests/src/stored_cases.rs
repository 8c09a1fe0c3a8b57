//! Models with inputs and expected outputs, stored as `importer/tests/data/generate.py` describes.

use bytes::Bytes;
use prost::Message;

/// All cases of a file.
#[derive(Clone, PartialEq, prost::Message)]
struct Cases {
    #[prost(message, repeated, tag = "1")]
    case: Vec<StoredCase>,
}

/// A model with inputs and expected outputs, as messages.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StoredCase {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The model.
    #[prost(bytes = "bytes", tag = "2")]
    pub model: Bytes,
    /// Tensors, in order.
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub input: Vec<Bytes>,
    /// Tensors, in order.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub output: Vec<Bytes>,
}

/// The cases of a file.
///
/// # Errors
/// The bytes are no such file.
pub fn stored_cases(bytes: &'static [u8]) -> Result<Vec<StoredCase>, prost::DecodeError> {
    Cases::decode(Bytes::from_static(bytes)).map(|cases| cases.case)
}
