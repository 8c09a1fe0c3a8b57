//! Parts of ONNX files that tests put together by hand.

use onnx::proto::{
    Dimension, DimensionProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};

/// An input or output in single precision.
pub fn port(name: &str, sizes: &[i64]) -> ValueInfoProto {
    let dim = sizes.iter().map(|n| DimensionProto {
        value: Some(Dimension::DimValue(*n)),
        ..Default::default()
    });
    let tensor = TensorTypeProto {
        elem_type: 1,
        shape: Some(TensorShapeProto { dim: dim.collect() }),
    };
    ValueInfoProto {
        name: name.to_string(),
        r#type: Some(TypeProto {
            tensor_type: Some(tensor),
            ..Default::default()
        }),
        ..Default::default()
    }
}
