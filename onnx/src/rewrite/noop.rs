//! Nodes that change nothing.
//!
//! Before: `y = Identity(x)`; after: readers of `y` read `x`. What counts: Identity; Dropout outside of
//! training; Cast to the type a value has; Transpose in order; Reshape, Flatten, Expand, Squeeze and
//! Unsqueeze to the sizes a value has, symbols included; Concat, Sum, Max, Min, Mean of one; Slice and
//! Pad of nothing; `x + -0`, `x - 0`, `x * 1`, `x / 1`, `x ^ 1` of x's type and sizes. Not `x + 0`, nor
//! `x - -0`, of floats: they turn -0 into 0, which a division tells apart.

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
    let output = scope.fact(node.output.first()?)?;
    let a = Attributes::of(node);
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
        // Backwards, it keeps the size and turns the order.
        "Slice" => match scope.input(n, 4) {
            None => true,
            Some(steps) => {
                let steps = scope.fact(steps).and_then(Fact::known_ints);
                steps.is_some_and(|s| s.iter().all(|s| *s == 1))
            }
        },
        // As much cropped as added moves the elements.
        "Pad" => {
            let given = Attributes::of(node).ints("pads").map(<[i64]>::to_vec);
            let pads = given.or_else(|| scope.fact(scope.input(n, 1)?)?.known_ints());
            pads.is_some_and(|p| p.iter().all(|p| *p == 0))
        }
        "DepthToSpace" | "SpaceToDepth" => Attributes::of(node).int("blocksize") == Some(1),
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
