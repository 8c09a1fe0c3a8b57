//! Normalizations that exporters took apart, as one operator where the operator set has it.
//!
//! - `layer-normalization` (opset 17): `d = x - mean(x); y = d / sqrt(mean(d²) + ε) · g + b` over the
//!   last dimensions → LayerNormalization. Without g it gets ones.
//! - `rms-normalization` (opset 23): the same without the mean → RMSNormalization.
//! - `softmax`: `e = exp(x - max(x)); y = e / sum(e)` along one axis → Softmax.
//!
//! Legal where nothing else reads a step, the axes are the last ones, ε is positive and g and b have
//! the sizes of what is normalized. Not in `f64`, where the operator would count in `f32`. Saves six to
//! eight passes over memory.

use super::Rule;
use super::matching::{Taken, is_closed, reduced_axes, take, with_number};
use super::patch::{Patch, float, heir, int, node};
use super::scope::Scope;
use crate::element::Element;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[
    Rule {
        name: "layer-normalization",
        at: layer_normalization,
    },
    Rule {
        name: "rms-normalization",
        at: rms_normalization,
    },
    Rule {
        name: "softmax",
        at: softmax,
    },
];

/// `x / sqrt(mean(x²) + ε)` over `axes`.
pub struct Core<'a> {
    /// What is normalized.
    pub x: &'a str,
    /// The axes the mean is over, in order.
    pub axes: Vec<usize>,
    /// What is added to the mean.
    pub epsilon: f64,
    /// The nodes that compute it.
    pub taken: Taken,
}

/// The value under a root, and whether the root divides: `Sqrt(v)`, `Pow(v, ±0.5)`, `1 / Sqrt(v)`.
fn root<'a>(scope: &Scope<'a>, name: &'a str, taken: &mut Taken) -> Option<(&'a str, bool)> {
    const MOST_NODES: usize = 8;
    let n = scope.producer(name)?;
    taken.insert(n);
    if taken.len() > MOST_NODES {
        return None;
    }
    if scope.is(n, "Sqrt") {
        return Some((scope.input(n, 0)?, false));
    }
    if scope.is(n, "Pow") {
        let power = scope.scalar(scope.input(n, 1)?)?;
        return (power.abs() == 0.5).then_some((scope.input(n, 0)?, power < 0.0));
    }
    let under = if scope.is(n, "Reciprocal") {
        scope.input(n, 0)?
    } else if scope.is(n, "Div") && scope.scalar(scope.input(n, 0)?) == Some(1.0) {
        scope.input(n, 1)?
    } else {
        return None;
    };
    let (value, inverse) = root(scope, under, taken)?;
    Some((value, !inverse))
}

/// The normalization that ends at node `n`.
pub fn core<'a>(scope: &Scope<'a>, n: usize) -> Option<Core<'a>> {
    let mut taken = Taken::from([n]);
    let (a, b) = (scope.input(n, 0)?, scope.input(n, 1)?);
    let (x, under) = if scope.is(n, "Div") {
        let (value, inverse) = root(scope, b, &mut taken)?;
        (a, (!inverse).then_some(value)?)
    } else if scope.is(n, "Mul") {
        let side = |root_of: &'a str, x: &'a str| {
            let mut taken = Taken::from([n]);
            let (value, inverse) = root(scope, root_of, &mut taken)?;
            inverse.then_some((x, value, taken))
        };
        let (x, value, nodes) = side(b, a).or_else(|| side(a, b))?;
        taken = nodes;
        (x, value)
    } else {
        return None;
    };
    let (mean, epsilon) = with_number(scope, take(scope, under, "Add", &mut taken)?)?;
    let mean = take(scope, mean, "ReduceMean", &mut taken)?;
    let square = scope.input(mean, 0)?;
    let square = scope.producer(square)?;
    taken.insert(square);
    let (base, other) = (scope.input(square, 0)?, scope.input(square, 1)?);
    let squares = (scope.is(square, "Pow") && scope.scalar(other) == Some(2.0))
        || (scope.is(square, "Mul") && base == other);
    let axes = reduced_axes(scope, mean)?;
    (squares && base == x && epsilon > 0.0).then_some(Core {
        x,
        axes,
        epsilon,
        taken,
    })
}

/// The operand beside `value` that node `n` reads, if it has the sizes of the dimensions from `first` on.
fn beside<'a>(scope: &Scope<'a>, n: usize, value: &str, first: usize) -> Option<&'a str> {
    let (a, b) = (scope.input(n, 0)?, scope.input(n, 1)?);
    let other = if a == value { b } else { a };
    let sizes = scope.fact(value)?.shape.as_deref()?.get(first..)?;
    let fact = scope.fact(other)?;
    let fits = fact.shape.as_deref() == Some(sizes) && fact.element == scope.fact(value)?.element;
    fits.then_some(other)
}

/// The normalization of `x`, with the scale and shift that follow it at node `n`.
fn normalized(scope: &Scope, n: usize, x: &str, core: Core, op: &str) -> Option<Patch> {
    let fact = scope.fact(x)?;
    let (rank, element) = (fact.rank()?, fact.element?);
    let first = *core.axes.first()?;
    let trailing = core.axes.iter().copied().eq(first..rank);
    if !trailing || element == Element::F64 || !element.is_float() {
        return None;
    }
    let mut taken = core.taken;
    let mut last = n;
    let mut operands = Vec::new();
    let ops: &[&str] = if op == "LayerNormalization" {
        &["Mul", "Add"]
    } else {
        &["Mul"]
    };
    for next in ops {
        let Some(reader) = scope.sole_user(last).filter(|m| scope.is(*m, next)) else {
            break;
        };
        let Some(other) = beside(scope, reader, &scope.node(last).output[0], first) else {
            break;
        };
        taken.insert(reader);
        operands.push(other.to_string());
        last = reader;
    }
    if !is_closed(scope, &taken, last) {
        return None;
    }
    let mut patch = Patch {
        remove: taken.into_iter().collect(),
        ..Patch::default()
    };
    if operands.is_empty() {
        let sizes: Option<Vec<usize>> = fact.shape.as_ref()?[first..]
            .iter()
            .map(|s| usize::try_from(s.as_const()?).ok())
            .collect();
        let sizes = sizes?;
        let count: usize = sizes.iter().product();
        let ones = Tensor::floats(element, &sizes, &vec![1.0; count])?;
        if ones.n_bytes() > scope.around().fold_limit {
            return None;
        }
        operands.push(patch.constant(scope, &format!("{}_ones", scope.node(n).output[0]), ones));
    }
    let mut inputs = vec![x];
    inputs.extend(operands.iter().map(String::as_str));
    let attributes = vec![
        int("axis", first as i64 - rank as i64),
        float("epsilon", core.epsilon as f32),
    ];
    patch
        .insert
        .push(heir(scope.node(last), node(op, &inputs, attributes)));
    Some(patch)
}

fn layer_normalization(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.opset() < 17 {
        return None;
    }
    let mut core = core(scope, n)?;
    let difference = take(scope, core.x, "Sub", &mut core.taken)?;
    let (x, mean) = (scope.input(difference, 0)?, scope.input(difference, 1)?);
    let mean = take(scope, mean, "ReduceMean", &mut core.taken)?;
    let same = scope.input(mean, 0) == Some(x) && reduced_axes(scope, mean)? == core.axes;
    same.then(|| normalized(scope, n, x, core, "LayerNormalization"))?
}

fn rms_normalization(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.opset() < 23 {
        return None;
    }
    let core = core(scope, n)?;
    normalized(scope, n, core.x, core, "RMSNormalization")
}

fn softmax(scope: &Scope, n: usize) -> Option<Patch> {
    if !scope.is(n, "Div") {
        return None;
    }
    let mut taken = Taken::from([n]);
    let (top, bottom) = (scope.input(n, 0)?, scope.input(n, 1)?);
    let exp = take(scope, top, "Exp", &mut taken)?;
    let sum = take(scope, bottom, "ReduceSum", &mut taken)?;
    let difference = take(scope, scope.input(exp, 0)?, "Sub", &mut taken)?;
    let x = scope.input(difference, 0)?;
    let most = take(scope, scope.input(difference, 1)?, "ReduceMax", &mut taken)?;
    let axes = reduced_axes(scope, sum)?;
    let [axis] = axes.as_slice() else { return None };
    let rank = scope.fact(x)?.rank()?;
    let whole = scope.input(most, 0) == Some(x)
        && reduced_axes(scope, most)? == axes
        && scope.input(sum, 0) == Some(top);
    // Before 13, Softmax took all dimensions from the axis on.
    if !whole || (scope.opset() < 13 && axis + 1 != rank) || !is_closed(scope, &taken, n) {
        return None;
    }
    let axis = if scope.opset() < 13 {
        *axis as i64
    } else {
        *axis as i64 - rank as i64
    };
    let mut patch = Patch::exchange(scope, n, node("Softmax", &[x], vec![int("axis", axis)]));
    patch.remove = taken.into_iter().collect();
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::patch::ints;
    use super::super::trial::{Trial, real, reals};
    use super::*;

    struct Steps {
        opset: i64,
        axes: [i64; 2],
        scale: Tensor,
        epsilon: f32,
    }

    fn steps() -> Steps {
        Steps {
            opset: 17,
            axes: [-1, -1],
            scale: reals(&[8]),
            epsilon: 1e-5,
        }
    }

    fn layer(steps: Steps) -> Trial {
        let over = |d: i64| vec![ints("axes", &[d])];
        Trial::new(steps.opset)
            .input("x", "N 8 8")
            .output("y", "N 8 8")
            .constant("two", real(2.0))
            .constant("eps", real(steps.epsilon))
            .constant("g", steps.scale)
            .constant("b", reals(&[8]))
            .with("m = ReduceMean(x)", over(steps.axes[0]))
            .node("d = Sub(x, m)")
            .node("p = Pow(d, two)")
            .with("v = ReduceMean(p)", over(steps.axes[1]))
            .node("ve = Add(v, eps)")
            .node("sd = Sqrt(ve)")
            .node("n = Div(d, sd)")
            .node("ng = Mul(g, n)")
            .node("y = Add(ng, b)")
            .only(&["layer-normalization", "rms-normalization"])
    }

    #[test]
    fn a_layer_normalization_is_one_operator() {
        let (fired, nodes) = layer(steps()).run();
        assert_eq!(fired, ["layer-normalization"]);
        let expected = "y = LayerNormalization(x, g, b) {axis=-1, epsilon=0.00001}";
        assert_eq!(nodes, [expected]);
    }

    #[test]
    fn a_layer_normalization_needs_its_operator_set() {
        layer(Steps {
            opset: 16,
            ..steps()
        })
        .stays();
    }

    #[test]
    fn a_layer_normalization_is_over_the_last_dimensions() {
        layer(Steps {
            axes: [1, 1],
            ..steps()
        })
        .stays();
        layer(Steps {
            axes: [-1, 1],
            ..steps()
        })
        .stays();
    }

    #[test]
    fn a_layer_normalization_has_a_positive_epsilon() {
        layer(Steps {
            epsilon: 0.0,
            ..steps()
        })
        .stays();
    }

    #[test]
    fn a_step_that_others_read_keeps_all_steps() {
        layer(steps()).output("sd", "N 8 1").stays();
    }

    #[test]
    fn a_scale_of_other_sizes_stays_outside() {
        let (_, nodes) = layer(Steps {
            scale: reals(&[8, 1]),
            ..steps()
        })
        .run();
        assert_eq!(nodes.len(), 3);
        assert_eq!(
            nodes[0],
            "n = LayerNormalization(x, n_ones) {axis=-1, epsilon=0.00001}"
        );
    }

    fn root_mean_square(opset: i64) -> Trial {
        Trial::new(opset)
            .input("x", "N 4 8")
            .output("y", "N 4 8")
            .ints("axis", &[2])
            .constant("eps", real(1e-6))
            .constant("g", reals(&[8]))
            .node("p = Mul(x, x)")
            .node("v = ReduceMean(p, axis)")
            .node("ve = Add(v, eps)")
            .node("sd = Sqrt(ve)")
            .node("i = Reciprocal(sd)")
            .node("n = Mul(x, i)")
            .node("y = Mul(n, g)")
            .only(&["rms-normalization"])
    }

    #[test]
    fn a_root_mean_square_normalization_is_one_operator() {
        root_mean_square(23).gives(&["y = RMSNormalization(x, g) {axis=-1, epsilon=0.000001}"]);
        root_mean_square(22).stays();
    }

    fn exponentials(opset: i64, axes: [i64; 2]) -> Trial {
        let over = |d: i64| vec![ints("axes", &[d])];
        Trial::new(opset)
            .input("x", "N 4 8")
            .output("y", "N 4 8")
            .with("m = ReduceMax(x)", over(axes[0]))
            .node("d = Sub(x, m)")
            .node("e = Exp(d)")
            .with("s = ReduceSum(e)", over(axes[1]))
            .node("y = Div(e, s)")
            .only(&["softmax"])
    }

    #[test]
    fn a_softmax_is_one_operator() {
        exponentials(12, [2, -1]).gives(&["y = Softmax(x) {axis=2}"]);
        // There it would be over both of the last dimensions.
        exponentials(12, [1, 1]).stays();
        exponentials(12, [1, 2]).stays();
        exponentials(12, [2, -1]).output("s", "N 4 1").stays();
    }
}
