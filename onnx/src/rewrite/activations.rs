//! Activations that exporters took apart, and choices and truth values that decide nothing.
//!
//! - `gelu` (opset 20): `x/2 · (1 + erf(x/√2))` and the tanh form, factors in any order → Gelu. For ONNX
//!   Runtime and older sets → its own Gelu and FastGelu.
//! - `hard-swish` (opset 14): `x · clip(x + 3, 0, 6) / 6`, `x · HardSigmoid(x)` → HardSwish.
//! - `swish` (opset 24): `x · Sigmoid(x)` → Swish.
//! - `neutral-truth`: `And(true, x)` → x, `Or(false, x)` → x.
//! - `choose-once`: `Where(Not(c), a, b)` → `Where(c, b, a)`; `Where(c, a, Where(c, b, d))` →
//!   `Where(c, a, d)`.
//!
//! Legal where nothing else reads a step and constants are those of the formula to `f32`'s digits.
//! Saves passes over memory.

use super::matching::{ScaledProduct, Taken, is_close, is_closed, product, take, with_number};
use super::noop::same_sizes;
use super::patch::{Patch, node, text};
use super::scope::Scope;
use super::{Rule, Target};
use crate::attributes::{Attributes, is_standard};
use crate::element::Element;
use crate::proto::NodeProto;

pub const RULES: &[Rule] = &[
    Rule {
        name: "gelu",
        at: gelu,
    },
    Rule {
        name: "hard-swish",
        at: hard_swish,
    },
    Rule {
        name: "swish",
        at: swish,
    },
    Rule {
        name: "neutral-truth",
        at: neutral_truth,
    },
    Rule {
        name: "choose-once",
        at: choose_once,
    },
];

/// Node `n` and `taken` become `node`.
fn instead(scope: &Scope, n: usize, taken: Taken, node: NodeProto) -> Option<Patch> {
    // Numbers of one element may have more dimensions than `x`, and then the result had them too.
    let x = scope.fact(node.input.first()?)?;
    let y = scope.fact(scope.node(n).output.first()?)?;
    if !same_sizes(x, y) || !is_closed(scope, &taken, n) {
        return None;
    }
    let mut patch = Patch::exchange(scope, n, node);
    patch.remove = taken.into_iter().collect();
    Some(patch)
}

/// The other factor, if the product has two and one of them is `x`.
fn beside<'a>(product: &ScaledProduct<'a>, x: &str) -> Option<&'a str> {
    match product.factors.as_slice() {
        [a, b] if *a == x => Some(b),
        [a, b] if *b == x => Some(a),
        _ => None,
    }
}

fn gelu(scope: &Scope, n: usize) -> Option<Patch> {
    let has_gelu = scope.opset() >= 20;
    if !has_gelu && scope.around().target == Target::Standard {
        return None;
    }
    let product = product(scope, n).filter(|p| is_close(p.number, 0.5))?;
    product.factors.iter().find_map(|x| {
        let mut taken = product.taken.clone();
        let add = take(scope, beside(&product, x)?, "Add", &mut taken)?;
        let (inner, one) = with_number(scope, add)?;
        if one != 1.0 {
            return None;
        }
        let is_exact = is_erf(scope, inner, x, &mut taken);
        if !is_exact && !is_tanh(scope, inner, x, &mut taken)? {
            return None;
        }
        let made = match (has_gelu, is_exact) {
            (true, true) => node("Gelu", &[x], Vec::new()),
            (true, false) => node("Gelu", &[x], vec![text("approximate", "tanh")]),
            (false, _) if scope.fact(x)?.element != Some(Element::F32) => return None,
            (false, is_exact) => NodeProto {
                domain: super::fused::DOMAIN.to_string(),
                ..node(if is_exact { "Gelu" } else { "FastGelu" }, &[x], Vec::new())
            },
        };
        instead(scope, n, taken, made)
    })
}

/// Whether a value is `x` times the number.
fn is_multiple(scope: &Scope, name: &str, x: &str, number: f64, taken: &mut Taken) -> bool {
    let Some(times) = scope.producer(name).and_then(|n| product(scope, n)) else {
        return false;
    };
    let is = times.factors == [x] && is_close(times.number, number);
    taken.extend(times.taken);
    is
}

fn is_erf(scope: &Scope, name: &str, x: &str, taken: &mut Taken) -> bool {
    let Some(erf) = scope.made_by(name, "Erf") else {
        return false;
    };
    taken.insert(erf);
    let scaled = scope.input(erf, 0);
    scaled.is_some_and(|s| is_multiple(scope, s, x, std::f64::consts::FRAC_1_SQRT_2, taken))
}

/// `tanh(√(2/π) · (x + 0.044715 · x³))`.
fn is_tanh(scope: &Scope, name: &str, x: &str, taken: &mut Taken) -> Option<bool> {
    let tanh = take(scope, name, "Tanh", taken)?;
    let outer = product(scope, scope.producer(scope.input(tanh, 0)?)?)?;
    taken.extend(outer.taken);
    let [sum] = outer.factors.as_slice() else {
        return None;
    };
    let sum = take(scope, sum, "Add", taken)?;
    let (a, b) = (scope.input(sum, 0)?, scope.input(sum, 1)?);
    let cubic = if a == x { b } else { a };
    let cubic = product(scope, scope.producer(cubic)?)?;
    taken.extend(cubic.taken);
    let is_cube = match cubic.factors.as_slice() {
        [one] => is_power(scope, one, x, 3.0, taken),
        [a, b] => {
            (*a == x && is_power(scope, b, x, 2.0, taken))
                || (*b == x && is_power(scope, a, x, 2.0, taken))
        }
        factors => factors == [x, x, x],
    };
    let numbers = is_close(outer.number, (2.0 / std::f64::consts::PI).sqrt())
        && is_close(cubic.number, 0.044_715);
    Some(is_cube && numbers && (a == x || b == x))
}

fn is_power(scope: &Scope, name: &str, x: &str, power: f64, taken: &mut Taken) -> bool {
    let Some(n) = scope.made_by(name, "Pow") else {
        return false;
    };
    taken.insert(n);
    scope.input(n, 0) == Some(x) && scope.input(n, 1).and_then(|p| scope.scalar(p)) == Some(power)
}

fn hard_swish(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.opset() < 14 {
        return None;
    }
    let product = product(scope, n)?;
    product.factors.iter().find_map(|x| {
        let element = scope.fact(x)?.element?;
        if !element.is_float() || (element == Element::BF16 && scope.opset() < 22) {
            return None;
        }
        let mut taken = product.taken.clone();
        let gate = beside(&product, x)?;
        let is = match scope.made_by(gate, "HardSigmoid") {
            Some(gate) => {
                taken.insert(gate);
                let a = Attributes::new(scope.node(gate));
                let of = |name, or| a.float(name).map_or(or, f64::from);
                scope.input(gate, 0) == Some(*x)
                    && product.number == 1.0
                    && is_close(of("alpha", 0.2), 1.0 / 6.0)
                    && of("beta", 0.5) == 0.5
            }
            None => {
                let clip = take(scope, gate, "Clip", &mut taken)?;
                let bound = |at| scope.scalar(scope.input(clip, at)?);
                let add = take(scope, scope.input(clip, 0)?, "Add", &mut taken)?;
                with_number(scope, add) == Some((*x, 3.0))
                    && (bound(1), bound(2)) == (Some(0.0), Some(6.0))
                    && is_close(product.number, 1.0 / 6.0)
            }
        };
        is.then(|| instead(scope, n, taken, node("HardSwish", &[x], Vec::new())))?
    })
}

fn swish(scope: &Scope, n: usize) -> Option<Patch> {
    if scope.opset() < 24 {
        return None;
    }
    let product = product(scope, n).filter(|p| p.number == 1.0)?;
    product.factors.iter().find_map(|x| {
        let mut taken = product.taken.clone();
        let gate = take(scope, beside(&product, x)?, "Sigmoid", &mut taken)?;
        let is = scope.input(gate, 0) == Some(*x);
        is.then(|| instead(scope, n, taken, node("Swish", &[x], Vec::new())))?
    })
}

fn neutral_truth(scope: &Scope, n: usize) -> Option<Patch> {
    let neutral = match scope.node(n).op_type.as_str() {
        "And" => 1.0,
        "Or" => 0.0,
        _ => return None,
    };
    if !is_standard(scope.node(n)) {
        return None;
    }
    let (a, b) = (scope.input(n, 0)?, scope.input(n, 1)?);
    let kept = match (scope.all_equal(a), scope.all_equal(b)) {
        (_, Some(v)) if v == neutral => a,
        (Some(v), _) if v == neutral => b,
        _ => return None,
    };
    let same = same_sizes(
        scope.fact(kept)?,
        scope.fact(scope.node(n).output.first()?)?,
    );
    same.then(|| Patch::forward(scope, n, kept))?
}

fn choose_once(scope: &Scope, n: usize) -> Option<Patch> {
    if !scope.is(n, "Where") {
        return None;
    }
    let (condition, a, b) = (scope.input(n, 0)?, scope.input(n, 1)?, scope.input(n, 2)?);
    if let Some(not) = scope.made_by(condition, "Not") {
        let swapped = node("Where", &[scope.input(not, 0)?, b, a], Vec::new());
        return Some(Patch::exchange(scope, n, swapped));
    }
    // An inner choice by the same condition always takes the same branch: that branch.
    let taken = |name: &str, at: usize| {
        let inner = scope.made_by(name, "Where")?;
        (scope.input(inner, 0) == Some(condition)).then(|| scope.input(inner, at))?
    };
    let (first, second) = (taken(a, 1).unwrap_or(a), taken(b, 2).unwrap_or(b));
    let sizes = |x: &str, y: &str| -> Option<_> {
        let of = |name: &str| scope.fact(name)?.shape.clone();
        let all = [of(condition)?, of(x)?, of(y)?];
        let all: Vec<&[graph::SymExpr]> = all.iter().map(Vec::as_slice).collect();
        crate::operators::broadcast(&all, scope.around().unknowns)
    };
    let changes = (first, second) != (a, b);
    if !changes || sizes(first, second)? != sizes(a, b)? {
        return None;
    }
    let once = node("Where", &[condition, first, second], Vec::new());
    Some(Patch::exchange(scope, n, once))
}

#[cfg(test)]
mod tests {
    use super::super::patch::float;
    use super::super::trial::{Trial, real};
    use crate::element::Element;
    use crate::tensor::{Tensor, Values};

    fn erf_form(opset: i64, root: f32, half: f32) -> Trial {
        Trial::new(opset)
            .input("x", "N 8")
            .output("y", "N 8")
            .constant("root", real(root))
            .constant("one", real(1.0))
            .constant("half", real(half))
            .node("a = Div(x, root)")
            .node("b = Erf(a)")
            .node("c = Add(one, b)")
            .node("d = Mul(half, c)")
            .node("y = Mul(x, d)")
            .only(&["gelu"])
    }

    #[test]
    fn the_error_function_form_is_gelu() {
        let root = std::f32::consts::SQRT_2;
        erf_form(20, root, 0.5).gives(&["y = Gelu(x)"]);
        erf_form(19, root, 0.5).stays();
        erf_form(20, 1.41, 0.5).stays();
        erf_form(20, root, 0.51).stays();
        erf_form(20, root, 0.5).output("b", "N 8").stays();
    }

    fn tanh_form(cubic: f32) -> Trial {
        Trial::new(20)
            .input("x", "N 8")
            .output("y", "N 8")
            .constant("three", real(3.0))
            .constant("k", real(cubic))
            .constant("s", real(0.797_884_6))
            .constant("one", real(1.0))
            .constant("half", real(0.5))
            .node("a = Mul(x, half)")
            .node("p = Pow(x, three)")
            .node("q = Mul(p, k)")
            .node("r = Add(x, q)")
            .node("t = Mul(r, s)")
            .node("u = Tanh(t)")
            .node("v = Add(u, one)")
            .node("y = Mul(a, v)")
            .only(&["gelu"])
    }

    #[test]
    fn the_tanh_form_is_its_approximation() {
        tanh_form(0.044_715).gives(&["y = Gelu(x) {approximate=b\"tanh\"}"]);
        tanh_form(0.045).stays();
    }

    fn clipped(opset: i64, least: f32) -> Trial {
        Trial::new(opset)
            .input("x", "N 8")
            .output("y", "N 8")
            .constant("three", real(3.0))
            .constant("zero", real(least))
            .constant("six", real(6.0))
            .node("a = Add(x, three)")
            .node("b = Clip(a, zero, six)")
            .node("c = Mul(x, b)")
            .node("y = Div(c, six)")
            .only(&["hard-swish"])
    }

    #[test]
    fn a_clipped_product_is_hard_swish() {
        assert_eq!(clipped(14, 0.0).unverified(), ["y = HardSwish(x)"]);
        clipped(13, 0.0).stays();
        clipped(14, 0.5).stays();
        let gate = |alpha: f32| {
            Trial::new(14)
                .input("x", "N 8")
                .output("y", "N 8")
                .with("a = HardSigmoid(x)", vec![float("alpha", alpha)])
                .node("y = Mul(a, x)")
                .only(&["hard-swish"])
        };
        assert_eq!(gate(1.0 / 6.0).unverified(), ["y = HardSwish(x)"]);
        gate(0.2).stays();
    }

    #[test]
    fn a_gated_product_is_swish_where_there_is_one() {
        let gated = |opset: i64, other: &str| {
            Trial::new(opset)
                .input("x", "N 8")
                .input("z", "N 8")
                .output("y", "N 8")
                .node("a = Sigmoid(x)")
                .node(&format!("y = Mul({other}, a)"))
                .only(&["swish"])
        };
        gated(24, "x").gives(&["y = Swish(x)"]);
        gated(23, "x").stays();
        gated(24, "z").stays();
    }

    fn truth(op: &str, value: bool, sizes: &[usize]) -> Trial {
        let n = sizes.iter().product();
        Trial::new(14)
            .input_of("x", Element::Bool, "8")
            .output_of("y", Element::Bool, "A")
            .constant("c", Tensor::new(sizes, Values::Bool(vec![value; n])))
            .node("z = Not(x)")
            .node(&format!("y = {op}(c, z)"))
            .only(&["neutral-truth"])
    }

    #[test]
    fn a_truth_value_that_decides_nothing_goes() {
        truth("And", true, &[]).gives(&["y = Not(x)"]);
        truth("Or", false, &[8]).gives(&["y = Not(x)"]);
        truth("And", false, &[]).stays();
    }

    fn chosen(inner: &str, small: &str) -> Trial {
        Trial::new(14)
            .input_of("c", Element::Bool, "4 8")
            .input_of("other", Element::Bool, "4 8")
            .input("a", "4 8")
            .input("b", small)
            .input("d", "4 8")
            .output("y", "4 8")
            .node("n = Not(c)")
            .node(&format!("z = Where({inner}, b, d)"))
            .node("y = Where(c, a, z)")
            .only(&["choose-once"])
    }

    #[test]
    fn a_choice_made_before_is_not_made_again() {
        chosen("c", "4 8").gives(&["y = Where(c, a, d)"]);
        chosen("n", "4 8").gives(&["y = Where(c, a, b)"]);
        chosen("other", "4 8").stays();
    }
}
