//! Nodes that change nothing.
//!
//! Before: `y = Identity(x)`; after: readers of `y` read `x`. What counts: Identity; Dropout outside of
//! training; OptionalGetElement of the Optional of a tensor; Cast to the type a value has; Transpose in order;
//! Reshape, Flatten, Expand, Squeeze and Unsqueeze to the sizes a value has, symbols included; Concat, Sum, Max, Min,
//! Mean of one; Slice and Pad of nothing; `x + -0`, `x - 0`, `x * 1`, `x / 1`, `x ^ 1` of x's type and sizes. Not
//! `x + 0`, nor `x - -0`, of floats: they turn -0 into 0, which a division tells apart.

use super::Rule;
use super::patch::Patch;
use super::scope::Scope;
use crate::attributes::{Attributes, is_standard};
use crate::fact::Fact;

pub const RULES: &[Rule] = &[Rule {
    name: "remove-no-op",
    at: noop,
}];

fn noop(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    if !is_standard(node) {
        return None;
    }
    Patch::forward(scope, n, stands_for(scope, n)?)
}

/// The input that the node's output equals.
fn stands_for<'a>(scope: &Scope<'a>, n: usize) -> Option<&'a str> {
    let node = scope.node(n);
    let x = scope.input(n, 0)?;
    if node.op_type == "OptionalGetElement" {
        return scope.input(scope.made_by(x, "Optional")?, 0);
    }
    let output = scope.fact(node.output.first()?)?;
    let a = Attributes::new(node);
    let only = || node.input.len() == 1;
    let is = match node.op_type.as_str() {
        "Identity" => true,
        "Dropout" => match scope.input(n, 2) {
            Some(mode) => scope.scalar(mode) == Some(0.0),
            None => scope.opset() >= 7,
        },
        "Cast" | "CastLike" => {
            let element = scope.fact(x)?.element;
            element.is_some() && element == output.element
        }
        "Transpose" => {
            let rank = scope.fact(x)?.rank();
            match a.ints("perm") {
                Some(perm) => perm.iter().copied().eq(0..perm.len() as i64),
                None => rank.is_some_and(|r| r <= 1),
            }
        }
        "Reshape" | "Flatten" | "Expand" | "Squeeze" | "Unsqueeze" | "Tile" | "Slice" | "Pad"
        | "DepthToSpace" | "SpaceToDepth" | "Upsample" => {
            keeps_positions(scope, n) && same_sizes(scope.fact(x)?, output)
        }
        "Concat" | "Sum" | "Max" | "Min" | "Mean" => only(),
        "Add" | "Sub" | "Mul" | "Div" | "Pow" => return neutral(scope, n, output),
        _ => false,
    };
    is.then_some(x)
}

/// Whether equal sizes mean equal elements at equal positions.
fn keeps_positions(scope: &Scope, n: usize) -> bool {
    let node = scope.node(n);
    match node.op_type.as_str() {
        // A slice backwards keeps the size and turns the order.
        "Slice" => match scope.input(n, 4) {
            None => true,
            Some(steps) => {
                let steps = scope.fact(steps).and_then(Fact::known_ints);
                steps.is_some_and(|s| s.iter().all(|s| *s == 1))
            }
        },
        // If a Pad crops as much as it adds, elements move although the sizes are equal.
        "Pad" => {
            let given = Attributes::new(node).ints("pads").map(<[i64]>::to_vec);
            let pads = given.or_else(|| scope.fact(scope.input(n, 1)?)?.known_ints());
            pads.is_some_and(|p| p.iter().all(|p| *p == 0))
        }
        "DepthToSpace" | "SpaceToDepth" => Attributes::new(node).int("blocksize") == Some(1),
        "Upsample" => false,
        _ => true,
    }
}

/// Whether all sizes are known to be the same, symbols included.
pub fn same_sizes(a: &Fact, b: &Fact) -> bool {
    a.shape.is_some() && a.shape == b.shape
}

/// The operand that `x ∘ e` equals, where `e` is neutral for the operator.
fn neutral<'a>(scope: &Scope<'a>, n: usize, output: &Fact) -> Option<&'a str> {
    let op = scope.node(n).op_type.as_str();
    let (x, y) = (scope.input(n, 0)?, scope.input(n, 1)?);
    let is_float = output.element?.is_float();
    let all = |name: &str| {
        scope.all_equal(name).is_some_and(|e| match op {
            "Add" => e == 0.0 && (e.is_sign_negative() || !is_float),
            "Sub" => e == 0.0 && e.is_sign_positive(),
            _ => e == 1.0,
        })
    };
    let kept = if all(y) {
        x
    } else if matches!(op, "Add" | "Mul") && all(x) {
        y
    } else {
        return None;
    };
    let fact = scope.fact(kept)?;
    let same = fact.element.is_some() && fact.element == output.element && same_sizes(fact, output);
    same.then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, real, reals};
    use crate::element::Element;
    use crate::rewrite::patch::{int, ints};
    use crate::tensor::{Tensor, Values};

    fn around(node: impl Fn(Trial) -> Trial) -> Trial {
        let before = Trial::new(17).only(&["remove-no-op"]).input("x", "n 4");
        node(before.node("a = Relu(x)"))
            .node("y = Neg(b)")
            .output("y", "n 4")
    }

    const ALONE: [&str; 2] = ["a = Relu(x)", "y = Neg(a)"];

    #[test]
    fn what_changes_nothing_goes() {
        around(|t| t.node("b = Identity(a)")).gives(&ALONE);
        around(|t| t.node("b = Dropout(a)")).gives(&ALONE);
        around(|t| t.with("b = Cast(a)", vec![int("to", 1)])).gives(&ALONE);
        around(|t| t.with("b = Transpose(a)", vec![ints("perm", &[0, 1])])).gives(&ALONE);
        around(|t| t.with("b = Concat(a)", vec![int("axis", 0)])).gives(&ALONE);
        around(|t| t.ints("to", &[0, 4]).node("b = Reshape(a, to)")).gives(&ALONE);
        around(|t| t.ints("none", &[0; 4]).node("b = Pad(a, none)")).gives(&ALONE);
        around(|t| t.constant("one", real(1.0)).node("b = Mul(one, a)")).gives(&ALONE);
        around(|t| t.constant("zero", real(-0.0)).node("b = Add(a, zero)")).gives(&ALONE);
        around(|t| t.constant("zero", real(0.0)).node("b = Sub(a, zero)")).gives(&ALONE);
    }

    #[test]
    fn sizes_without_a_name_are_not_equal() {
        let swapped = |sizes: &str| {
            let trial = Trial::new(17).only(&["remove-no-op"]).input("x", sizes);
            let trial = trial.ints("order", &[1, 0]).node("s = Shape(x)");
            let trial = trial.node("t = Gather(s, order)");
            trial
                .node("r = Reshape(x, t)")
                .node("y = Neg(r)")
                .output("y", sizes)
        };
        let kept = |trial: &Trial| {
            let (_, nodes) = trial.run();
            nodes.iter().filter(|n| n.contains("Reshape")).count()
        };
        assert_eq!(kept(&swapped("n n")), 0);
        for none in ["? ?", "None None", "-1 -1"] {
            assert_eq!(kept(&swapped(none)), 1, "{none}");
        }
    }

    #[test]
    fn what_changes_something_stays() {
        around(|t| {
            t.with("b = Transpose(a)", vec![ints("perm", &[0, 1])])
                .node("c = Abs(b)")
        })
        .run();
        around(|t| t.constant("one", real(1.5)).node("b = Mul(one, a)")).stays();
        // -0 + 0 is 0.
        around(|t| t.constant("zero", real(0.0)).node("b = Add(a, zero)")).stays();
        around(|t| t.constant("zero", real(-0.0)).node("b = Sub(a, zero)")).stays();
        // 1 / x is not x.
        around(|t| t.constant("one", real(1.0)).node("b = Div(one, a)")).stays();
        // Backwards: the same sizes, another order.
        let backwards = around(|t| {
            let t = t
                .ints("from", &[-1])
                .ints("to", &[-9])
                .ints("axis", &[1])
                .ints("step", &[-1]);
            t.node("b = Slice(a, from, to, axis, step)")
        });
        backwards.stays();
        // The pads crop as much as they add.
        around(|t| t.ints("pads", &[0, -1, 0, 1]).node("b = Pad(a, pads)")).stays();
    }

    #[test]
    fn what_is_wrapped_and_unwrapped_is_what_it_was() {
        around(|t| t.node("o = Optional(a)").node("b = OptionalGetElement(o)")).gives(&ALONE);
        around(|t| t.node("b = OptionalGetElement(a)")).stays();
    }

    #[test]
    fn a_neutral_constant_that_broadcasts_stays() {
        let ones = Tensor::new(&[3, 1, 4], Values::F32(vec![1.0; 12]));
        let trial = Trial::new(17).input("x", "n 4").constant("ones", ones);
        let trial = trial.node("a = Relu(x)").node("y = Mul(a, ones)");
        trial.output("y", "3 n 4").stays();
    }

    #[test]
    fn outputs_keep_their_names() {
        let trial = Trial::new(17).input("x", "4").constant("w", reals(&[4]));
        let trial = trial.node("a = Mul(x, w)").node("y = Identity(a)");
        trial.output("y", "4").gives(&["y = Mul(x, w)"]);
        // If the value is an input or another output, the copy must stay.
        let copy = Trial::new(17)
            .input("x", "4")
            .node("y = Identity(x)")
            .output("y", "4");
        copy.stays();
        let twice = Trial::new(17)
            .input("x", "4")
            .node("y = Relu(x)")
            .node("z = Identity(y)");
        twice.output("y", "4").output("z", "4").stays();
    }

    #[test]
    fn a_cast_to_another_type_stays() {
        let trial = Trial::new(17)
            .input("x", "4")
            .with("y = Cast(x)", vec![int("to", 11)]);
        trial.output_of("y", Element::F64, "4").stays();
    }
}
