//! Operators of versions before 7, which broadcast and told training from evaluation in another way.

mod files;

use files::port;
use graph::{DType, Precision, Tensor, interpret};
use importer::onnx::{File, Options};
use onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use prost::Message;

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: 2,
        i: Some(value),
        ..Default::default()
    }
}

/// A model of version 6 with one node on inputs of these sizes.
fn model(op: &str, inputs: &[&[i64]], attribute: Vec<AttributeProto>) -> Vec<u8> {
    let names: Vec<String> = (0..inputs.len()).map(|n| format!("x{n}")).collect();
    let pairs = names.iter().zip(inputs);
    let graph = GraphProto {
        name: "old".to_string(),
        node: vec![NodeProto {
            op_type: op.to_string(),
            input: names.clone(),
            output: vec!["y".to_string()],
            attribute,
            ..Default::default()
        }],
        input: pairs.map(|(name, sizes)| port(name, sizes)).collect(),
        output: vec![port("y", inputs[0])],
        ..Default::default()
    };
    let made = ModelProto {
        ir_version: Some(3),
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto {
            version: 6,
            ..Default::default()
        }],
        ..Default::default()
    };
    made.encode_to_vec()
}

fn imported(bytes: Vec<u8>) -> Result<importer::onnx::Model, String> {
    let file = File::decode("old.onnx", bytes.into()).map_err(|e| e.to_string())?;
    file.import(&Options::default()).map_err(|e| e.to_string())
}

/// The result for inputs that count from 1, as numbers.
fn result(op: &str, sizes: &[&[i64]], attributes: Vec<AttributeProto>) -> Vec<f64> {
    let model = imported(model(op, sizes, attributes)).expect("it is imported");
    let tensor = |sizes: &&[i64]| {
        let shape: Vec<usize> = sizes.iter().map(|n| *n as usize).collect();
        let n: usize = shape.iter().product();
        let values = (1..=n).map(|i| i as f64 - n as f64 / 2.0).collect();
        Tensor::from_f64(DType::F32, &shape, values)
    };
    let inputs: Vec<Tensor> = sizes.iter().map(tensor).collect();
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
fn a_second_operand_lies_along_the_dimension_that_is_named() {
    // x counts from −5 to 6, b is 0 and 1.
    let asked = vec![int("broadcast", 1), int("axis", 1)];
    let found = result("Add", &[&[2, 2, 3], &[2]], asked);
    let expected: Vec<f64> = (0..12)
        .map(|n| f64::from(n - 5) + f64::from(n / 3 % 2))
        .collect();
    assert_eq!(found, expected);
    // Without `axis`, it is aligned with the last dimensions.
    let found = result("Mul", &[&[2, 3], &[3]], vec![int("broadcast", 1)]);
    let expected: Vec<f64> = (0..6)
        .map(|n| f64::from(n - 2) * (f64::from(n % 3) - 0.5))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn slopes_are_those_of_channels() {
    let found = result("PRelu", &[&[1, 2, 3], &[2]], Vec::new());
    // x counts from −2 to 3; the slopes are 0 and 1.
    assert_eq!(found, [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]);
}

#[test]
fn training_forms_are_refused() {
    let error = imported(model("Dropout", &[&[2]], Vec::new())).expect_err("an error");
    assert!(error.contains("the node is in that of training"), "{error}");
    assert_eq!(
        result("Dropout", &[&[2]], vec![int("is_test", 1)]),
        [0.0, 1.0]
    );
}
