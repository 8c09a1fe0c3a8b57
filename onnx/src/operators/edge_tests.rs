//! Results at the edge of what operators are given: the largest integers, no elements, scalars.

use crate::attributes::Attributes;
use crate::operators::bounds::OperatorError;
use crate::operators::{Call, find};
use crate::proto::{AttributeProto, NodeProto};
use crate::tensor::{Tensor, Values, n_elements};

/// What an operator gives.
fn run(
    op: &str,
    attribute: &[AttributeProto],
    inputs: &[Tensor],
) -> Result<Vec<Tensor>, OperatorError> {
    let node = NodeProto {
        op_type: op.into(),
        input: (0..inputs.len()).map(|n| format!("x{n}")).collect(),
        output: vec!["y".into()],
        attribute: attribute.to_vec(),
        ..Default::default()
    };
    let inputs: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    let call = Call {
        node: &node,
        attributes: Attributes::new(&node),
        opset: 17,
        inputs: &inputs,
        widened: false,
    };
    find(&node).expect("a known operator").run(&call, 1 << 30)
}

fn range(bounds: [Values; 3]) -> usize {
    let scalars = bounds.map(|value| Tensor::new(&[], value));
    run("Range", &[], &scalars).expect("a range")[0].len()
}

#[test]
fn ranges_have_their_lengths() {
    let whole = |bounds: [i64; 3]| range(bounds.map(|n| Values::I64(vec![n])));
    assert_eq!(whole([1 << 53, (1 << 53) + 1, 1]), 1);
    assert_eq!(whole([i64::MAX, i64::MAX - 3, -2]), 2);
    assert_eq!(whole([3, 3, 1]), 0);
    let single = |bounds: [f32; 3]| range(bounds.map(|x| Values::F32(vec![x])));
    assert_eq!(single([0.1, 1.1, 0.1]), 11, "as in ONNX Runtime");
    let double = |bounds: [f64; 3]| range(bounds.map(|x| Values::F64(vec![x])));
    assert_eq!(double([0.0, 16_777_217.0, 1.0]), 16_777_217);
    let no_step = [0, 1, 0].map(|n| Tensor::new(&[], Values::I64(vec![n])));
    assert!(run("Range", &[], &no_step).is_err());
}

#[test]
fn the_open_size_of_a_reshape_of_nothing_is_that_of_onnx_runtime() {
    let reshaped = |from: &[usize], to: &[i64]| {
        let x = Tensor::new(from, Values::F32(vec![0.0; from.iter().product()]));
        let to = Tensor::new(&[to.len()], Values::I64(to.to_vec()));
        let found = run("Reshape", &[], &[x, to]).ok()?;
        Some(found[0].shape.clone())
    };
    assert_eq!(reshaped(&[0, 4, 8], &[0, -1]), Some(vec![0, 32]));
    assert_eq!(reshaped(&[0, 4, 8], &[0, -1, 8]), Some(vec![0, 4, 8]));
    assert_eq!(reshaped(&[0, 4, 8], &[-1, 8]), Some(vec![0, 8]));
    assert_eq!(reshaped(&[2, 0, 8], &[0, 0, -1]), Some(vec![2, 0, 8]));
    assert_eq!(reshaped(&[0, 1, 512], &[-1, 0, 512]), Some(vec![0, 1, 512]));
    assert_eq!(reshaped(&[2, 3], &[0, -1]), Some(vec![2, 3]));
    for (from, to) in [(&[0usize, 4, 8], &[0i64, -1, 5]), (&[2, 3, 4], &[0, -1, 5])] {
        assert!(reshaped(from, to).is_none());
    }
}

#[test]
fn the_norm_of_the_largest_integer_does_not_overflow() {
    let x = Tensor::new(&[1], Values::U64(vec![u64::MAX]));
    assert_eq!(run("ReduceL2", &[], &[x]).expect("a norm")[0].len(), 1);
}

#[test]
fn sizes_beyond_memory_are_refused_without_elements_too() {
    assert_eq!(n_elements(&[0, 1 << 20]), Some(0));
    assert_eq!(n_elements(&[]), Some(1));
    assert_eq!(n_elements(&[0, 1 << 40, 1 << 40]), None);
}

#[test]
fn products_of_nothing_take_no_memory() {
    let none = |shape: &[usize]| Tensor::new(shape, Values::F32(Vec::new()));
    let some = |shape: &[usize]| {
        let n = shape.iter().product();
        Tensor::new(shape, Values::F32(vec![1.0; n]))
    };
    let einsum = |equation: &str, inputs: &[Tensor]| {
        let named = AttributeProto {
            name: "equation".into(),
            r#type: 3,
            s: Some(equation.to_string().into()),
            ..Default::default()
        };
        run("Einsum", &[named], inputs)
    };
    let large = 1 << 20;
    let found = einsum(
        "irk,ikc->irc",
        &[some(&[1, large, 1]), none(&[large, large, 0])],
    );
    assert_eq!(found.expect("a product")[0].shape, [large, large, 0]);
    let found = einsum("ikc->c", &[none(&[large, large, 0])]);
    assert_eq!(found.expect("a sum")[0].shape, [0]);
    let outer = einsum(
        "ab,ac,zbc->",
        &[
            none(&[0, large]),
            none(&[0, large]),
            none(&[0, large, large]),
        ],
    );
    assert_eq!(outer.expect("a sum")[0].len(), 1);
}

#[test]
fn a_scalar_has_one_row_of_indices() {
    let x = Tensor::new(&[], Values::F32(vec![2.0]));
    assert_eq!(run("NonZero", &[], &[x]).expect("indices")[0].shape, [1, 1]);
}
