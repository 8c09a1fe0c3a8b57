//! Elementwise steps that repeat, undo or bound each other.
//!
//! Before: `Relu(Abs(x))`; after: `Abs(x)`: Relu of what is never negative. Before: `f(f(x))`; after:
//! `f(x)` for Abs, Ceil, Floor, Round, Sign. Before: `Neg(Neg(x))`, `Not(Not(x))`; after: `x`. Before:
//! `Abs(Neg(x))`; after: `Abs(x)`. Before: `Clip(Relu(x), c, d)` and other pairs of Relu and Clip with
//! constant bounds; after: one Clip, or Relu where the bounds are 0 and infinity.
//!
//! Exact, NaN included; where bounds are merged, a zero may have another sign. Abs stays behind Relu, which may leave
//! -0. Legal wherever the types are those of the operators; pairs of bounds only if
//! nobody else reads what is between. Saves a node and a pass over the data.

use super::Rule;
use super::pad::is_non_negative;
use super::patch::{Patch, float, heir, node};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::proto::NodeProto;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "repeated-step",
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
        ("Abs", "Sigmoid" | "Exp" | "Softmax" | "HardSigmoid") => Patch::forward(scope, n, x),
        ("Neg", "Neg") | ("Not", "Not") => Patch::forward(scope, n, scope.input(p, 0)?),
        ("Abs", "Neg") => {
            let mut abs = scope.node(n).clone();
            abs.input[0] = scope.input(p, 0)?.to_string();
            Some(Patch::exchange(scope, n, abs))
        }
        _ => None,
    }
}

/// What an elementwise step keeps its values between. A side is `None` where Clip is given no bound:
/// runtimes then take infinity or the largest finite number, as the standard's versions do.
#[derive(Clone, Copy)]
struct Bounds {
    low: Option<f64>,
    high: Option<f64>,
}

impl Bounds {
    /// The bounds of a Relu, or of a Clip of floats with constant bounds.
    fn new(scope: &Scope, n: usize) -> Option<Bounds> {
        if scope.is(n, "Relu") {
            let (low, high) = (Some(0.0), Some(f64::INFINITY));
            return Some(Bounds { low, high });
        }
        if !scope.is(n, "Clip") {
            return None;
        }
        let a = Attributes::new(scope.node(n));
        let bound = |attribute, at, default: f32| {
            let given = a.float(attribute);
            match (scope.opset(), scope.input(n, at)) {
                (..6, _) => Some(given.map(f64::from)),
                (6..11, _) => Some(Some(f64::from(given.unwrap_or(default)))),
                (_, None) => Some(None),
                (_, Some(name)) => scope.scalar(name).map(Some),
            }
        };
        let low = bound("min", 1, f32::MIN)?;
        let high = bound("max", 2, f32::MAX)?;
        let (least, most) = Bounds { low, high }.ends();
        (least <= most).then_some(Bounds { low, high })
    }

    fn ends(self) -> (f64, f64) {
        let low = self.low.unwrap_or(f64::NEG_INFINITY);
        (low, self.high.unwrap_or(f64::INFINITY))
    }

    /// These bounds and then those of `outer`, as one pair.
    fn then(self, outer: Bounds) -> Bounds {
        let ((a, b), (low, high)) = (self.ends(), outer.ends());
        // If nothing finite bounds a side and a step leaves its bound there out, the result leaves it out too.
        let given = |end: f64, one: Option<f64>, other: Option<f64>| {
            let open = end.is_infinite() && (one.is_none() || other.is_none());
            (!open).then_some(end)
        };
        Bounds {
            low: given(a.clamp(low, high), self.low, outer.low),
            high: given(b.clamp(low, high), self.high, outer.high),
        }
    }

    /// One node that keeps `x` between these bounds.
    fn node(self, scope: &Scope, n: usize, x: &str, patch: &mut Patch) -> Option<NodeProto> {
        if self.low == Some(0.0) && self.high == Some(f64::INFINITY) {
            return Some(node("Relu", &[x], Vec::new()));
        }
        let sides = [("min", self.low), ("max", self.high)];
        if scope.opset() < 11 {
            let given = sides.iter().filter_map(|(what, v)| Some((what, (*v)?)));
            let attributes = given.map(|(what, v)| float(what, v as f32)).collect();
            return Some(node("Clip", &[x], attributes));
        }
        let element = scope.fact(x)?.element.filter(|e| e.is_float())?;
        let mut clip = node("Clip", &[x], Vec::new());
        let base = scope.node(n).output.first()?;
        for (what, value) in sides {
            let name = match value {
                Some(value) => {
                    let tensor = Tensor::floats(element, &[], &[value])?;
                    patch.constant(scope, &format!("{base}_{what}"), tensor)
                }
                None => String::new(),
            };
            clip.input.push(name);
        }
        while clip.input.last().is_some_and(String::is_empty) {
            clip.input.pop();
        }
        Some(clip)
    }
}

fn bounds(scope: &Scope, n: usize) -> Option<Patch> {
    let outer = Bounds::new(scope, n)?;
    let between = scope.input(n, 0)?;
    scope.fact(between)?.element.filter(|e| e.is_float())?;
    let inner = scope
        .producer(between)
        .filter(|p| scope.sole_user(*p) == Some(n))?;
    let both = Bounds::new(scope, inner)?.then(outer);
    let mut patch = Patch {
        remove: vec![n, inner],
        ..Patch::default()
    };
    let made = both.node(scope, n, scope.input(inner, 0)?, &mut patch)?;
    patch.insert.push(heir(scope.node(n), made));
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::patch::float;
    use super::super::trial::{Trial, real};
    use crate::element::Element;

    fn chain(opset: i64, nodes: &[&str]) -> Trial {
        let mut model = Trial::new(opset)
            .input("x", "N 3")
            .output("y", "N 3")
            .constant("zero", real(0.0))
            .constant("six", real(6.0))
            .constant("low", real(-1.0))
            .constant("most", real(f32::INFINITY))
            .constant("least", real(f32::NEG_INFINITY));
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
        // Relu of -0 may be -0.
        chain(13, &["a = Relu(x)", "y = Abs(a)"]).stays();
        chain(13, &["a = Tanh(x)", "y = Tanh(a)"]).stays();
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
        one(&["a = Relu(x)", "y = Clip(a, zero, most)"], "y = Relu(x)");
        // No upper bound means infinity in one runtime, the largest finite number in another.
        one(
            &["a = Clip(x, low)", "y = Clip(a, zero)"],
            "y = Clip(x, y_min)",
        );
        one(
            &["a = Clip(x, , least)", "y = Clip(a, low, six)"],
            // Both bounds are -1, one constant.
            "y = Clip(x, y_max, y_max)",
        );
        chain(13, &["y = Clip(x, low)"]).stays();
    }

    #[test]
    fn bounds_as_attributes() {
        let bounds = vec![float("min", -1.0), float("max", 6.0)];
        let model = chain(9, &["a = Relu(x)"]).with("y = Clip(a)", bounds);
        model.gives(&["y = Clip(x) {min=0, max=6}"]);
        // From version 6 to 10 a bound that is not given is the largest finite number.
        let model = chain(9, &["a = Relu(x)"]).with("y = Clip(a)", vec![float("min", 0.0)]);
        model.gives(&["y = Clip(x) {min=0, max=340282350000000000000000000000000000000}"]);
    }

    #[test]
    fn not_if_read_elsewhere_or_not_constant() {
        let nodes = ["a = Clip(x, low, six)", "y = Relu(a)"];
        chain(13, &nodes).output("a", "N 3").stays();
        let given = ["a = Clip(x, given, six)", "y = Relu(a)"];
        chain(13, &given).input("given", "").stays();
    }

    #[test]
    fn the_magnitude_of_an_integer_may_be_negative() {
        let trial = Trial::new(14).input_of("x", Element::I32, "N 3");
        let trial = trial.node("a = Abs(x)").node("y = Relu(a)");
        trial.output_of("y", Element::I32, "N 3").stays();
    }
}
