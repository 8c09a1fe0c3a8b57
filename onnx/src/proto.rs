//! The messages of an ONNX file, with the field numbers of `onnx.proto` (IR version 14).
//!
//! Every field is here, so that what is read can be written again without loss. Messages nobody
//! looks into (devices, training algorithms, types other than tensors) are kept as their bytes.
//! `bytes` fields are slices of the decoded buffer, so tensors are not copied. This file never checks
//! what it decodes.

use bytes::Bytes;

/// `ModelProto`: a file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ModelProto {
    /// Version of the file format.
    #[prost(int64, optional, tag = "1")]
    pub ir_version: Option<i64>,
    /// The program that wrote the file.
    #[prost(string, tag = "2")]
    pub producer_name: String,
    /// Its version.
    #[prost(string, tag = "3")]
    pub producer_version: String,
    /// The computation.
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    /// Versions of the operator sets.
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Functions local to the model.
    #[prost(message, repeated, tag = "25")]
    pub functions: Vec<FunctionProto>,
    /// Namespace of the model.
    #[prost(string, tag = "4")]
    pub domain: String,
    /// Version of the model.
    #[prost(int64, tag = "5")]
    pub model_version: i64,
    /// Documentation.
    #[prost(string, tag = "6")]
    pub doc_string: String,
    /// Metadata.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// Training algorithms, not looked into.
    #[prost(bytes = "bytes", repeated, tag = "20")]
    pub training_info: Vec<Bytes>,
    /// Device configurations, not looked into.
    #[prost(bytes = "bytes", repeated, tag = "26")]
    pub configuration: Vec<Bytes>,
}

/// `OperatorSetIdProto`: a version of a domain.
#[derive(Clone, PartialEq, prost::Message)]
pub struct OperatorSetIdProto {
    /// Empty or `ai.onnx` for the standard's operators.
    #[prost(string, tag = "1")]
    pub domain: String,
    /// The version.
    #[prost(int64, tag = "2")]
    pub version: i64,
}

/// `FunctionProto`: a function local to the model.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FunctionProto {
    /// What nodes call it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its domain.
    #[prost(string, tag = "10")]
    pub domain: String,
    /// Names of its inputs.
    #[prost(string, repeated, tag = "4")]
    pub input: Vec<String>,
    /// Names of its outputs.
    #[prost(string, repeated, tag = "5")]
    pub output: Vec<String>,
    /// Names of attributes without default.
    #[prost(string, repeated, tag = "6")]
    pub attribute: Vec<String>,
    /// Attributes with their defaults.
    #[prost(message, repeated, tag = "11")]
    pub attribute_proto: Vec<AttributeProto>,
    /// Its nodes.
    #[prost(message, repeated, tag = "7")]
    pub node: Vec<NodeProto>,
    /// Documentation.
    #[prost(string, tag = "8")]
    pub doc_string: String,
    /// Versions of the operator sets it uses.
    #[prost(message, repeated, tag = "9")]
    pub opset_import: Vec<OperatorSetIdProto>,
    /// Tells functions of one name apart.
    #[prost(string, tag = "13")]
    pub overload: String,
    /// Types of its values.
    #[prost(message, repeated, tag = "12")]
    pub value_info: Vec<ValueInfoProto>,
    /// Metadata.
    #[prost(message, repeated, tag = "14")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// `GraphProto`: nodes in an order in which they can run.
#[derive(Clone, PartialEq, prost::Message)]
pub struct GraphProto {
    /// The nodes.
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    /// Its name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Named values that the file holds.
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    /// Inputs; those that are also initializers have a default.
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    /// Outputs.
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
    /// Initializers stored as coordinates and values.
    #[prost(message, repeated, tag = "15")]
    pub sparse_initializer: Vec<SparseTensorProto>,
    /// Documentation.
    #[prost(string, tag = "10")]
    pub doc_string: String,
    /// Types of values inside.
    #[prost(message, repeated, tag = "13")]
    pub value_info: Vec<ValueInfoProto>,
    /// Quantization parameters by tensor: each a [`TensorAnnotation`].
    #[prost(bytes = "bytes", repeated, tag = "14")]
    pub quantization_annotation: Vec<Bytes>,
    /// Metadata.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// `NodeProto`: one operator applied.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NodeProto {
    /// Names of inputs; empty for an absent one.
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    /// Names of outputs; empty for one nobody needs.
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    /// The node's name, often empty.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The operator.
    #[prost(string, tag = "4")]
    pub op_type: String,
    /// Attributes.
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    /// The operator's domain; empty for the standard's.
    #[prost(string, tag = "7")]
    pub domain: String,
    /// Tells functions of one name apart.
    #[prost(string, tag = "8")]
    pub overload: String,
    /// Documentation.
    #[prost(string, tag = "6")]
    pub doc_string: String,
    /// Metadata.
    #[prost(message, repeated, tag = "9")]
    pub metadata_props: Vec<StringStringEntryProto>,
    /// Where it runs, not looked into.
    #[prost(bytes = "bytes", repeated, tag = "10")]
    pub device_configurations: Vec<Bytes>,
}

/// `AttributeProto`: a named value of a node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AttributeProto {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Real number.
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    /// Integer.
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    /// Text.
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub s: Option<Bytes>,
    /// Tensor.
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    /// Real numbers.
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    /// Integers.
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    /// Texts.
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub strings: Vec<Bytes>,
    /// Which field is in use; see [`attribute_type`].
    #[prost(int32, tag = "20")]
    pub r#type: i32,
    /// The attribute of the enclosing function that this one stands for.
    #[prost(string, tag = "21")]
    pub ref_attr_name: String,
    /// A body of nodes.
    #[prost(message, optional, tag = "6")]
    pub g: Option<GraphProto>,
    /// Tensors.
    #[prost(message, repeated, tag = "10")]
    pub tensors: Vec<TensorProto>,
    /// Bodies.
    #[prost(message, repeated, tag = "11")]
    pub graphs: Vec<GraphProto>,
    /// A sparse tensor, not looked into.
    #[prost(bytes = "bytes", optional, tag = "22")]
    pub sparse_tensor: Option<Bytes>,
    /// Sparse tensors, not looked into.
    #[prost(bytes = "bytes", repeated, tag = "23")]
    pub sparse_tensors: Vec<Bytes>,
    /// A type, not looked into.
    #[prost(bytes = "bytes", optional, tag = "14")]
    pub tp: Option<Bytes>,
    /// Types, not looked into.
    #[prost(bytes = "bytes", repeated, tag = "15")]
    pub type_protos: Vec<Bytes>,
    /// Documentation.
    #[prost(string, tag = "13")]
    pub doc_string: String,
}

/// Values of [`AttributeProto::type`] for fields whose absence means a value.
pub mod attribute_type {
    /// `f` is in use.
    pub const FLOAT: i32 = 1;
    /// `i` is in use.
    pub const INT: i32 = 2;
    /// `s` is in use.
    pub const STRING: i32 = 3;
    /// `ints` is in use.
    pub const INTS: i32 = 7;
    /// `t` is in use.
    pub const TENSOR: i32 = 4;
    /// `g` is in use.
    pub const GRAPH: i32 = 5;
    /// `floats` is in use.
    pub const FLOATS: i32 = 6;
    /// `strings` is in use.
    pub const STRINGS: i32 = 8;
}

/// `TensorProto`: an array.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorProto {
    /// Sizes, outermost first.
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    /// Element type; see `tensor.rs`.
    #[prost(int32, tag = "2")]
    pub data_type: i32,
    /// Elements of `float` tensors.
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    /// Elements of tensors of 32 bits or fewer; halves as their bits.
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    /// Elements of `int64` tensors.
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    /// The value's name.
    #[prost(string, tag = "8")]
    pub name: String,
    /// Elements of any type, little-endian.
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub raw_data: Option<Bytes>,
    /// Elements of `double` tensors.
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    /// Elements of `uint32` and `uint64` tensors.
    #[prost(uint64, repeated, tag = "11")]
    pub uint64_data: Vec<u64>,
    /// Where the elements are: `location`, `offset`, `length`.
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// 1 if the elements are in another file.
    #[prost(int32, tag = "14")]
    pub data_location: i32,
    /// Part of a larger tensor, not looked into.
    #[prost(bytes = "bytes", optional, tag = "3")]
    pub segment: Option<Bytes>,
    /// Elements of `string` tensors.
    #[prost(bytes = "bytes", repeated, tag = "6")]
    pub string_data: Vec<Bytes>,
    /// Documentation.
    #[prost(string, tag = "12")]
    pub doc_string: String,
    /// Metadata.
    #[prost(message, repeated, tag = "16")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// `SparseTensorProto`: an array given by coordinates and elements.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SparseTensorProto {
    /// The non-zero elements; carries the name.
    #[prost(message, optional, tag = "1")]
    pub values: Option<TensorProto>,
    /// Coordinates of the elements.
    #[prost(message, optional, tag = "2")]
    pub indices: Option<TensorProto>,
    /// Sizes of the whole.
    #[prost(int64, repeated, packed = "false", tag = "3")]
    pub dims: Vec<i64>,
}

/// `TensorAnnotation`: which tensors hold the quantization parameters of a tensor.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorAnnotation {
    /// The tensor.
    #[prost(string, tag = "1")]
    pub tensor_name: String,
    /// Tensors by the name of what they hold, such as `SCALE_TENSOR`.
    #[prost(message, repeated, tag = "2")]
    pub quant_parameter_tensor_names: Vec<StringStringEntryProto>,
}

/// `StringStringEntryProto`: a key and a value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StringStringEntryProto {
    /// Key.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `ValueInfoProto`: name and type of a value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ValueInfoProto {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Type.
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
    /// Documentation.
    #[prost(string, tag = "3")]
    pub doc_string: String,
    /// Metadata.
    #[prost(message, repeated, tag = "4")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

/// `TypeProto`: at most one field besides the denotation.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TypeProto {
    /// A tensor.
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
    /// A sequence, not looked into.
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub sequence_type: Option<Bytes>,
    /// A map, not looked into.
    #[prost(bytes = "bytes", optional, tag = "5")]
    pub map_type: Option<Bytes>,
    /// An opaque type, not looked into.
    #[prost(bytes = "bytes", optional, tag = "7")]
    pub opaque_type: Option<Bytes>,
    /// A sparse tensor, not looked into.
    #[prost(bytes = "bytes", optional, tag = "8")]
    pub sparse_tensor_type: Option<Bytes>,
    /// An optional value, not looked into.
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub optional_type: Option<Bytes>,
    /// What the value means.
    #[prost(string, tag = "6")]
    pub denotation: String,
}

/// `TypeProto.Tensor`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorTypeProto {
    /// Element type.
    #[prost(int32, tag = "1")]
    pub elem_type: i32,
    /// Sizes; absent if even their number is unknown.
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TensorShapeProto {
    /// Sizes, outermost first.
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<DimensionProto>,
}

/// `TensorShapeProto.Dimension`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DimensionProto {
    /// The size, if anything is known about it.
    #[prost(oneof = "Dimension", tags = "1, 2")]
    pub value: Option<Dimension>,
    /// What the size means.
    #[prost(string, tag = "3")]
    pub denotation: String,
}

impl DimensionProto {
    /// The name of the size; `None` for what exporters write if they know no name: two sizes `?` need not be equal.
    pub fn name(&self) -> Option<&str> {
        match &self.value {
            Some(Dimension::DimParam(name)) => {
                let is_name = !matches!(name.as_str(), "" | "?" | "-1" | "None");
                is_name.then_some(name)
            }
            _ => None,
        }
    }
}

/// A size.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Dimension {
    /// Known.
    #[prost(int64, tag = "1")]
    DimValue(i64),
    /// Named.
    #[prost(string, tag = "2")]
    DimParam(String),
}
