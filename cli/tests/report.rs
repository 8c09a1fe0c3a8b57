//! What `shorthaul report` finds in a file.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::proto::{ModelProto, TensorProto};
use program::{arg, model, node, save, stdout};

fn integers(name: &str, values: &[i64]) -> TensorProto {
    let bytes: Vec<u8> = values.iter().flat_map(|n| n.to_le_bytes()).collect();
    TensorProto {
        dims: vec![values.len() as i64],
        data_type: 7,
        raw_data: Some(bytes.into()),
        name: name.to_string(),
        ..Default::default()
    }
}

fn number(name: &str, value: f32) -> TensorProto {
    TensorProto {
        data_type: 1,
        raw_data: Some(value.to_le_bytes().to_vec().into()),
        name: name.to_string(),
        ..Default::default()
    }
}

/// Attention with four heads and 512 tokens, as exporters write it: its factor is a tensor without dimensions.
fn attention() -> ModelProto {
    let width = 4 * 512 * 16;
    let mut keys = node("Transpose", &["k"], "kt");
    keys.attribute
        .push(onnx::rewrite::patch::ints("perm", &[0, 1, 3, 2]));
    let nodes = vec![
        node("Reshape", &["x", "heads"], "q"),
        node("Neg", &["q"], "k"),
        node("Tanh", &["q"], "v"),
        keys,
        node("MatMul", &["q", "kt"], "products"),
        node("Div", &["products", "four"], "scores"),
        node("Softmax", &["scores"], "p"),
        node("MatMul", &["p", "v"], "o"),
        node("Reshape", &["o", "row"], "y"),
    ];
    let initializers = vec![
        integers("heads", &[-1, 4, 512, 16]),
        integers("row", &[-1, width]),
        number("four", 4.0),
    ];
    model(nodes, initializers, width)
}

#[test]
fn attention_of_a_file_stores_no_scores() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&attention(), folder.path(), "m.onnx");
    let json = stdout(&["report", arg(&path), "--bind", "batch=1", "--json"], 0);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let report = &json["report"];
    let kernels = report["kernels"].as_array().expect("kernels");
    assert!(kernels.iter().any(|k| k["path"] == "attention"), "{report}");
    let peak = report["memory"]["forward_arena_bytes"].as_i64();
    let scores = 4 * 4 * 512 * 512;
    assert!(peak.is_some_and(|bytes| bytes < scores), "{peak:?}");
}
