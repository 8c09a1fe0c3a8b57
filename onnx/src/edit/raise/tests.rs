//! Each change of an operator: the raised model is well formed and gives what the original gives.

use super::*;
use crate::check;
use crate::element::Element;
use crate::proto::AttributeProto;
use crate::rewrite::patch::{float, int, ints, text};
use crate::rewrite::trial::{Trial, reals};
use crate::verify::{Checker, Options};

/// Raises `y = Op(x)` from a version to another one and runs both.
fn held(
    from: i64,
    to: i64,
    call: &str,
    attributes: Vec<AttributeProto>,
    sizes: &str,
) -> Vec<String> {
    let trial = Trial::new(from).input("x", sizes);
    let rank = sizes.split_whitespace().count();
    let sizes: Vec<String> = (0..rank).map(|d| format!("out{d}")).collect();
    let trial = trial.with(call, attributes).output("y", &sizes.join(" "));
    held_trial(trial, to)
}

fn held_trial(trial: Trial, to: i64) -> Vec<String> {
    let model = trial.model();
    let raised = raise(&model.proto, &model.folder, to).expect("it can be raised");
    let raised = model.with(raised);
    assert_eq!(check::errors(&raised), [], "{:?}", raised.proto.graph);
    let checker = Checker::new(&model, &Options::default()).expect("the original runs");
    checker.check_other(&raised).expect("they give the same");
    let graph = raised.proto.graph.expect("a graph");
    graph.node.iter().map(|n| n.op_type.clone()).collect()
}

#[test]
fn attributes_become_inputs() {
    let bounds = vec![float("min", -0.25), float("max", 0.5)];
    assert_eq!(
        held(7, 23, "y = Clip(x)", bounds, "3 4"),
        ["Constant", "Constant", "Clip"]
    );
    let only = vec![float("max", 0.5)];
    assert_eq!(
        held(7, 11, "y = Clip(x)", only, "3 4"),
        ["Constant", "Constant", "Clip"]
    );
    let cut = vec![ints("starts", &[1]), ints("ends", &[3]), ints("axes", &[1])];
    held(7, 23, "y = Slice(x)", cut, "3 4");
    let pads = vec![ints("pads", &[0, 1, 2, 0]), float("value", 0.5)];
    held(7, 23, "y = Pad(x)", pads, "3 4");
    let axes = || vec![ints("axes", &[1])];
    for op in ["ReduceSum", "ReduceMax", "ReduceMean", "ReduceL2"] {
        held(11, 23, &format!("y = {op}(x)"), axes(), "3 4");
    }
    let trial = Trial::new(11).input("x", "3 4");
    let trial = trial.with("u = Unsqueeze(x)", axes());
    let trial = trial.with("y = Squeeze(u)", axes()).output("y", "3 4");
    held_trial(trial, 23);
    let trial = Trial::new(11).input("x", "3 6");
    let pieces = vec![int("axis", 1), ints("split", &[2, 4])];
    let trial = trial
        .with("a, b = Split(x)", pieces)
        .with("c, d = Split(b)", vec![int("axis", 1)]);
    let trial = trial.with("y = Concat(d, a, c)", vec![int("axis", 1)]);
    held_trial(trial.output("y", "3 6"), 23);
}

#[test]
fn a_softmax_over_several_dimensions_is_one_of_their_product() {
    let axis = |n| vec![int("axis", n)];
    assert_eq!(
        held(11, 13, "y = Softmax(x)", axis(2), "2 3 4"),
        ["Softmax"]
    );
    assert_eq!(
        held(11, 13, "y = LogSoftmax(x)", axis(1), "2 3 4"),
        ["Flatten", "LogSoftmax", "Shape", "Reshape"]
    );
}

#[test]
fn resizes_keep_their_positions() {
    for mode in ["nearest", "linear"] {
        let scales =
            crate::tensor::Tensor::new(&[4], crate::tensor::Values::F32(vec![1.0, 1.0, 2.0, 3.0]));
        for op in ["Resize", "Upsample"] {
            let version = if op == "Resize" { 10 } else { 9 };
            let trial = Trial::new(version).input("x", "1 2 3 4");
            let trial = trial.constant("scales", scales.clone());
            let call = format!("y = {op}(x, scales)");
            let trial = trial.with(&call, vec![text("mode", mode)]);
            let made = held_trial(trial.output("y", "1 2 6 12"), 23);
            assert_eq!(made, ["Resize"]);
        }
    }
}

#[test]
fn normalization_loses_what_it_had_for_one_image() {
    let of_channels = |trial: Trial| {
        let trial = trial.constant("s", reals(&[3])).constant("b", reals(&[3]));
        let positive = reals(&[3]).to_f64().expect("reals");
        let positive: Vec<f64> = positive.iter().map(|v| v.abs() + 0.5).collect();
        let variance = crate::tensor::Tensor::floats(Element::F32, &[3], &positive);
        trial
            .constant("m", reals(&[3]))
            .constant("v", variance.expect("reals"))
    };
    let trial = of_channels(Trial::new(7).input("x", "2 3 4 4"));
    let call = "y = BatchNormalization(x, s, b, m, v)";
    let trial = trial.with(call, vec![float("epsilon", 1e-3)]);
    held_trial(trial.output("y", "2 3 4 4"), 23);
}

#[test]
fn experiments_become_operators_that_stayed() {
    let both = || vec![float("alpha", 1.5), float("beta", -0.75)];
    assert_eq!(
        held(7, 13, "y = Affine(x)", both(), "3 4"),
        ["Constant", "Mul", "Constant", "Add"]
    );
    assert_eq!(
        held(9, 23, "y = ScaledTanh(x)", both(), "3 4"),
        ["Constant", "Mul", "Tanh", "Constant", "Mul"]
    );
    held(7, 13, "y = Affine(x)", Vec::new(), "3 4");
    held(7, 13, "y = Scale(x)", vec![float("scale", 3.0)], "3 4");
    held(7, 13, "y = ParametricSoftplus(x)", both(), "3 4");
    let bias = AttributeProto {
        name: "bias".into(),
        r#type: crate::proto::attribute_type::FLOATS,
        floats: vec![0.5, -1.0, 2.0],
        ..Default::default()
    };
    let scaled = vec![float("scale", 0.25), bias];
    held(7, 13, "y = ImageScaler(x)", scaled, "2 3 4 5");
    for border in [[1, 2, 0, 1], [0, 0, 0, 0], [2, 0, 1, 0]] {
        let cropped = vec![ints("border", &border)];
        let made = held(7, 13, "y = Crop(x)", cropped, "2 3 4 5");
        assert_eq!(made.last().map(String::as_str), Some("Slice"));
    }
    let cut = vec![ints("border", &[1, 2, 0, 0]), ints("scale", &[2, 3])];
    held(7, 13, "y = Crop(x)", cut, "2 3 4 5");
    let constant = |n| crate::tensor::Tensor::ints(&[n]);
    let trial = Trial::new(9).input("x", "3 4");
    let trial = trial
        .constant("from", constant(1))
        .constant("to", constant(3));
    let trial = trial.node("y = DynamicSlice(x, from, to)");
    assert_eq!(held_trial(trial.output("y", "2 4"), 13), ["Slice"]);
}

#[test]
fn an_experiment_without_what_it_needs_is_refused() {
    let refused = |call: &str, attributes| {
        let trial = Trial::new(7).input("x", "1 1 3 4");
        let model = trial.with(call, attributes).output("y", "a b c d").model();
        let error = raise(&model.proto, &model.folder, 13).expect_err("refused");
        error.to_string()
    };
    assert_eq!(
        refused("y = ScaledTanh(x)", Vec::new()),
        "ScaledTanh → `y`: version 13 of the operators needs `beta`, and the node has none"
    );
    let sides = vec![ints("border", &[1, 2])];
    assert!(refused("y = Crop(x)", sides).contains("its border [1, 2] has not four sides"));
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let refused = |trial: Trial, to| {
        let model = trial.model();
        let error = raise(&model.proto, &model.folder, to).expect_err("refused");
        error.to_string()
    };
    let trial = || Trial::new(11).input("x", "3 4").output("y", "3 4");
    let unknown = trial().with("y = Relu(x)", vec![int("odd", 1)]);
    assert_eq!(
        refused(unknown, 23),
        "Relu → `y`: version 13 of the operators has no attribute `odd`"
    );
    assert_eq!(
        refused(trial().node("y = Relu(x)"), 7),
        "the file has version 11 of the operators, which is not converted down to 7"
    );
    assert!(refused(trial().node("y = Relu(x)"), 99).contains("the newest is 28"));
}
