//! The captured document as Rust types. Its schema is described where it is written, in the Python
//! package's `_capture.py`; this file only parses.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The version of the schema that this importer reads.
pub const VERSION: u32 = 1;

/// A captured graph.
#[derive(Debug, Deserialize)]
pub struct Document {
    /// Must be [`VERSION`].
    pub version: u32,
    /// Sizes that may change from call to call.
    pub symbols: Vec<SymbolDoc>,
    /// Tensors the graph reads.
    pub inputs: Vec<InputDoc>,
    /// Operators in execution order.
    pub nodes: Vec<NodeDoc>,
    /// Tensors the graph gives.
    pub outputs: Vec<OutputDoc>,
}

/// A symbolic size with its value in the example the graph was captured from.
#[derive(Debug, Deserialize)]
pub struct SymbolDoc {
    pub name: String,
    pub hint: i64,
}

/// Where an input comes from.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum InputKind {
    Parameter,
    Buffer,
    Constant,
    User,
}

/// An input.
#[derive(Debug, Deserialize)]
pub struct InputDoc {
    pub name: String,
    pub kind: InputKind,
    /// Key in the module's `state_dict`.
    pub target: Option<String>,
    /// Position among the constants' bytes.
    pub constant: Option<usize>,
    pub shape: Vec<Value>,
    pub dtype: String,
}

/// An operator call.
#[derive(Debug, Deserialize)]
pub struct NodeDoc {
    pub name: String,
    pub target: String,
    pub args: BTreeMap<String, Value>,
    pub outputs: Vec<Option<ValueDoc>>,
    /// What tells its random numbers from those of other operators; absent: its position among those that draw.
    #[serde(default)]
    pub draw: Option<i64>,
    pub origin: OriginDoc,
}

/// A tensor made by an operator.
#[derive(Debug, Deserialize)]
pub struct ValueDoc {
    pub name: String,
    pub shape: Vec<Value>,
    pub dtype: String,
}

/// Where an operator call stands in the model.
#[derive(Debug, Deserialize)]
pub struct OriginDoc {
    pub module: String,
    pub source: String,
}

/// What becomes of an output.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum OutputKind {
    /// Returned.
    User,
    /// The new value of a buffer.
    Buffer,
    /// The new value of a tensor that the caller passed.
    UserInput,
}

/// An output.
#[derive(Debug, Deserialize)]
pub struct OutputDoc {
    pub kind: OutputKind,
    /// The buffer's key, or the written input's name.
    pub target: Option<String>,
    pub value: String,
}
