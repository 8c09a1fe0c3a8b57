//! Attention that exporters took apart, as one operator.
//!
//! Before: `s = MatMul(q, Transpose(k)) · c + mask; y = MatMul(Softmax(s), v)`, the factor `c` at the
//! product, at `q` or at `k`, the mask optional; after (operator set 23): `y = Attention(q, k, v, mask)
//! {scale=c}`. Not for ONNX Runtime on CPUs, where the steps
//! were faster (`--measure` shows it).
//!
//! Legal for four dimensions with the same sequences and heads in q, k and v, and a softmax over the keys, where
//! nothing else reads a step. The mask is constant and of q's type; its last size is the number of keys, each other
//! size that of the scores or 1. Rows of a mask that leave no key give NaN in the steps and 0 in the operator, so a
//! mask that is not known keeps the steps. Saves passes over the scores.

use super::matching::{Taken, is_closed, with_number};
use super::noop::same_sizes;
use super::patch::{Patch, float, heir, ints, node};
use super::product::is_quantized;
use super::scope::Scope;
use super::{Rule, Target};
use crate::attributes::Attributes;
use crate::element::Element;

pub const RULES: &[Rule] = &[Rule {
    name: "attention",
    at: attention,
}];

/// Factors that were found on the way to a value.
struct Scaled<'a> {
    value: &'a str,
    factor: f64,
}

/// A value and a factor whose product is the given value.
fn scaled<'a>(scope: &Scope<'a>, value: &'a str, taken: &mut Taken) -> Scaled<'a> {
    const MOST_FACTORS: usize = 4;
    let mut scaled = Scaled { value, factor: 1.0 };
    for _ in 0..MOST_FACTORS {
        let Some(n) = scope.producer(scaled.value) else {
            break;
        };
        let step = if scope.is(n, "Mul") {
            with_number(scope, n)
        } else if scope.is(n, "Div") {
            let number = scope.input(n, 1).and_then(|b| scope.scalar(b));
            let number = number.filter(|b| *b != 0.0);
            scope.input(n, 0).zip(number.map(f64::recip))
        } else {
            None
        };
        let Some((x, number)) = step else { break };
        let sizes = scope.fact(x).zip(scope.fact(scaled.value));
        if !sizes.is_some_and(|(a, b)| same_sizes(a, b)) {
            break;
        }
        taken.insert(n);
        scaled = Scaled {
            value: x,
            factor: scaled.factor * number,
        };
    }
    scaled
}

/// Keys as the operator reads them: the value, and the order of its dimensions where it is not that.
struct Keys<'a> {
    value: &'a str,
    order: Option<Vec<i64>>,
}

/// The keys `[batch, heads, length, size]` whose transpose is `turned`.
fn keys<'a>(scope: &Scope<'a>, turned: &'a str, taken: &mut Taken) -> Option<Keys<'a>> {
    let t = scope.made_by(turned, "Transpose")?;
    let mut order = Attributes::new(scope.node(t)).ints("perm")?.to_vec();
    if order.len() != 4 {
        return None;
    }
    order.swap(2, 3);
    if scope.sole_reader(turned).is_some() {
        taken.insert(t);
    }
    Some(Keys {
        value: scope.input(t, 0)?,
        order: (order != [0, 1, 2, 3]).then_some(order),
    })
}

/// The scores and the mask that is added to them.
fn masked<'a>(
    scope: &Scope<'a>,
    scores: &'a str,
    taken: &mut Taken,
) -> Option<(&'a str, Option<&'a str>)> {
    let Some(add) = scope.made_by(scores, "Add") else {
        return Some((scores, None));
    };
    taken.insert(add);
    let is_product = |name: &'a str| {
        let scaled = scaled(scope, name, &mut Taken::new());
        scope.made_by(scaled.value, "MatMul").is_some()
    };
    let (a, b) = (scope.input(add, 0)?, scope.input(add, 1)?);
    let (scores, mask) = if is_product(a) { (a, b) } else { (b, a) };
    Some((scores, Some(mask)))
}

/// Whether a mask is constant, leaves every query a key, and has the sizes of the scores or 1, but the number of keys
/// as its last.
fn is_mask(scope: &Scope, mask: &str, scores: &str) -> Option<bool> {
    let constant = scope.constant(mask)?;
    let n_keys = constant.shape.last().copied().filter(|n| *n > 0)?;
    let values = constant.to_f64()?;
    let leaves = values.chunks(n_keys).all(|row| {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        most.is_finite() && !row.iter().any(|x| x.is_nan())
    });
    let (mask, scores) = (scope.fact(mask)?, scope.fact(scores)?);
    let (given, sizes) = (mask.shape.as_deref()?, scores.shape.as_deref()?);
    let from = sizes.len().checked_sub(given.len())?;
    let mut pairs = given.iter().zip(&sizes[from..]);
    let fits = pairs.all(|(m, s)| m == s || m.as_const() == Some(1));
    let whole = given.last() == sizes.last() && matches!(given.len(), 2 | 4);
    Some(leaves && fits && whole && mask.element == scores.element)
}

fn attention(scope: &Scope, n: usize) -> Option<Patch> {
    let may = scope.opset() >= 23 && scope.around().target != Target::OrtCpu;
    if !may || !scope.is(n, "MatMul") || is_quantized(scope, n) {
        return None;
    }
    let mut taken = Taken::from([n]);
    let (weights, v) = (scope.input(n, 0)?, scope.input(n, 1)?);
    let softmax = scope.made_by(weights, "Softmax")?;
    taken.insert(softmax);
    let axis = Attributes::new(scope.node(softmax)).int("axis");
    if !matches!(axis.unwrap_or(-1), -1 | 3) {
        return None;
    }
    let (scores, mask) = masked(scope, scope.input(softmax, 0)?, &mut taken)?;
    let all = scaled(scope, scores, &mut taken);
    let product = scope.made_by(all.value, "MatMul")?;
    taken.insert(product);
    if is_quantized(scope, product) {
        return None;
    }
    let q = scaled(scope, scope.input(product, 0)?, &mut taken);
    let k = scaled(scope, scope.input(product, 1)?, &mut taken);
    let keys = keys(scope, k.value, &mut taken)?;
    let sizes = |name: &str| scope.fact(name)?.shape.as_deref().filter(|s| s.len() == 4);
    let (of_q, of_k, of_v) = (sizes(q.value)?, sizes(k.value)?, sizes(v)?);
    let element = scope.fact(q.value)?.element?;
    let alike = of_q[..2] == of_k[..2] && of_q[..2] == of_v[..2] && of_k[3] == of_v[2];
    let fits = mask.is_none_or(|mask| is_mask(scope, mask, all.value) == Some(true));
    if !alike || !fits || !matches!(element, Element::F32 | Element::F16 | Element::BF16) {
        return None;
    }
    if !is_closed(scope, &taken, n) {
        return None;
    }
    let mut patch = Patch {
        remove: taken.into_iter().collect(),
        ..Patch::default()
    };
    let base = scope.node(n).output.first()?;
    let keys = match keys.order {
        None => keys.value.to_string(),
        Some(order) => {
            let turned = node("Transpose", &[keys.value], vec![ints("perm", &order)]);
            patch.node(scope, &format!("{base}_keys"), turned)
        }
    };
    let mut operands = vec![q.value, &keys, v];
    operands.extend(mask);
    let scale = (all.factor * q.factor * k.factor) as f32;
    if !(scale.is_finite() && scale > 0.0) {
        return None;
    }
    let made = node("Attention", &operands, vec![float("scale", scale)]);
    patch.insert.push(heir(scope.node(n), made));
    Some(patch)
}

#[cfg(test)]
mod tests {
    use super::super::patch::{int, ints};
    use super::super::trial::{Trial, real, reals};
    use crate::rewrite::Target;
    use crate::tensor::{Tensor, Values};

    struct Parts {
        opset: i64,
        axis: i64,
        keys: &'static str,
        mask: Tensor,
    }

    fn parts() -> Parts {
        Parts {
            opset: 23,
            axis: -1,
            keys: "n 2 3 8",
            mask: triangle(&[3, 3], -1),
        }
    }

    /// Minus infinity for keys after the query by more than `more`, otherwise numbers.
    fn triangle(shape: &[usize], more: i64) -> Tensor {
        let Values::F32(mut values) = (*reals(shape).values).clone() else {
            return reals(shape);
        };
        let n = shape[shape.len() - 1];
        for (at, value) in values.iter_mut().enumerate() {
            let (query, key) = ((at / n % n) as i64, (at % n) as i64);
            if key > query + 1 + more {
                *value = f32::NEG_INFINITY;
            }
        }
        Tensor::new(shape, Values::F32(values))
    }

    fn apart(parts: Parts) -> Trial {
        Trial::new(parts.opset)
            .input("q", "n 2 3 8")
            .input("k", parts.keys)
            .input("v", "n 2 3 6")
            .output("y", "n 2 3 6")
            .constant("mask", parts.mask)
            .constant("root", real(2.5))
            .with("kt = Transpose(k)", vec![ints("perm", &[0, 1, 3, 2])])
            .node("p = MatMul(q, kt)")
            .node("s = Div(p, root)")
            .node("m = Add(s, mask)")
            .with("w = Softmax(m)", vec![int("axis", parts.axis)])
            .node("y = MatMul(w, v)")
            .only(&["attention"])
    }

    #[test]
    fn attention_is_one_operator() {
        apart(parts()).gives(&["y = Attention(q, k, v, mask) {scale=0.4}"]);
    }

    #[test]
    fn it_needs_its_operator_set_and_the_softmax_over_keys() {
        apart(Parts {
            opset: 22,
            ..parts()
        })
        .stays();
        apart(Parts { axis: 2, ..parts() }).stays();
        apart(parts()).target(Target::OrtCpu).stays();
    }

    #[test]
    fn heads_that_broadcast_stay_apart() {
        apart(Parts {
            keys: "1 1 3 8",
            ..parts()
        })
        .stays();
    }

    #[test]
    fn a_mask_has_all_keys_and_leaves_every_query_one() {
        let with = |mask: Tensor| apart(Parts { mask, ..parts() });
        with(triangle(&[1, 1, 3, 3], -1)).gives(&["y = Attention(q, k, v, mask) {scale=0.4}"]);
        with(reals(&[3, 1])).stays();
        // The first query has no key.
        with(triangle(&[3, 3], -2)).stays();
    }

    #[test]
    fn a_mask_that_nobody_knows_stays_apart() {
        let trial = Trial::new(23)
            .input("q", "n 2 3 8")
            .input("mask", "3 3")
            .output("y", "n 2 3 8")
            .with("kt = Transpose(q)", vec![ints("perm", &[0, 1, 3, 2])])
            .node("p = MatMul(q, kt)")
            .node("m = Add(p, mask)")
            .node("w = Softmax(m)")
            .node("y = MatMul(w, q)");
        trial.only(&["attention"]).stays();
    }

    #[test]
    fn steps_that_others_read_stay() {
        apart(parts()).output("w", "n 2 3 3").stays();
    }

    #[test]
    fn keys_in_another_order_are_turned_once() {
        let trial = Trial::new(23)
            .input("q", "n 2 t 8")
            .input("k", "n t 2 8")
            .input("v", "n 2 t 8")
            .output("y", "n 2 t 8")
            .with("kt = Transpose(k)", vec![ints("perm", &[0, 2, 3, 1])])
            .node("p = MatMul(q, kt)")
            .node("w = Softmax(p)")
            .node("y = MatMul(w, v)")
            .only(&["attention"]);
        trial.gives(&[
            "y_keys = Transpose(k) {perm=[0, 2, 1, 3]}",
            "y = Attention(q, y_keys, v) {scale=1}",
        ]);
    }
}
