//! Common subexpressions: what is computed twice is computed once; what is stored twice is stored once.
//!
//! Before: `a = Exp(x); b = Exp(x)`; after: readers of `b` read `a`. Legal where operator, attributes
//! (bit by bit) and inputs are the same and the operator is a function of its inputs. Saves the second
//! computation and its bytes.

use super::Rule;
use super::patch::{Patch, may_stand_for};
use super::scope::Scope;
use crate::attributes::bodies;
use crate::infer::is_random;
use crate::operators;
use crate::proto::{AttributeProto, NodeProto};
use prost::Message;

pub const RULES: &[Rule] = &[
    Rule {
        name: "common-subexpression",
        at: repeated,
    },
    Rule {
        name: "share-initializers",
        at: shared_initializer,
    },
];

fn repeated(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    if is_random(node) || bodies(node).next().is_some() || !is_function(scope, n) {
        return None;
    }
    // Candidates read the same first input; nodes without inputs are folded instead.
    let first = node.input.iter().find(|i| !i.is_empty())?;
    let earlier = scope.readers(first).iter().copied().take_while(|m| *m < n);
    let twin = earlier.into_iter().find(|m| same(scope.node(*m), node))?;
    let pairs = node.output.iter().zip(&scope.node(twin).output);
    let mut replace = Vec::new();
    for (old, new) in pairs {
        if !scope.is_used(old) {
            continue;
        }
        if new.is_empty() || !may_stand_for(scope, old, new) {
            return None;
        }
        replace.push((old.clone(), new.clone()));
    }
    Some(Patch {
        remove: vec![n],
        replace,
        ..Patch::default()
    })
}

/// Whether a node is known to be a function of its inputs: what has no meaning here may be random, and
/// so may what a local function does; a Dropout in training is.
fn is_function(scope: &Scope, n: usize) -> bool {
    let mode = scope.input(n, 2).filter(|_| scope.is(n, "Dropout"));
    let in_training = mode.is_some_and(|mode| scope.scalar(mode) != Some(0.0));
    operators::find(scope.node(n)).is_some() && !in_training
}

fn same(a: &NodeProto, b: &NodeProto) -> bool {
    a.op_type == b.op_type
        && a.domain == b.domain
        && a.overload == b.overload
        && a.input == b.input
        && a.output.len() == b.output.len()
        && attributes(a) == attributes(b)
}

fn attributes(node: &NodeProto) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = node
        .attribute
        .iter()
        .map(|a| {
            AttributeProto {
                doc_string: String::new(),
                ..a.clone()
            }
            .encode_to_vec()
        })
        .collect();
    all.sort();
    all
}

/// The first reader of an initializer that another one equals reads that one.
fn shared_initializer(scope: &Scope, n: usize) -> Option<Patch> {
    let mut node = scope.node(n).clone();
    let mut changed = false;
    for input in &mut node.input {
        if let Some(twin) = scope.first_equal_initializer(input)
            && twin != input
        {
            *input = twin.to_string();
            changed = true;
        }
    }
    changed.then(|| Patch {
        remove: vec![n],
        insert: vec![node],
        ..Patch::default()
    })
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, reals};
    use crate::rewrite::patch::{float, int};
    use crate::tensor::{Tensor, Values};

    fn twice(trial: Trial) -> Trial {
        trial
            .only(&["common-subexpression"])
            .node("y = Add(a, b)")
            .output("y", "n 4")
    }

    #[test]
    fn what_is_computed_twice_is_computed_once() {
        let trial = Trial::new(17)
            .input("x", "n 4")
            .node("a = Exp(x)")
            .node("b = Exp(x)");
        twice(trial).gives(&["a = Exp(x)", "y = Add(a, a)"]);
    }

    #[test]
    fn other_attributes_inputs_or_chance_are_other_values() {
        let x = || Trial::new(17).input("x", "n 4");
        let elu = |trial: Trial, name: &str, alpha: f32| {
            trial.with(&format!("{name} = Elu(x)"), vec![float("alpha", alpha)])
        };
        twice(elu(elu(x(), "a", 1.0), "b", 1.5)).stays();
        // Equal, but not the same bits.
        twice(elu(elu(x(), "a", 0.0), "b", -0.0)).stays();
        twice(x().node("n = Neg(x)").node("a = Exp(x)").node("b = Exp(n)")).stays();
        let random = x()
            .node("a = RandomNormalLike(x)")
            .node("b = RandomNormalLike(x)");
        assert_eq!(twice(random).unverified().len(), 3);
    }

    #[test]
    fn two_outputs_stay_two() {
        let trial = Trial::new(17)
            .input("x", "4")
            .node("y = Exp(x)")
            .node("z = Exp(x)");
        trial.output("y", "4").output("z", "4").stays();
    }

    #[test]
    fn equal_initializers_are_stored_once_and_zeros_of_two_signs_twice() {
        let sums = |a: Tensor, b: Tensor| {
            let trial = Trial::new(17)
                .input("x", "n 4")
                .constant("v", a)
                .constant("w", b);
            let trial = trial
                .node("a = Mul(x, v)")
                .node("b = Div(x, w)")
                .node("y = Add(a, b)");
            trial
                .only(&["share-initializers"])
                .output("y", "n 4")
                .run()
                .1
        };
        let shared = sums(reals(&[4]), reals(&[4]));
        assert_eq!(shared[1], "b = Div(x, v)");
        let zeros = |z: f32| Tensor::new(&[4], Values::F32(vec![1.0, z, 2.0, 3.0]));
        assert_eq!(sums(zeros(0.0), zeros(-0.0))[1], "b = Div(x, w)");
        let shape = reals(&[4]).reshaped(&[1, 4]);
        assert_eq!(sums(reals(&[4]), shape)[1], "b = Div(x, w)");
    }

    #[test]
    fn an_initializer_that_a_caller_may_replace_is_not_shared() {
        let trial = Trial::new(17).input("x", "n 4").input("w", "4");
        let trial = trial.constant("v", reals(&[4])).constant("w", reals(&[4]));
        let trial = trial
            .node("a = Mul(x, v)")
            .node("b = Mul(x, w)")
            .node("y = Add(a, b)");
        trial.output("y", "n 4").stays();
    }

    #[test]
    fn attributes_in_another_order_are_the_same() {
        let soft = |t: Trial, name: &str, turned: bool| {
            let mut a = vec![int("axis", 0), int("keepdims", 1)];
            if turned {
                a.reverse();
            }
            t.with(&format!("{name} = ArgMax(x)"), a)
        };
        let trial = soft(
            soft(Trial::new(17).input("x", "3 4"), "a", false),
            "b",
            true,
        );
        let trial = trial.node("c = Add(a, b)");
        let (_, nodes) = trial
            .output_of("c", crate::element::Element::I64, "1 4")
            .run();
        assert_eq!(nodes.len(), 2);
    }
}
