//! Elementwise steps that repeat, undo or bound each other.
//!
//! Before: `Relu(Abs(x))`; after: `Abs(x)`: Relu of what is never negative. Before: `f(f(x))`; after:
//! `f(x)` for Abs, Ceil, Floor, Round, Sign. Before: `Neg(Neg(x))`, `Not(Not(x))`; after: `x`. Before:
//! `Abs(Neg(x))`; after: `Abs(x)`. Before: `Clip(Relu(x), c, d)` and other pairs of Relu and Clip with
//! constant bounds; after: one Clip, or Relu where the bounds are 0 and none.
//!
//! Exact, NaN included. Legal wherever the types are those of the operators; pairs of bounds only if
//! nobody else reads what is between. Saves a node and a pass over the data.

use super::Rule;
use super::pad::is_non_negative;
use super::patch::{Patch, float, heir, node};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "remove-repeated-step",
        at: repeated,
    },
    Rule {
        name: "merge-bounds",
        at: bounds,
    },
];

fn repeated(scope: &Scope, n: usize) -> Option<Patch> {
    let x = scope.input(n, 0)?;
    let standard = |n: usize| crate::attributes::is_standard(scope.node(n));
    let op = scope.node(n).op_type.as_str();
    if !standard(n) {
        return None;
    }
    if op == "Relu" && is_non_negative(scope, x) {
        return Patch::forward(scope, n, x);
    }
    let p = scope.producer(x).filter(|p| standard(*p))?;
    match (op, scope.node(p).op_type.as_str()) {
        ("Abs" | "Ceil" | "Floor" | "Round" | "Sign", inner) if inner == op => {
            Patch::forward(scope, n, x)
        }
        ("Abs", "Relu" | "Sigmoid" | "Exp" | "Softmax" | "HardSigmoid") => {
            Patch::forward(scope, n, x)
        }
        ("Neg", "Neg") | ("Not", "Not") => Patch::forward(scope, n, scope.input(p, 0)?),
        ("Abs", "Neg") => {
            let mut abs = scope.node(n).clone();
            abs.input[0] = scope.input(p, 0)?.to_string();
            Some(Patch::exchange(scope, n, abs))
        }
        _ => None,
    }
}

/// The bounds of a Relu or a Clip of floats.
fn bounds_of(scope: &Scope, n: usize) -> Option<(f64, f64)> {
    if scope.is(n, "Relu") {
        return Some((0.0, f64::INFINITY));
    }
    if !scope.is(n, "Clip") {
        return None;
    }
    let a = Attributes::of(scope.node(n));
    let bound = |attribute, at, none: f64| {
        let given = a.float(attribute).map(f64::from);
        match (scope.opset() < 11, scope.input(n, at)) {
            (true, _) => Some(given.unwrap_or(none)),
            (false, None) => Some(none),
            (false, Some(name)) => scope.scalar(name),
        }
    };
    let low = bound("min", 1, f64::NEG_INFINITY)?;
    let high = bound("max", 2, f64::INFINITY)?;
    (low <= high).then_some((low, high))
}

fn bounds(scope: &Scope, n: usize) -> Option<Patch> {
    let (low, high) = bounds_of(scope, n)?;
    let x = scope.input(n, 0)?;
    let element = scope.fact(x)?.element.filter(|e| e.is_float())?;
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    let inner = scope.producer(x).filter(|p| scope.sole_user(*p) == Some(n));
    let (low, high, x) = match inner.and_then(|p| Some((p, bounds_of(scope, p)?))) {
        Some((p, (a, b))) => {
            patch.remove.push(p);
            (a.clamp(low, high), b.clamp(low, high), scope.input(p, 0)?)
        }
        None => (low, high, x),
    };
    let is_relu = low == 0.0 && high == f64::INFINITY;
    if patch.remove.len() == 1 && (!is_relu || scope.is(n, "Relu")) {
        return None;
    }
    let old = scope.node(n);
    let made = if is_relu {
        node("Relu", &[x], Vec::new())
    } else if scope.opset() < 11 {
        node(
            "Clip",
            &[x],
            vec![float("min", low as f32), float("max", high as f32)],
        )
    } else {
        let mut clip = node("Clip", &[x], Vec::new());
        let base = old.output.first()?;
        for (what, value) in [("min", low), ("max", high)] {
            let name = match value.is_finite() {
                true => {
                    let tensor = Tensor::floats(element, &[], &[value])?;
                    patch.constant(scope, &format!("{base}_{what}"), tensor)
                }
                false => String::new(),
            };
            clip.input.push(name);
        }
        clip
    };
    patch.insert.push(heir(old, made));
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::patch::float;
    use super::super::trial::{Trial, real};

    fn chain(opset: i64, nodes: &[&str]) -> Trial {
        let mut model = Trial::new(opset)
            .input("x", "N 3")
            .output("y", "N 3")
            .constant("zero", real(0.0))
            .constant("six", real(6.0))
            .constant("low", real(-1.0));
        for node in nodes {
            model = model.node(node);
        }
        model
    }

    fn one(nodes: &[&str], expected: &str) {
        chain(13, nodes).gives(&[expected]);
    }

    #[test]
    fn repeated_and_undone() {
        one(&["a = Relu(x)", "y = Relu(a)"], "y = Relu(x)");
        one(&["a = Abs(x)", "y = Relu(a)"], "y = Abs(x)");
        one(&["a = Floor(x)", "y = Floor(a)"], "y = Floor(x)");
        one(&["a = Neg(x)", "y = Abs(a)"], "y = Abs(x)");
        one(&["a = Neg(x)", "b = Neg(a)", "y = Exp(b)"], "y = Exp(x)");
        chain(13, &["a = Neg(x)", "y = Relu(a)"]).stays();
        chain(13, &["a = Floor(x)", "y = Ceil(a)"]).stays();
        // Nothing else computes the output.
        chain(13, &["a = Neg(x)", "y = Neg(a)"]).stays();
    }

    #[test]
    fn bounds_meet() {
        one(
            &["a = Relu(x)", "y = Clip(a, zero, six)"],
            "y = Clip(x, y_min, y_max)",
        );
        one(
            &["a = Clip(x, low, six)", "y = Relu(a)"],
            "y = Clip(x, y_min, y_max)",
        );
        one(&["a = Clip(x, low)", "y = Clip(a, zero)"], "y = Relu(x)");
        chain(13, &["y = Clip(x, low)"]).stays();
    }

    #[test]
    fn bounds_as_attributes() {
        let bounds = vec![float("min", -1.0), float("max", 6.0)];
        let model = chain(9, &["a = Relu(x)"]).with("y = Clip(a)", bounds);
        model.gives(&["y = Clip(x) {min=0, max=6}"]);
    }

    #[test]
    fn not_if_read_elsewhere_or_not_constant() {
        let nodes = ["a = Clip(x, low, six)", "y = Relu(a)"];
        chain(13, &nodes).output("a", "N 3").stays();
        let given = ["a = Clip(x, given, six)", "y = Relu(a)"];
        chain(13, &given).input("given", "").stays();
    }
}
