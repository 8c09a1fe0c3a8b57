//! What each rule does, in one line for people. Owns the words; the rules' files say why it is legal.

/// Names of rules and what they do, in the order in which they are tried.
const LINES: &[(&str, &str)] = &[
    (
        "inline-function",
        "replaces calls of short local functions, and of those called once, with their nodes",
    ),
    (
        "fold-constants",
        "replaces nodes that read only constants with initializers, up to the fold limit",
    ),
    ("remove-no-op", "removes nodes that change nothing"),
    ("common-subexpression", "computes equal nodes once"),
    ("share-initializers", "stores equal initializers once"),
    (
        "inline-branch",
        "replaces an If whose condition is known with its branch",
    ),
    (
        "constant-target",
        "replaces computed target sizes with constants",
    ),
    (
        "earlier-shape",
        "takes Shape of the earliest value that has the same sizes",
    ),
    (
        "equal-integers",
        "computes integers that are equal for all sizes once",
    ),
    (
        "sizes-from-shape",
        "replaces sizes that are collected one by one with one Shape",
    ),
    (
        "drop-expansion",
        "removes an Expand if all its readers broadcast anyway",
    ),
    ("join-reshapes", "merges consecutive Reshapes"),
    ("join-transpositions", "merges consecutive Transposes"),
    (
        "transpose-to-reshape",
        "replaces a Transpose that moves only dimensions of size 1 with a Reshape",
    ),
    (
        "compute-unreshaped",
        "removes two Reshapes around element-wise operators, which then compute in the outer sizes",
    ),
    ("join-slices", "merges consecutive Slices"),
    ("join-concats", "merges nested Concats"),
    (
        "split-then-concat",
        "removes a Split and the Concat that joins its parts again",
    ),
    (
        "slice-of-concat",
        "replaces a Slice of one operand of a Concat with that operand",
    ),
    (
        "slices-to-split",
        "replaces several Slices that divide a value with one Split",
    ),
    (
        "join-gathers",
        "merges consecutive Gathers with constant positions",
    ),
    (
        "fold-batch-norm-after",
        "folds BatchNormalization into the weights of the product before it",
    ),
    (
        "fold-batch-norm-before",
        "folds BatchNormalization into the weights of the product after it",
    ),
    (
        "fold-scale-after",
        "folds constant factors and terms into the product before them",
    ),
    (
        "fold-scale-before",
        "folds constant factors and terms into the product after them",
    ),
    (
        "fold-distant-scale",
        "folds a constant factor into an earlier product, with other nodes in between",
    ),
    (
        "transpose-in-gemm",
        "replaces transposes of matrices with flags of Gemm",
    ),
    (
        "term-in-gemm",
        "merges MatMul of matrices and Add into Gemm",
    ),
    (
        "attention",
        "merges MatMul, scale, mask, Softmax and MatMul into Attention (not for ort-cpu)",
    ),
    (
        "layer-normalization",
        "merges the steps of a layer normalization into LayerNormalization",
    ),
    (
        "rms-normalization",
        "merges the steps of a normalization by the root mean square into RMSNormalization",
    ),
    (
        "softmax",
        "merges exponentials divided by their sum into Softmax",
    ),
    (
        "instance-normalization",
        "merges the steps of an instance normalization into InstanceNormalization",
    ),
    (
        "group-normalization",
        "replaces reshaped InstanceNormalization with GroupNormalization (not for ort-cpu)",
    ),
    (
        "gelu",
        "merges the steps of GELU into Gelu; for ort-cpu and ort-cuda, also into ONNX Runtime's own",
    ),
    ("hard-swish", "merges x·clip(x + 3, 0, 6)/6 into HardSwish"),
    ("swish", "merges x·Sigmoid(x) into Swish"),
    ("neutral-truth", "removes And with true and Or with false"),
    (
        "choose-once",
        "merges Wheres with a negated or repeated condition",
    ),
    (
        "skip-normalization",
        "merges Add and LayerNormalization into ONNX Runtime's own operator (ort-cuda)",
    ),
    (
        "fold-pad",
        "merges a Pad into the window of the operator after it",
    ),
    ("merge-pads", "merges consecutive Pads"),
    (
        "repeated-step",
        "simplifies Relu of Abs, Neg of Neg, Round of Round and the like",
    ),
    (
        "merge-bounds",
        "merges consecutive Clip, Relu, Min and Max into one Clip",
    ),
    (
        "stack-products",
        "computes products that share an input as one product, and splits the result",
    ),
    (
        "lrn-as-convolution",
        "replaces LRN with a convolution (ort-cpu)",
    ),
    (
        "widen-groups",
        "widens the groups of convolutions to 16 channels, with zeros (ort-cpu)",
    ),
    (
        "drop-zero-states",
        "removes initial states and biases of LSTM, GRU and RNN that are zeros",
    ),
    (
        "move-transpositions",
        "moves transpositions to where they cancel or move the fewest bytes",
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
