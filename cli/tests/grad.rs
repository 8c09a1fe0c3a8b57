//! `grad`: the names and types of what it adds to a model, and what it says.

// Each test binary uses a part of it.
#[allow(dead_code)]
mod program;

use onnx::element::Element;
use onnx::file::Model;
use onnx::npy;
use onnx::proto::{
    AttributeProto, Dimension, ModelProto, NodeProto, ValueInfoProto, attribute_type,
};
use onnx::tensor::{Tensor, Values};
use program::{arg, floats, listing, model, node, port, save, shorthaul, small, stderr, stdout};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Names of inputs or outputs with the numbers of their element types.
fn typed(ports: &[ValueInfoProto]) -> BTreeMap<String, i32> {
    let element = |port: &ValueInfoProto| {
        let tensor = port.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
        tensor.expect("a tensor").elem_type
    };
    ports
        .iter()
        .map(|port| (port.name.clone(), element(port)))
        .collect()
}

/// The training graph's inputs and outputs.
fn made(path: &Path) -> (BTreeMap<String, i32>, BTreeMap<String, i32>) {
    let graph = Model::read(path)
        .expect("a model")
        .proto
        .graph
        .expect("a graph");
    (typed(&graph.input), typed(&graph.output))
}

/// The model with its floats in half precision.
fn halved(mut model: ModelProto) -> ModelProto {
    let graph = model.graph.as_mut().expect("a graph");
    for port in graph.input.iter_mut().chain(&mut graph.output) {
        let tensor = port.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
        tensor.expect("a tensor").elem_type = Element::F16.number();
    }
    for tensor in &mut graph.initializer {
        let whole = Tensor::of_proto(tensor).expect("elements");
        *tensor = half(&whole.shape, &whole.to_f64().expect("numbers")).to_proto(&tensor.name);
    }
    model
}

fn half(shape: &[usize], values: &[f64]) -> Tensor {
    Tensor::floats(Element::F16, shape, values).expect("floats")
}

/// `y = x · w` with a 4 × 4 weight.
fn product(w: &str) -> ModelProto {
    model(
        vec![node("MatMul", &["x", w], "y")],
        vec![floats(w, &[4, 4], 0.5)],
        4,
    )
}

#[test]
fn successors_have_the_type_of_what_they_follow() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&halved(product("w")), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    for (optimizer, state) in [
        ("sgd", &[][..]),
        ("momentum", &["w.momentum"]),
        ("adam", &["w.mean", "w.square"]),
        ("adamw", &["w.mean", "w.square"]),
    ] {
        let grad = [
            "grad",
            arg(&path),
            "-o",
            arg(&train),
            "--loss",
            "mse",
            "--optimizer",
            optimizer,
        ];
        stdout(&grad, 0);
        let (inputs, outputs) = made(&train);
        assert_eq!((inputs["w"], outputs["w.next"]), (10, 10));
        for name in state {
            assert_eq!(
                (inputs[*name], outputs[&format!("{name}.next")]),
                (1, 1),
                "{name}"
            );
        }
    }
    // The last one is AdamW. It keeps squares of gradients that are too small for half precision, and the first step is
    // the learning rate against the gradient's sign.
    let zeros = Tensor::new(&[4, 4], Values::F32(vec![0.0; 16]));
    let number = |v: f32| Tensor::new(&[], Values::F32(vec![v]));
    let feeds = [
        ("x", &half(&[1, 4], &[0.001; 4])),
        ("target", &half(&[1, 4], &[0.0; 4])),
        ("lr", &number(0.0625)),
        ("step", &number(1.0)),
        ("w.mean", &zeros),
        ("w.square", &zeros),
    ];
    let (given, found) = (folder.path().join("x.npz"), folder.path().join("y.npz"));
    npy::write_npz(feeds, fs::File::create(&given).expect("created")).expect("written");
    stdout(
        &[
            "run",
            arg(&train),
            "--inputs",
            arg(&given),
            "--out",
            arg(&found),
        ],
        0,
    );
    let found = npy::read_npz(&fs::read(&found).expect("read")).expect("an archive");
    let found: BTreeMap<String, Tensor> = found.into_iter().collect();
    let values = |name: &str| found[name].to_f64().expect("numbers");
    assert_eq!(found["w.next"].element(), Element::F16);
    assert!(
        values("w.square.next").iter().all(|v| *v > 0.0),
        "{:?}",
        values("w.square.next")
    );
    let next = values("w.next");
    for (k, next) in next.iter().enumerate() {
        let w = 0.5 + (k % 7) as f64 * 0.25;
        let wanted = w * (1.0 - 0.01 * 0.0625) - 0.0625;
        assert!((next - wanted).abs() < 2e-3, "{k}: {next}, not {wanted}");
    }
}

#[test]
fn what_is_named_twice_is_differentiated_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&product("w"), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    stdout(
        &[
            "grad",
            arg(&path),
            "-o",
            arg(&train),
            "--loss",
            "mse",
            "--wrt",
            "w,w",
        ],
        0,
    );
    let graph = Model::read(&train)
        .expect("read")
        .proto
        .graph
        .expect("a graph");
    let names: Vec<&str> = graph.output.iter().map(|o| o.name.as_str()).collect();
    assert_eq!(names, ["loss", "w.grad"]);
}

#[test]
fn a_name_that_the_model_has_already_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let train = folder.path().join("t.onnx");
    let nodes = vec![
        node("MatMul", &["x", "w"], "a"),
        node("MatMul", &["a", "w.grad"], "y"),
    ];
    let weights = vec![floats("w", &[4, 4], 0.5), floats("w.grad", &[4, 4], 0.5)];
    let clashes = [
        (model(nodes, weights, 4), "w.grad"),
        (product("loss"), "loss"),
        (product("lr"), "lr"),
    ];
    for (model, name) in clashes {
        let path = save(&model, folder.path(), "m.onnx");
        let text = stderr(&[
            "grad",
            arg(&path),
            "-o",
            arg(&train),
            "--loss",
            "mse",
            "--optimizer",
            "sgd",
        ]);
        assert!(
            text.contains(&format!("already has a value called `{name}`")),
            "{text}"
        );
    }
    assert_eq!(listing(folder.path()), ["m.onnx"]);
}

#[test]
fn the_loss_is_compared_in_the_form_that_is_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let train = folder.path().join("t.onnx");
    let said = |model: &ModelProto, mode: &str| {
        let path = save(model, folder.path(), "m.onnx");
        let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
        stdout(&[&grad[..], &["--mode", mode]].concat(), 0)
    };
    let by_batch = {
        let operands = ["x", "scale", "bias", "mean", "var"];
        let weights = operands[1..].iter().map(|name| floats(name, &[4], 0.5));
        model(
            vec![node("BatchNormalization", &operands, "y")],
            weights.collect(),
            4,
        )
    };
    for mode in ["file", "train", "eval"] {
        for model in [product("w"), by_batch.clone()] {
            let text = said(&model, mode);
            assert!(text.contains("loss within"), "{mode}: {text}");
        }
    }
    // In training, dropout makes the forms differ, so the loss is not compared.
    let mut dropped = product("w");
    let graph = dropped.graph.as_mut().expect("a graph");
    graph.node[0].output[0] = "a".to_string();
    graph.node.push(node("Dropout", &["a"], "y"));
    assert!(said(&dropped, "eval").contains("loss within"));
    assert!(said(&dropped, "train").contains("loss not compared"));
}

#[test]
fn gradients_need_not_be_outputs() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&product("w"), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let adam = ["--optimizer", "adam", "--no-gradients"];
    let text = stdout(&[&grad[..], &adam].concat(), 0);
    let step = "of that of the graph with gradients";
    assert!(
        text.contains("verified in float64") && text.contains(step),
        "{text}"
    );
    let outputs: Vec<String> = made(&train).1.into_keys().collect();
    assert_eq!(outputs, ["loss", "w.mean.next", "w.next", "w.square.next"]);
    let usage = shorthaul(&[&grad[..], &["--no-gradients"]].concat());
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn a_size_that_the_model_lacks_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&product("w"), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let text = stderr(&[&grad[..], &["--bind", "Q=3"]].concat());
    let unknown = "size `Q`: the file has no dynamic size of that name; it has batch";
    assert!(text.contains(unknown), "{text}");
    assert_eq!(listing(folder.path()), ["m.onnx"]);
}

#[test]
fn a_size_that_the_model_cannot_be_read_without_gets_a_number() {
    let folder = tempfile::tempdir().expect("a folder");
    let int = |name: &str, i: i64| AttributeProto {
        name: name.to_string(),
        i: Some(i),
        r#type: attribute_type::INT,
        ..Default::default()
    };
    // Halves of a dynamic size.
    let mut split = node("Split", &["p"], "a");
    split.output.push("b".to_string());
    split.attribute = vec![int("num_outputs", 2)];
    let mut whole = node("Concat", &["b", "c"], "y");
    whole.attribute = vec![int("axis", 0)];
    let product = |a: &str, b: &str, y: &str| node("Mul", &[a, b], y);
    let nodes = vec![product("x", "w", "p"), split, product("a", "b", "c"), whole];
    let halves = model(nodes, vec![floats("w", &[4], 0.5)], 4);
    let path = save(&halves, folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let said = stdout(&grad, 0);
    assert!(said.contains("the training graph is for batch="), "{said}");
    let said = stdout(&[&grad[..], &["--bind", "batch=6"]].concat(), 0);
    assert!(!said.contains("--bind"), "{said}");
    assert!(said.contains("verified in float64"), "{said}");
}

#[test]
fn a_graph_with_dropout_is_proven_with_masks_that_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let drops = vec![
        node("MatMul", &["x", "w"], "a"),
        node("Dropout", &["a", "ratio", "on"], "y"),
    ];
    let mut ratio = floats("ratio", &[], 0.5);
    ratio.dims.clear();
    let on = Tensor::new(&[], Values::Bool(vec![true])).to_proto("on");
    let weights = vec![floats("w", &[4, 4], 0.5), ratio, on];
    let path = save(&model(drops, weights, 4), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let said = stdout(&[&grad[..], &["--mode", "train"]].concat(), 0);
    assert!(said.contains("random numbers held"), "{said}");
}

#[test]
fn uniform_numbers_are_drawn_once_and_used_in_both_passes() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut as_float = node("Cast", &["kept"], "mask");
    as_float.attribute = vec![AttributeProto {
        name: "to".to_string(),
        i: Some(1),
        r#type: attribute_type::INT,
        ..Default::default()
    }];
    let nodes = vec![
        node("MatMul", &["x", "w"], "a"),
        node("RandomUniformLike", &["a"], "u"),
        node("Less", &["u", "survival"], "kept"),
        as_float,
        node("Mul", &["a", "mask"], "y"),
    ];
    let mut survival = floats("survival", &[], 0.5);
    survival.dims.clear();
    let weights = vec![floats("w", &[4, 4], 0.5), survival];
    let path = save(&model(nodes, weights, 4), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = [
        "grad",
        arg(&path),
        "-o",
        arg(&train),
        "--loss",
        "mse",
        "--wrt",
        "w",
    ];
    let said = stdout(&grad, 0);
    assert!(said.contains("random numbers held"), "{said}");
    let written = Model::read(&train).expect("a model");
    let graph = written.proto.graph.as_ref().expect("a graph");
    let drawing = graph
        .node
        .iter()
        .filter(|n| n.op_type.starts_with("Random"));
    assert_eq!(drawing.count(), 1);
    assert!(graph.input.iter().all(|i| !i.name.contains("seed")));
}

#[test]
fn json_says_what_the_file_takes_and_gives() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&small(), folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = [
        "grad",
        arg(&path),
        "-o",
        arg(&train),
        "--loss",
        "mse",
        "--optimizer",
        "sgd",
        "--json",
    ];
    let json: Value = serde_json::from_str(&stdout(&grad, 0)).expect("JSON");
    assert_eq!(
        json["inputs"],
        serde_json::json!(["x", "w", "target", "lr"])
    );
    assert_eq!(
        json["outputs"],
        serde_json::json!(["loss", "w.grad", "w.next"])
    );
    assert_eq!(
        json["file_bytes"],
        fs::metadata(&train).expect("there").len()
    );
    assert_eq!(json["keep_running_statistics"], serde_json::json!([]));
    let error = |what: &str| json["verified"][what].as_f64().expect("a number");
    assert!(error("loss_error") < 1e-12 && error("gradient_error") < 1e-6);
    assert_eq!(json["not_verified"], Value::Null);
    let quiet = shorthaul(&[
        "--quiet",
        "grad",
        arg(&path),
        "-o",
        arg(&train),
        "--loss",
        "mse",
    ]);
    assert!(quiet.status.success() && quiet.stderr.is_empty());
}

#[test]
fn it_says_what_it_was_made_of_and_whether_it_is_proven() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut described = small();
    described.doc_string = "a model".to_string();
    described.metadata_props = vec![onnx::proto::StringStringEntryProto {
        key: "licence".to_string(),
        value: "free".to_string(),
    }];
    let path = save(&described, folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let said = stdout(&grad, 0);
    assert!(said.contains("verified in float64 (seed 2"), "{said}");
    let unasked = stdout(&[&grad[..], &["--no-verify"]].concat(), 0);
    assert!(!unasked.contains("verified"), "{unasked}");
    let made = Model::read(&train).expect("a model").proto;
    assert_eq!(made.doc_string, "a model");
    assert_eq!(made.metadata_props, described.metadata_props);
}

/// What `grad --loss mse` says of a model, and the training graph.
fn trained(model: &ModelProto, more: &[&str]) -> (String, Model) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(model, folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", "mse"];
    let said = stdout(&[&grad[..], more].concat(), 0);
    assert!(said.contains("gradients within"), "{said}");
    (said, Model::read(&train).expect("a model"))
}

fn output_names(model: &Model) -> Vec<&str> {
    let graph = model.proto.graph.iter();
    graph
        .flat_map(|g| &g.output)
        .map(|o| o.name.as_str())
        .collect()
}

/// A node that gives a tensor of floats.
fn constant(name: &str, dims: &[i64]) -> NodeProto {
    NodeProto {
        attribute: vec![AttributeProto {
            name: "value".to_string(),
            t: Some(floats("", dims, 0.5)),
            r#type: attribute_type::TENSOR,
            ..AttributeProto::default()
        }],
        ..node("Constant", &[], name)
    }
}

#[test]
fn weights_may_be_constants() {
    let nodes = |last: &str| {
        vec![
            constant("w", &[4, 4]),
            constant("scale", &[1]),
            node("MatMul", &["x", "w"], "a"),
            node("Mul", &["a", "scale"], "b"),
            node("Add", &["b", last], "y"),
        ]
    };
    let only_constants = model(nodes("b"), Vec::new(), 4);
    let (said, made) = trained(&only_constants, &[]);
    assert!(said.contains("the values of 1 `Constant` nodes are trained"));
    assert_eq!(output_names(&made), ["loss", "w.grad"]);
    let (said, made) = trained(&only_constants, &["--wrt", "scale"]);
    assert!(!said.contains("Constant"), "{said}");
    assert_eq!(output_names(&made), ["loss", "scale.grad"]);
    // If there is an initializer too, `Constant` nodes are not trained.
    let (said, made) = trained(&model(nodes("c"), vec![floats("c", &[4], 0.5)], 4), &[]);
    assert!(!said.contains("Constant"), "{said}");
    assert_eq!(output_names(&made), ["loss", "c.grad"]);
}

#[test]
fn a_loss_is_of_the_output_that_is_named() {
    let mut two = product("w");
    let graph = two.graph.as_mut().expect("a graph");
    graph.node.push(node("Relu", &["y"], "z"));
    graph.output.push(port("z", 4));
    let (_, made) = trained(&two, &["--output", "z"]);
    assert_eq!(output_names(&made), ["loss", "w.grad"]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&two, folder.path(), "m.onnx");
    let train = folder.path().join("t.onnx");
    let refused = |more: &[&str]| {
        let grad = ["grad", arg(&path), "-o", arg(&train)];
        stderr(&[&grad[..], more].concat())
    };
    // An output of integers is never that of a loss, wherever it stands.
    for loss in ["mse", "cross-entropy"] {
        let mut first = product("w");
        let graph = first.graph.as_mut().expect("a graph");
        let mut arg_max = node("ArgMax", &["y"], "label");
        arg_max.attribute.push(AttributeProto {
            name: "axis".to_string(),
            i: Some(1),
            r#type: attribute_type::INT,
            ..AttributeProto::default()
        });
        graph.node.push(arg_max);
        let mut label = port("label", 1);
        let tensor = label.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
        tensor.expect("a tensor").elem_type = 7;
        graph.output.insert(0, label);
        let path = save(&first, folder.path(), "first.onnx");
        let grad = ["grad", arg(&path), "-o", arg(&train), "--loss", loss];
        let said = stdout(&grad, 0);
        assert!(said.contains("loss within"), "{said}");
        fs::remove_file(&train).expect("removed");
    }
    let text = refused(&["--loss", "mse"]);
    assert!(text.contains("`y` f32[batch, 4], `z` f32[batch, 4]; name the one that"));
    let text = refused(&["--loss", "mse", "--output", "w"]);
    assert!(text.contains("`w` is no output of real numbers"), "{text}");
    let text = refused(&["--loss", "y", "--output", "z"]);
    assert!(text.contains("leave out the option `output`"), "{text}");
}

#[test]
fn only_sizes_without_which_shapes_do_not_fit_get_numbers() {
    let mut sum = product("w");
    let graph = sum.graph.as_mut().expect("a graph");
    graph.node = vec![
        node("MatMul", &["x", "w"], "a"),
        node("Concat", &["u", "v"], "uv"),
        node("ReduceSum", &["uv"], "s"),
        node("Add", &["a", "s"], "y"),
    ];
    graph.node[1].attribute.push(AttributeProto {
        name: "axis".to_string(),
        i: Some(1),
        r#type: attribute_type::INT,
        ..AttributeProto::default()
    });
    for (name, rows) in [("u", "rows"), ("v", "other")] {
        let mut operand = port(name, 4);
        let tensor = operand.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
        let shape = tensor.and_then(|t| t.shape.as_mut()).expect("a shape");
        shape.dim[0].value = Some(Dimension::DimParam(rows.to_string()));
        graph.input.push(operand);
    }
    let (said, made) = trained(&sum, &[]);
    assert!(said.contains("other="), "{said}");
    assert!(said.contains("--bind gives other sizes"), "{said}");
    let graph = made.proto.graph.as_ref().expect("a graph");
    let x = graph.input.iter().find(|i| i.name == "x").expect("x");
    let shape = x.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
    let batch = &shape.and_then(|t| t.shape.as_ref()).expect("a shape").dim[0];
    assert_eq!(
        batch.value,
        Some(Dimension::DimParam("batch".to_string())),
        "what fits for all sizes stays so"
    );
    let (said, _) = trained(&sum, &["--bind", "rows=5", "--bind", "other=5"]);
    assert!(!said.contains("--bind"), "{said}");
}

#[test]
fn a_negative_size_is_a_dynamic_one() {
    let mut open = product("w");
    let graph = open.graph.as_mut().expect("a graph");
    for port in graph.input.iter_mut().chain(&mut graph.output) {
        let tensor = port.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
        let shape = tensor.and_then(|t| t.shape.as_mut()).expect("a shape");
        shape.dim[0].value = Some(Dimension::DimValue(-1));
    }
    trained(&open, &[]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = save(&open, folder.path(), "m.onnx");
    let said = stdout(&["report", arg(&path)], 0);
    assert!(said.contains("running the model: x_dim0="), "{said}");
}
