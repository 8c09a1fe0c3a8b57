//! Functions of a model: they are inlined wherever they are called, or refused with their name.

mod files;

use files::port;
use graph::{DType, Precision, Tensor, interpret};
use importer::onnx::{File, Model, Options};
use onnx::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use prost::Message;

fn set(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto {
        domain: domain.to_string(),
        version,
    }
}

fn node(domain: &str, op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        domain: domain.to_string(),
        op_type: op.to_string(),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.to_string()],
        ..Default::default()
    }
}

/// A function `r = name(p)` in that version of the operators.
fn function(name: &str, node: Vec<NodeProto>, version: i64) -> FunctionProto {
    FunctionProto {
        name: name.to_string(),
        domain: "local".to_string(),
        input: vec!["p".to_string()],
        output: vec!["r".to_string()],
        opset_import: vec![set("", version), set("local", 1)],
        node,
        ..Default::default()
    }
}

/// `y = F(F(x))`, where `F` is the first of the functions.
fn imported(functions: Vec<FunctionProto>) -> Result<Model, String> {
    let name = functions[0].name.clone();
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![set("", 18), set("local", 1)],
        graph: Some(GraphProto {
            name: "g".to_string(),
            node: vec![
                node("local", &name, &["x"], "h"),
                node("local", &name, &["h"], "y"),
            ],
            input: vec![port("x", &[3])],
            output: vec![port("y", &[3])],
            ..Default::default()
        }),
        functions,
        ..Default::default()
    };
    let file = File::decode("m.onnx", model.encode_to_vec().into()).map_err(|e| e.to_string())?;
    file.import(&Options::default()).map_err(|e| e.to_string())
}

#[test]
fn a_long_function_that_is_called_twice_is_imported() {
    // Twelve changes of sign are none.
    let mut nodes = vec![node("", "Neg", &["p"], "v0")];
    for n in 1..12 {
        let (from, to) = (format!("v{}", n - 1), format!("v{n}"));
        nodes.push(node("", "Neg", &[&from], &to));
    }
    nodes.push(node("", "Add", &["v11", "p"], "r"));
    let model = imported(vec![function("Twice", nodes, 18)]).expect("it is imported");
    let x = Tensor::from_f64(DType::F32, &[3], vec![-1.0, 0.5, 2.0]);
    let none = Default::default();
    let found = interpret(&model.graph, &[x], &none, &ops::Meaning, Precision::Double);
    let found = found.expect("it runs")[0].to_f64();
    assert_eq!(found, [-4.0, 2.0, 8.0]);
}

#[test]
fn functions_that_become_too_long_are_named() {
    let level = |n: usize| match n {
        29 => vec![node("", "Relu", &["p"], "r")],
        n => {
            let next = format!("F{}", n + 1);
            vec![
                node("local", &next, &["p"], "v"),
                node("local", &next, &["v"], "r"),
            ]
        }
    };
    let functions = (0..30).map(|n| function(&format!("F{n}"), level(n), 18));
    let error = imported(functions.collect()).expect_err("too long");
    let expected = "m.onnx cannot be imported
  function `local.F0`: the functions of the file would become 3221225468 nodes where they are called, but at most \
                    131072 are read; a call of `local.F0` alone becomes 1610612734";
    assert_eq!(error, expected);
}

#[test]
fn a_function_in_another_version_is_named() {
    let of = |op: &str| imported(vec![function("Older", vec![node("", op, &["p"], "r")], 12)]);
    assert!(of("Sin").is_ok());
    let error = of("Softmax").expect_err("another meaning");
    assert!(
        error.contains("function `local.Older`: `local.Older` is written with version 12"),
        "{error}"
    );
    assert!(!error.contains("not supported"), "{error}");
}
