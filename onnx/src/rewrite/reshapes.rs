//! Chains of operators that only give the same elements other sizes, and of transpositions.
//!
//! - `join-reshapes`: `Reshape(Unsqueeze(x, a), t)` → `Reshape(x, t')`; two Unsqueeze become one Unsqueeze,
//!   two Squeeze one Squeeze. Flatten counts too.
//! - `join-transpositions`: `Transpose(Transpose(x, p), q)` → `Transpose(x, q ∘ p)`, or x.
//! - `transpose-to-reshape`: a transposition that only moves dimensions of size 1 → Reshape, which moves
//!   no element.
//!
//! Legal because all of these keep the elements in order (or compose their orders), and the sizes are
//! the same for every value of the symbols. Saves nodes, and the bytes a transposition moves.

use super::Rule;
use super::patch::{Patch, heir, ints, node};
use super::scope::Scope;
use super::targets::target_between;
use crate::attributes::Attributes;
use crate::operators::axis;
use crate::proto::NodeProto;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "join-reshapes",
        at: join_reshapes,
    },
    Rule {
        name: "join-transpositions",
        at: join_transpositions,
    },
    Rule {
        name: "transpose-to-reshape",
        at: transpose_to_reshape,
    },
];

const RESHAPES: [&str; 4] = ["Reshape", "Flatten", "Squeeze", "Unsqueeze"];

/// Whether the node only gives its first input other sizes.
pub fn is_reshape(scope: &Scope, n: usize) -> bool {
    RESHAPES.iter().any(|op| scope.is(n, op))
}

fn join_reshapes(scope: &Scope, n: usize) -> Option<Patch> {
    let middle = scope.input(n, 0)?;
    let first = scope.producer(middle).filter(|m| is_reshape(scope, *m))?;
    if !is_reshape(scope, n) || scope.sole_reader(middle) != Some(n) {
        return None;
    }
    let x = scope.input(first, 0)?;
    let mut patch = Patch {
        remove: vec![first, n],
        ..Patch::default()
    };
    let joined = joined_axes(scope, first, n, &mut patch)
        .or_else(|| reshaped(scope, x, n, &mut patch))
        .or_else(|| retargeted(scope, x, n))?;
    patch.insert.push(heir(scope.node(n), joined));
    Some(patch)
}

/// Axes a Squeeze or Unsqueeze names, as positions among `rank` dimensions.
pub fn named_axes(scope: &Scope, n: usize, rank: usize) -> Option<Vec<usize>> {
    let given = match Attributes::new(scope.node(n)).ints("axes") {
        Some(axes) => axes.to_vec(),
        None => scope.fact(scope.input(n, 1)?)?.known_ints()?,
    };
    given.iter().map(|d| axis(*d, rank)).collect()
}

/// Two Squeeze or two Unsqueeze as one.
fn joined_axes(scope: &Scope, first: usize, n: usize, patch: &mut Patch) -> Option<NodeProto> {
    let op = scope.node(n).op_type.as_str();
    if !matches!(op, "Squeeze" | "Unsqueeze") || !scope.is(first, op) {
        return None;
    }
    let rank = |name: &str| scope.fact(name)?.rank();
    let ends = (
        rank(scope.input(first, 0)?)?,
        rank(&scope.node(n).output[0])?,
    );
    let middle = rank(scope.input(n, 0)?)?;
    // All dimensions that are inserted or removed, as positions among all dimensions.
    let (inner, outer, all) = match op {
        "Unsqueeze" => (
            named_axes(scope, n, ends.1)?,
            named_axes(scope, first, middle)?,
            ends.1,
        ),
        _ => (
            named_axes(scope, first, ends.0)?,
            named_axes(scope, n, middle)?,
            ends.0,
        ),
    };
    let rest: Vec<usize> = (0..all).filter(|d| !inner.contains(d)).collect();
    let moved: Option<Vec<usize>> = outer.iter().map(|d| rest.get(*d).copied()).collect();
    let mut axes: Vec<i64> = inner.iter().chain(&moved?).map(|d| *d as i64).collect();
    axes.sort_unstable();
    let x = scope.input(first, 0)?;
    if scope.opset() < 13 {
        return Some(node(op, &[x], vec![ints("axes", &axes)]));
    }
    let name = patch.constant(
        scope,
        &format!("{}_axes", scope.node(n).output[0]),
        Tensor::ints(&axes),
    );
    Some(node(op, &[x, &name], Vec::new()))
}

/// A Reshape from `x` to the sizes of the output of node `n`.
fn reshaped(scope: &Scope, x: &str, n: usize, patch: &mut Patch) -> Option<NodeProto> {
    let output = &scope.node(n).output[0];
    let target = target_between(scope, x, n)?;
    let name = patch.constant(scope, &format!("{output}_sizes"), Tensor::ints(&target));
    Some(node("Reshape", &[x, &name], Vec::new()))
}

/// The Reshape `n` itself, reading `x`, if its target copies no size of its input.
fn retargeted(scope: &Scope, x: &str, n: usize) -> Option<NodeProto> {
    if !scope.is(n, "Reshape") {
        return None;
    }
    let target = scope.fact(scope.input(n, 1)?)?.ints()?;
    let never_0 = |e: &graph::SymExpr| match e.as_const() {
        Some(n) => n != 0,
        None => crate::operators::symbolic::is_at_least(e, 1),
    };
    if !target.iter().all(never_0) {
        return None;
    }
    let mut node = scope.node(n).clone();
    node.input[0] = x.to_string();
    Some(node)
}

/// The order in which a Transpose takes the dimensions of its input.
pub fn order_of(scope: &Scope, n: usize) -> Option<Vec<usize>> {
    if !scope.is(n, "Transpose") {
        return None;
    }
    match Attributes::new(scope.node(n)).ints("perm") {
        Some(perm) => perm.iter().map(|d| axis(*d, perm.len())).collect(),
        None => Some((0..scope.fact(scope.input(n, 0)?)?.rank()?).rev().collect()),
    }
}

fn join_transpositions(scope: &Scope, n: usize) -> Option<Patch> {
    let outer = order_of(scope, n)?;
    let middle = scope.input(n, 0)?;
    let first = scope.producer(middle)?;
    let inner = order_of(scope, first)?;
    let x = scope.input(first, 0)?;
    let joined: Option<Vec<usize>> = outer.iter().map(|d| inner.get(*d).copied()).collect();
    let joined = joined?;
    if joined.iter().copied().eq(0..joined.len()) {
        return Patch::forward(scope, n, x);
    }
    // If others read the value in between, there would be as many transpositions, and x would live longer.
    if scope.sole_reader(middle) != Some(n) {
        return None;
    }
    let perm: Vec<i64> = joined.iter().map(|d| *d as i64).collect();
    let both = node("Transpose", &[x], vec![ints("perm", &perm)]);
    let mut patch = Patch::exchange(scope, n, both);
    patch.remove.push(first);
    Some(patch)
}

fn transpose_to_reshape(scope: &Scope, n: usize) -> Option<Patch> {
    let order = order_of(scope, n)?;
    let x = scope.input(n, 0)?;
    let sizes = scope.fact(x)?.shape.as_deref()?;
    let moving = order
        .iter()
        .filter(|d| sizes.get(**d).is_some_and(|s| s.as_const() != Some(1)));
    if !moving.is_sorted() || order.len() != sizes.len() {
        return None;
    }
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    let node = reshaped(scope, x, n, &mut patch)?;
    patch.insert.push(heir(scope.node(n), node));
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::patch::int;
    use super::super::trial::Trial;
    use super::*;

    fn chain(opset: i64) -> Trial {
        Trial::new(opset)
            .input("x", "N 3 4")
            .only(&["join-reshapes"])
    }

    #[test]
    fn reshapes_in_a_row_are_one() {
        chain(14)
            .ints("a", &[0, 12])
            .ints("b", &[0, 2, 6])
            .output("z", "N 2 6")
            .node("y = Reshape(x, a)")
            .node("z = Reshape(y, b)")
            .gives(&["z = Reshape(x, [0, 2, 6])"]);
    }

    #[test]
    fn copied_sizes_are_those_of_the_first_value() {
        chain(14)
            .ints("a", &[12, -1])
            .ints("b", &[0, 0, 1])
            .output("z", "12 N 1")
            .node("y = Reshape(x, a)")
            .node("z = Reshape(y, b)")
            .gives(&["z = Reshape(x, [12, -1, 1])"]);
        // A size that is 0 would be copied from x.
        Trial::new(14)
            .input("x", "N M 4")
            .only(&["join-reshapes"])
            .ints("order", &[1, 0])
            .ints("flat", &[-1])
            .ints("four", &[4])
            .output("z", "M N 4")
            .node("s = Shape(x)")
            .node("mn = Gather(s, order)")
            .with("t = Concat(mn, four)", vec![int("axis", 0)])
            .node("y = Reshape(x, flat)")
            .node("z = Reshape(y, t)")
            .stays();
    }

    #[test]
    fn what_others_read_stays() {
        chain(14)
            .ints("a", &[0, 12])
            .ints("b", &[0, 2, 6])
            .output("z", "N 2 6")
            .output("y", "N 12")
            .node("y = Reshape(x, a)")
            .node("z = Reshape(y, b)")
            .stays();
    }

    #[test]
    fn axes_that_come_or_go_are_joined() {
        chain(14)
            .ints("a", &[1])
            .ints("b", &[0, -1])
            .output("z", "1 N 1 3 4 1")
            .node("y = Unsqueeze(x, a)")
            .node("z = Unsqueeze(y, b)")
            .gives(&["z = Unsqueeze(x, [0, 2, 5])"]);
        Trial::new(11)
            .input("x", "1 N 1 3 1")
            .output("z", "N 3")
            .with("y = Squeeze(x)", vec![ints("axes", &[2])])
            .with("z = Squeeze(y)", vec![ints("axes", &[0, -1])])
            .only(&["join-reshapes"])
            .gives(&["z = Squeeze(x) {axes=[0, 2, 4]}"]);
    }

    #[test]
    fn flattening_after_squeezing_is_one_reshape() {
        Trial::new(13)
            .input("x", "N 3 1 4")
            .output("z", "N 12")
            .ints("a", &[2])
            .node("y = Squeeze(x, a)")
            .node("z = Flatten(y)")
            .only(&["join-reshapes"])
            .gives(&["z = Reshape(x, [0, 12])"]);
    }

    #[test]
    fn transpositions_compose() {
        let two = |p: [i64; 3], q: [i64; 3], to: &str| {
            Trial::new(13)
                .input("x", "N 3 4")
                .output("w", to)
                .with("y = Transpose(x)", vec![ints("perm", &p)])
                .with("z = Transpose(y)", vec![ints("perm", &q)])
                .node("w = Relu(z)")
                .only(&["join-transpositions"])
        };
        two([1, 2, 0], [1, 2, 0], "4 N 3")
            .gives(&["z = Transpose(x) {perm=[2, 0, 1]}", "w = Relu(z)"]);
        two([1, 2, 0], [2, 0, 1], "N 3 4").gives(&["w = Relu(x)"]);
        let read = two([1, 2, 0], [1, 2, 0], "4 N 3").output("y", "3 4 N");
        read.stays();
    }

    #[test]
    fn ones_move_without_a_transposition() {
        let moved = |sizes: &str, to: &str| {
            Trial::new(13)
                .input("x", sizes)
                .output("y", to)
                .with("y = Transpose(x)", vec![ints("perm", &[0, 2, 3, 1])])
                .only(&["transpose-to-reshape"])
        };
        moved("N 8 1 1", "N 1 1 8").gives(&["y = Reshape(x, [0, 1, 1, 8])"]);
        moved("N 8 2 1", "N 2 1 8").stays();
    }
}
