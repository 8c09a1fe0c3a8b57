//! What is written out gives what the loop or the cell gives.

use super::*;
use crate::check;
use crate::element::Element;
use crate::proto::ValueInfoProto;
use crate::rewrite::patch::{int, text};
use crate::rewrite::trial::{Trial, line, reals, value};
use crate::verify::{Checker, Options};

/// Allowed error, relative to the largest element, in float64: at each step a cell feeds back what it rounded, through
/// functions of any slope.
const CELL_TOLERANCE: f64 = 1e-12;

/// Writes a model out and runs both; returns the operators that are left.
fn held(trial: Trial) -> BTreeSet<String> {
    held_within(trial, 0.0)
}

/// The same, where outputs may differ by a part of their largest element.
fn held_within(trial: Trial, tolerance: f64) -> BTreeSet<String> {
    let model = trial.model();
    let made = model.with(unrolled(&model.proto, &model.folder));
    assert_eq!(check::errors(&made), []);
    let options = Options {
        tolerance,
        ..Options::default()
    };
    let checker = Checker::new(&model, &options).expect("the original runs");
    checker.check_other(&made).expect("they give the same");
    let graph = made.proto.graph.expect("a graph");
    graph.node.iter().map(|n| n.op_type.clone()).collect()
}

fn body(inputs: Vec<ValueInfoProto>, nodes: &[&str], outputs: &[&str]) -> AttributeProto {
    AttributeProto {
        name: "body".to_string(),
        r#type: attribute_type::GRAPH,
        g: Some(GraphProto {
            name: "body".to_string(),
            node: nodes.iter().map(|text| line(text, Vec::new())).collect(),
            input: inputs,
            output: outputs
                .iter()
                .map(|name| ValueInfoProto {
                    name: name.to_string(),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

#[test]
fn a_loop_of_known_trips_becomes_its_trips() {
    let step = || {
        let inputs = vec![
            value("i", Element::I64, ""),
            value("goes", Element::Bool, ""),
            value("c", Element::F32, "3"),
        ];
        let nodes = [
            "next = Mul(c, w)",
            "shown = Tanh(next)",
            "on = Identity(goes)",
        ];
        body(inputs, &nodes, &["on", "next", "shown"])
    };
    let trial = || Trial::new(17).input("x", "3").constant("w", reals(&[3]));
    let trips = |n: i64| {
        let n = Tensor::new(&[], Values::I64(vec![n]));
        let looped = trial().constant("n", n);
        let looped = looped.with("end, all = Loop(n, , x)", vec![step()]);
        looped.output("end", "3").output("all", "t 3")
    };
    assert!(!held(trips(4)).contains("Loop"));
    let asked = trial().input_of("n", Element::I64, "");
    let asked = asked.with("end, all = Loop(n, , x)", vec![step()]);
    let asked = asked.output("end", "3").output("all", "t 3");
    assert!(held(asked).contains("Loop"), "its trips are not known");
}

#[test]
fn a_scan_over_a_known_length_becomes_its_steps() {
    for backward in [0, 1] {
        let inputs = vec![value("s", Element::F32, "3"), value("x", Element::F32, "3")];
        let step = body(
            inputs,
            &["next = Add(s, x)", "shown = Tanh(next)"],
            &["next", "shown"],
        );
        let trial = Trial::new(17).input("s0", "3").input("xs", "4 3");
        let directions = |name| crate::rewrite::patch::ints(name, &[backward]);
        let attributes = vec![
            step,
            int("num_scan_inputs", 1),
            directions("scan_input_directions"),
            directions("scan_output_directions"),
        ];
        let trial = trial.with("end, all = Scan(s0, xs)", attributes);
        let kept = held(trial.output("end", "3").output("all", "4 3"));
        assert!(!kept.contains("Scan"));
    }
}

/// A cell in double precision with everything it may have: 4 steps, 2 sequences, 3 features, 5 hidden.
fn cell(
    op: &str,
    gates: usize,
    attributes: Vec<AttributeProto>,
    inputs: &str,
    n_directions: usize,
) -> Trial {
    let d = n_directions;
    let reals = |sizes: &[usize]| reals(sizes).widened();
    let trial = Trial::new(17).input_of("x", Element::F64, "4 2 3");
    let trial = trial.constant("w", reals(&[d, gates * 5, 3]));
    let trial = trial.constant("r", reals(&[d, gates * 5, 5]));
    let trial = trial.constant("b", reals(&[d, 2 * gates * 5]));
    let trial = trial.constant("h0", reals(&[d, 2, 5]));
    let trial = trial.constant("c0", reals(&[d, 2, 5]));
    let trial = trial.constant("p", reals(&[d, 15]));
    let last = if op == "LSTM" { ", y_c" } else { "" };
    let mut attributes = attributes;
    attributes.push(int("hidden_size", 5));
    let trial = trial.with(&format!("y, y_h{last} = {op}(x, w, r{inputs})"), attributes);
    let trial = trial.output_of("y", Element::F64, &format!("4 {d} 2 5"));
    let trial = trial.output_of("y_h", Element::F64, &format!("{d} 2 5"));
    match op {
        "LSTM" => trial.output_of("y_c", Element::F64, &format!("{d} 2 5")),
        _ => trial,
    }
}

#[test]
fn recurrent_cells_become_their_steps() {
    let held_cell = |op: &str, gates, attributes, inputs: &str, n| {
        held_within(cell(op, gates, attributes, inputs, n), CELL_TOLERANCE)
    };
    let direction = |name: &str| vec![text("direction", name)];
    let cases = [
        ("forward", 1, ""),
        ("reverse", 1, ", b"),
        ("bidirectional", 2, ", b, , h0"),
    ];
    for (name, n, inputs) in cases {
        for (op, gates) in [("RNN", 1), ("GRU", 3), ("LSTM", 4)] {
            let kept = held_cell(op, gates, direction(name), inputs, n);
            assert!(!kept.contains(op), "{op} {name}");
        }
    }
    held_cell("LSTM", 4, Vec::new(), ", b, , h0, c0, p", 1);
    for inputs in [", b", ", b, , h0"] {
        held_cell("GRU", 3, vec![int("linear_before_reset", 1)], inputs, 1);
    }
}

#[test]
fn what_is_unusual_stays() {
    let clipped = vec![crate::rewrite::patch::float("clip", 0.5)];
    assert!(held(cell("LSTM", 4, clipped, ", b", 1)).contains("LSTM"));
}
