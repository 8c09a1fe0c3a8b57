//! Simplified expressions have the value and the type of the original, on random trees.

use graph::{Binary, DType, Expr, Scalar, SymExpr, Symbol, Unary};
use proptest::prelude::*;

const TYPES: [DType; 5] = [DType::F32, DType::I64, DType::Bool, DType::BF16, DType::I32];

fn leaf() -> impl Strategy<Value = Expr> {
    prop_oneof![
        4 => (0..TYPES.len()).prop_map(Expr::In),
        2 => prop::sample::select(vec![0.0, 1.0, -1.0, 2.0, f64::INFINITY, f64::NEG_INFINITY])
            .prop_map(Expr::float),
        2 => (-1i64..3).prop_map(Expr::int),
        1 => any::<bool>().prop_map(|b| Expr::Const(Scalar::Bool(b))),
        1 => (-1i64..2).prop_map(|n| Expr::Index(SymExpr::symbol("i") + n)),
    ]
}

fn tree() -> impl Strategy<Value = Expr> {
    leaf().prop_recursive(4, 24, 3, |inner| {
        let arc = |e: Expr| std::sync::Arc::new(e);
        prop_oneof![
            (prop::sample::select(Unary::ALL.to_vec()), inner.clone())
                .prop_map(|(f, a)| Expr::unary(f, a)),
            (
                prop::sample::select(Binary::ALL.to_vec()),
                inner.clone(),
                inner.clone()
            )
                .prop_map(|(f, a, b)| Expr::binary(f, a, b)),
            (inner.clone(), inner.clone(), inner.clone()).prop_map(move |(c, a, b)| Expr::Select(
                arc(c),
                arc(a),
                arc(b)
            )),
            (prop::sample::select(TYPES.to_vec()), inner).prop_map(|(d, e)| e.cast(d)),
        ]
    })
}

/// Whether some function takes the negative or magnitude of a truth value, which no operator does
/// (PyTorch refuses it) and for which the type, `bool`, says nothing about the value.
fn negates_truth(e: &Expr) -> bool {
    let mut found = false;
    e.visit(&mut |node| {
        if let Expr::Unary(Unary::Neg | Unary::Abs | Unary::Sign, a) = node {
            found |= a.dtype(&TYPES) == DType::Bool;
        }
    });
    found
}

fn value(e: &Expr, inputs: &[Scalar]) -> f64 {
    let index = |s: &Symbol| (s.as_str() == "i").then_some(3);
    e.eval(inputs, &index).unwrap().as_f64()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, max_global_rejects: 1 << 20, ..Default::default() })]

    #[test]
    fn simplification_keeps_value_and_type(
        e in tree(),
        real in prop::sample::select(vec![0.0, 1.5, -2.0, f64::INFINITY, f64::NAN]),
        whole in -2i64..3,
        truth in any::<bool>(),
    ) {
        prop_assume!(!negates_truth(&e));
        let inputs = [
            Scalar::Float(real), Scalar::Int(whole), Scalar::Bool(truth),
            Scalar::Float(0.5), Scalar::Int(7),
        ];
        for simple in [e.simplify_typed(&TYPES), e.simplify()] {
            let (was, is) = (value(&e, &inputs), value(&simple, &inputs));
            prop_assert!(
                was == is || (was.is_nan() && is.is_nan()),
                "{} = {}, simplified {} = {}", e, was, simple, is
            );
            prop_assert_eq!(simple.dtype(&TYPES), e.dtype(&TYPES), "{} became {}", e, simple);
        }
        let once = e.simplify_typed(&TYPES);
        let twice = once.simplify_typed(&TYPES);
        prop_assert_eq!(&twice, &once, "{} became {}", once, twice);
    }
}
