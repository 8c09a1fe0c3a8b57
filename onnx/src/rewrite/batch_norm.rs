//! Batch normalization folded into a neighbouring product.
//!
//! Before: `y = Conv(x, W, b); z = BatchNormalization(y, γ, β, μ, σ²)`; after: `z = Conv(x, W', b')`
//! with `W' = γ/√(σ²+ε) · W` by output channel and `b' = γ/√(σ²+ε) · (b - μ) + β`. The product may be
//! Conv, ConvTranspose, Gemm, MatMul or another normalization. Also `Conv(BatchNormalization(x))`, by
//! input channel; where the convolution pads, only if the normalization shifts by 0, for the padding
//! was not normalized.
//!
//! Legal if the statistics are constant and not of the batch, the product has constant weights and
//! nobody else reads what is between, and none of it is quantized. Saves a node and a pass over the
//! product's output. A normalization alone stays: Mul and Add instead would be one node more.

use super::Rule;
use super::patch::Patch;
use super::product::{Affine, LinearOperation};
use super::scope::Scope;
use crate::attributes::Attributes;

pub const RULES: &[Rule] = &[
    Rule {
        name: "fold-batch-norm-after",
        at: after_product,
    },
    Rule {
        name: "fold-batch-norm-before",
        at: before_product,
    },
];

/// What a normalization does to each channel.
fn affine(scope: &Scope, n: usize) -> Option<Affine> {
    let node = scope.node(n);
    let a = Attributes::new(node);
    let of_batch = a.flag("training_mode") || scope.opset() < 7 || a.int("spatial") == Some(0);
    // Before version 14 further outputs, read or not, mean statistics of the batch.
    let others = node.output.iter().skip(1).any(|o| !o.is_empty());
    if !scope.is(n, "BatchNormalization") || of_batch || others {
        return None;
    }
    let values = |at: usize| scope.constant(scope.input(n, at)?)?.to_f64();
    let (gamma, beta, mean, variance) = (values(1)?, values(2)?, values(3)?, values(4)?);
    let n_channels = gamma.len();
    if [&beta, &mean, &variance]
        .iter()
        .any(|v| v.len() != n_channels)
    {
        return None;
    }
    let epsilon = f64::from(a.float("epsilon").unwrap_or(1e-5));
    let scale: Vec<f64> = (0..n_channels)
        .map(|c| gamma[c] / (variance[c] + epsilon).sqrt())
        .collect();
    let shift = (0..n_channels)
        .map(|c| beta[c] - mean[c] * scale[c])
        .collect();
    Some(Affine { scale, shift })
}

fn after_product(scope: &Scope, n: usize) -> Option<Patch> {
    let by = affine(scope, n)?;
    let p = scope.producer(scope.input(n, 0)?)?;
    if scope.sole_user(p) != Some(n) {
        return None;
    }
    let product = LinearOperation::new(scope, p)?;
    // Channels are the second dimension; those of a Gemm are the last, of two.
    let y = scope.node(p).output.first()?;
    if !product.has_channels_second(scope, y) || by.scale.len() != product.n_channels {
        return None;
    }
    product.then(scope, &by, &[n], n)
}

fn before_product(scope: &Scope, n: usize) -> Option<Patch> {
    let product = LinearOperation::new(scope, n)?;
    let y = scope.input(product.first(), 0)?;
    let norm = scope.made_by(y, "BatchNormalization")?;
    if scope.sole_user(norm) != Some(product.first()) {
        return None;
    }
    let by = affine(scope, norm)?;
    if !product.has_channels_second(scope, y) || by.scale.len() != product.n_in {
        return None;
    }
    product.after(scope, &by, scope.input(norm, 0)?, &[norm])
}

#[cfg(test)]
mod tests {
    use super::super::patch::{float, int, ints};
    use super::super::trial::{Trial, reals};
    use crate::tensor::{Tensor, Values};

    fn positive(n: usize) -> Tensor {
        let values = (0..n).map(|n| 0.5 + n as f32 / 8.0);
        Tensor::new(&[n], Values::F32(values.collect()))
    }

    /// A model with the statistics of `n` channels.
    fn trial(opset: i64, n: usize) -> Trial {
        let vector = reals(&[3 * n]).to_f64().unwrap();
        let row = |from: usize| {
            Tensor::floats(crate::element::Element::F32, &[n], &vector[from..from + n]).unwrap()
        };
        Trial::new(opset)
            .constant("gamma", row(0))
            .constant("beta", row(n))
            .constant("mean", row(2 * n))
            .constant("var", positive(n))
    }

    const NORM: &str = "BatchNormalization(a, gamma, beta, mean, var)";

    fn after(group: i64, weights: &[usize], op: &str, n: usize) -> Trial {
        let norm = vec![float("epsilon", 1e-3)];
        trial(15, n)
            .input("x", "N 4 5 5")
            .output("y", "N C H W")
            .constant("w", reals(weights))
            .with(&format!("a = {op}(x, w)"), vec![int("group", group)])
            .with(&format!("y = {NORM}"), norm)
    }

    #[test]
    fn after_convolutions_of_any_groups() {
        let expected = ["y = Conv(x, w_1, w_bias) {group=2}"];
        after(2, &[6, 2, 3, 3], "Conv", 6).gives(&expected);
        after(4, &[4, 1, 3, 3], "Conv", 4).gives(&["y = Conv(x, w_1, w_bias) {group=4}"]);
    }

    #[test]
    fn after_a_product_with_bias() {
        let matrices = |rank: &str| {
            trial(15, 3)
                .input("x", rank)
                .output("y", &rank.replace('4', "3"))
                .constant("w", reals(&[4, 3]))
        };
        matrices("N 4")
            .node("a = MatMul(x, w)")
            .node(&format!("y = {NORM}"))
            .gives(&["y = Gemm(x, w_1, w_bias)"]);
        let gemm = vec![float("alpha", 0.5), float("beta", 2.0)];
        matrices("N 4")
            .constant("b", reals(&[1, 3]))
            .with("a = Gemm(x, w, b)", gemm)
            .node(&format!("y = {NORM}"))
            .gives(&["y = Gemm(x, w_1, b_1)"]);
        // With three dimensions, the channels are the second, and the columns the last.
        matrices("N 3 4")
            .node("a = MatMul(x, w)")
            .node(&format!("y = {NORM}"))
            .stays();
    }

    #[test]
    fn only_if_nobody_else_reads_what_is_between() {
        let both = |other: &str| {
            after(1, &[3, 4, 3, 3], "Conv", 3)
                .output("z", "N C H W")
                .node(&format!("z = Relu({other})"))
        };
        assert_eq!(both("y").run().1.len(), 2);
        both("a").stays();
    }

    #[test]
    fn only_with_constant_statistics_of_no_batch() {
        let model = |mode: i64, var: &str| {
            trial(15, 3)
                .input("x", "N 4 5 5")
                .input("given", "3")
                .output("y", "N 3 5 5")
                .constant("w", reals(&[3, 4, 1, 1]))
                .node("a = Conv(x, w)")
                .node("v = Abs(given)")
                .with(
                    &format!("y = BatchNormalization(a, gamma, beta, mean, {var})"),
                    vec![int("training_mode", mode)],
                )
                .only(&["fold-batch-norm-after"])
        };
        assert_eq!(model(0, "var").run().0.len(), 1);
        assert_eq!(model(0, "v").run().0.len(), 0);
        assert_eq!(model(1, "var").unverified().len(), 2);
    }

    #[test]
    fn weights_that_others_read_are_not_doubled() {
        let shared = |size: usize| {
            after(1, &[64, 4, size, size], "Conv", 64)
                .output("z", "N 64 H W")
                .node("z = Conv(x, w)")
                .only(&["fold-batch-norm-after"])
        };
        // 1 KB is copied, 25 KB are not.
        assert_eq!(shared(1).run().0.len(), 1);
        assert_eq!(shared(5).run().0.len(), 0);
    }

    /// Weights that a node makes, of one value.
    fn generated(n: usize) -> Trial {
        trial(15, n)
            .input("x", "N 64 5 5")
            .output("y", &format!("N {n} 3 3"))
            .ints("sizes", &[n as i64, 64, 3, 3])
            .constant("half", Tensor::new(&[1], Values::F32(vec![0.5])))
    }

    #[test]
    fn weights_that_a_node_makes_are_not_stored() {
        let scaled = generated(64)
            .node("w = ConstantOfShape(sizes)")
            .node("a = Conv(x, w)")
            .node(&format!("y = {NORM}"));
        // Zeros remain zeros.
        scaled.gives(&[
            "w_1 = ConstantOfShape([64, 64, 3, 3])",
            "y = Conv(x, w_1, w_bias)",
        ]);
        let by_channel = generated(64)
            .constant("each", reals(&[64, 1, 1, 1]))
            .node("w = Expand(each, sizes)")
            .node("a = Conv(x, w)")
            .node(&format!("y = {NORM}"));
        by_channel.gives(&[
            "w_2 = Expand(w_1, [64, 64, 3, 3])",
            "y = Conv(x, w_2, w_bias)",
        ]);
        // By input channel they are no longer few.
        let of_input = generated(64)
            .constant("each", reals(&[64, 1, 1]))
            .node("w = Expand(each, sizes)")
            .node("a = Conv(x, w)")
            .node(&format!("y = {NORM}"));
        of_input.stays();
    }

    fn before(pads: &[i64], shifts: bool) -> Trial {
        let mut model = trial(15, 4);
        if !shifts {
            let zeros = Tensor::new(&[4], Values::F32(vec![0.0; 4]));
            model = model.constant("zeros", zeros);
        }
        let norm = match shifts {
            true => "a = BatchNormalization(x, gamma, beta, mean, var)",
            false => "a = BatchNormalization(x, gamma, zeros, zeros, var)",
        };
        model
            .input("x", "N 4 5 5")
            .output("y", "N 6 H W")
            .constant("w", reals(&[6, 2, 3, 3]))
            .node(norm)
            .with("y = Conv(a, w)", vec![int("group", 2), ints("pads", pads)])
    }

    #[test]
    fn before_a_convolution_unless_the_padding_would_miss_the_shift() {
        let expected = "y = Conv(x, w_1, w_bias) {group=2, pads=[0, 0, 0, 0]}";
        before(&[0; 4], true).gives(&[expected]);
        before(&[1; 4], true).stays();
        let expected = "y = Conv(x, w_1) {group=2, pads=[1, 1, 1, 1]}";
        before(&[1; 4], false).gives(&[expected]);
    }

    #[test]
    fn quantized_products_keep_their_structure() {
        let model = |weights: &str| {
            trial(15, 3)
                .input("x", "N 4 5 5")
                .output("y", "N 3 5 5")
                .constant("w", reals(&[3, 4, 1, 1]))
                .constant(
                    "q",
                    Tensor::new(&[3, 4, 1, 1], Values::I8((0..12).collect())),
                )
                .constant("s", Tensor::new(&[], Values::F32(vec![0.1])))
                .node("d = DequantizeLinear(q, s)")
                .node(&format!("a = Conv(x, {weights})"))
                .node(&format!("y = {NORM}"))
        };
        assert_eq!(model("w").unverified().len(), 1);
        assert_eq!(model("d").unverified().len(), 3);
    }
}
