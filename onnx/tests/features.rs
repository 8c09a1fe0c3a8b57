//! Operators of the domain for classical machine learning, against numbers worked out by hand.

use onnx::evaluate::{Precision, Program, Values as Named};
use onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto};
use onnx::tensor::{Tensor, Values};
use std::path::Path;

fn attribute(name: &str, set: impl FnOnce(&mut AttributeProto)) -> AttributeProto {
    let mut attribute = AttributeProto {
        name: name.to_string(),
        ..Default::default()
    };
    set(&mut attribute);
    attribute
}

fn run(op: &str, attributes: Vec<AttributeProto>, x: Tensor) -> Result<Tensor, String> {
    let named = |name: &str| ValueInfoProto {
        name: name.to_string(),
        ..Default::default()
    };
    let node = NodeProto {
        op_type: op.to_string(),
        domain: "ai.onnx.ml".to_string(),
        input: vec!["x".to_string()],
        output: vec!["y".to_string()],
        attribute: attributes,
        ..Default::default()
    };
    let model = ModelProto {
        graph: Some(GraphProto {
            node: vec![node],
            input: vec![named("x")],
            output: vec![named("y")],
            ..Default::default()
        }),
        ..Default::default()
    };
    let program = Program::new(&model, Path::new("."), Precision::AsStored).expect("a graph");
    let outputs = program.outputs(&Named::from([("x".to_string(), x)]));
    let mut outputs = outputs.map_err(|error| error.to_string())?;
    Ok(outputs.remove(0))
}

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::new(shape, Values::F32(values.to_vec()))
}

#[test]
fn a_scaler_subtracts_then_multiplies_by_column() {
    let attributes = || {
        vec![
            attribute("offset", |a| a.floats = vec![1.0, 2.0, 3.0]),
            attribute("scale", |a| a.floats = vec![2.0, 10.0, 0.5]),
        ]
    };
    let x = floats(&[2, 3], &[1.0, 2.0, 3.0, 2.0, 1.0, 5.0]);
    let y = run("Scaler", attributes(), x).expect("it runs");
    assert_eq!(y, floats(&[2, 3], &[0.0, 0.0, 0.0, 2.0, -10.0, 1.0]));
    let whole = Tensor::new(&[1, 3], Values::I64(vec![2, 1, 5]));
    let y = run("Scaler", attributes(), whole).expect("it runs");
    assert_eq!(y, floats(&[1, 3], &[2.0, -10.0, 1.0]));
    let error = run("Scaler", attributes(), floats(&[2, 2], &[0.0; 4]));
    assert!(error.expect_err("refused").contains("`offset`"));
}

#[test]
fn a_one_hot_encoder_marks_the_category() {
    let categories = |zeros: i64| {
        vec![
            attribute("cats_int64s", |a| a.ints = vec![7, 3]),
            attribute("zeros", |a| a.i = Some(zeros)),
        ]
    };
    let x = || Tensor::new(&[3], Values::I64(vec![3, 8, 7]));
    let y = run("OneHotEncoder", categories(1), x()).expect("it runs");
    assert_eq!(y, floats(&[3, 2], &[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]));
    let error = run("OneHotEncoder", categories(0), x()).expect_err("refused");
    assert!(error.contains("none of its categories"), "{error}");
    let text = vec![attribute("cats_strings", |a| {
        a.strings = vec!["cat".into(), "dog".into()];
    })];
    let x = Tensor::new(&[2, 1], Values::String(vec!["dog".into(), "cow".into()]));
    let y = run("OneHotEncoder", text, x).expect("it runs");
    assert_eq!(y, floats(&[2, 1, 2], &[0.0, 1.0, 0.0, 0.0]));
}
