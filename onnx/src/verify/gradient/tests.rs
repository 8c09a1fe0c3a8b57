//! Right training graphs are found right, wrong ones named; what proves nothing is not called wrong.

use super::super::Options;
use super::{
    EvaluateError, GradientError, MOST_ERROR, Objective, Original, Precision, Values,
    check_gradients, check_same_step, program,
};
use crate::element::Element;
use crate::file::Model;
use crate::proto::{AttributeProto, attribute_type};
use crate::rewrite::patch::int;
use crate::rewrite::trial::{Trial, real, reals};

/// `y = x · w + b`.
fn forward() -> Trial {
    let trial = Trial::new(17)
        .input("x", "3 4")
        .constant("w", reals(&[4, 2]));
    let trial = trial.constant("b", reals(&[2]));
    trial.node("p = MatMul(x, w)").node("y = Add(p, b)")
}

fn original() -> Model {
    forward().output("y", "3 2").model()
}

/// Its training graph, where `scale` multiplies the gradient of the mean squared difference: 2 / 6 is right. The
/// gradient of `b`, which is small, is multiplied by `of_bias`.
fn training(scale: f32, of_bias: f32, reduction: &str) -> Model {
    let trial = forward()
        .input("target", "3 2")
        .constant("scale", real(scale))
        .constant("part", real(of_bias / 3.0));
    trial
        .node("d = Sub(y, target)")
        .node("q = Mul(d, d)")
        .with(&format!("loss = {reduction}(q)"), vec![int("keepdims", 0)])
        .node("e = Mul(d, scale)")
        .node("t = Transpose(x)")
        .node("w.grad = MatMul(t, e)")
        .node("e_part = Mul(d, part)")
        .ints("rows", &[0])
        .with("b.grad = ReduceSum(e_part, rows)", vec![int("keepdims", 0)])
        .output("loss", "")
        .output("w.grad", "4 2")
        .output("b.grad", "2")
        .model()
}

const MEAN: Objective = Objective::MeanSquaredError;

fn of(model: &Model) -> Original<'_> {
    Original {
        model,
        objective: &MEAN,
        output: None,
        same_form: true,
    }
}

#[test]
fn right_gradients_are_close_to_differences() {
    let (made, original) = (training(1.0 / 3.0, 1.0, "ReduceMean"), original());
    let found = check_gradients(&made, Some(of(&original)), &Options::default());
    let found = found.expect("right");
    // A third of single precision is off by 1e-8 of it.
    assert!(found.gradients < 1e-7, "{found:?}");
    assert!(found.loss.is_some_and(|e| e < 1e-12), "{found:?}");
}

#[test]
fn targets_have_the_sizes_of_the_output() {
    // The file gives the output's sizes other names than the inputs'.
    let squares = |output: &str| {
        let model = Trial::new(17)
            .input("x", "n 4 4")
            .constant("w", reals(&[4]));
        let model = model.ints("from", &[1]).ints("to", &[4]).ints("axis", &[1]);
        let model = model
            .node("s = Slice(x, from, to, axis)")
            .node("y = Mul(s, w)");
        if output == "y" {
            return model.output("y", "a b 4").model();
        }
        let model = model.input("target", "a b 4").node("d = Sub(y, target)");
        let model = model.node("q = Mul(d, d)").ints("rows", &[0, 1]);
        let model = model.with("loss = ReduceMean(q)", vec![int("keepdims", 0)]);
        let model = model
            .node("n_y = Size(y)")
            .with("n = Cast(n_y)", vec![int("to", 1)]);
        let model = model
            .node("e = Add(d, d)")
            .node("f = Div(e, n)")
            .node("g = Mul(f, s)");
        let model = model.with("w.grad = ReduceSum(g, rows)", vec![int("keepdims", 0)]);
        model.output("loss", "").output("w.grad", "4").model()
    };
    let (made, original) = (squares("loss"), squares("y"));
    let found = check_gradients(&made, Some(of(&original)), &Options::default());
    assert!(found.as_ref().is_ok_and(|f| f.loss.is_some()), "{found:?}");
}

#[test]
fn a_wrong_gradient_is_named() {
    let named = |made: Model| match check_gradients(&made, None, &Options::default()) {
        Err(GradientError::Gradient { name, .. }) => name,
        other => panic!("{other:?}"),
    };
    assert_eq!(named(training(0.3334, 1.0, "ReduceMean")), "w.grad");
    assert_eq!(named(training(1.0 / 3.0, 1.001, "ReduceMean")), "b.grad");
    assert_eq!(named(training(1.0 / 3.0, 0.0, "ReduceMean")), "b.grad");
    const { assert!(MOST_ERROR < 1e-4) };
}

#[test]
fn gradients_that_do_not_fit_together_are_an_error() {
    let mut made = training(1.0 / 3.0, 1.0, "ReduceMean");
    let graph = made.proto.graph.as_mut().expect("a graph");
    let product = graph.node.iter_mut().find(|n| n.output == ["w.grad"]);
    // x itself instead of its transpose.
    product.expect("the gradient of w").input[0] = "x".to_string();
    let found = check_gradients(&made, Some(of(&original())), &Options::default());
    let Err(error @ GradientError::Broken { .. }) = found else {
        panic!("{found:?}");
    };
    let text = error.to_string();
    assert!(
        text.starts_with("its gradients cannot be computed: MatMul"),
        "{text}"
    );
}

#[test]
fn a_wrong_gradient_is_named_among_many() {
    // The loss is the sum of x · g0 + … + x · g6; the gradient of each is x.
    let made = |wrong: &[usize]| {
        let mut made = Trial::new(17)
            .input("x", "4")
            .constant("off", real(1.01))
            .constant("y0", real(0.0));
        for n in 0..7 {
            let scale = match wrong.contains(&n) {
                true => format!("g{n}.grad = Mul(x, off)"),
                false => format!("g{n}.grad = Identity(x)"),
            };
            made = made
                .constant(&format!("g{n}"), reals(&[4]))
                .node(&format!("p{n} = Mul(x, g{n})"))
                .node(&format!("y{} = Add(y{n}, p{n})", n + 1))
                .node(&scale);
        }
        made = made.with("loss = ReduceSum(y7)", vec![int("keepdims", 0)]);
        made = made.output("loss", "");
        let all = (0..7).fold(made, |made, n| made.output(&format!("g{n}.grad"), "4"));
        match check_gradients(&all.model(), None, &Options::default()) {
            Err(GradientError::Gradient { name, .. }) => Some(name),
            Ok(_) => None,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(made(&[]), None);
    for n in 0..7 {
        assert_eq!(made(&[n]), Some(format!("g{n}.grad")));
    }
    assert!(made(&[1, 5]).is_some_and(|name| name == "g1.grad" || name == "g5.grad"));
}

#[test]
fn a_step_without_gradients_is_the_step_with_them() {
    let step = |rate: f32, with: bool| {
        let made = Trial::new(17)
            .input("x", "3 4")
            .constant("w", reals(&[4]))
            .constant("rate", real(rate))
            .ints("rows", &[0]);
        let made = made.node("y = Mul(x, w)");
        let made = made.with("loss = ReduceSum(y)", vec![int("keepdims", 0)]);
        let made = made.with("w.grad = ReduceSum(x, rows)", vec![int("keepdims", 0)]);
        let made = made
            .node("u = Mul(w.grad, rate)")
            .node("w.next = Sub(w, u)");
        let made = made.output("loss", "").output("w.next", "4");
        match with {
            true => made.output("w.grad", "4").model(),
            false => made.model(),
        }
    };
    let whole = step(0.1, true);
    let same = |without: &Model| check_same_step(&whole, without, &Options::default());
    assert!(same(&step(0.1, false)).is_ok_and(|error| error < 1e-12));
    match same(&step(0.1001, false)) {
        Err(GradientError::Step { name, .. }) => assert_eq!(name, "w.next"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn parameters_on_a_kink_are_tried_beside_it() {
    // Zeros before Relu, whose derivative at 0 is not what a difference across 0 gives.
    let zeros = crate::tensor::Tensor::new(&[4], crate::tensor::Values::F32(vec![0.0; 4]));
    let made = |sign: &str| {
        let made = Trial::new(17)
            .input("x", "3 4")
            .constant("g", zeros.clone());
        let made = made.constant("zero", real(0.0)).ints("rows", &[0]);
        let made = made.node("m = Mul(x, g)").node("y = Relu(m)");
        let made = made.with("loss = ReduceSum(y)", vec![int("keepdims", 0)]);
        let made = made
            .node(&format!("p = {sign}(m, zero)"))
            .node("d = Where(p, x, zero)");
        let made = made.with("g.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("g.grad", "4").model()
    };
    assert!(check_gradients(&made("Greater"), None, &Options::default()).is_ok());
    let wrong = check_gradients(&made("Less"), None, &Options::default());
    assert!(
        matches!(wrong, Err(GradientError::Gradient { .. })),
        "{wrong:?}"
    );
}

#[test]
fn rounding_of_a_large_loss_is_no_error() {
    let made = |scale: f32| {
        let made = Trial::new(17).input("x", "3 4").constant("w", reals(&[4]));
        let made = made
            .constant("much", real(1e7))
            .constant("scale", real(scale));
        let made = made.node("m = Mul(x, w)").ints("rows", &[0]);
        let made = made.with("s = ReduceSum(m)", vec![int("keepdims", 0)]);
        let made = made.node("loss = Add(s, much)").node("d = Mul(x, scale)");
        let made = made.with("w.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("w.grad", "4").model()
    };
    let found = check_gradients(&made(1.0), None, &Options::default());
    assert!(found.is_ok(), "{found:?}");
    let wrong = check_gradients(&made(1.5), None, &Options::default());
    assert!(
        matches!(wrong, Err(GradientError::Gradient { .. })),
        "{wrong:?}"
    );
}

#[test]
fn constants_in_half_precision_may_be_rounded_so() {
    let made = |scale: f32, element: Element| {
        let w = crate::tensor::Tensor::floats(element, &[4], &[0.5, -1.0, 2.0, 0.25]);
        let made = Trial::new(17).input_of("x", element, "3 4");
        let made = made
            .constant("w", w.expect("floats"))
            .constant("scale", real(scale));
        let made = made.node("m = Mul(x, w)").ints("rows", &[0]);
        let made = made.with("loss = ReduceSum(m)", vec![int("keepdims", 0)]);
        let made = made.node("d = Mul(x, scale)");
        let made = made.with("w.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("w.grad", "4").model()
    };
    let is_right = |scale: f32, element: Element| {
        check_gradients(&made(scale, element), None, &Options::default()).is_ok()
    };
    assert!(is_right(1.0005, Element::F16));
    assert!(!is_right(1.01, Element::F16));
    assert!(!is_right(1.0005, Element::F32));
}

#[test]
fn what_a_mask_swallows_is_tried_without_it() {
    // A row of scores to which the largest number of single precision was added is that number.
    let made = |of_kept: f32| {
        let made = Trial::new(17)
            .input("x", "3 4")
            .input_of("mask", Element::I64, "3 4");
        let made = made
            .constant("w", reals(&[4]))
            .constant("most", real(-3.4e38));
        let made = made
            .constant("least", real(0.0))
            .constant("of_kept", real(of_kept));
        let made = made
            .with("kept = Cast(mask)", vec![int("to", 9)])
            .ints("rows", &[0]);
        let made = made
            .node("far = Where(kept, least, most)")
            .node("m = Mul(x, w)");
        let made = made
            .node("a = Add(m, far)")
            .node("y = Softmax(a)")
            .node("z = Mul(y, m)");
        let made = made.with("loss = ReduceSum(z)", vec![int("keepdims", 0)]);
        // d/dm of softmax(a)·m, where a is m plus something: y + y·(m − Σ y·m).
        let made = made.ints("last", &[1]).node("t = ReduceSum(z, last)");
        let made = made
            .node("u = Sub(m, t)")
            .node("v = Mul(y, u)")
            .node("s = Add(y, v)");
        let made = made.node("r = Mul(s, of_kept)").node("d = Mul(r, x)");
        let made = made.with("w.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("w.grad", "4").model()
    };
    let found = check_gradients(&made(1.0), None, &Options::default());
    assert!(found.is_ok(), "{found:?}");
    assert!(check_gradients(&made(1.1), None, &Options::default()).is_err());
}

#[test]
fn another_loss_than_the_models_is_an_error() {
    let (made, original) = (training(2.0, 6.0, "ReduceSum"), original());
    assert!(check_gradients(&made, None, &Options::default()).is_ok());
    let found = check_gradients(&made, Some(of(&original)), &Options::default());
    assert!(
        matches!(found, Err(GradientError::Loss { .. })),
        "{found:?}"
    );
}

#[test]
fn what_draws_at_random_is_not_tried() {
    let made = Trial::new(17).input("x", "3 4").constant("w", reals(&[4]));
    let made = made
        .node("m = Mul(x, w)")
        .with("r = RandomNormalLike(m)", vec![int("dtype", 1)]);
    let made = made
        .node("y = Mul(m, r)")
        .with("loss = ReduceSum(y)", vec![int("keepdims", 0)]);
    let made = made.with("g = Mul(r, x)", Vec::new());
    let made = made
        .with("w.grad = ReduceSum(g, rows)", vec![int("keepdims", 0)])
        .ints("rows", &[0]);
    let made = made.output("loss", "").output("w.grad", "4").model();
    let found = check_gradients(&made, None, &Options::default());
    let untried =
        matches!(&found, Err(GradientError::Untried(why)) if why.contains("RandomNormalLike"));
    assert!(untried, "{found:?}");
}

#[test]
fn dropout_is_tried_with_a_mask_that_stays() {
    let on = crate::tensor::Tensor::new(&[], crate::tensor::Values::Bool(vec![true]));
    let made = |scale: f32| {
        let made = Trial::new(17).input("x", "30 4").constant("w", reals(&[4]));
        let made = made
            .constant("ratio", real(0.5))
            .constant("on", on.clone())
            .constant("scale", real(scale))
            .constant("none", real(0.0));
        let made = made
            .node("m = Mul(x, w)")
            .node("y, mask = Dropout(m, ratio, on)")
            .with("loss = ReduceSum(y)", vec![int("keepdims", 0)]);
        let made = made
            .node("t = Mul(x, scale)")
            .node("d = Where(mask, t, none)")
            .ints("rows", &[0]);
        let made = made.with("w.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("w.grad", "4").model()
    };
    let found = check_gradients(&made(2.0), None, &Options::default()).expect("right");
    assert!(found.run.contains("held"), "{found:?}");
    let wrong = check_gradients(&made(1.5), None, &Options::default());
    assert!(
        matches!(wrong, Err(GradientError::Gradient { .. })),
        "{wrong:?}"
    );
}

#[test]
fn uniform_numbers_are_tried_as_ones_that_stay() {
    let made = |wrong: f32| {
        let made = Trial::new(17).input("x", "30 4").constant("w", reals(&[4]));
        let made = made.constant("more", real(wrong)).ints("rows", &[0]);
        let bounds = [("low", 0.5), ("high", 2.0)].map(|(name, f)| AttributeProto {
            name: name.to_string(),
            f: Some(f),
            r#type: attribute_type::FLOAT,
            ..Default::default()
        });
        let made = made
            .node("m = Mul(x, w)")
            .with("u = RandomUniformLike(m)", bounds.to_vec());
        let made = made
            .node("y = Mul(m, u)")
            .with("loss = ReduceSum(y)", vec![int("keepdims", 0)]);
        let made = made
            .node("drawn = Add(u, more)")
            .node("d = Mul(x, drawn)")
            .with("w.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("w.grad", "4").model()
    };
    let found = check_gradients(&made(0.0), None, &Options::default()).expect("right");
    assert!(found.run.contains("held"), "{found:?}");
    let wrong = check_gradients(&made(0.1), None, &Options::default());
    assert!(
        matches!(wrong, Err(GradientError::Gradient { .. })),
        "{wrong:?}"
    );
}

#[test]
fn what_would_take_minutes_is_not_tried() {
    let made = |sizes: &str| {
        let made = Trial::new(17).input("x", sizes).constant("w", reals(&[64]));
        let made = made.node("a = Mul(x, w)").node("b = Sigmoid(a)");
        let made = made.node("c = Sigmoid(b)").node("d = Sigmoid(c)");
        let made = made.with("loss = ReduceSum(d)", vec![int("keepdims", 0)]);
        // Whether it is right does not matter here.
        let made = made.ints("rows", &[0, 1]);
        let made = made.with("w.grad = ReduceSum(d, rows)", vec![int("keepdims", 0)]);
        made.output("loss", "").output("w.grad", "64").model()
    };
    for sizes in ["4096 4096 64", "n 65536 65536"] {
        let found = check_gradients(&made(sizes), None, &Options::default());
        let untried =
            matches!(&found, Err(GradientError::Untried(why)) if why.contains("smaller batch"));
        assert!(untried, "{sizes}: {found:?}");
    }
}

#[test]
fn values_that_were_counted_have_room() {
    // Five values of 16 million numbers, 128 MiB each in float64, which are all read at the end.
    let made = Trial::new(17).input("x", "1").ints("n", &[16 << 20]);
    let made = made.node("a = Expand(x, n)").node("b = Neg(a)");
    let made = made.node("c = Neg(b)").node("d = Neg(c)");
    let made = made.node("loss = Sum(a, b, c, d)").output("loss", "");
    let made = made.model();
    let exact = program(&made.proto, &made.folder, Precision::Float64, None).expect("a graph");
    let x = crate::tensor::Tensor::new(&[1], crate::tensor::Values::F64(vec![1.0]));
    let feeds: Values = [("x".to_string(), x)].into_iter().collect();
    let refused = exact.run(&feeds, &["loss"]);
    assert!(
        matches!(refused, Err(EvaluateError::Large { .. })),
        "{refused:?}"
    );
    exact.allow(1 << 30);
    let sum = exact.run(&feeds, &["loss"]).expect("room");
    assert_eq!(sum[0].to_f64().expect("numbers")[0], 0.0);
}

#[test]
fn cross_entropy_is_that_of_the_outputs() {
    // log-softmax of two classes of which the first has the logarithm of 3: probabilities 3/4 and 1/4.
    let logits = crate::tensor::Tensor::new(
        &[2, 2],
        crate::tensor::Values::F64(vec![3f64.ln(), 0.0, 0.0, 3f64.ln()]),
    );
    let labels = crate::tensor::Tensor::new(&[2], crate::tensor::Values::I64(vec![0, 0]));
    let feeds = [("labels".to_string(), labels)].into_iter().collect();
    let of = |smoothing: f64| Objective::CrossEntropy(smoothing).of(&logits, &feeds);
    let (likely, unlikely) = (-(0.75f64.ln()), -(0.25f64.ln()));
    let mean = (likely + unlikely) / 2.0;
    assert!((of(0.0).expect("fits") - mean).abs() < 1e-15);
    // All of it spread: the mean over the classes.
    assert!((of(1.0).expect("fits") - mean).abs() < 1e-15);
}
