//! Each rule with a file that breaks it alone.

use super::*;
use crate::proto::{FunctionProto, OperatorSetIdProto, ValueInfoProto};
use crate::rewrite::trial::{model_of, node, typed};
use bytes::Bytes;
use std::sync::Arc;

fn port(name: &str) -> ValueInfoProto {
    typed(&(name, 0, "?"))
}

/// The errors of a model, as text.
pub(super) fn problems_of(proto: ModelProto) -> String {
    let model = Model { proto, ..model() };
    let all: Vec<String> = errors(&model).iter().map(ToString::to_string).collect();
    all.join("; ")
}

/// What is legal but odd.
pub(super) fn notes_of(proto: ModelProto) -> String {
    let model = Model { proto, ..model() };
    let all = problems(&model).into_iter();
    let notes = all.filter(|p| p.severity == Severity::Note);
    let notes: Vec<String> = notes.map(|p| p.to_string()).collect();
    notes.join("; ")
}

/// `h = x + w`, `y = Relu(h)`.
fn model() -> Model {
    let weight = TensorProto {
        dims: vec![2],
        data_type: 1,
        raw_data: Some(Bytes::from_static(&[0; 8])),
        name: "w".to_string(),
        ..Default::default()
    };
    let graph = GraphProto {
        node: vec![node("Add", &["x", "w"], "h"), node("Relu", &["h"], "y")],
        input: vec![port("x")],
        output: vec![port("y")],
        initializer: vec![weight],
        ..Default::default()
    };
    Model {
        proto: model_of(graph, 18),
        path: "m.onnx".into(),
        n_bytes: 0,
        folder: Arc::from(Path::new(".")),
        stamps: Default::default(),
    }
}

/// The one problem after a change, as text.
fn after(change: impl FnOnce(&mut ModelProto, &mut dyn FnMut(&dyn Fn(&mut GraphProto)))) -> String {
    let mut model = model();
    let mut graph = model.proto.graph.take().unwrap_or_default();
    change(&mut model.proto, &mut |f| f(&mut graph));
    model.proto.graph = Some(graph);
    let all: Vec<String> = problems(&model).iter().map(ToString::to_string).collect();
    all.join("; ")
}

fn after_graph(change: impl Fn(&mut GraphProto)) -> String {
    after(|_, graph| graph(&change))
}

#[test]
fn a_sound_file_has_no_problem() {
    assert_eq!(after_graph(|_| {}), "");
}

#[test]
fn cycles_are_named_node_by_node() {
    let text = after_graph(|g| g.node[0].input[1] = "y".to_string());
    assert!(
        text.contains("cycle of 2 nodes: each reads from the next: Add → `h`, Relu → `y`"),
        "{text}"
    );
    let mut cyclic = model().proto;
    if let Some(graph) = &mut cyclic.graph {
        graph.node[0].input[1] = "y".to_string();
    }
    assert!(sorted(cyclic).is_err());
}

#[test]
fn nodes_are_put_in_order() {
    let text = after_graph(|g| g.node.reverse());
    assert_eq!(text, "Relu → `y`: it reads `h`, which is computed later");
    let mut reversed = model().proto;
    if let Some(graph) = &mut reversed.graph {
        graph.node.reverse();
    }
    assert_eq!(sorted(reversed), Ok(model().proto));
}

#[test]
fn an_old_file_may_name_an_initializer_once() {
    let mut model = model();
    model.proto.ir_version = Some(3);
    assert_eq!(problems_of(model.proto.clone()), "");
    let note = "initializer `w`: files before version 4 of the format name it among the inputs too";
    assert!(notes_of(model.proto).contains(note));
}

#[test]
fn initializers_of_one_name_are_the_same() {
    let again = |change: fn(&mut TensorProto)| {
        let mut graph = model().proto.graph.unwrap_or_default();
        let mut tensor = graph.initializer[0].clone();
        change(&mut tensor);
        graph.initializer.push(tensor);
        let proto = ModelProto {
            graph: Some(graph),
            ..model().proto
        };
        (problems_of(proto.clone()), notes_of(proto))
    };
    let note = "initializer `w`: it is stored more than once, each time with the same elements";
    let same = ("".to_string(), note.to_string());
    assert_eq!(again(|_| ()), same);
    let in_another_form = again(|tensor| {
        tensor.raw_data = None;
        tensor.float_data = vec![0.0; 2];
    });
    assert_eq!(in_another_form, same);
    let twice = "initializer `w`: it is defined twice: initializers 0 and 1 of the file are";
    let elements = again(|tensor| tensor.raw_data = Some(Bytes::from_static(&[1; 8])));
    assert_eq!(
        elements.0,
        format!("{twice} float [2], with other elements")
    );
    let sizes = again(|tensor| {
        tensor.dims = vec![1];
        tensor.raw_data = Some(Bytes::from_static(&[0; 4]));
    });
    assert_eq!(sizes.0, format!("{twice} float [2] and float [1]"));
}

#[test]
fn names_have_one_definition() {
    let twice = after_graph(|g| g.node.push(node("Relu", &["x"], "h")));
    assert!(twice.contains("`h` is defined twice"), "{twice}");
    let none = after_graph(|g| g.node[0].input[0] = "z".to_string());
    assert!(
        none.contains("Add → `h`: it reads `z`, which nothing computes"),
        "{none}"
    );
    let output = after_graph(|g| g.output.push(port("o")));
    assert_eq!(output, "output `o`: nothing computes it");
}

#[test]
fn tensors_have_the_bytes_of_their_sizes() {
    let text = after_graph(|g| g.initializer[0].dims = vec![3]);
    assert_eq!(
        text,
        "initializer `w`: its shape [3] of float does not take 8 bytes"
    );
    let outside = after_graph(|g| {
        let entry = |key: &str, value: &str| crate::proto::StringStringEntryProto {
            key: key.to_string(),
            value: value.to_string(),
        };
        g.initializer[0].data_location = 1;
        g.initializer[0].external_data = vec![entry("location", "../w.bin")];
    });
    assert!(
        outside.contains("only paths below the model's folder are read"),
        "{outside}"
    );
}

#[test]
fn versions_that_are_not_known_are_errors() {
    let newer = after(|model, _| model.ir_version = Some(NEWEST_IR + 1));
    assert!(
        newer.contains("of version 15 of the format; versions up to 14 are known"),
        "{newer}"
    );
    for version in [6, 29] {
        let text = after(|model, _| model.opset_import[0].version = version);
        assert!(
            text.contains(&format!("imports version {version} of the standard")),
            "{text}"
        );
    }
    let domain = after_graph(|g| g.node[1].domain = "somewhere".to_string());
    assert!(
        domain.contains("imports no operators of the domain `somewhere`"),
        "{domain}"
    );
}

#[test]
fn what_nothing_depends_on_is_a_note() {
    let mut unused = model();
    if let Some(graph) = &mut unused.proto.graph {
        graph.node.push(node("Relu", &["x"], "o"));
    }
    let found = problems(&unused);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].severity, Severity::Note);
    assert!(errors(&unused).is_empty());
}

#[test]
fn functions_that_call_each_other_in_a_circle() {
    let function = |name: &str, calls: &str| FunctionProto {
        name: name.to_string(),
        domain: "own".to_string(),
        input: vec!["a".to_string()],
        output: vec!["b".to_string()],
        node: vec![NodeProto {
            domain: "own".to_string(),
            ..node(calls, &["a"], "b")
        }],
        opset_import: vec![OperatorSetIdProto {
            domain: "own".to_string(),
            version: 1,
        }],
        ..Default::default()
    };
    let mut circular = model();
    circular.proto.functions = vec![function("f", "g"), function("g", "f")];
    let text = format!("{:?}", errors(&circular));
    assert!(text.contains("in a cycle: f, g"), "{text}");
}
