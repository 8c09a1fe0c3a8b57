//! Sparse tensors of a file: they are written out, and they are no parameters.

mod files;

use files::port;
use graph::{DType, Precision, Tensor, interpret};
use importer::onnx::{File, Options};
use onnx::element::Element;
use onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, SparseTensorProto,
};
use prost::Message;

/// `[[1, 0, 0], [0, −2, 0]]` by positions in the whole.
fn sparse(name: &str) -> SparseTensorProto {
    let values = onnx::tensor::Tensor::floats(Element::F32, &[2], &[1.0, -2.0]);
    let indices = onnx::tensor::Tensor::of_ints(Element::I64, &[2], &[0, 4]);
    SparseTensorProto {
        values: Some(values.expect("floats").to_proto(name)),
        indices: Some(indices.expect("integers").to_proto("")),
        dims: vec![2, 3],
    }
}

fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: op.to_string(),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.to_string()],
        ..Default::default()
    }
}

#[test]
fn sparse_initializers_and_constants_are_imported() {
    let mut constant = node("Constant", &[], "c");
    constant.attribute.push(AttributeProto {
        name: "sparse_value".to_string(),
        sparse_tensor: Some(sparse("").encode_to_vec().into()),
        r#type: 11,
        ..Default::default()
    });
    let nodes = vec![
        constant,
        node("Add", &["x", "w"], "s"),
        node("Add", &["s", "c"], "y"),
    ];
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto {
            version: 17,
            ..Default::default()
        }],
        graph: Some(GraphProto {
            name: "g".to_string(),
            node: nodes,
            input: vec![port("x", &[2, 3])],
            output: vec![port("y", &[2, 3])],
            sparse_initializer: vec![sparse("w")],
            ..Default::default()
        }),
        ..Default::default()
    };
    let file = File::decode("m.onnx", model.encode_to_vec().into()).expect("a file");
    let model = file.import(&Options::default()).expect("it is imported");
    assert!(model.parameters.is_empty());
    let x = Tensor::from_f64(DType::F32, &[2, 3], vec![1.0; 6]);
    let none = Default::default();
    let found = interpret(&model.graph, &[x], &none, &ops::Meaning, Precision::Double);
    let found = found.expect("it runs")[0].to_f64();
    assert_eq!(found, [3.0, 1.0, 1.0, 1.0, -3.0, 1.0]);
}
