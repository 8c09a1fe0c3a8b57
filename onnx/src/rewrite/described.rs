//! What each rule does, in one line for people. Owns the words; the rules' files say why it is legal.

/// Names of rules and what they do, in the order in which they are tried.
const LINES: &[(&str, &str)] = &[
    (
        "inline-function",
        "calls of short local functions, and of those called once, become their nodes",
    ),
    (
        "fold-constants",
        "nodes of constants become initializers, up to the fold limit",
    ),
    ("remove-no-op", "nodes that change nothing go"),
    ("common-subexpression", "equal nodes are computed once"),
    ("share-initializers", "equal initializers are stored once"),
    (
        "inline-branch",
        "If of a known condition becomes its branch",
    ),
    (
        "constant-target",
        "targets computed from sizes become constants",
    ),
    (
        "earlier-shape",
        "Shape is asked of the earliest value with these sizes",
    ),
    (
        "equal-integers",
        "integers that are equal for all sizes are computed once",
    ),
    (
        "sizes-from-shape",
        "sizes put together one by one come from one Shape",
    ),
    (
        "drop-expansion",
        "Expand that the next operator would do by itself goes",
    ),
    ("join-reshapes", "Reshape of Reshape becomes one"),
    ("join-transpositions", "Transpose of Transpose becomes one"),
    (
        "transpose-to-reshape",
        "Transpose that only moves sizes of 1 becomes Reshape",
    ),
    (
        "compute-unreshaped",
        "element-wise operators between two Reshapes work in the sizes outside",
    ),
    ("join-slices", "Slice of Slice becomes one"),
    ("join-concats", "Concat of Concat becomes one"),
    (
        "split-then-concat",
        "pieces that are put together again are what they were",
    ),
    ("slice-of-concat", "a piece of a Concat is that operand"),
    (
        "slices-to-split",
        "several Slices that cut a value up become Split",
    ),
    (
        "join-gathers",
        "Gather of Gather of constant positions becomes one",
    ),
    (
        "fold-batch-norm-after",
        "BatchNormalization goes into the weights of the product before it",
    ),
    (
        "fold-batch-norm-before",
        "BatchNormalization goes into the weights of the product after it",
    ),
    (
        "fold-scale-after",
        "constant scales and terms go into the product before them",
    ),
    (
        "fold-scale-before",
        "constant scales and terms go into the product after them",
    ),
    (
        "fold-distant-scale",
        "a constant scale goes into a product some moves of elements before",
    ),
    (
        "transpose-in-gemm",
        "transposes of matrices become flags of Gemm",
    ),
    ("term-in-gemm", "MatMul of matrices and Add become Gemm"),
    (
        "attention",
        "MatMul, scale, mask, Softmax, MatMul become Attention (not for ort-cpu)",
    ),
    (
        "layer-normalization",
        "mean, variance and what follows become LayerNormalization",
    ),
    (
        "rms-normalization",
        "root mean square and what follows become RMSNormalization",
    ),
    ("softmax", "exponentials over their sum become Softmax"),
    (
        "instance-normalization",
        "mean, variance and what follows become InstanceNormalization",
    ),
    (
        "group-normalization",
        "reshaped InstanceNormalization becomes GroupNormalization (not for ort-cpu)",
    ),
    (
        "gelu",
        "x/2·(1 + erf(x/√2)) and its tanh form become Gelu, for ort-cpu and ort-cuda also its own",
    ),
    ("hard-swish", "x·clip(x + 3, 0, 6)/6 becomes HardSwish"),
    ("swish", "x·Sigmoid(x) becomes Swish"),
    ("neutral-truth", "And with true and Or with false go"),
    (
        "choose-once",
        "Where of a negated or repeated condition becomes one Where",
    ),
    (
        "skip-normalization",
        "Add and LayerNormalization become ONNX Runtime's own (ort-cuda)",
    ),
    (
        "fold-pad",
        "Pad goes into the window of the operator after it",
    ),
    ("merge-pads", "Pad of Pad becomes one"),
    (
        "repeated-step",
        "Relu of Abs, Neg of Neg, Round of Round and the like become one step",
    ),
    (
        "merge-bounds",
        "Clip, Relu, Min and Max one after the other become one Clip",
    ),
    (
        "stack-products",
        "products of one input are one product, cut up",
    ),
    ("lrn-as-convolution", "LRN becomes a convolution (ort-cpu)"),
    (
        "widen-groups",
        "groups of convolutions are widened to blocks (ort-cpu)",
    ),
    (
        "drop-zero-states",
        "initial states and biases of zeros of LSTM, GRU and RNN go",
    ),
    (
        "move-transpositions",
        "transpositions move to where they move the fewest bytes, and cancel",
    ),
];

/// What a rule does.
pub fn about(rule: &str) -> &'static str {
    let line = LINES.iter().find(|(name, _)| *name == rule);
    line.map_or("", |(_, about)| about)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_line_and_every_line_a_rule() {
        let described: Vec<&str> = LINES.iter().map(|(name, _)| *name).collect();
        assert_eq!(described, super::super::rule_names());
        assert!(LINES.iter().all(|(_, about)| !about.is_empty()));
    }
}
