//! Elements written at indices, beside others that are infinite or no numbers.

mod files;

use files::port;
use graph::{DType, Precision, Tensor, interpret};
use importer::onnx::{File, Options};
use onnx::proto::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use prost::Message;

/// `y[1] = 5, y[3] = -∞` in `x`.
fn written(x: [f64; 4]) -> Vec<f64> {
    let index = TensorProto {
        name: "index".to_string(),
        dims: vec![2],
        data_type: 7,
        raw_data: Some([1i64, 3].iter().flat_map(|n| n.to_le_bytes()).collect()),
        ..Default::default()
    };
    let names = |list: &[&str]| list.iter().map(|name| (*name).to_string()).collect();
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto {
            version: 18,
            ..Default::default()
        }],
        graph: Some(GraphProto {
            node: vec![NodeProto {
                op_type: "ScatterElements".to_string(),
                input: names(&["x", "index", "updates"]),
                output: names(&["y"]),
                ..Default::default()
            }],
            input: vec![port("x", &[4]), port("updates", &[2])],
            output: vec![port("y", &[4])],
            initializer: vec![index],
            ..Default::default()
        }),
        ..Default::default()
    };
    let file = File::decode("case.onnx", model.encode_to_vec().into()).expect("decoded");
    let model = file.import(&Options::default()).expect("imported");
    let updates = vec![5.0, f64::NEG_INFINITY];
    let mut inputs = vec![
        Tensor::from_f64(DType::F32, &[4], x.to_vec()),
        Tensor::from_f64(DType::F32, &[2], updates),
    ];
    let stored = model.parameters.iter().map(|p| p.stored.tensor());
    inputs.extend(stored.map(|tensor| tensor.expect("stored")));
    let none = Default::default();
    let found = interpret(
        &model.graph,
        &inputs,
        &none,
        &ops::Meaning,
        Precision::Double,
    );
    found.expect("it runs")[0].to_f64()
}

#[test]
fn infinite_elements_are_replaced_or_stay() {
    let minus = f64::NEG_INFINITY;
    assert_eq!(written([1.0, 2.0, 3.0, 4.0]), [1.0, 5.0, 3.0, minus]);
    assert_eq!(written([minus, minus, 3.0, 4.0]), [minus, 5.0, 3.0, minus]);
    let found = written([f64::NAN, f64::NAN, 3.0, 4.0]);
    assert!(found[0].is_nan());
    assert_eq!(found[1..], [5.0, 3.0, minus]);
}
