//! What verification finds, and what it lets pass.

use super::*;
use crate::element::Element;
use crate::proto::{AttributeProto, GraphProto, attribute_type};
use crate::rewrite::patch::int;
use crate::rewrite::trial::{Trial, line, real, reals, value};

fn checked(before: &Trial, after: &Trial) -> Result<Evidence, VerifyError> {
    let model = before.model();
    Checker::new(&model, &Options::default())?.check(&after.model().proto)
}

fn scaled(by: f32) -> Trial {
    let trial = Trial::new(17).input("x", "n 8").constant("c", real(by));
    trial.node("y = Mul(x, c)").output("y", "n 8")
}

#[test]
fn a_few_roundings_pass_and_a_thousandth_does_not() {
    let evidence = checked(&scaled(1.5), &scaled(1.5 + 3e-7)).expect("the same");
    let (before, after) = evidence.worst().expect("an output");
    assert!(before < 1e-7 && after > 1e-7, "{before} {after}");
    let error = checked(&scaled(1.5), &scaled(1.5015)).expect_err("not the same");
    assert!(error.to_string().contains("`y` differs"), "{error}");
}

#[test]
fn sizes_are_real_and_differ_between_seeds() {
    let trial = Trial::new(17).input("x", "batch seq 4").node("y = Relu(x)");
    let trial = trial.output("y", "batch seq 4");
    let runs = checked(&trial, &trial).expect("the same").runs;
    assert_eq!(runs[0], "seed 0, batch=1 seq=5");
    assert_eq!(runs[1], "seed 1, batch=2 seq=6");
    assert!(
        runs[2].ends_with("with NaN") && runs[3].ends_with("with infinities"),
        "{runs:?}"
    );
    assert_eq!(runs[4], "seed 0, batch=0 seq=5");
    assert_eq!(runs[5], "seed 0, batch=1 seq=0");
}

#[test]
fn a_batch_that_is_fixed_inside_is_kept_in_every_run() {
    let fixed = Trial::new(17)
        .input("x", "batch seq 4")
        .ints("t", &[1, 0, 4]);
    let fixed = fixed.node("y = Reshape(x, t)").output("y", "1 seq 4");
    let runs = checked(&fixed, &fixed).expect("the same").runs;
    assert_eq!(
        runs[..2],
        ["seed 0, batch=1 seq=5", "seed 1, batch=1 seq=6"]
    );
}

#[test]
fn sizes_may_follow_from_others() {
    let cache = || Trial::new(17).input("past", "p 4").input("new", "s 4");
    let joined = cache().with("all = Concat(past, new)", vec![int("axis", 0)]);
    let trial = joined
        .input("mask", "t 4")
        .with("y = Concat(all, mask)", vec![int("axis", 1)])
        .output("y", "t 8");
    let model = trial.model();
    let check = |relations: &[(&str, &str)]| {
        let related = |(name, text): &(&str, &str)| {
            let relation = relation(text).expect("a relation");
            (name.to_string(), relation)
        };
        let options = Options {
            relations: relations.iter().map(related).collect(),
            ..Options::default()
        };
        Checker::new(&model, &options)?.check(&model.proto)
    };
    let runs = check(&[("t", "p+s")]).expect("it runs").runs;
    assert_eq!(runs[0], "seed 0, p=1 s=1 t=2");
    let refused = |relations| check(relations).expect_err("refused").to_string();
    assert!(refused(&[("t", "p+q")]).contains("no input has a size `q`"));
    assert!(refused(&[("t", "p"), ("p", "s")]).contains("follows from others itself"));
    assert!(matches!(check(&[]), Err(VerifyError::Original { .. })));
    for wrong in ["", "p+", "p+-1", "*"] {
        assert!(relation(wrong).is_err(), "{wrong}");
    }
    for wrong in ["3.5", "p+.5", "2*1e3", "1e+3", "9223372036854775808"] {
        let said = relation(wrong).expect_err("no whole number");
        assert!(said.contains("a size is a whole number from 0"), "{said}");
    }
    assert!(relation("inf+1d").is_ok());
}

#[test]
fn dimensions_are_told_apart_and_may_be_empty() {
    let x = || Trial::new(17).input("x", "n h w").output("y", "a b c");
    let same = x().node("y = Identity(x)");
    let mixed = x().ints("order", &[0, 2, 1]).node("s = Shape(x)");
    let mixed = mixed.node("t = Gather(s, order)").node("y = Reshape(x, t)");
    let error = checked(&same, &mixed).expect_err("other sizes").to_string();
    assert!(error.contains("`y` differs"), "{error}");
    // The mean over the first dimension, with the divisor at least 1 or as it is.
    let mean = |divisor: &str| {
        let trial = Trial::new(17).input("x", "n 4").output("y", "");
        let trial = trial.ints("zero", &[0]).ints("one", &[1]);
        let trial = trial.node("s = Shape(x)").node("n = Gather(s, zero)");
        let trial = trial.node("m = Max(n, one)");
        let trial = trial.with(&format!("f = Cast({divisor})"), vec![int("to", 1)]);
        let trial = trial.with("r = ReduceSum(x)", vec![int("keepdims", 0)]);
        trial.node("y = Div(r, f)")
    };
    let error = checked(&mean("m"), &mean("n"))
        .expect_err("0 / 0")
        .to_string();
    assert!(error.contains("n=0"), "{error}");
}

#[test]
fn integers_of_both_signs_and_beyond_1_are_tried() {
    let trial = || Trial::new(17).input_of("x", Element::I64, "n");
    let x = || trial().output_of("y", Element::I64, "n");
    let magnitude = x().node("y = Abs(x)");
    let same = x().node("y = Identity(x)");
    assert!(checked(&magnitude, &same).is_err());
}

#[test]
fn a_small_part_beside_a_large_one_is_compared_by_itself() {
    let joined = |more: f32| {
        let trial = Trial::new(17).input_of("x", Element::I64, "n 16");
        let trial = trial.output("y", "n 32").constant("k", real(1999.9));
        let trial = trial
            .constant("more", real(more))
            .constant("third", real(0.3));
        let trial = trial.with("a = Cast(x)", vec![int("to", 1)]);
        let trial = trial.node("t = Mul(a, third)").node("large = Mul(t, k)");
        let trial = trial.node("s = Sigmoid(t)").node("small = Add(s, more)");
        trial.with("y = Concat(large, small)", vec![int("axis", 0)])
    };
    checked(&joined(0.0), &joined(0.0)).expect("the same");
    let error = checked(&joined(0.0), &joined(2e-3)).expect_err("differs");
    assert!(error.to_string().contains("of dimension 0"), "{error}");
}

#[test]
fn an_output_without_finite_elements_is_told() {
    let logarithm = Trial::new(17).input("x", "n 4").constant("one", real(1.0));
    let logarithm = logarithm.node("a = Abs(x)").node("b = Neg(a)");
    let logarithm = logarithm.node("c = Sub(b, one)").node("y = Log(c)");
    let logarithm = logarithm.output("y", "n 4");
    let evidence = checked(&logarithm, &logarithm).expect("NaN in both");
    assert_eq!(evidence.blind, ["y"]);
}

#[test]
fn a_known_operator_of_a_type_that_is_not_computed_with_is_a_cut() {
    let cast = Trial::new(19).input("x", "n 4").node("a = Relu(x)");
    // 17: 8-bit floats.
    let cast = cast.with("b = Cast(a)", vec![int("to", 17)]);
    let cast = cast
        .with("y = Cast(b)", vec![int("to", 1)])
        .output("y", "n 4");
    let evidence = checked(&cast, &cast).expect("the same");
    assert_eq!(evidence.cuts.len(), 2, "{:?}", evidence.cuts);
}

#[test]
fn a_size_taken_for_another_is_found() {
    let reshape = |target: [i64; 3]| {
        let trial = Trial::new(17).input("x", "batch seq 4").ints("to", &target);
        trial.node("y = Reshape(x, to)").output("y", "a b c")
    };
    assert!(checked(&reshape([0, -1, 4]), &reshape([-1, 5, 4])).is_err());
}

#[test]
fn what_happens_to_nan_and_infinity_counts() {
    let x = || Trial::new(17).input("x", "n 8");
    let relu = x().node("y = Relu(x)").output("y", "n 8");
    // (x + |x|) / 2: infinity - infinity is NaN.
    let sums = x()
        .constant("half", real(0.5))
        .node("a = Abs(x)")
        .node("b = Add(x, a)");
    let sums = sums.node("y = Mul(b, half)").output("y", "n 8");
    let error = checked(&relu, &sums)
        .expect_err("infinities differ")
        .to_string();
    assert!(
        error.contains("with infinities") && error.contains("NaN"),
        "{error}"
    );
    // Where(x > 0, x, 0) makes 0 of NaN.
    let select = x().constant("zero", real(0.0)).node("p = Greater(x, zero)");
    let select = select.node("y = Where(p, x, zero)").output("y", "n 8");
    let error = checked(&relu, &select)
        .expect_err("NaN differs")
        .to_string();
    assert!(error.contains("with NaN"), "{error}");
}

#[test]
fn at_unknown_operators_models_are_cut_and_both_sides_compared() {
    let model = |scale: f32, after: &str| {
        let trial = Trial::new(17).input("x", "n 4").constant("c", real(scale));
        let trial = trial.node("a = Mul(x, c)").node("b = somewhere.Thing(a)");
        let mut model = trial
            .node(&format!("y = {after}(b)"))
            .output("y", "n 4")
            .model();
        if let Some(graph) = &mut model.proto.graph {
            let shape = crate::rewrite::trial::value("b", crate::element::Element::F32, "n 4");
            graph.value_info.push(shape);
        }
        model
    };
    let original = model(1.5, "Exp");
    let checker = Checker::new(&original, &Options::default()).expect("it runs");
    let evidence = checker.check(&model(1.5, "Exp").proto).expect("the same");
    assert_eq!(evidence.cuts.len(), 1);
    let before = checker
        .check(&model(2.5, "Exp").proto)
        .expect_err("before the cut");
    assert!(matches!(before, VerifyError::Differs { output, .. } if output == "a"));
    let after = checker
        .check(&model(1.5, "Tanh").proto)
        .expect_err("after the cut");
    assert!(matches!(after, VerifyError::Differs { output, .. } if output == "y"));
}

fn cut_trial(middle: &str, scale: f32) -> Trial {
    let trial = Trial::new(21).input("x", "n 4").constant("c", real(scale));
    let trial = trial.node("a = Mul(x, c)").node(middle);
    trial.node("y = Exp(b)").output("y", "n 4")
}

#[test]
fn what_an_unknown_operator_gives_is_made_up_in_the_sizes_of_what_it_reads() {
    let trial = cut_trial("b = somewhere.Thing(a)", 1.5);
    assert_eq!(checked(&trial, &trial).expect("the same").cuts.len(), 1);
    let other = cut_trial("b = somewhere.Thing(a)", 1.25);
    assert!(matches!(
        checked(&trial, &other),
        Err(VerifyError::Differs { .. })
    ));
}

#[test]
fn an_unknown_operator_that_changed_is_a_difference() {
    let trial = cut_trial("b = somewhere.Thing(a, a)", 1.5);
    for changed in [
        "b = elsewhere.Thing(a, a)",
        "b = somewhere.Thing(a)",
        "b = somewhere.Thing(a, )",
    ] {
        let error = checked(&trial, &cut_trial(changed, 1.5)).expect_err("changed");
        assert!(matches!(error, VerifyError::Changed { .. }), "{error}");
    }
}

#[test]
fn sequences_cut_until_tensors_come_back() {
    let model = |scale: f32| {
        let trial = Trial::new(21).input("x", "n 4").constant("c", real(scale));
        let trial = trial
            .node("a = Mul(x, c)")
            .node("s = SequenceConstruct(a, x)");
        let trial = trial
            .ints("zero", &[0])
            .node("b = SequenceAt(s, zero)")
            .node("y = Exp(b)");
        trial.output("y", "n 4")
    };
    assert_eq!(
        checked(&model(1.5), &model(1.5))
            .expect("the same")
            .cuts
            .len(),
        2
    );
    assert!(checked(&model(1.5), &model(1.25)).is_err());
}

#[test]
fn what_a_cut_gives_may_be_called_otherwise() {
    let model = |ends: &str, place: i64| {
        let trial = Trial::new(21).input("x", "n 4").ints("place", &[place]);
        let trial = trial.node("s = SequenceConstruct(x, x)");
        let mut model = match ends {
            "" => trial.node("y = SequenceAt(s, place)"),
            ends => trial.node("b = SequenceAt(s, place)").node(ends),
        };
        model = model.output("y", "n 4");
        let mut model = model.model();
        if let Some(graph) = &mut model.proto.graph {
            graph.node[1].name = "at".to_string();
        }
        model
    };
    let original = model("y = Identity(b)", 0);
    let checker = Checker::new(&original, &Options::default()).expect("it runs");
    let evidence = checker.check(&model("", 0).proto).expect("only renamed");
    assert_eq!(evidence.cuts.len(), 2);
    let elsewhere = checker.check(&model("", 1).proto);
    assert!(matches!(elsewhere, Err(VerifyError::Differs { .. })));
    let negated = model("y = Neg(b)", 0);
    let checker = Checker::new(&negated, &Options::default()).expect("it runs");
    let differs = checker.check(&model("", 0).proto);
    assert!(matches!(differs, Err(VerifyError::Differs { output, .. }) if output == "y"));
}

#[test]
fn what_cannot_be_read_is_compared_bit_by_bit() {
    let model = |bits: u8| {
        let trial = Trial::new(21).input("x", "4").constant("scale", real(0.5));
        let trial = trial
            .node("w = DequantizeLinear(q, scale)")
            .node("y = Add(x, w)");
        let mut model = trial.output("y", "4").model();
        let nibbles = crate::proto::TensorProto {
            dims: vec![4],
            data_type: 22,
            name: "q".to_string(),
            raw_data: Some(bytes::Bytes::from(vec![bits, 0x21])),
            ..Default::default()
        };
        model
            .proto
            .graph
            .as_mut()
            .expect("a graph")
            .initializer
            .push(nibbles);
        model
    };
    let original = model(0x43);
    let checker = Checker::new(&original, &Options::default()).expect("it runs");
    assert!(checker.check(&model(0x43).proto).is_ok());
    let error = checker.check(&model(0x44).proto).expect_err("other bits");
    assert!(matches!(error, VerifyError::Changed { .. }), "{error}");
}

#[test]
fn inputs_with_a_default_get_other_values_too() {
    let model = |replaceable: bool| {
        let trial = Trial::new(21).input("x", "n 4").constant("w", reals(&[4]));
        let trial = if replaceable {
            trial.input("w", "4")
        } else {
            trial
        };
        trial.node("y = Mul(x, w)").output("y", "n 4")
    };
    let folded = Trial::new(21)
        .input("x", "n 4")
        .input("w", "4")
        .constant("v", reals(&[4]));
    let folded = folded
        .constant("w", reals(&[4]))
        .node("y = Mul(x, v)")
        .output("y", "n 4");
    assert!(checked(&model(true), &model(true)).is_ok());
    assert!(checked(&model(true), &folded).is_err());
}

#[test]
fn sparse_initializers_are_what_they_stand_for() {
    let model = |at: i64| {
        let trial = Trial::new(21)
            .input("x", "2 3")
            .node("y = Add(x, w)")
            .output("y", "2 3");
        let mut model = trial.model();
        let sparse = crate::proto::SparseTensorProto {
            values: Some(reals(&[2]).to_proto("w")),
            indices: Some(Tensor::ints(&[0, at]).to_proto("")),
            dims: vec![2, 3],
        };
        model
            .proto
            .graph
            .as_mut()
            .expect("a graph")
            .sparse_initializer
            .push(sparse);
        model
    };
    let original = model(4);
    let checker = Checker::new(&original, &Options::default()).expect("it runs");
    assert!(checker.check(&model(4).proto).is_ok());
    assert!(checker.check(&model(5).proto).is_err());
    assert!(matches!(
        checker.check(&model(6).proto),
        Err(VerifyError::Rewritten { .. })
    ));
}

#[test]
fn a_mask_does_not_hide_what_is_beside_it() {
    let model = |scale: f32| {
        let trial = Trial::new(17)
            .input("x", "n 8")
            .constant("low", real(-3.4e38));
        let trial = trial.constant("c", real(scale)).constant("zero", real(0.0));
        let trial = trial.node("m = Greater(x, zero)").node("a = Mul(x, c)");
        trial.node("y = Where(m, a, low)").output("y", "n 8")
    };
    assert!(checked(&model(1.5), &model(1.5)).is_ok());
    assert!(checked(&model(1.5), &model(1.515)).is_err());
}

#[test]
fn inputs_that_make_everything_nan_are_no_proof() {
    let model = |scale: f32| {
        let trial = Trial::new(17).input("x", "n 64").constant("c", real(scale));
        let trial = trial
            .node("l = Log(x)")
            .node("m = MatMul(l, w)")
            .node("y = Mul(m, c)");
        trial.constant("w", reals(&[64, 4])).output("y", "n 4")
    };
    assert!(checked(&model(1.5), &model(1.5)).is_ok());
    assert!(checked(&model(1.5), &model(2.5)).is_err());
}

#[test]
fn an_unknown_operator_that_nobody_needs_is_no_cut() {
    let trial = Trial::new(17).input("x", "n 4").node("a = Exp(x)");
    let trial = trial
        .node("b = somewhere.Thing(a)")
        .node("y = Relu(x)")
        .output("y", "n 4");
    let after = Trial::new(17)
        .input("x", "n 4")
        .node("y = Relu(x)")
        .output("y", "n 4");
    assert!(checked(&trial, &after).expect("the same").cuts.is_empty());
}

#[test]
fn a_model_that_does_not_run_is_no_difference() {
    let trial = Trial::new(17).input("x", "n 4").constant("w", reals(&[3]));
    let trial = trial.node("y = Add(x, w)").output("y", "n 4");
    assert!(matches!(
        checked(&trial, &trial),
        Err(VerifyError::Original { .. })
    ));
}

#[test]
fn what_is_given_has_to_fit_the_model() {
    let trial = Trial::new(17).input("x", "n 4").input("z", "n");
    let model = trial.node("y = Identity(x)").output("y", "n 4").model();
    let tensor = |shape: &[usize]| reals(&[shape.iter().product()]).reshaped(shape);
    let with = |inputs: &[(&str, Tensor)], sizes: &[(&str, i64)]| {
        let options = Options {
            inputs: inputs
                .iter()
                .map(|(n, t)| (n.to_string(), t.clone()))
                .collect(),
            sizes: sizes
                .iter()
                .map(|(n, size)| (n.to_string(), *size))
                .collect(),
            ..Options::default()
        };
        Checker::new(&model, &options).map(|checker| {
            let evidence = checker.check(&model.proto).expect("the same");
            (evidence.runs[0].clone(), evidence.shapes["z"].clone())
        })
    };
    // Sizes follow from what is given, and what is said of the run is true.
    let (run, other) = with(&[("x", tensor(&[7, 4]))], &[]).expect("it fits");
    assert_eq!((run.as_str(), other), ("seed 0, n=7", vec![7]));
    assert_eq!(with(&[], &[("n", 6)]).expect("it fits").1, [6]);
    let refused = |inputs: &[(&str, Tensor)], sizes: &[(&str, i64)]| {
        with(inputs, sizes).expect_err("refused").to_string()
    };
    let whole = Tensor::of_ints(crate::element::Element::I64, &[1, 4], &[0; 4]).expect("made");
    let cases = [
        (
            refused(&[("w", tensor(&[1]))], &[]),
            "no input `w`; the inputs are x, z",
        ),
        (
            refused(&[("x", whole)], &[]),
            "but the given array has the type",
        ),
        (refused(&[("x", tensor(&[4]))], &[]), "has 2 dimensions"),
        (
            refused(&[("x", tensor(&[4, 2]))], &[]),
            "dimension 1 of the input `x` (4) has to be 4",
        ),
        (
            refused(&[("x", tensor(&[2, 4]))], &[("n", 3)]),
            "has to be 3",
        ),
        (
            refused(&[], &[("m", 3)]),
            "no input has a size `m`; its dynamic sizes are n",
        ),
    ];
    for (error, what) in cases {
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn models_that_differ_in_the_sign_of_a_zero_differ() {
    let model = |zero: f32| {
        let mut trial = Trial::new(17)
            .input("x", "n 4")
            .node("z = Constant()")
            .node("d = Div(x, z)")
            .node("y = Atan(d)")
            .output("y", "n 4")
            .model();
        let node = trial.proto.graph.as_mut().map(|graph| &mut graph.node[0]);
        if let Some(node) = node {
            node.attribute = vec![crate::proto::AttributeProto {
                name: "value_float".to_string(),
                f: Some(zero),
                r#type: 1,
                ..Default::default()
            }];
        }
        trial
    };
    let original = model(0.0);
    let checker = Checker::new(&original, &Options::default()).expect("it runs");
    assert!(checker.check_other(&model(0.0)).is_ok());
    let error = checker.check_other(&model(-0.0)).expect_err("other signs");
    assert!(matches!(error, VerifyError::Differs { output, .. } if output == "y"));
}

#[test]
fn branches_that_no_run_takes_are_told() {
    let branch = |name: &str, node: &str| AttributeProto {
        name: name.to_string(),
        r#type: attribute_type::GRAPH,
        g: Some(GraphProto {
            name: name.to_string(),
            node: vec![line(node, Vec::new())],
            output: vec![value("b", Element::F32, "n 4")],
            ..GraphProto::default()
        }),
        ..AttributeProto::default()
    };
    let branches = vec![
        branch("then_branch", "b = Abs(x)"),
        branch("else_branch", "b = Neg(x)"),
    ];
    let choice = |trial: Trial| {
        let trial = trial.input("x", "n 4").output("y", "n 4");
        trial.with("y = If(c)", branches.clone())
    };
    let given = choice(Trial::new(17).input_of("c", Element::Bool, ""));
    assert!(
        checked(&given, &given)
            .expect("the same")
            .untried
            .is_empty()
    );
    let never = Trial::new(17).input("z", "").constant("far", real(1e30));
    let never = choice(never.node("c = Greater(z, far)"));
    let evidence = checked(&never, &never).expect("the same");
    assert_eq!(evidence.untried.len(), 1, "{:?}", evidence.untried);
    assert!(
        evidence.untried[0].starts_with("then of If"),
        "{:?}",
        evidence.untried
    );
}

#[test]
fn a_few_small_numbers_beside_large_ones_are_seen() {
    // Only integers go in, so that no run with NaN shows the wrong ones; three sigmoids a run are few.
    let model = |shift: f32| {
        let trial = Trial::new(17).input_of("x", Element::I64, "1 3");
        let trial = trial
            .constant("e", reals(&[10, 4]))
            .constant("k", real(1700.7))
            .constant("shift", real(shift));
        let trial = trial.node("g = Gather(e, x)").node("u = Mul(g, k)");
        let trial = trial.node("s = Sigmoid(g)").node("v = Add(s, shift)");
        let trial = trial.with("y = Concat(u, v)", vec![int("axis", 2)]);
        trial.output("y", "1 3 8")
    };
    assert!(checked(&model(0.0), &model(0.0)).is_ok());
    let error = checked(&model(0.0), &model(2e-3)).expect_err("off by 2e-3");
    let all = matches!(&error, VerifyError::Differs { run, .. } if run.starts_with("all runs"));
    assert!(all, "{error:?}");
}
