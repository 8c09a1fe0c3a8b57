//! Products that share an input, as one product.
//!
//! Before: `q = Add(MatMul(x, A), a); k = Add(MatMul(x, B), b); v = Add(MatMul(x, C), c)`; after:
//! `s = Add(MatMul(x, [A B C]), [a b c]); q, k, v = Split(s)`. The same for Gemm, and without biases.
//!
//! Legal if the weights are constant, of one type and read by nobody else. Saves nodes, at the price of
//! copying what is cut up. With less than [`MIN_BYTES`] of weights, products are stacked only if that halves the number
//! of nodes (three products with biases, four without): tiny products cost what a Split costs, and three become
//! 1.1 to 1.3 times as slow in ONNX Runtime (`bench/onnx/operator_times.py`). More than [`MAX_BYTES`] are never
//! stacked: large products take their time in any case, and runtimes recognize attention by its three products.

use super::Rule;
use super::patch::{Patch, heir, int, ints, node};
use super::product::{LinearKind, LinearOperation};
use super::scope::Scope;
use crate::attributes::Attributes;
use crate::tensor::Tensor;

pub const RULES: &[Rule] = &[Rule {
    name: "stack-products",
    at: stack,
}];

/// With at least this many bytes of weights, saving one node is worth a Split.
pub const MIN_BYTES: usize = 1 << 14;

/// Most bytes of weights of one stack.
pub const MAX_BYTES: usize = 1 << 20;

fn stack(scope: &Scope, n: usize) -> Option<Patch> {
    let x = scope.input(n, 0)?;
    let products = siblings(scope, x, n)?;
    let nodes: usize = products.iter().map(|p| p.nodes.len()).sum();
    let with_add = products[0].kind == LinearKind::MatMul && products[0].bias_name().is_some();
    let made = if with_add { 3 } else { 2 };
    let bytes: usize = products.iter().map(|p| p.weight_bytes()).sum();
    let pays = nodes >= 2 * made || (nodes > made && bytes >= MIN_BYTES);
    if products[0].first() != n || !pays || bytes > MAX_BYTES {
        return None;
    }
    let old = scope.node(n);
    let rank = scope.fact(old.output.first()?)?.rank();
    if scope.opset() < 11 && rank.is_none() {
        return None;
    }
    let axis = if scope.opset() < 11 {
        rank? as i64 - 1
    } else {
        -1
    };
    let mut patch = Patch {
        remove: products.iter().flat_map(|p| p.nodes.clone()).collect(),
        ..Patch::default()
    };
    let weight = stacked_weights(scope, &products)?;
    let weight = patch.constant(scope, products[0].weight_name(), weight);
    let bias = match products[0].bias_name() {
        None => None,
        Some(name) => {
            let bias = stacked_biases(scope, &products)?;
            Some(patch.constant(scope, name, bias))
        }
    };
    let mut inputs = vec![x, &weight];
    if !with_add {
        inputs.extend(bias.as_deref());
    }
    let product = node(&old.op_type, &inputs, old.attribute.clone());
    let base = format!("{}_stacked", old.output[0]);
    let mut value = patch.node(scope, &base, product);
    if let (true, Some(bias)) = (with_add, &bias) {
        let add = node("Add", &[&value, bias], Vec::new());
        value = patch.node(scope, &base, add);
    }
    let sizes: Vec<i64> = products.iter().map(|p| p.n_channels as i64).collect();
    let mut split = node("Split", &[&value], vec![int("axis", axis)]);
    if scope.opset() < 13 {
        split.attribute.push(ints("split", &sizes));
    } else {
        let sizes = patch.constant(scope, &format!("{base}_sizes"), Tensor::ints(&sizes));
        split.input.push(sizes);
    }
    for product in &products {
        let last = scope.node(*product.nodes.last()?);
        split.output.push(last.output.first()?.clone());
    }
    let mut split = heir(scope.node(*products[0].nodes.last()?), split);
    split.name = scope.fresh(&format!("{base}_split"));
    patch.insert.push(split);
    Some(patch)
}

/// The products of `x` that can be one with that of node `n`, in order.
fn siblings<'a>(scope: &Scope<'a>, x: &str, n: usize) -> Option<Vec<LinearOperation<'a>>> {
    let own = product_at(scope, n)?;
    let attributes = Attributes::new(scope.node(n));
    let alike = |other: &LinearOperation| {
        let node = scope.node(other.first());
        let a = Attributes::new(node);
        let same = |name| a.float(name) == attributes.float(name);
        let turned = |name| a.flag(name) == attributes.flag(name);
        other.kind == own.kind
            && other.element() == own.element()
            && other.bias_name().is_some() == own.bias_name().is_some()
            && other.weight_is_own(scope)
            && ["alpha", "beta"].into_iter().all(same)
            && ["transA", "transB"].into_iter().all(turned)
    };
    let mut readers = scope.readers(x).to_vec();
    readers.dedup();
    let products = readers
        .into_iter()
        .filter(|r| scope.input(*r, 0) == Some(x));
    let products: Vec<LinearOperation> = products
        .filter_map(|r| product_at(scope, r))
        .filter(alike)
        .collect();
    (products.len() > 1).then_some(products)
}

/// The product of the MatMul or Gemm at that position, with the Add after it if it has one.
fn product_at<'a>(scope: &Scope<'a>, n: usize) -> Option<LinearOperation<'a>> {
    if !scope.is(n, "MatMul") && !scope.is(n, "Gemm") {
        return None;
    }
    let after = scope.sole_user(n).filter(|m| scope.is(*m, "Add"));
    let with_bias = after.and_then(|m| LinearOperation::new(scope, m));
    with_bias
        .filter(|p| p.first() == n)
        .or_else(|| LinearOperation::new(scope, n))
}

fn stacked_weights(scope: &Scope, products: &[LinearOperation]) -> Option<Tensor> {
    let first = scope.constant(products[0].weight_name())?;
    let by_rows = Attributes::new(scope.node(products[0].first())).flag("transB");
    let n_in = products[0].n_in;
    let n_out: usize = products.iter().map(|p| p.n_channels).sum();
    let tensors: Option<Vec<Vec<f64>>> = products
        .iter()
        .map(|p| scope.constant(p.weight_name())?.to_f64())
        .collect();
    let tensors = tensors?;
    if by_rows {
        return Tensor::floats(first.element(), &[n_out, n_in], &tensors.concat());
    }
    let mut values = Vec::with_capacity(n_in * n_out);
    for row in 0..n_in {
        for (tensor, product) in tensors.iter().zip(products) {
            let n = product.n_channels;
            values.extend_from_slice(&tensor[row * n..][..n]);
        }
    }
    Tensor::floats(first.element(), &[n_in, n_out], &values)
}

fn stacked_biases(scope: &Scope, products: &[LinearOperation]) -> Option<Tensor> {
    let mut values = Vec::new();
    for product in products {
        let bias = scope.constant(product.bias_name()?)?.to_f64()?;
        match bias.as_slice() {
            [one] => values.extend(std::iter::repeat_n(*one, product.n_channels)),
            row => values.extend_from_slice(row),
        }
    }
    Tensor::floats(products[0].element(), &[values.len()], &values)
}

#[cfg(test)]
mod tests {
    use super::super::patch::{float, int};
    use super::super::trial::{Trial, reals};

    fn trial(opset: i64, columns: [usize; 3]) -> Trial {
        Trial::new(opset)
            .input("x", "N 3 4")
            .output("q", "N 3 A")
            .output("k", "N 3 B")
            .output("v", "N 3 C")
            .constant("a", reals(&[4, columns[0]]))
            .constant("b", reals(&[4, columns[1]]))
            .constant("c", reals(&[4, columns[2]]))
    }

    #[test]
    fn three_products_with_biases() {
        let row = |n: usize| reals(&[n]);
        let model = |opset| {
            trial(opset, [2, 5, 3])
                .constant("d", row(2))
                .constant("e", row(5))
                .constant("f", row(3))
                .node("p = MatMul(x, a)")
                .node("q = Add(p, d)")
                .node("r = MatMul(x, b)")
                .node("k = Add(e, r)")
                .node("s = MatMul(x, c)")
                .node("v = Add(s, f)")
        };
        model(13).gives(&[
            "p_stacked = MatMul(x, a_1)",
            "p_stacked_1 = Add(p_stacked, d_1)",
            "q, k, v = Split(p_stacked_1, [2, 5, 3]) {axis=-1}",
        ]);
        model(9).gives(&[
            "p_stacked = MatMul(x, a_1)",
            "p_stacked_1 = Add(p_stacked, d_1)",
            "q, k, v = Split(p_stacked_1) {axis=2, split=[2, 5, 3]}",
        ]);
    }

    /// `q`, `k`, `v` and `u` of the columns of `x`, without biases.
    fn four(columns: [usize; 4]) -> Trial {
        let [a, b, c, d] = columns;
        trial(13, [a, b, c])
            .output("u", "N 3 D")
            .constant("d", reals(&[4, d]))
            .node("q = MatMul(x, a)")
            .node("k = MatMul(x, b)")
            .node("v = MatMul(x, c)")
    }

    #[test]
    fn only_if_nodes_become_half_as_many() {
        let model = four([2, 5, 3, 1]);
        model.node("u = MatMul(x, d)").gives(&[
            "q_stacked = MatMul(x, a_1)",
            "q, k, v, u = Split(q_stacked, [2, 5, 3, 1]) {axis=-1}",
        ]);
        let model = four([2, 5, 3, 1]).node("r = Relu(x)");
        model.node("u = MatMul(r, d)").stays();
    }

    #[test]
    fn one_node_less_pays_from_some_size_on() {
        let model = |n: usize| {
            let model = trial(13, [n - 1, n, n + 1]).node("q = MatMul(x, a)");
            model.node("k = MatMul(x, b)").node("v = MatMul(x, c)")
        };
        model(341).stays();
        assert_eq!(model(342).run().1.len(), 2);
    }

    #[test]
    fn only_weights_of_their_own() {
        let model = four([4; 4]).node("u = MatMul(x, d)");
        assert_eq!(model.only(&["stack-products"]).run().1.len(), 2);
        let model = four([4; 4]).node("u = MatMul(x, a)");
        model.only(&["stack-products"]).stays();
    }

    #[test]
    fn only_small_ones() {
        let model = |n: usize| four([n, n + 1, n + 2, n + 3]).node("u = MatMul(x, d)");
        assert_eq!(model(100).run().1.len(), 2);
        model(30_000).stays();
    }

    #[test]
    fn only_with_the_same_factors() {
        let model = |alpha: f32| {
            let product = |alpha| vec![float("alpha", alpha), int("transB", 1)];
            Trial::new(13)
                .input("x", "N 4")
                .output("q", "N 2")
                .output("k", "N 3")
                .output("v", "N 5")
                .output("u", "N 1")
                .constant("a", reals(&[2, 4]))
                .constant("b", reals(&[3, 4]))
                .constant("c", reals(&[5, 4]))
                .constant("d", reals(&[1, 4]))
                .with("q = Gemm(x, a)", product(2.0))
                .with("k = Gemm(x, b)", product(2.0))
                .with("v = Gemm(x, c)", product(2.0))
                .with("u = Gemm(x, d)", product(alpha))
        };
        assert_eq!(model(2.0).run().1.len(), 2);
        model(3.0).stays();
    }
}
