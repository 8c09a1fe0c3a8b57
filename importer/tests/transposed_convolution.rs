//! Where ConvTranspose cuts what an explicit `output_shape` leaves over: the numbers are the sums that
//! the standard's formula gives, and ONNX Runtime.

mod files;

use files::port;
use graph::{Precision, Tensor, interpret};
use importer::onnx::{File, Options};
use onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
};
use prost::Message;

fn floats(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    TensorProto {
        name: name.to_string(),
        dims: dims.to_vec(),
        data_type: 1,
        raw_data: Some(bytes.into()),
        ..Default::default()
    }
}

/// `[1, 10, 100]` with the window `[1, 2, 3]` and stride 2, which would cover seven elements.
fn upsampled(auto_pad: &str, output_shape: i64) -> Vec<f64> {
    let attribute = |name: &str, r#type: i32| AttributeProto {
        name: name.to_string(),
        r#type,
        ..Default::default()
    };
    let ints = |name: &str, n: i64| AttributeProto {
        ints: vec![n],
        ..attribute(name, 7)
    };
    let node = NodeProto {
        op_type: "ConvTranspose".to_string(),
        input: vec!["x".to_string(), "w".to_string()],
        output: vec!["y".to_string()],
        attribute: vec![
            ints("strides", 2),
            ints("output_shape", output_shape),
            AttributeProto {
                s: Some(auto_pad.to_string().into_bytes().into()),
                ..attribute("auto_pad", 3)
            },
        ],
        ..Default::default()
    };
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: 18,
        }],
        graph: Some(GraphProto {
            node: vec![node],
            input: vec![port("x", &[1, 1, 3])],
            output: vec![port("y", &[1, 1, output_shape])],
            initializer: vec![floats("w", &[1, 1, 3], &[1.0, 2.0, 3.0])],
            ..Default::default()
        }),
        ..Default::default()
    };
    let file = File::decode("case.onnx", model.encode_to_vec().into()).expect("decoded");
    let model = file.import(&Options::default()).expect("imported");
    let x = importer::onnx::decode_tensor(
        floats("x", &[1, 1, 3], &[1.0, 10.0, 100.0])
            .encode_to_vec()
            .into(),
    );
    let mut inputs: Vec<Tensor> = vec![x.expect("a tensor")];
    inputs.extend(
        model
            .parameters
            .iter()
            .map(|p| p.stored.tensor().expect("stored")),
    );
    let found = interpret(
        &model.graph,
        &inputs,
        &Default::default(),
        &ops::Meaning,
        Precision::Double,
    )
    .expect("interpreted");
    (0..output_shape as usize)
        .map(|n| found[0].at(n).as_f64())
        .collect()
}

#[test]
fn an_odd_element_is_cut_at_the_start_but_for_same_upper() {
    let start = [2.0, 13.0, 20.0, 130.0, 200.0, 300.0];
    let end = [1.0, 2.0, 13.0, 20.0, 130.0, 200.0];
    assert_eq!(upsampled("NOTSET", 6), start);
    assert_eq!(upsampled("SAME_LOWER", 6), start);
    assert_eq!(upsampled("VALID", 6), start);
    assert_eq!(upsampled("SAME_UPPER", 6), end);
    // Three are two at the start and one at the end.
    assert_eq!(upsampled("NOTSET", 4), start[1..5]);
    assert_eq!(upsampled("SAME_UPPER", 4), end[1..5]);
}
