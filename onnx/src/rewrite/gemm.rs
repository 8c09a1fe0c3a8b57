//! Products of matrices with what stands around them.
//!
//! - `transpose-in-gemm`: `y = Gemm(Transpose(a), b, c)` → `Gemm(a, b, c) {transA=1}`, the same for `b`;
//!   from operator set 11 on also `MatMul(Transpose(a), b)` of two matrices.
//! - `term-in-gemm`: `p = MatMul(a, b); y = p + c` → `Gemm(a, b, c)`, `c` being computed.
//!
//! Legal for floats of two dimensions, where nothing else reads what is between, `c` broadcasts to the
//! product's sizes and nothing is quantized. Saves a node and a pass over an operand or the result.

use super::Rule;
use super::noop::same_sizes;
use super::patch::{Patch, heir, int, node};
use super::product::{is_matrix_product, is_quantized};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::element::Element;

pub const RULES: &[Rule] = &[
    Rule {
        name: "transpose-in-gemm",
        at: transposed,
    },
    Rule {
        name: "term-in-gemm",
        at: with_term,
    },
];

/// Whether node `n` multiplies two matrices, so that Gemm says the same.
fn is_of_matrices(scope: &Scope, n: usize) -> bool {
    let operand = |at: usize| {
        let name = scope.input(n, at)?;
        let element = scope.fact(name)?.element?;
        Some(is_matrix_product(scope, name, element))
    };
    operand(0) == Some(true) && operand(1) == Some(true) && !is_quantized(scope, n)
}

/// The Transpose of a matrix that only operand `at` of node `n` reads, and what it turns.
fn turned<'a>(scope: &Scope<'a>, n: usize, at: usize) -> Option<(usize, &'a str)> {
    let t = scope.made_by(scope.input(n, at)?, "Transpose")?;
    let x = scope.input(t, 0)?;
    let turns = matches!(
        Attributes::new(scope.node(t)).ints("perm"),
        None | Some([1, 0])
    );
    let alone = scope.sole_user(t) == Some(n) && scope.fact(x)?.rank() == Some(2);
    (turns && alone && !is_quantized(scope, t)).then_some((t, x))
}

fn transposed(scope: &Scope, n: usize) -> Option<Patch> {
    let may_be = scope.is(n, "Gemm") || (scope.is(n, "MatMul") && scope.opset() >= 11);
    if !may_be || !is_of_matrices(scope, n) {
        return None;
    }
    let found = [turned(scope, n, 0), turned(scope, n, 1)];
    if found.iter().all(Option::is_none) {
        return None;
    }
    let old = scope.node(n);
    let mut made = node("Gemm", &[], Vec::new());
    made.input.clone_from(&old.input);
    let is_flag = |name: &str| matches!(name, "transA" | "transB");
    let kept = old.attribute.iter().filter(|a| !is_flag(&a.name));
    made.attribute.extend(kept.cloned());
    let mut patch = Patch {
        remove: vec![n],
        ..Patch::default()
    };
    for (at, name) in ["transA", "transB"].into_iter().enumerate() {
        let mut flag = Attributes::new(old).flag(name);
        if let Some((t, x)) = found[at] {
            flag = !flag;
            made.input[at] = x.to_string();
            patch.remove.push(t);
        }
        made.attribute.extend(flag.then(|| int(name, 1)));
    }
    patch.insert.push(heir(old, made));
    Some(patch)
}

fn with_term(scope: &Scope, n: usize) -> Option<Patch> {
    if !scope.is(n, "Add") {
        return None;
    }
    [(0, 1), (1, 0)].into_iter().find_map(|(value, term)| {
        let (value, term) = (scope.input(n, value)?, scope.input(n, term)?);
        let p = scope.made_by(value, "MatMul")?;
        if scope.sole_user(p) != Some(n) || !is_of_matrices(scope, p) {
            return None;
        }
        let (product, added) = (scope.fact(value)?, scope.fact(term)?);
        let sizes = product.shape.as_deref()?;
        let given = added.shape.as_deref()?;
        let from = sizes.len().checked_sub(given.len())?;
        let mut pairs = given.iter().zip(&sizes[from..]);
        let fits = pairs.all(|(c, y)| c == y || c.as_const() == Some(1));
        let sum = scope.fact(scope.node(n).output.first()?)?;
        let is_float = added.element == product.element && added.element != Some(Element::BF16);
        if !fits || !is_float || !same_sizes(product, sum) || is_quantized(scope, n) {
            return None;
        }
        let operands = [scope.input(p, 0)?, scope.input(p, 1)?, term];
        let mut patch = Patch::exchange(scope, n, node("Gemm", &operands, Vec::new()));
        patch.remove.push(p);
        Some(patch)
    })
}

#[cfg(test)]
mod tests {
    use super::super::patch::{float, int, ints};
    use super::super::trial::{Trial, reals};
    use crate::tensor::{Tensor, Values};

    fn trial(opset: i64) -> Trial {
        Trial::new(opset)
            .input("x", "4 n")
            .input("c", "3")
            .output("y", "n 3")
            .constant("w", reals(&[4, 3]))
            .only(&["transpose-in-gemm", "term-in-gemm"])
    }

    #[test]
    fn transposes_become_flags() {
        let gemm = |flag: i64| {
            trial(13).node("t = Transpose(x)").with(
                "y = Gemm(t, w, c)",
                vec![float("alpha", 2.0), int("transA", flag)],
            )
        };
        gemm(0).gives(&["y = Gemm(x, w, c) {alpha=2, transA=1}"]);
        let product = |opset: i64| {
            trial(opset)
                .node("t = Transpose(x)")
                .node("y = MatMul(t, w)")
        };
        product(13).gives(&["y = Gemm(x, w) {transA=1}"]);
        // Before 11 a Gemm has a term.
        product(10).stays();
    }

    #[test]
    fn quantized_operands_keep_their_structure_through_movements() {
        let model = |steps: &str| {
            let model = Trial::new(13).output("y", "4 n");
            let model = model.constant("s", reals(&[]));
            let model = model.constant("q", Tensor::new(&[3, 4], Values::I8((0..12).collect())));
            let model = model.node("d = DequantizeLinear(q, s)").input("z", "3 n");
            let model = model.node("e = Neg(d)");
            let model = steps.split("; ").fold(model, Trial::node);
            model.only(&["transpose-in-gemm"]).unverified().len()
        };
        // Over real numbers, the transposition goes.
        assert_eq!(model("t = Transpose(e); y = MatMul(t, z)"), 3);
        assert_eq!(model("t = Transpose(d); y = MatMul(t, z)"), 3);
        assert_eq!(
            model("a = Identity(d); t = Transpose(a); y = MatMul(t, z)"),
            4
        );
    }

    #[test]
    fn a_transpose_that_others_read_stays() {
        let both = trial(13)
            .output("z", "n 4")
            .node("t = Transpose(x)")
            .node("z = Neg(t)");
        both.node("y = MatMul(t, w)").stays();
    }

    #[test]
    fn only_of_matrices_that_are_turned() {
        let order = trial(13).with("t = Transpose(x)", vec![ints("perm", &[0, 1])]);
        let order = order.with("y = Gemm(t, w)", vec![int("transA", 1)]);
        order.stays();
        let three = Trial::new(13)
            .input("x", "2 4 5")
            .output("y", "5 4 3")
            .constant("w", reals(&[2, 3]))
            .node("t = Transpose(x)")
            .node("y = MatMul(t, w)");
        three.only(&["transpose-in-gemm"]).stays();
    }

    fn summed(term: &str, sizes: &str) -> Trial {
        Trial::new(13)
            .input("x", "n 4")
            .input("c", term)
            .output("y", sizes)
            .constant("w", reals(&[4, 3]))
            .node("p = MatMul(x, w)")
            .node("y = Add(c, p)")
            .only(&["term-in-gemm"])
    }

    #[test]
    fn a_term_becomes_that_of_the_product() {
        summed("3", "n 3").gives(&["y = Gemm(x, w, c)"]);
        summed("n 1", "n 3").gives(&["y = Gemm(x, w, c)"]);
    }

    #[test]
    fn a_term_that_gives_the_product_other_sizes_stays() {
        summed("2 1 3", "2 n 3").stays();
        summed("m 3", "n 3").stays();
    }

    #[test]
    fn a_product_that_others_read_stays() {
        let both = Trial::new(13)
            .input("x", "n 4")
            .input("c", "3")
            .output("y", "n 3")
            .output("p", "n 3")
            .constant("w", reals(&[4, 3]));
        let both = both.node("p = MatMul(x, w)").node("y = Add(p, c)");
        both.only(&["term-in-gemm"]).stays();
    }
}
