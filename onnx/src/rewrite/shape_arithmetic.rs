//! Sizes written as constants or as one Shape, so that chains of Shape, Gather, Unsqueeze, Concat go away.
//!
//! - `constant-target`: `Reshape(x, Concat(Unsqueeze(Gather(Shape(x), 0)), [12]))` → `Reshape(x, [0, 12])`.
//!   Reshape, Expand, Slice and Resize whose sizes follow from x's for every value of the symbols.
//! - `earlier-shape`: `Shape(Relu(x))` → `Shape(x)`: more may be known of x, and equal Shapes become one.
//! - `sizes-from-shape` (opset 15, whose Shape has a range): `Unsqueeze(Gather(Shape(x), 1), 0)` →
//!   `Shape(x) {start=1, end=2}`; also neighbours inside a Concat.
//! - `equal-integers`: a value whose elements are, symbol by symbol, those of an earlier one → that one.
//!
//! Legal because the elements are the same polynomials in the sizes of the inputs. Saves nodes, the
//! launches of a dozen tiny operators per chain, and what keeps intermediate values alive.

use super::Rule;
use super::patch::{Patch, heir, int, node};
use super::scope::Scope;
use super::targets::{bound, expand_target, target_between};
use crate::attributes::{Attributes, bodies, is_standard};
use crate::element::Element;
use crate::fact::Fact;
use crate::operators::axis;
use crate::proto::NodeProto;
use crate::tensor::{Tensor, Values};
use graph::SymExpr;
use std::collections::BTreeSet;

pub const RULES: &[Rule] = &[
    Rule {
        name: "constant-target",
        at: constant_target,
    },
    Rule {
        name: "earlier-shape",
        at: earlier_shape,
    },
    Rule {
        name: "equal-integers",
        at: equal_integers,
    },
    Rule {
        name: "sizes-from-shape",
        at: sizes_from_shape,
    },
    Rule {
        name: "sizes-from-shape",
        at: neighbours_from_shape,
    },
];

/// Whether an input is present but not constant.
fn is_open(scope: &Scope, n: usize, at: usize) -> bool {
    let fact = scope.input(n, at).and_then(|name| scope.fact(name));
    fact.is_some_and(|f| f.constant.is_none())
}

fn constant_target(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    if !is_standard(node) {
        return None;
    }
    match node.op_type.as_str() {
        "Reshape" if is_open(scope, n, 1) => {
            let target = target_between(scope, scope.input(n, 0)?, n)?;
            let mut node = node.clone();
            node.attribute.retain(|a| a.name != "allowzero");
            Some(with_ints(scope, n, node, &[(1, Element::I64, target)]))
        }
        "Expand" if is_open(scope, n, 1) => {
            let from = scope.fact(scope.input(n, 0)?)?.shape.as_deref()?;
            let to = scope.fact(node.output.first()?)?.shape.as_deref()?;
            let target = expand_target(from, to)?;
            Some(with_ints(
                scope,
                n,
                node.clone(),
                &[(1, Element::I64, target)],
            ))
        }
        "Slice" => constant_bounds(scope, n),
        "Resize" => constant_scales(scope, n),
        _ => None,
    }
}

/// Node `n` as `node` with new constants of integers as inputs.
fn with_ints(
    scope: &Scope,
    n: usize,
    mut node: NodeProto,
    inputs: &[(usize, Element, Vec<i64>)],
) -> Patch {
    let mut patch = Patch::default();
    let base = node.output.first().cloned().unwrap_or_default();
    for (at, element, ints) in inputs {
        let tensor = Tensor::of_ints(*element, &[ints.len()], ints);
        let tensor = tensor.unwrap_or_else(|| Tensor::ints(ints));
        node.input[*at] = patch.constant(scope, &format!("{base}_sizes"), tensor);
    }
    patch.remove.push(n);
    patch.insert.push(heir(scope.node(n), node));
    patch
}

fn constant_bounds(scope: &Scope, n: usize) -> Option<Patch> {
    if !is_open(scope, n, 1) && !is_open(scope, n, 2) {
        return None;
    }
    let sizes = scope.fact(scope.input(n, 0)?)?.shape.as_deref()?;
    let given = |at: usize| scope.fact(scope.input(n, at)?)?.ints();
    let (starts, ends) = (given(1)?, given(2)?);
    let known = |at: usize, default: Vec<i64>| match scope.input(n, at) {
        None => Some(default),
        Some(name) => scope.fact(name)?.known_ints(),
    };
    let axes = known(3, (0..starts.len() as i64).collect())?;
    let steps = known(4, vec![1; starts.len()])?;
    if steps.iter().any(|s| *s < 1) || axes.len() != starts.len() || ends.len() != starts.len() {
        return None;
    }
    let mut bounds = (Vec::new(), Vec::new());
    for (k, d) in axes.iter().enumerate() {
        let size = &sizes[axis(*d, sizes.len())?];
        bounds.0.push(bound(&starts[k], size, false)?);
        bounds.1.push(bound(&ends[k], size, true)?);
    }
    let element = |at| scope.fact(scope.input(n, at)?)?.element;
    let most = match element(2)? {
        Element::I64 => i64::MAX,
        _ => i64::from(i32::MAX),
    };
    let clamped = |v: Vec<i64>| v.into_iter().map(|n| n.min(most)).collect();
    let inputs = [
        (1, element(1)?, clamped(bounds.0)),
        (2, element(2)?, clamped(bounds.1)),
    ];
    Some(with_ints(scope, n, scope.node(n).clone(), &inputs))
}

/// Sizes that are whole multiples of the input's become scales.
fn constant_scales(scope: &Scope, n: usize) -> Option<Patch> {
    let a = Attributes::new(scope.node(n));
    let policy = a.text("keep_aspect_ratio_policy").unwrap_or("stretch");
    let plain = scope.opset() >= 11 && a.get("axes").is_none() && policy == "stretch";
    if !plain || !is_open(scope, n, 3) {
        return None;
    }
    let from = scope.fact(scope.input(n, 0)?)?.shape.as_deref()?;
    let to = scope.fact(scope.input(n, 3)?)?.ints()?;
    // Up to here, scales are exact as floats, and so are their products with sizes below 2²⁴.
    const MOST: i64 = 1 << 8;
    let scale = |(from, to): (&SymExpr, &SymExpr)| {
        let times = to.divide_exactly(from)?.as_const()?;
        (1..=MOST).contains(&times).then_some(times as f32)
    };
    let scales: Option<Vec<f32>> = from.iter().zip(&to).map(scale).collect();
    let scales = scales.filter(|s| s.len() == to.len() && s.len() == from.len())?;
    let mut node = scope.node(n).clone();
    let mut patch = Patch::default();
    let tensor = Tensor::new(&[scales.len()], Values::F32(scales));
    node.input[2] = patch.constant(scope, &format!("{}_scales", node.output[0]), tensor);
    node.input.truncate(3);
    patch.remove.push(n);
    patch.insert.push(heir(scope.node(n), node));
    Some(patch)
}

fn earlier_shape(scope: &Scope, n: usize) -> Option<Patch> {
    if !scope.is(n, "Shape") {
        return None;
    }
    let x = scope.input(n, 0)?;
    let read = scope.node(n);
    if let Some((name, start)) = among_inputs(scope, &scope.fact(read.output.first()?)?.ints()?)
        && name != x
        && !is_input(scope, x)
    {
        let len = scope.fact(read.output.first()?)?.ints()?.len();
        return Some(Patch::exchange(
            scope,
            n,
            shape_of(scope, &name, start, len)?,
        ));
    }
    let origin = same_sizes_before(scope, x);
    if origin == x {
        return None;
    }
    let mut node = read.clone();
    node.input[0] = origin.to_string();
    Some(Patch::exchange(scope, n, node))
}

fn is_input(scope: &Scope, name: &str) -> bool {
    scope.body().input.iter().any(|i| i.name == name)
}

/// The earliest value that is seen to have the sizes of `x`, following its producers.
fn same_sizes_before<'a>(scope: &Scope<'a>, x: &'a str) -> &'a str {
    let mut at = x;
    let sizes = scope.fact(x).and_then(|f| f.shape.as_ref());
    while let (Some(sizes), Some(n)) = (sizes, scope.producer(at)) {
        let same = |name: &&&String| {
            let fact = scope.fact(name);
            fact.is_some_and(|f| f.shape.as_ref() == Some(sizes) && f.constant.is_none())
        };
        match scope
            .node(n)
            .input
            .iter()
            .filter(|i| !i.is_empty())
            .find(|i| same(&i))
        {
            Some(earlier) => at = earlier,
            None => break,
        }
    }
    at
}

/// A Shape of `len` sizes of a value from `start` on.
fn shape_of(scope: &Scope, name: &str, start: usize, len: usize) -> Option<NodeProto> {
    let rank = scope.fact(name)?.rank()?;
    let attributes = match (start, len) {
        (0, all) if all == rank => Vec::new(),
        _ if scope.opset() < 15 => return None,
        (start, len) if start + len == rank => vec![int("start", start as i64)],
        (0, len) => vec![int("end", len as i64)],
        (start, len) => vec![int("start", start as i64), int("end", (start + len) as i64)],
    };
    Some(node("Shape", &[name], attributes))
}

/// An input of the body with these sizes side by side, and where they begin.
fn among_inputs(scope: &Scope, elements: &[SymExpr]) -> Option<(String, usize)> {
    let mut inputs = scope.body().input.iter();
    inputs.find_map(|i| Some((i.name.clone(), run_in(scope, &i.name, elements)?)))
}

/// Where these sizes stand side by side in the shape of a value.
fn run_in(scope: &Scope, name: &str, elements: &[SymExpr]) -> Option<usize> {
    let sizes = scope.fact(name)?.shape.as_deref()?;
    let at = sizes
        .windows(elements.len().max(1))
        .position(|w| w == elements)?;
    (scope.opset() >= 15 || elements.len() == sizes.len()).then_some(at)
}

/// A value with these sizes side by side: one whose Shape `from` is computed from, else an input.
fn with_sizes(scope: &Scope, from: &str, elements: &[SymExpr]) -> Option<(String, usize)> {
    if elements.iter().all(|e| e.as_const().is_some()) {
        return None;
    }
    let mut seen = BTreeSet::new();
    let mut open = vec![from];
    let mut read = BTreeSet::new();
    while let Some(name) = open.pop() {
        let symbolic = scope.fact(name).is_some_and(|f| f.elements.is_some());
        let Some(n) = scope
            .producer(name)
            .filter(|_| symbolic && seen.insert(name))
        else {
            continue;
        };
        if scope.is(n, "Shape") {
            read.extend(scope.input(n, 0));
        } else {
            open.extend(scope.node(n).input.iter().map(String::as_str));
        }
    }
    // The first in the order of the body.
    let mut read: Vec<&str> = read.into_iter().collect();
    read.sort_by_key(|name| scope.producer(name).map_or(0, |n| n + 1));
    let found = read
        .into_iter()
        .find_map(|x| Some((x.to_string(), run_in(scope, x, elements)?)));
    found.or_else(|| among_inputs(scope, elements))
}

fn int_vector<'a>(scope: &'a Scope, name: &str) -> Option<&'a Fact> {
    let fact = scope.fact(name)?;
    let vector = fact.element == Some(Element::I64) && fact.rank() == Some(1);
    (vector && fact.elements.is_some()).then_some(fact)
}

fn sizes_from_shape(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    let [output] = node.output.as_slice() else {
        return None;
    };
    if scope.is(n, "Shape") || bodies(node).next().is_some() {
        return None;
    }
    let elements = int_vector(scope, output)?.ints()?;
    let (name, start) = with_sizes(scope, output, &elements)?;
    let node = shape_of(scope, &name, start, elements.len())?;
    Some(Patch::exchange(scope, n, node))
}

/// Neighbouring inputs of a Concat that one Shape gives.
fn neighbours_from_shape(scope: &Scope, n: usize) -> Option<Patch> {
    let node = scope.node(n);
    if !scope.is(n, "Concat") {
        return None;
    }
    let parts: Vec<Option<Vec<SymExpr>>> = (node.input.iter())
        .map(|name| int_vector(scope, name)?.ints())
        .collect();
    for first in 0..parts.len() {
        for end in (first + 2..=parts.len()).rev() {
            let joined: Option<Vec<_>> = parts[first..end].iter().cloned().collect();
            let Some(joined) = joined.map(|parts| parts.concat()) else {
                continue;
            };
            let dies = (first..end).any(|k| scope.sole_reader(&node.input[k]).is_some());
            let Some((name, start)) = with_sizes(scope, node.output.first()?, &joined) else {
                continue;
            };
            let mut patch = Patch::default();
            let shape = shape_of(scope, &name, start, joined.len())?;
            if !dies {
                continue;
            }
            let shape = patch.node(scope, &format!("{}_sizes", node.output[0]), shape);
            let mut node = node.clone();
            node.input.splice(first..end, [shape]);
            patch.remove.push(n);
            patch.insert.push(heir(scope.node(n), node));
            return Some(patch);
        }
    }
    None
}

fn equal_integers(scope: &Scope, n: usize) -> Option<Patch> {
    let [output] = scope.node(n).output.as_slice() else {
        return None;
    };
    let twin = scope.first_of_equal_integers(output)?;
    if scope.producer(twin)? >= n {
        return None;
    }
    Patch::forward(scope, n, twin)
}

#[cfg(test)]
mod tests {
    use super::super::trial::{Trial, real};
    use super::*;

    fn shape_chain(trial: Trial) -> Trial {
        trial
            .constant("zero", Tensor::int(0))
            .ints("axis", &[0])
            .node("s = Shape(x)")
            .node("n = Gather(s, zero)")
            .node("n1 = Unsqueeze(n, axis)")
    }

    #[test]
    fn counts_that_a_file_declares_are_not_believed() {
        let counted = |declared: &str| {
            let trial = Trial::new(17).input("x", "n").ints("first", &[0]);
            let trial = trial.node("z = NonZero(x)").node("s = Squeeze(z, first)");
            let trial = trial.node("t = Neg(s)").node("y = Shape(t)");
            trial
                .declares(declared, "n")
                .output_of("y", Element::I64, "1")
        };
        // The Shapes of what is counted and of values computed from it stay; only the step between them goes.
        assert_eq!(counted("s").unverified().len(), 3);
        assert_eq!(counted("t").unverified().len(), 3);
    }

    #[test]
    fn a_target_that_follows_from_sizes_is_a_constant() {
        shape_chain(Trial::new(14).input("x", "N 3 4").output("y", "N 12"))
            .ints("rest", &[12])
            .with("t = Concat(n1, rest)", vec![int("axis", 0)])
            .node("y = Reshape(x, t)")
            .gives(&["y = Reshape(x, [0, 12])"]);
        // One size that moves becomes -1; two of them cannot.
        let moved = |to: &str| {
            Trial::new(14)
                .input("x", "N M 12")
                .output("y", to)
                .node("s = Shape(x)")
                .ints("order", &[2, 0, 1])
                .node("t = Gather(s, order)")
                .node("y = Reshape(x, t)")
        };
        moved("12 N M").only(&["constant-target"]).stays();
    }

    #[test]
    fn a_target_that_never_fits_stays() {
        let reshaped = |to: &str, declared: &str| {
            Trial::new(14)
                .input("x", "2 3 4")
                .input_of("t", Element::I64, to)
                .output("y", declared)
                .node("y = Reshape(x, t)")
                .only(&["constant-target"])
                .unverified()
        };
        // An empty target asks for one element, and x has 24.
        assert_eq!(reshaped("0", ""), ["y = Reshape(x, t)"]);
        assert_eq!(reshaped("1", "24"), ["y = Reshape(x, [24])"]);
    }

    #[test]
    fn a_target_of_unknown_elements_stays() {
        let nodes = Trial::new(14)
            .input("x", "N 12")
            .input_of("t", Element::I64, "2")
            .output("y", "A B")
            .node("y = Reshape(x, t)")
            .only(&["constant-target"])
            .unverified();
        assert_eq!(nodes, ["y = Reshape(x, t)"]);
    }

    #[test]
    fn an_expansion_of_other_sizes_needs_them_known() {
        let expand = |to: &str, order: &[i64]| {
            Trial::new(14)
                .input("x", "N 1")
                .input("z", "3 N 5")
                .output("y", to)
                .node("s = Shape(z)")
                .ints("order", order)
                .node("t = Gather(s, order)")
                .node("y = Expand(x, t)")
                .only(&["constant-target"])
        };
        expand("N 5", &[1, 2]).gives(&["y = Expand(x, [1, 5])"]);
        Trial::new(14)
            .input("x", "1 N")
            .output("y", "N N")
            .node("s = Shape(x)")
            .ints("order", &[1, 1])
            .node("t = Gather(s, order)")
            .node("y = Expand(x, t)")
            .only(&["constant-target"])
            .stays();
    }

    #[test]
    fn bounds_of_slices_count_from_the_end() {
        let slice = |less: i64| {
            Trial::new(14)
                .input("x", "N 4")
                .output("y", "M 4")
                .ints("zero", &[0])
                .ints("axis", &[0])
                .ints("less", &[less])
                .node("s = Shape(x)")
                .node("n = Gather(s, zero)")
                .node("e = Sub(n, less)")
                .node("y = Slice(x, zero, e, axis)")
                .only(&["constant-target"])
        };
        slice(1).gives(&["y = Slice(x, [0], [-1], [0])"]);
        slice(2).gives(&["y = Slice(x, [0], [-2], [0])"]);
        // If N is 2, 2 - 3 is negative and counts from the end, and -3 is before the beginning.
        slice(3).stays();
    }

    #[test]
    fn a_shape_is_taken_from_where_it_is_known_first() {
        Trial::new(14)
            .input("x", "N 4")
            .output_of("y", Element::I64, "2")
            .output("w", "N 4")
            .node("z = Relu(x)")
            .node("w = Exp(z)")
            .node("y = Shape(w)")
            .only(&["earlier-shape"])
            .gives(&["z = Relu(x)", "w = Exp(z)", "y = Shape(x)"]);
        // A sum has the sizes of neither summand for sure.
        Trial::new(14)
            .input("x", "N 1")
            .input("v", "1 M")
            .output_of("y", Element::I64, "2")
            .node("z = Add(x, v)")
            .node("y = Shape(z)")
            .only(&["earlier-shape"])
            .stays();
    }

    #[test]
    fn one_size_is_one_shape_from_opset_15_on() {
        let one = |opset| {
            shape_chain(Trial::new(opset).input("x", "N 4"))
                .output_of("n1", Element::I64, "1")
                .only(&["sizes-from-shape"])
        };
        one(15).gives(&["n1 = Shape(x) {end=1}"]);
        one(14).stays();
    }

    #[test]
    fn neighbouring_sizes_are_one_shape() {
        let two = |axes: [i64; 2]| {
            Trial::new(17)
                .input("x", "N T 4")
                .output("y", "N T 5")
                .input("z", "1 1 5")
                .ints("a", &axes[..1])
                .ints("b", &axes[1..])
                .ints("five", &[5])
                .node("s = Shape(x)")
                .node("n = Gather(s, a)")
                .node("t = Gather(s, b)")
                .with("to = Concat(n, t, five)", vec![int("axis", 0)])
                .node("y = Expand(z, to)")
        };
        two([0, 1]).gives(&[
            "to_sizes = Shape(x) {end=2}",
            "to = Concat(to_sizes, [5]) {axis=0}",
            "y = Expand(z, to)",
        ]);
    }

    #[test]
    fn equal_integers_are_computed_once() {
        let sum = |other: &str| {
            Trial::new(14)
                .input("x", "N M")
                .output_of("y", Element::I64, "1")
                .output_of("z", Element::I64, "1")
                .ints("zero", &[0])
                .ints("one", &[1])
                .node("s = Shape(x)")
                .node("n = Gather(s, zero)")
                .node("m = Gather(s, one)")
                .node("a = Add(n, m)")
                .node(&format!("b = Add(m, {other})"))
                .node("y = Mul(a, a)")
                .node("z = Mul(b, a)")
                .only(&["equal-integers"])
        };
        let (fired, _) = sum("n").run();
        assert!(!fired.is_empty());
        sum("m").stays();
    }

    #[test]
    fn whole_multiples_of_sizes_are_scales() {
        let resize = |times: i64| {
            Trial::new(13)
                .input("x", "N 2 H W")
                .output("y", "N 2 A B")
                .ints("batch", &[0, 1])
                .ints("space", &[2, 3])
                .ints("times", &[times])
                .node("s = Shape(x)")
                .node("b = Gather(s, batch)")
                .node("hw = Gather(s, space)")
                .node("more = Mul(hw, times)")
                .with("to = Concat(b, more)", vec![int("axis", 0)])
                .with(
                    "y = Resize(x, , , to)",
                    vec![super::super::patch::text("mode", "nearest")],
                )
                .only(&["constant-target"])
        };
        let done = resize(2).unverified();
        assert_eq!(done.len(), 1, "{done:?}");
        assert_eq!(resize(512).unverified().len(), 6);
    }

    #[test]
    fn the_trial_itself_refuses_wrong_numbers() {
        let x = Trial::new(14).input("x", "N").output("y", "N");
        x.constant("c", real(2.0)).node("y = Add(x, c)").stays();
    }
}
