//! Files whose operators are older than those that Shorthaul knows: the program brings them to a known version first.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::proto::{AttributeProto, ModelProto};
use program::{arg, floats, listing, model, node, save, shorthaul, stderr, stdout};
use std::path::{Path, PathBuf};

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.to_string(),
        r#type: 2,
        i: Some(value),
        ..Default::default()
    }
}

/// `y = Relu(x + w)`, `w` one number for each row: before version 7 the attribute `axis` said so.
fn old() -> ModelProto {
    let mut add = node("Add", &["x", "w"], "s");
    add.attribute = vec![int("broadcast", 1), int("axis", 0)];
    let nodes = vec![
        add,
        node("Identity", &["s"], "i"),
        node("Relu", &["i"], "y"),
    ];
    let mut model = model(nodes, vec![floats("w", &[3], -0.5)], 3);
    model.opset_import[0].version = 6;
    model
}

/// Three rows `[1, 0, −1]`.
fn rows(folder: &Path) -> PathBuf {
    let values: Vec<f64> = [1.0, 0.0, -1.0].repeat(3);
    let tensor = onnx::tensor::Tensor::floats(onnx::element::Element::F32, &[3, 3], &values);
    let path = folder.join("x.npy");
    let bytes = onnx::npy::npy(&tensor.expect("floats")).expect("bytes");
    std::fs::write(&path, bytes).expect("written");
    path
}

#[test]
fn old_files_run_as_their_version_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&old(), folder.path(), "old.onnx");
    let x = rows(folder.path());
    let out = folder.path().join("y.npz");
    let run = ["run", arg(&path), "--inputs", arg(&x), "-o", arg(&out)];
    stdout(&run, 0);
    let bytes = std::fs::read(&out).expect("outputs");
    let outputs = onnx::npy::read_npz(&bytes).expect("tensors");
    let found = outputs[0].1.to_f64().expect("floats");
    // Each row has a number of its own: −0.5, −0.25 and 0.
    assert_eq!(found, [0.5, 0.0, 0.0, 0.75, 0.0, 0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn old_files_are_checked_and_optimized() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&old(), folder.path(), "old.onnx");
    let text = stdout(&["check", arg(&path)], 0);
    assert!(text.contains("well formed"), "{text}");
    assert!(
        text.contains("version 6 of the operators, and is read as one of version 9"),
        "{text}"
    );
    let out = folder.path().join("new.onnx");
    let text = stdout(
        &["optimize", arg(&path), "-o", arg(&out), "--bind", "batch=3"],
        0,
    );
    assert!(text.contains("converted to version 9 first"), "{text}");
    let same = ["check", arg(&path), arg(&out), "--bind", "batch=3"];
    assert!(stdout(&same, 0).contains("the results are the same"));
    // The same numbers, one for each column, give something else.
    let mut other = old();
    let graph = other.graph.as_mut().expect("a graph");
    graph.node[0].attribute = vec![int("broadcast", 1)];
    let other = save(&other, folder.path(), "other.onnx");
    let different = shorthaul(&["check", arg(&path), arg(&other), "--bind", "batch=3"]);
    assert_eq!(different.status.code(), Some(3));
}

#[test]
fn old_files_are_trained() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&old(), folder.path(), "old.onnx");
    let out = folder.path().join("train.onnx");
    let size = ["--bind", "batch=3"];
    let grad = ["grad", arg(&path), "-o", arg(&out), "--loss", "mse"];
    stdout(&[&grad[..], &size].concat(), 0);
    let made = onnx::file::Model::read(&out).expect("a model").proto;
    let outputs = made.graph.expect("a graph").output;
    assert!(outputs.iter().any(|output| output.name == "w.grad"));
}

#[test]
fn what_cannot_be_brought_up_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut model = old();
    let graph = model.graph.as_mut().expect("a graph");
    graph.node[1] = node("Dropout", &["s"], "i");
    let path = save(&model, folder.path(), "old.onnx");
    let out = folder.path().join("new.onnx");
    let before = listing(folder.path());
    let text = stderr(&["optimize", arg(&path), "-o", arg(&out)]);
    assert!(text.contains("is too old"), "{text}");
    assert!(text.contains("training"), "{text}");
    assert_eq!(listing(folder.path()), before);
    let text = stdout(&["check", arg(&path)], 3);
    assert!(text.contains("version 6 of the operators"), "{text}");
}
