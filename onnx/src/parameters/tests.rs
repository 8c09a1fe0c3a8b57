//! Small graphs, and which of their tensors are trained.

use super::*;
use crate::proto::NodeProto;
use crate::rewrite::trial::{model_of, node, typed};
use crate::tensor::{Tensor, Values};
use std::path::Path;

/// Numbers without a pattern.
fn tensor(name: &str, shape: &[usize]) -> TensorProto {
    let n = shape.iter().product::<usize>() as u64;
    let number = |k: u64| ((k + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / 1e7 - 0.8;
    Tensor::new(shape, Values::F32((0..n).map(number).collect())).to_proto(name)
}

fn of_values(name: &str, shape: &[usize], value: impl Fn(usize) -> f64) -> TensorProto {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|k| value(k) as f32).collect();
    Tensor::new(shape, Values::F32(values)).to_proto(name)
}

/// `x` holds real numbers, `ids` whole ones; `y` is the output.
fn graph(node: Vec<NodeProto>, initializer: Vec<TensorProto>) -> GraphProto {
    GraphProto {
        node,
        initializer,
        input: vec![typed(&("x", 1, "?")), typed(&("ids", 7, "?"))],
        output: vec![typed(&("y", 1, "?"))],
        ..Default::default()
    }
}

fn found(graph: GraphProto) -> Parameters {
    let proto = model_of(graph, 18);
    let bytes = prost::Message::encode_to_vec(&proto);
    let model = Model::of_bytes(Path::new("m.onnx"), bytes.into()).expect("a model");
    parameters(&model)
}

/// Why one tensor of a graph is not trained.
fn why(nodes: Vec<NodeProto>, tensors: Vec<TensorProto>, name: &str) -> Option<NotTrained> {
    found(graph(nodes, tensors)).left_out.get(name).copied()
}

#[test]
fn frequencies_are_multiplied_with_positions_and_read_through_sines() {
    let embedding = |positions: &str, read: &str| {
        vec![
            node("Cast", &[positions], "p"),
            node("Unsqueeze", &["p", "axes"], "column"),
            node("Expand", &["f", "sizes"], "row"),
            node("MatMul", &["column", "row"], "angle"),
            node("Concat", &["angle", "angle"], "both"),
            node(read, &["both"], "turned"),
            node("Mul", &["x", "turned"], "y"),
        ]
    };
    let axes = || Tensor::ints(&[1]).to_proto("axes");
    let tensors = || vec![tensor("f", &[1, 4]), axes()];
    let frequency = Some(NotTrained::Frequency);
    assert_eq!(why(embedding("ids", "Cos"), tensors(), "f"), frequency);
    // A layer with sines as activation reads real numbers, and another activation makes it a layer.
    assert_eq!(why(embedding("x", "Cos"), tensors(), "f"), None);
    assert_eq!(why(embedding("ids", "Tanh"), tensors(), "f"), None);
    // Something else reads it too.
    let mut twice = embedding("ids", "Cos");
    twice.push(node("Add", &["x", "f"], "z"));
    assert_eq!(why(twice, tensors(), "f"), None);
    // A time encoding with phases has parameters.
    let mut phases = embedding("ids", "Cos");
    phases[4] = node("Add", &["angle", "phase"], "both");
    assert_eq!(why(phases, tensors(), "f"), None);
}

#[test]
fn a_value_that_is_made_of_itself_is_no_position() {
    let nodes = vec![
        node("Add", &["q", "ids"], "p"),
        node("Cast", &["p"], "q"),
        node("Mul", &["q", "f"], "angle"),
        node("Sin", &["angle"], "y"),
    ];
    assert_eq!(why(nodes, vec![tensor("f", &[4])], "f"), None);
}

#[test]
fn settings_and_statistics_are_no_parameters() {
    let norm = node("BatchNormalization", &["x", "a", "b", "m", "v"], "n");
    let nodes = vec![
        norm,
        node("Identity", &["low"], "least"),
        node("Clip", &["n", "least", ""], "c"),
        node("Resize", &["c", "", "scales"], "y"),
    ];
    let names = ["a", "b", "m", "v", "low", "scales"];
    let all = found(graph(nodes, names.map(|n| tensor(n, &[4])).to_vec())).left_out;
    let reason = |name: &str| all.get(name).copied();
    for name in ["m", "v"] {
        assert_eq!(reason(name), Some(NotTrained::Statistic));
    }
    for name in ["low", "scales"] {
        assert_eq!(reason(name), Some(NotTrained::Setting));
    }
    assert_eq!((reason("a"), reason("b")), (None, None));
}

#[test]
fn tables_of_sines_are_told_from_tables_that_are_learned() {
    let (rows, columns) = (24, 6);
    let nodes = || vec![node("Add", &["x", "t"], "y")];
    let angle = |k: usize| {
        let (row, column) = (k / columns, k % columns);
        let phase = std::f64::consts::FRAC_PI_2 * (column % 2) as f64;
        row as f64 * 0.05f64.powi((column / 2) as i32) + phase
    };
    let table = |value: &dyn Fn(usize) -> f64| of_values("t", &[1, rows, columns], value);
    let sines = table(&|k| angle(k).sin());
    assert_eq!(why(nodes(), vec![sines], "t"), Some(NotTrained::Sinusoid));
    // One element of a column that is small.
    let moved = |k: usize| angle(k).sin() * if k == 9 * columns + 4 { 1.5 } else { 1.0 };
    assert_eq!(why(nodes(), vec![table(&moved)], "t"), None);
    for equal in [0.0, 1.0] {
        assert_eq!(why(nodes(), vec![table(&|_| equal)], "t"), None, "{equal}");
    }
    assert_eq!(
        why(nodes(), vec![tensor("t", &[1, rows, columns])], "t"),
        None
    );
}

#[test]
fn masks_are_known_by_what_they_hold() {
    let n = 5;
    let mask = |value: &dyn Fn(usize, usize) -> f64| {
        let held = of_values("t", &[1, n, n], |k| value(k / n, k % n));
        why(vec![node("Add", &["x", "t"], "y")], vec![held], "t")
    };
    let later =
        |masked: f64| move |row: usize, column: usize| if column > row { masked } else { 0.0 };
    for masked in [f64::NEG_INFINITY, f64::from(f32::MIN), -1e4] {
        assert_eq!(mask(&later(masked)), Some(NotTrained::Mask), "{masked}");
    }
    let lower = |row: usize, column: usize| f64::from(u8::from(column <= row));
    assert_eq!(mask(&lower), Some(NotTrained::Mask));
    // A weight that begins as the identity, and a large bias.
    let identity = |row: usize, column: usize| f64::from(u8::from(column == row));
    assert_eq!(mask(&identity), None);
    assert_eq!(mask(&|row, _| -2e5 * (row + 1) as f64), None);
}

#[test]
fn the_exporters_mark_decides_over_names() {
    let nodes = vec![
        node("Mul", &["x", "onnx::Mul_7"], "a"),
        node("MatMul", &["a", "onnx::MatMul_8"], "b"),
        node("Mul", &["b", "scale"], "c"),
        node("Add", &["c", "layer.inv_freq"], "d"),
        node("Add", &["d", "layer.offset"], "y"),
    ];
    let sizes = [
        ("onnx::Mul_7", &[4][..]),
        ("onnx::MatMul_8", &[4, 4]),
        ("scale", &[]),
        ("layer.inv_freq", &[4]),
        ("layer.offset", &[4]),
    ];
    let tensors = sizes.map(|(name, shape)| tensor(name, shape)).to_vec();
    let plain = graph(nodes, tensors);
    let known = found(plain.clone());
    let all: Vec<(&str, NotTrained)> = known
        .left_out
        .iter()
        .map(|(name, why)| (name.as_str(), *why))
        .collect();
    let wanted = [
        ("layer.inv_freq", NotTrained::Name),
        ("onnx::Mul_7", NotTrained::Constant),
        ("scale", NotTrained::Number),
    ];
    assert_eq!(all, wanted);
    assert!(all.iter().all(|(_, why)| why.is_guess()));

    let mut marked = plain;
    let kinds = sizes.map(|(name, _)| match name {
        // Some versions of the exporter write the name of the enumeration, too.
        "layer.offset" => (name, "InputKind.BUFFER"),
        name => (name, "PARAMETER"),
    });
    for (name, kind) in kinds {
        let mut info = typed(&(name, 1, "?"));
        info.metadata_props.push(StringStringEntryProto {
            key: KIND.to_string(),
            value: kind.to_string(),
        });
        marked.value_info.push(info);
    }
    let known = found(marked);
    let offset = ("layer.offset".to_string(), NotTrained::Buffer);
    assert_eq!(known.left_out, BTreeMap::from([offset]));
    assert_eq!(known.marked.len(), 4);
}

#[test]
fn parameters_that_several_nodes_read_are_named_once() {
    let nodes = vec![
        node("Gather", &["w", "ids"], "a"),
        node("Split", &["side", "parts"], "s"),
        node("Mul", &["a", "s"], "b"),
        node("Mul", &["b", "s"], "c"),
        node("Transpose", &["w"], "t"),
        node("MatMul", &["c", "t"], "y"),
    ];
    let tensors = vec![tensor("w", &[4, 4]), tensor("side", &[8])];
    let shared = found(graph(nodes, tensors)).shared;
    assert_eq!(shared.len(), 1, "{shared:?}");
    let mut readers = shared[0].readers.clone();
    readers.sort();
    assert_eq!(readers, ["Gather → `a`", "MatMul → `y`"]);
}

#[test]
fn constants_are_looked_at_as_initializers_are() {
    let mut constant = node("Constant", &[], "val_3");
    constant.attribute.push(crate::proto::AttributeProto {
        name: "value".to_string(),
        t: Some(tensor("", &[4])),
        r#type: crate::proto::attribute_type::TENSOR,
        ..Default::default()
    });
    let nodes = vec![constant, node("Mul", &["x", "val_3"], "y")];
    assert_eq!(why(nodes, Vec::new(), "val_3"), Some(NotTrained::Constant));
}
