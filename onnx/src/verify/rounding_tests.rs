//! What rounding explains, and what it does not; runs that the original cannot make.

use super::*;
use crate::element::Element;
use crate::rewrite::patch::int;
use crate::rewrite::trial::{Trial, reals};
use crate::tensor::Values as Elements;

fn checked(before: &Trial, after: &Trial) -> Result<Evidence, VerifyError> {
    let model = before.model();
    Checker::new(&model, &Options::default())?.check(&after.model().proto)
}

fn floats(shape: &[usize], values: Vec<f32>) -> Tensor {
    Tensor::new(shape, Elements::F32(values))
}

/// The position of the largest of four sums: the first and second are equal, the others 0 or `last`.
fn largest(second: f32, last: f32) -> Trial {
    let row = |n: usize| {
        let weight = 0.3 + n as f32 / 7.0;
        [weight, weight * second, 0.0, weight * last]
    };
    let weights = floats(&[8, 4], (0..8).flat_map(row).collect());
    let trial = Trial::new(17).input("x", "8").constant("w", weights);
    let trial = trial.node("a = Abs(x)").node("p = MatMul(a, w)");
    trial
        .with("y = ArgMax(p)", vec![int("axis", 0)])
        .output_of("y", Element::I64, "1")
}

#[test]
fn a_tie_may_be_decided_otherwise_and_another_position_is_wrong() {
    let before = largest(1.0, 0.0);
    let evidence = checked(&before, &largest(1.0 + 2.0 * f32::EPSILON, 0.0)).expect("a tie");
    let [unsettled] = evidence.unsettled.as_slice() else {
        panic!("{:?}", evidence.unsettled);
    };
    assert_eq!(unsettled.output, "y");
    let error = checked(&before, &largest(1.0, 1.01)).expect_err("another position");
    assert!(error.to_string().contains("`y` differs"), "{error}");
    // Without a tie the position stays the same, however the sums are rounded.
    let clear = checked(&largest(0.9, 0.0), &largest(1.01, 0.0));
    assert!(clear.is_err(), "{clear:?}");
}

/// Sums rounded to whole numbers far above 1, so that the last places of the sums decide them.
fn rounded(weights: Vec<f32>) -> Trial {
    let trial = Trial::new(17).input("x", "n 32").output("y", "n 256");
    let trial = trial.constant("w", floats(&[32, 256], weights));
    let trial = trial.constant("s", Tensor::new(&[], Elements::F32(vec![1e4])));
    let trial = trial.node("p = MatMul(x, w)").node("q = Mul(p, s)");
    let trial = trial.with("i = Cast(q)", vec![int("to", 6)]);
    trial
        .output_of("i", Element::I32, "n 256")
        .node("y = Round(q)")
}

fn weights() -> Vec<f32> {
    let weight = |n: usize| ((n * 37 % 101) as f32 - 50.0) / 64.0 + n as f32 / 3e4;
    (0..32 * 256).map(weight).collect()
}

#[test]
fn a_step_of_what_is_rounded_to_integers_passes_and_an_altered_weight_does_not() {
    let before = rounded(weights());
    // The same sums in another order.
    let mut other = before.model();
    let graph = other.proto.graph.as_mut().expect("a graph");
    let turned = |t: &Tensor| {
        let v = t.to_f64().expect("numbers");
        let columns = t.shape[1];
        let rows = v.chunks(columns).rev().flatten();
        floats(&t.shape, rows.map(|x| *x as f32).collect())
    };
    let w = Tensor::of_proto(&graph.initializer[0]).expect("weights");
    graph.initializer[0] = turned(&w).to_proto("w");
    let order: Vec<i64> = (0..32).rev().collect();
    graph
        .initializer
        .push(Tensor::ints(&order).to_proto("order"));
    graph.node[0].input[0] = "r".to_string();
    let reverse = crate::rewrite::trial::line("r = Gather(x, order)", vec![int("axis", 1)]);
    graph.node.insert(0, reverse);
    let model = before.model();
    let checker = Checker::new(&model, &Options::default()).expect("it runs");
    let evidence = checker.check(&other.proto).expect("the same sums");
    assert!(
        evidence.unsettled.iter().any(|found| found.output == "i"),
        "{:?}",
        evidence.unsettled
    );
    for (at, factor) in [(5, 1.001f32), (700, 0.99), (2047, 1.0001)] {
        let mut altered = weights();
        altered[at] *= factor;
        let error = checker.check(&rounded(altered).model().proto);
        assert!(
            matches!(error, Err(VerifyError::Differs { .. })),
            "{at} {factor}: {error:?}"
        );
    }
}

/// A product with stored weights of 8 bits, whose other operand is quantized when the model runs.
fn quantized(first: f32, weight: i8) -> Trial {
    let mut stored: Vec<i8> = (0..24 * 40).map(|n| (n * 89 % 251) as u8 as i8).collect();
    stored[77] = weight;
    let mut values = reals(&[16, 24]).to_f64().expect("numbers");
    values.iter_mut().for_each(|v| *v *= f64::from(first));
    let values = values.iter().map(|v| *v as f32).collect();
    let trial = Trial::new(17).input("x", "n 16").output("y", "n 40");
    let trial = trial.constant("v", floats(&[16, 24], values));
    let trial = trial.constant("w", Tensor::new(&[24, 40], Elements::I8(stored)));
    let trial = trial.constant("z", Tensor::new(&[], Elements::I8(vec![3])));
    trial
        .node("h = MatMul(x, v)")
        .node("q, s, o = DynamicQuantizeLinear(h)")
        .node("p = MatMulInteger(q, w, o, z)")
        .with("f = Cast(p)", vec![int("to", 1)])
        .node("y = Mul(f, s)")
}

#[test]
fn products_of_8_bits_are_held_against_their_stored_weights() {
    let before = quantized(1.0, 50);
    let evidence = checked(&before, &quantized(1.0 + f32::EPSILON, 50)).expect("the same");
    assert!(evidence.cuts.is_empty(), "{:?}", evidence.cuts);
    for weight in [53, 45, -50] {
        let error = checked(&before, &quantized(1.0, weight));
        assert!(
            matches!(error, Err(VerifyError::Differs { .. })),
            "{weight}: {error:?}"
        );
    }
    assert!(checked(&before, &quantized(1.01, 50)).is_err());
}

#[test]
fn what_rounding_moves_everywhere_excuses_nothing() {
    // The last places of large numbers: other roundings change all elements.
    let noise = |by: f32| {
        let trial = Trial::new(17).input("x", "n 64").output("y", "n 64");
        let trial = trial.constant("c", Tensor::new(&[], Elements::F32(vec![1e6 + 0.3])));
        let trial = trial.constant("b", Tensor::new(&[], Elements::F32(vec![by])));
        trial
            .node("l = Add(x, c)")
            .node("m = Sub(l, c)")
            .node("y = Mul(m, b)")
    };
    assert!(checked(&noise(1.0), &noise(1.5)).is_err());
}

#[test]
fn runs_that_the_original_cannot_make_are_left_out_and_told() {
    let trial = Trial::new(17).input("x", "n 4").output("y", "n 4 3");
    let trial = trial.constant("w", reals(&[5, 3]));
    let trial = trial
        .with("i = Cast(x)", vec![int("to", 7)])
        .with("y = Gather(w, i)", vec![int("axis", 0)]);
    let evidence = checked(&trial, &trial).expect("positions below 5");
    assert!(
        evidence.runs[0].starts_with("seed 0"),
        "{:?}",
        evidence.runs
    );
    assert!(
        evidence
            .left_out
            .iter()
            .any(|left_out| left_out.starts_with("seed 3, with infinities: ")),
        "{:?}",
        evidence.left_out
    );
}

#[test]
fn sound_needs_hundreds_of_samples() {
    let trial = Trial::new(17).input("x", "1 1 n").output("y", "1 2 m");
    let trial = trial
        .constant("w", reals(&[2, 1, 400]))
        .node("y = Conv(x, w)");
    let runs = checked(&trial, &trial).expect("it runs").runs;
    assert_eq!(runs[0], "seed 0, n=640");
}
