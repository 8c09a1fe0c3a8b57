//! `grad`: which initializers it trains by default, what it says of the others, and the state of optimizers.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::file::Model;
use onnx::npy;
use onnx::proto::{
    AttributeProto, ModelProto, StringStringEntryProto, TensorProto, attribute_type,
};
use onnx::tensor::{Tensor, Values};
use program::{arg, floats, model, node, port, save, shorthaul, stderr, stdout};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What `grad --loss mse` says of a model, and the names of the outputs of its training graph.
fn trained(model: &ModelProto, more: &[&str]) -> (String, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(model, folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let said = stdout(&[&grad[..], more].concat(), 0);
    let made = Model::read(&train).expect("a model").proto.graph;
    let outputs = made.iter().flat_map(|g| &g.output);
    (said, outputs.map(|o| o.name.clone()).collect())
}

/// A number without a dimension.
fn number(name: &str) -> TensorProto {
    Tensor::new(&[], Values::F32(vec![0.75])).to_proto(name)
}

/// What PyTorch's exporter writes beside a parameter.
fn mark() -> StringStringEntryProto {
    StringStringEntryProto {
        key: "pkg.torch.export.graph_signature.InputSpec.kind".to_string(),
        value: "PARAMETER".to_string(),
    }
}

/// `y = (x · w + cos(p · f)) · onnx::Mul_3` with positions `p`.
fn rotary() -> ModelProto {
    let mut cast = node("Cast", &["p"], "q");
    cast.attribute.push(AttributeProto {
        name: "to".to_string(),
        i: Some(1),
        r#type: attribute_type::INT,
        ..Default::default()
    });
    let nodes = vec![
        cast,
        node("Mul", &["q", "f"], "angle"),
        node("Cos", &["angle"], "c"),
        node("MatMul", &["x", "w"], "a"),
        node("Add", &["a", "c"], "b"),
        node("Mul", &["b", "onnx::Mul_3"], "y"),
    ];
    let stored = vec![
        Tensor::ints(&[0, 1, 2, 3]).to_proto("p"),
        floats("f", &[4], 0.5),
        floats("w", &[4, 4], 0.5),
        floats("onnx::Mul_3", &[4], 0.5),
    ];
    model(nodes, stored, 4)
}

#[test]
fn what_is_no_parameter_is_left_out_with_its_reason() {
    let (said, outputs) = trained(&rotary(), &[]);
    assert_eq!(outputs, ["loss", "w.grad"], "{said}");
    for line in [
        "trained: 1 with 16 elements: `w`\n",
        "left out: 2; --wrt names what to train instead\n",
        "  `f`: frequencies of a position embedding\n",
        "  `onnx::Mul_3`: named as exporters name constants\n",
    ] {
        assert!(said.contains(line), "`{line}` is not in:\n{said}");
    }
    let (said, outputs) = trained(&rotary(), &["--wrt", "f,w"]);
    assert_eq!(outputs, ["loss", "f.grad", "w.grad"]);
    assert!(
        said.contains("trained: 2 with 20 elements: `f`, `w`\n"),
        "{said}"
    );
    assert!(!said.contains("left out"), "{said}");
    let (said, _) = trained(&rotary(), &["--json"]);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(said["trained"], json!([{"name": "w", "elements": 16}]));
    assert_eq!(
        said["left_out"],
        json!([
            {"name": "f", "elements": 4, "reason": "frequency"},
            {"name": "onnx::Mul_3", "elements": 4, "reason": "constant"},
        ])
    );
}

#[test]
fn a_statistic_that_is_also_something_else_is_left_out_as_both() {
    // Before training, means and biases are all 0, and some exporters store equal arrays once.
    let norm = node("BatchNormalization", &["x", "s", "m", "m", "v"], "y");
    let stored = ["s", "m", "v"].map(|name| floats(name, &[4], 0.5));
    let (said, outputs) = trained(&model(vec![norm], stored.to_vec(), 4), &[]);
    assert_eq!(outputs, ["loss", "s.grad"], "{said}");
    for line in [
        "  `v`: running statistics of batch normalization\n",
        "  `m`: read as running statistics of batch normalization, and as something else too\n",
    ] {
        assert!(said.contains(line), "`{line}` is not in:\n{said}");
    }
}

#[test]
fn info_and_report_train_what_grad_trains() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&rotary(), folder.path(), "m.onnx");
    let text = stdout(&["info", arg(&path)], 0);
    let line = "parameters: 3 with 24 elements (96 B), 16 of them trainable";
    assert!(text.contains(line), "{text}");
    let mut only_buffers = rotary();
    let graph = only_buffers.graph.as_mut().expect("a graph");
    graph.node[3] = node("Relu", &["x"], "a");
    graph.initializer.retain(|t| t.name != "w");
    let path = save(&only_buffers, folder.path(), "b.onnx");
    let text = stderr(&["report", arg(&path), "--bind", "batch=2", "--train"]);
    assert!(text.contains("no trainable parameters"), "{text}");
}

#[test]
fn what_does_not_reach_the_loss_is_said() {
    let nodes = vec![
        node("MatMul", &["x", "w"], "y"),
        node("Mul", &["y", "v"], "z"),
    ];
    let stored = vec![floats("w", &[4, 4], 0.5), floats("v", &[4], 0.5)];
    let mut two = model(nodes, stored, 4);
    two.graph
        .as_mut()
        .expect("a graph")
        .output
        .push(port("z", 4));
    let (said, outputs) = trained(&two, &["--output", "y"]);
    assert_eq!(outputs, ["loss", "w.grad"]);
    assert!(
        said.contains("  `v`: without influence on the loss\n"),
        "{said}"
    );
}

#[test]
fn a_number_is_trained_if_the_exporter_marked_it_or_if_it_is_named() {
    let nodes = vec![
        node("MatMul", &["x", "w"], "a"),
        node("Mul", &["a", "scale"], "y"),
    ];
    let plain = model(nodes, vec![floats("w", &[4, 4], 0.5), number("scale")], 4);
    let (said, outputs) = trained(&plain, &[]);
    assert_eq!(outputs, ["loss", "w.grad"]);
    let reason = "  `scale`: a single number that no exporter marked as a parameter\n";
    assert!(said.contains(reason), "{said}");
    let (_, outputs) = trained(&plain, &["--wrt", "scale"]);
    assert_eq!(outputs, ["loss", "scale.grad"]);
    let mut marked = plain;
    for tensor in &mut marked.graph.as_mut().expect("a graph").initializer {
        tensor.metadata_props.push(mark());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&marked, folder.path(), "m.onnx");
    let text = stdout(&["info", arg(&path)], 0);
    let line = "parameters: 2 with 17 elements (68 B), 17 of them trainable";
    assert!(text.contains(line), "{text}");
    let (said, mut outputs) = trained(&marked, &["--optimizer", "adam"]);
    assert!(said.contains("trained: 2 with 17 elements"), "{said}");
    assert!(
        said.contains("gradients within") && !said.contains("left out"),
        "{said}"
    );
    outputs.retain(|name| name.ends_with(".grad"));
    outputs.sort();
    assert_eq!(outputs, ["scale.grad", "w.grad"]);
}

#[test]
fn report_trains_a_number_that_the_exporter_marked() {
    let folder = tempfile::tempdir().expect("a folder");
    let nodes = vec![node("Mul", &["x", "scale"], "y")];
    let mut scaled = model(nodes, vec![number("scale")], 4);
    let path = save(&scaled, folder.path(), "plain.onnx");
    let text = stderr(&["report", arg(&path), "--bind", "batch=2", "--train"]);
    assert!(text.contains("no trainable parameters"), "{text}");
    let graph = scaled.graph.as_mut().expect("a graph");
    graph.initializer[0].metadata_props.push(mark());
    let path = save(&scaled, folder.path(), "marked.onnx");
    let text = stdout(&["report", arg(&path), "--bind", "batch=2", "--train"], 0);
    assert!(text.contains("a training step in"), "{text}");
}

#[test]
fn a_parameter_that_several_nodes_read_is_said() {
    let twice = |second: &str| {
        let nodes = vec![
            node("MatMul", &["x", "w"], "a"),
            node("MatMul", &["a", second], "y"),
        ];
        let stored = vec![floats("w", &[4, 4], 0.5), floats("v", &[4, 4], 0.25)];
        model(nodes, stored, 4)
    };
    let (said, _) = trained(&twice("w"), &[]);
    let note = "`w` is one array that 2 nodes read, so its gradient is the sum over them: ";
    assert!(said.contains(note), "{said}");
    let (said, _) = trained(&twice("v"), &[]);
    assert!(!said.contains("is one array"), "{said}");
}

/// What a training graph gives.
fn run(train: &Path, feeds: &[(&str, &Tensor)]) -> BTreeMap<String, Tensor> {
    let folder = tempfile::tempdir().expect("a folder");
    let (given, found) = (folder.path().join("x.npz"), folder.path().join("y.npz"));
    let file = fs::File::create(&given).expect("created");
    npy::write_npz(feeds.iter().copied(), file).expect("written");
    let args = [
        "run",
        arg(train),
        "--inputs",
        arg(&given),
        "--out",
        arg(&found),
    ];
    stdout(&args, 0);
    let found = npy::read_npz(&fs::read(&found).expect("read")).expect("an archive");
    found.into_iter().collect()
}

#[test]
fn the_first_step_needs_no_state_if_the_file_holds_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let product = model(
        vec![node("MatMul", &["x", "w"], "y")],
        vec![floats("w", &[4, 4], 0.5)],
        4,
    );
    let path = save(&product, folder.path(), "m.onnx");
    let made = |state: &str| {
        let train = folder.path().join(format!("{state}.onnx"));
        let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
        let adam = ["--optimizer", "adam", "--optimizer-state", state];
        let said = stdout(&[&grad[..], &adam].concat(), 0);
        assert!(said.contains("gradients within"), "{said}");
        train
    };
    let (outside, inside) = (made("outside"), made("inside"));
    let tensor = |shape: &[usize], value: f32| {
        let n: usize = shape.iter().product();
        Tensor::new(shape, Values::F32(vec![value; n]))
    };
    let (x, target) = (tensor(&[2, 4], 0.5), tensor(&[2, 4], 0.25));
    let (rate, step, zeros) = (tensor(&[], 0.1), tensor(&[], 1.0), tensor(&[4, 4], 0.0));
    let feeds = [("x", &x), ("target", &target), ("lr", &rate)];
    let begin = [("step", &step), ("w.mean", &zeros), ("w.square", &zeros)];
    let wanted = run(&outside, &[&feeds[..], &begin].concat());
    let found = run(&inside, &feeds);
    assert_eq!(found, wanted);
    assert_ne!(found["w.mean.next"], zeros);
    // Without the option the file holds no state, and every step is given it.
    let given = folder.path().join("x.npz");
    npy::write_npz(feeds, fs::File::create(&given).expect("created")).expect("written");
    let text = stderr(&["run", arg(&outside), "--inputs", arg(&given)]);
    assert!(text.contains("step"), "{text}");
    let grad = ["grad", arg(&path), "-o", arg(&inside), "--loss", "mse"];
    let alone = shorthaul(&[&grad[..], &["--optimizer-state", "inside"]].concat());
    assert_eq!(alone.status.code(), Some(2));
}
