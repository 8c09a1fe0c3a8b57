//! The program under test, small models, and folders that must stay as they are.

use onnx::proto::{
    Dimension, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use prost::Message;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the program.
pub fn shorthaul(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shorthaul"));
    command.args(args).output().expect("the program starts")
}

/// Standard output of a run that must end with `code` and complain about nothing.
pub fn stdout(args: &[&str], code: i32) -> String {
    let output = shorthaul(args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{stderr}");
    assert_eq!(stderr, "", "no progress where nobody watches");
    String::from_utf8(output.stdout).expect("text")
}

/// Standard error of a run that must fail with one message.
pub fn stderr(args: &[&str]) -> String {
    let output = shorthaul(args);
    let stderr = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(output.stdout.is_empty());
    assert_eq!(stderr.matches("error:").count(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

/// The names in a folder, sorted.
pub fn listing(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let name = |e: std::io::Result<std::fs::DirEntry>| e.expect("an entry").file_name();
    let mut names: Vec<String> = entries
        .map(|e| name(e).to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("text")
}

pub fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: op.to_string(),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: vec![output.to_string()],
        ..Default::default()
    }
}

/// `x` or `y`, float [batch, n].
pub fn port(name: &str, n: i64) -> ValueInfoProto {
    let dim = |value| DimensionProto {
        value: Some(value),
        ..Default::default()
    };
    let batch = Dimension::DimParam("batch".to_string());
    let shape = TensorShapeProto {
        dim: vec![dim(batch), dim(Dimension::DimValue(n))],
    };
    ValueInfoProto {
        name: name.to_string(),
        r#type: Some(TypeProto {
            tensor_type: Some(TensorTypeProto {
                elem_type: 1,
                shape: Some(shape),
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A tensor of floats that count from `first`.
pub fn floats(name: &str, dims: &[i64], first: f32) -> TensorProto {
    let n: i64 = dims.iter().product();
    let value = |k: i64| first + (k % 7) as f32 * 0.25;
    let bytes: Vec<u8> = (0..n).flat_map(|k| value(k).to_le_bytes()).collect();
    TensorProto {
        dims: dims.to_vec(),
        data_type: 1,
        raw_data: Some(bytes.into()),
        name: name.to_string(),
        ..Default::default()
    }
}

/// `y = nodes(x)`, all [batch, n].
pub fn model(nodes: Vec<NodeProto>, initializers: Vec<TensorProto>, n: i64) -> ModelProto {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto {
            domain: String::new(),
            version: 18,
        }],
        graph: Some(GraphProto {
            name: "g".to_string(),
            node: nodes,
            input: vec![port("x", n)],
            output: vec![port("y", n)],
            initializer: initializers,
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// `y = Relu(x) + (w + w)`, with an Identity on the way.
pub fn small() -> ModelProto {
    let nodes = vec![
        node("Add", &["w", "w"], "w2"),
        node("Relu", &["x"], "r"),
        node("Identity", &["r"], "i"),
        node("Add", &["i", "w2"], "y"),
    ];
    model(nodes, vec![floats("w", &[4], 0.5)], 4)
}

/// Moves an initializer to a file beside the model.
pub fn move_outside(tensor: &mut TensorProto, location: &str) {
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: key.to_string(),
        value: value.to_string(),
    };
    tensor.raw_data = None;
    tensor.data_location = 1;
    tensor.external_data = vec![entry("location", location)];
}

/// Writes a model as it is, sound or not.
pub fn save(model: &ModelProto, folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, model.encode_to_vec()).expect("written");
    path
}
