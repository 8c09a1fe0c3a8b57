//! What runs with other roundings explain, on tensors made by hand.

use super::*;
use crate::tensor::Values;

fn f32s(values: &[f32]) -> Tensor {
    Tensor::new(&[values.len()], Values::F32(values.to_vec()))
}

fn i32s(values: &[i32]) -> Tensor {
    Tensor::new(&[values.len()], Values::I32(values.to_vec()))
}

/// Whether samples explain that the original gives `before` and the rewritten model `after`.
fn explains(before: &Tensor, after: &Tensor, exact: &Tensor, samples: &[&Tensor]) -> bool {
    explained("y", [before, after], Some(exact), samples, 0.0).is_some()
}

/// `n` numbers about 1, the first one as given.
fn with_first(element: Element, first: f64) -> Tensor {
    let rest = (1..64).map(|n| 1.0 + f64::from(n) / 64.0);
    let values: Vec<f64> = [first].into_iter().chain(rest).collect();
    Tensor::floats(element, &[values.len()], &values).expect("floats")
}

#[test]
fn what_is_finite_beside_an_overflow_lies_among_the_finite_samples() {
    for element in [Element::F16, Element::F32] {
        let at = |first: f64| with_first(element, first);
        let before = at(f64::INFINITY);
        let exact = with_first(Element::F64, 60512.0);
        let samples = [at(60480.0), at(60544.0), at(f64::INFINITY)];
        let samples: Vec<&Tensor> = samples.iter().collect();
        assert!(explains(&before, &at(60512.0), &exact, &samples));
        for wrong in [1.0, -60512.0, 60000.0, 60800.0, f64::NAN] {
            assert!(!explains(&before, &at(wrong), &exact, &samples), "{wrong}");
        }
        // One sample is a range of one number.
        let one = at(60000.0);
        let exact = with_first(Element::F64, 60032.0);
        assert!(explains(&before, &at(60000.0), &exact, &[&one]));
        assert!(!explains(&before, &at(1.0), &exact, &[&one]));
        // An overflow that rounding alone makes is one of that sign.
        let (finite, over) = (at(60000.0), at(f64::INFINITY));
        let mut moved = over.to_f64().expect("floats");
        moved[1] += 1.0 / 64.0;
        let moved = Tensor::floats(element, &over.shape, &moved).expect("floats");
        let samples = [&moved, &at(60064.0)];
        assert!(explains(&finite, &over, &exact, &samples));
        let under = at(f64::NEG_INFINITY);
        assert!(!explains(&finite, &under, &exact, &samples));
    }
}

#[test]
fn a_sample_far_from_the_reference_explains_no_finite_number() {
    let before = f32s(&[f32::INFINITY, 1.0]);
    let exact = f32s(&[60000.0, 1.0]);
    for (seen, is_explained) in [(59000.0, true), (40000.0, false)] {
        let sample = f32s(&[seen, 1.0]);
        let after = sample.clone();
        assert_eq!(
            explains(&before, &after, &exact, &[&sample]),
            is_explained,
            "{seen}"
        );
    }
}

#[test]
fn floats_that_rounding_moves_far_are_not_excused() {
    let exact = f32s(&[8.0, 1.0]);
    for (by, is_excused) in [(0.5, true), (1.0, true), (1.01, false)] {
        // One part in eight is the most that is excused.
        let sample = f32s(&[8.0 + by, 1.0]);
        let after = f32s(&[8.0 + by / 2.0, 1.0]);
        assert_eq!(
            explains(&exact, &after, &exact, &[&sample]),
            is_excused,
            "{by}"
        );
    }
}

#[test]
fn whole_numbers_of_which_rounding_changes_many_are_not_excused() {
    let before = i32s(&[5; 64]);
    for (n_changed, is_excused) in [(1, true), (4, true), (5, false), (64, false)] {
        let mut values = [5; 64];
        values[..n_changed].fill(6);
        let sample = i32s(&values);
        let mut values = [5; 64];
        values[0] = 6;
        let after = i32s(&values);
        assert_eq!(
            explains(&before, &after, &before, &[&sample]),
            is_excused,
            "{n_changed}"
        );
    }
    // One always may, however few there are.
    let (before, after) = (i32s(&[5, 5]), i32s(&[6, 5]));
    assert!(explains(&before, &after, &before, &[&after]));
    assert!(!explains(&before, &i32s(&[7, 5]), &before, &[&after]));
}

#[test]
fn bytes_between_those_seen_are_excused_where_these_are_near() {
    let bytes = |first: u8| Tensor::new(&[3], Values::U8(vec![first, 7, 9]));
    let before = bytes(100);
    for (seen, after, is_excused) in [
        (102, 101, true),
        (102, 102, true),
        (103, 101, false),
        (103, 103, true),
        (102, 99, false),
    ] {
        let found = explains(&before, &bytes(after), &before, &[&bytes(seen)]);
        assert_eq!(found, is_excused, "{seen} {after}");
    }
}
