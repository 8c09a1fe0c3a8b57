//! Constant scales and terms folded into products, and into each other.
//!
//! Before: `y = Conv(x, W, b); z = y * c`, `z = y + c`, `z = y / c`, `z = y - c`, `z = c - y`, `z = -y`,
//! with `c` constant along all dimensions but the channels; after: `z = Conv(x, W', b')`. The same
//! before the product, by input channel: terms only where the convolution pads nothing. The product
//! may be Conv, ConvTranspose, Gemm, MatMul (alone or with the Add of a row: together they become Gemm
//! where both operands have two dimensions) or a normalization with a scale of its own.
//!
//! Before: `y = Reshape(Transpose(MatMul(x, W))); z = y * c`, `c` one number; after: `MatMul(x, c·W)`.
//! Legal through nodes that only move elements, and through Relu, pooling and means if `c` is
//! positive.
//!
//! Legal if nobody else reads what is between and nothing of it is quantized. The last step of a
//! decomposed Gelu or LayerNormalization stays with it. Saves a node and a pass
//! over the data.

use super::Rule;
use super::patch::{Patch, may_stand_for};
use super::product::{Affine, LinearOperation};
use super::scope::Scope;
use crate::attributes::is_standard;

pub const RULES: &[Rule] = &[
    Rule {
        name: "fold-scale-after",
        at: after_product,
    },
    Rule {
        name: "fold-scale-before",
        at: before_product,
    },
    Rule {
        name: "fold-distant-scale",
        at: through_movement,
    },
];

/// An arithmetic node with one operand that varies.
struct Step<'a> {
    /// The operand that varies.
    x: &'a str,
    op: Op<'a>,
}

enum Op<'a> {
    Negate,
    Times(&'a str),
    Over(&'a str),
    Plus(&'a str),
    Minus(&'a str),
    /// The constant less the operand.
    From(&'a str),
}

impl<'a> Step<'a> {
    /// Every way to read node `n` as a step; whether that operand is constant is checked later.
    fn of(scope: &Scope<'a>, n: usize) -> Vec<Step<'a>> {
        let (Some(a), b) = (scope.input(n, 0), scope.input(n, 1)) else {
            return Vec::new();
        };
        let b = b.unwrap_or("");
        if !is_standard(scope.node(n)) || scope.opset() < 7 {
            return Vec::new();
        }
        let ops = match scope.node(n).op_type.as_str() {
            "Neg" => vec![(a, Op::Negate)],
            "Mul" => vec![(a, Op::Times(b)), (b, Op::Times(a))],
            "Add" => vec![(a, Op::Plus(b)), (b, Op::Plus(a))],
            "Div" => vec![(a, Op::Over(b))],
            "Sub" => vec![(a, Op::Minus(b)), (b, Op::From(a))],
            _ => Vec::new(),
        };
        ops.into_iter().map(|(x, op)| Step { x, op }).collect()
    }

    /// The scale and shift of the step. `values` looks up the constant operand.
    fn affine(&self, values: impl Fn(&'a str) -> Option<Vec<f64>>) -> Option<Affine> {
        let map = |name: &'a str, f: fn(f64) -> f64| -> Option<Vec<f64>> {
            Some(values(name)?.into_iter().map(f).collect())
        };
        Some(match self.op {
            Op::Negate => Affine::scaled(vec![-1.0]),
            Op::Times(c) => Affine::scaled(values(c)?),
            Op::Over(c) => Affine::scaled(map(c, f64::recip)?),
            Op::Plus(c) => Affine::shifted(values(c)?),
            Op::Minus(c) => Affine::shifted(map(c, |c| -c)?),
            Op::From(c) => Affine {
                scale: vec![-1.0],
                shift: values(c)?,
            },
        })
    }
}

fn after_product(scope: &Scope, n: usize) -> Option<Patch> {
    Step::of(scope, n).into_iter().find_map(|step| {
        let p = scope.producer(step.x)?;
        if scope.sole_user(p) != Some(n) {
            return None;
        }
        let product = LinearOperation::new(scope, p)?;
        let by = step.affine(|name| product.per_channel(scope, name))?;
        product.then(scope, &by, &[n], n)
    })
}

fn before_product(scope: &Scope, n: usize) -> Option<Patch> {
    let product = LinearOperation::new(scope, n)?;
    let y = scope.input(product.first(), 0)?;
    let m = scope.producer(y)?;
    if scope.sole_user(m) != Some(product.first()) || ends_pattern(scope, m, PATTERN_DEPTH) {
        return None;
    }
    Step::of(scope, m).into_iter().find_map(|step| {
        let by = step.affine(|name| product.per_input_channel(scope, name))?;
        // The constant may have given the operand more elements than it had.
        let (x, y) = (scope.fact(step.x)?, scope.fact(y)?);
        let alike = x.rank().is_some() && x.rank() == y.rank();
        let same = alike && (x.shape == y.shape || by.scale.len() + by.shift.len() == 2);
        same.then(|| product.after(scope, &by, step.x, &[m]))?
    })
}

/// Most nodes from the last node of a decomposed operator to the one it is recognized by.
const PATTERN_DEPTH: usize = 4;

/// Whether a node may be the last of a decomposed Gelu or LayerNormalization: rules here and in
/// runtimes look for those, and what they save is more than one scale.
fn ends_pattern(scope: &Scope, n: usize, depth: usize) -> bool {
    let made = scope.node(n).input.iter().filter_map(|i| scope.producer(i));
    made.into_iter().any(|p| {
        let op = scope.node(p).op_type.as_str();
        matches!(op, "Erf" | "Tanh" | "Sqrt" | "Pow" | "ReduceMean")
            || (depth > 1 && ends_pattern(scope, p, depth - 1))
    })
}

/// What a node between a product and a distant scale lets through.
#[derive(PartialEq)]
enum Passes {
    AnyFactor,
    PositiveFactor,
}

fn passes(op: &str) -> Option<Passes> {
    Some(match op {
        "Reshape" | "Transpose" | "Squeeze" | "Unsqueeze" | "Flatten" | "Identity"
        | "GlobalAveragePool" | "AveragePool" | "ReduceMean" | "DepthToSpace" | "SpaceToDepth" => {
            Passes::AnyFactor
        }
        "Relu" | "LeakyRelu" | "MaxPool" | "GlobalMaxPool" | "ReduceMax" => Passes::PositiveFactor,
        _ => return None,
    })
}

/// Nodes between a product and a distant scale, at most.
const MAX_DISTANCE: usize = 8;

fn through_movement(scope: &Scope, n: usize) -> Option<Patch> {
    Step::of(scope, n).into_iter().find_map(|step| {
        let one = |name| {
            let c = scope.fact(name)?;
            let smaller = c.rank()? <= scope.fact(step.x)?.rank().unwrap_or(0);
            smaller.then(|| scope.scalar(name))?.map(|c| vec![c])
        };
        let by = step.affine(one)?;
        let &[factor] = by.scale.as_slice() else {
            return None;
        };
        if by.shift != [0.0]
            || factor == 0.0
            || !may_stand_for(scope, &scope.node(n).output[0], step.x)
        {
            return None;
        }
        let mut value = step.x;
        let mut reader = n;
        let mut changed = vec![value.to_string()];
        for _ in 0..MAX_DISTANCE {
            let p = scope.producer(value)?;
            if scope.sole_user(p) != Some(reader) {
                return None;
            }
            match passes(&scope.node(p).op_type).filter(|_| is_standard(scope.node(p))) {
                Some(Passes::PositiveFactor) if factor < 0.0 => return None,
                Some(_) => {
                    (value, reader) = (scope.input(p, 0)?, p);
                    changed.push(value.to_string());
                }
                None if reader == n => return None,
                None => {
                    let mut patch = LinearOperation::new(scope, p)?.then(scope, &by, &[n], p)?;
                    patch.replace = vec![(scope.node(n).output[0].clone(), step.x.to_string())];
                    patch.changed = changed;
                    return Some(patch);
                }
            }
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::super::patch::{float, int, ints};
    use super::super::trial::{Trial, real, reals};
    use crate::tensor::Tensor;

    fn conv(pads: i64, before: &str) -> Trial {
        Trial::new(13)
            .input("x", "N 4 5 5")
            .output("y", "N 6 H W")
            .constant("w", reals(&[6, 4, 3, 3]))
            .constant("b", reals(&[6]))
            .constant("c", real(3.0))
            .constant("per_channel", reals(&[6, 1, 1]))
            .constant("per_input", reals(&[1, 4, 1, 1]))
            .constant("per_column", reals(&[5]))
            .constant("per_row", reals(&[3, 1]))
            .node(before)
            .with("a = Conv(p, w, b)", vec![ints("pads", &[pads; 4])])
    }

    fn after(step: &str) -> Trial {
        conv(1, "p = Neg(x)").node(step).only(&["fold-scale-after"])
    }

    #[test]
    fn steps_after_a_convolution() {
        for step in [
            "y = Mul(a, per_channel)",
            "y = Mul(per_channel, a)",
            "y = Add(per_channel, a)",
            "y = Div(a, c)",
            "y = Sub(a, per_channel)",
            "y = Sub(per_channel, a)",
            "y = Neg(a)",
        ] {
            let (fired, nodes) = after(step).run();
            assert_eq!((fired.len(), nodes.len()), (1, 2), "{step}: {nodes:?}");
        }
    }

    #[test]
    fn not_what_differs_within_a_channel() {
        after("y = Mul(a, per_column)").stays();
        after("y = Add(a, per_column)").stays();
    }

    #[test]
    fn not_the_inverse() {
        after("y = Div(c, a)").stays();
    }

    #[test]
    fn not_what_has_no_finite_or_a_vanishing_result() {
        let divided = |by: f32| after("y = Div(a, by)").constant("by", real(by));
        assert_eq!(divided(0.5).run().0.len(), 1);
        divided(0.0).stays();
        let scaled = |by: f32| after("y = Mul(a, by)").constant("by", real(by));
        scaled(1e-45).stays();
    }

    #[test]
    fn not_what_gives_the_product_more_dimensions() {
        let more = |shape: &[usize]| after("y = Mul(a, by)").constant("by", reals(shape));
        assert_eq!(more(&[1, 1, 1, 1]).run().0.len(), 1);
        more(&[1, 1, 1, 1, 1]).stays();
    }

    fn before(pads: i64, step: &str) -> Trial {
        conv(pads, step)
            .node("y = Relu(a)")
            .only(&["fold-scale-before"])
    }

    #[test]
    fn steps_before_a_convolution() {
        for step in ["p = Mul(x, per_input)", "p = Div(x, c)", "p = Neg(x)"] {
            assert_eq!(before(1, step).run().1.len(), 2, "{step}");
        }
    }

    #[test]
    fn terms_only_where_nothing_is_padded() {
        assert_eq!(before(0, "p = Add(x, per_input)").run().1.len(), 2);
        assert_eq!(before(0, "p = Sub(c, x)").run().1.len(), 2);
        before(1, "p = Add(x, per_input)").stays();
    }

    #[test]
    fn not_the_end_of_a_decomposed_operator() {
        let model = |op: &str| {
            let half = Trial::new(13)
                .input("x", "N 4")
                .output("y", "N 3")
                .constant("w", reals(&[4, 3]))
                .constant("half", real(0.5))
                .constant("one", real(1.0))
                .node(&format!("e = {op}(x)"))
                .node("i = Add(e, one)")
                .node("p = Mul(x, i)");
            half.node("h = Mul(p, half)")
                .node("y = MatMul(h, w)")
                .only(&["fold-scale-before"])
        };
        assert_eq!(model("Sin").run().0.len(), 1);
        model("Erf").stays();
    }

    #[test]
    fn not_a_step_that_gives_its_operand_more_elements() {
        let model = |sizes: &str| {
            Trial::new(13)
                .input("x", sizes)
                .output("y", "N 6 H W")
                .constant("w", reals(&[6, 4, 3, 3]))
                .constant("per_input", reals(&[1, 4, 1, 1]))
                .node("p = Mul(x, per_input)")
                .node("y = Conv(p, w)")
                .only(&["fold-scale-before"])
        };
        assert_eq!(model("N 4 5 5").run().1.len(), 1);
        model("N 1 5 5").stays();
    }

    #[test]
    fn matrices_with_their_rows() {
        let model = |sizes: &str, step: &str| {
            Trial::new(13)
                .input("x", sizes)
                .output("y", &sizes.replace('4', "3"))
                .constant("w", reals(&[4, 3]))
                .constant("row", reals(&[3]))
                .constant("c", reals(&[1, 3]))
                .node("a = MatMul(x, w)")
                .node(step)
        };
        model("N 4", "y = Mul(a, c)").gives(&["y = MatMul(x, w_1)"]);
        model("N 4", "y = Add(row, a)").gives(&["y = Gemm(x, w, w_bias)"]);
        // A Gemm has two dimensions; with three, Add stays.
        model("N 5 4", "y = Add(row, a)").stays();
        let three = model("N 5 4", "s = Add(row, a)").node("y = Mul(s, c)");
        three.gives(&["y_product = MatMul(x, w_1)", "y = Add(y_product, row_1)"]);
    }

    #[test]
    fn a_gemm_keeps_its_factors_in_its_weights() {
        let model = |factors| {
            Trial::new(13)
                .input("x", "N 4")
                .output("y", "N 3")
                .constant("w", reals(&[3, 4]))
                .constant("row", reals(&[1, 4]))
                .constant("b", reals(&[3]))
                .node("s = Add(x, row)")
                .with("y = Gemm(s, w, b)", factors)
        };
        let factors = vec![float("alpha", 3.0), float("beta", 0.5), int("transB", 1)];
        model(factors).gives(&["y = Gemm(x, w_1, b_1) {transB=1}"]);
        // With `transA`, the row to add would become a column.
        let square = model(vec![int("transA", 1), int("transB", 1)]);
        assert_eq!(square.unverified().len(), 2);
    }

    #[test]
    fn normalizations_take_scale_and_shift() {
        let model = |axis: i64| {
            Trial::new(17)
                .input("x", "N 5 4")
                .output("y", "N 5 4")
                .constant("gamma", reals(&[4]))
                .constant("beta", reals(&[4]))
                .constant("c", reals(&[4]))
                .with(
                    "a = LayerNormalization(x, gamma, beta)",
                    vec![int("axis", axis)],
                )
                .node("s = Mul(a, c)")
                .node("y = Add(s, c)")
                .only(&["fold-scale-after"])
        };
        model(-1).gives(&["y = LayerNormalization(x, gamma_1, beta_1_1) {axis=-1}"]);
    }

    fn distant(between: &str, by: f32) -> Trial {
        distant_tensor(between, real(by))
    }

    fn distant_tensor(between: &str, by: Tensor) -> Trial {
        Trial::new(13)
            .input("x", "N 5 4")
            .output("y", "N 5 4")
            .constant("w", reals(&[4, 4]))
            .constant("c", by)
            .node("a = MatMul(x, w)")
            .with("t = Transpose(a)", vec![ints("perm", &[0, 2, 1])])
            .node(between)
            .with("v = Transpose(u)", vec![ints("perm", &[0, 2, 1])])
            .node("y = Mul(v, c)")
            .only(&["fold-distant-scale"])
    }

    #[test]
    fn one_number_passes_what_moves_elements() {
        assert_eq!(distant("u = Identity(t)", -0.5).run().1.len(), 4);
        assert_eq!(distant("u = Relu(t)", 0.5).run().1.len(), 4);
        distant("u = Relu(t)", -0.5).stays();
        distant("u = Exp(t)", 0.5).stays();
        distant("u = Identity(t)", 0.0).stays();
        distant("u = Identity(t)", 0.5).output("t", "N 4 5").stays();
    }

    #[test]
    fn several_numbers_do_not_pass() {
        distant_tensor("u = Identity(t)", reals(&[4])).stays();
        distant_tensor("u = Identity(t)", reals(&[1, 1, 1, 1])).stays();
    }
}
