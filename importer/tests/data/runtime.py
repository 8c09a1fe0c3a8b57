"""Writes cases of ONNX Runtime's own operators for importer/tests/operators.rs.

Run `python importer/tests/data/runtime.py` with the PyPI packages `onnx`, `onnxruntime` and
`numpy`; it rewrites `runtime.cases` and `runtime_attention.cases` beside itself, in the form that
`generate.py` describes. The expected outputs are ONNX Runtime's.
"""

import numpy as np
from edges import HERE, answers, encode, model_of, typed
from edges_made import Edge, edge

RANDOM = np.random.default_rng(0)


def some(*shape: int) -> np.ndarray:
    """Normal numbers, single precision."""
    return RANDOM.standard_normal(shape).astype(np.float32)


def i32(*values) -> np.ndarray:
    """Integers of 32 bits."""
    return np.array(values, np.int32)


def fused(name: str, op: str, *inputs, **rest) -> Edge:
    """A node of ONNX Runtime's domain."""
    return edge(name, op, *inputs, domain="com.microsoft", **rest)


X = some(2, 3, 4)
IMAGE, KERNELS = some(1, 2, 5, 5), some(3, 2, 3, 3)
WINDOW = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
WEIGHTS, ROW = some(4), some(4)

RUNTIME = [
    fused("plain", "Gelu", X),
    fused("a bias", "BiasGelu", X, ROW),
    fused("plain", "FastGelu", X),
    fused("a bias", "FastGelu", X, ROW),
    fused("usual", "QuickGelu", X),
    fused("another slope", "QuickGelu", X, alpha=0.5),
    fused("sums", "SkipLayerNormalization", X, some(2, 3, 4), WEIGHTS, ROW, some(4), outputs=4),
    fused("no shift", "SkipLayerNormalization", X, some(2, 3, 4), WEIGHTS, epsilon=0.1),
    fused("a row for all", "SkipLayerNormalization", X, some(3, 4), WEIGHTS, ROW),
    fused("a bias", "SkipSimplifiedLayerNormalization", X, some(2, 3, 4), WEIGHTS, ROW),
    edge("rows", "SimplifiedLayerNormalization", X, WEIGHTS, axis=-1, epsilon=0.01),
    fused("scaled", "FusedMatMul", X, some(2, 4, 2), alpha=0.5),
    fused("transposed", "FusedMatMul", X, some(2, 4), transB=1),
    fused("both transposed", "FusedMatMul", X, some(2, 5, 3), transA=1, transB=1),
    fused("transposed", "TransposeMatMul", X, some(2, 3, 2), transA=1),
    fused("scaled", "FusedGemm", some(2, 3), some(3, 4), ROW, alpha=0.5, activation="Relu"),
    fused(
        "leaky",
        "FusedGemm",
        some(2, 3),
        some(3, 4),
        ROW,
        activation="LeakyRelu",
        activation_alpha=0.1,
    ),
    fused("bare", "FusedConv", IMAGE, KERNELS, **WINDOW),
    fused("activated", "FusedConv", IMAGE, KERNELS, some(3), activation="Relu", **WINDOW),
    fused("a sum", "FusedConv", IMAGE, KERNELS, some(3), some(1, 3, 5, 5), **WINDOW),
    fused(
        "a line",
        "FusedConv",
        IMAGE,
        KERNELS,
        activation="HardSigmoid",
        activation_params=[0.3, 0.4],
        **WINDOW,
    ),
    fused(
        "limits",
        "FusedConv",
        IMAGE,
        KERNELS,
        activation="Clip",
        activation_params=[-0.5, 1.0],
        **WINDOW,
    ),
    fused(
        "all of it",
        "EmbedLayerNormalization",
        i32([1, 2, 0], [3, 3, 1]),
        i32([0, 1, 1], [1, 0, 0]),
        some(5, 4),
        some(6, 4),
        some(2, 4),
        WEIGHTS,
        ROW,
        i32([1, 1, 0], [1, 0, 0]),
        outputs=2,
    ),
    fused(
        "words and places",
        "EmbedLayerNormalization",
        i32([1, 2, 0]),
        None,
        some(5, 4),
        some(6, 4),
        None,
        WEIGHTS,
        ROW,
        None,
        i32([2, 0, 5]),
        outputs=2,
    ),
]

MERGED = (some(2, 3, 4), some(4, 12), some(12))
SEPARATE = (some(2, 3, 4), some(2, 5, 4), some(2, 5, 4))
PAST = some(2, 2, 2, 2, 2)

ATTENTION = [
    fused("plain", "Attention", *MERGED, num_heads=2),
    fused("causal", "Attention", *MERGED, num_heads=2, unidirectional=1),
    fused("scaled", "Attention", *MERGED, num_heads=2, scale=0.3),
    fused("lengths", "Attention", *MERGED, i32(2, 3), num_heads=2),
    fused("a mask of keys", "Attention", *MERGED, i32([1, 1, 0], [0, 1, 1]), num_heads=2),
    fused(
        "a mask for each query",
        "Attention",
        *MERGED,
        RANDOM.integers(0, 2, (2, 3, 3)).astype(np.int32),
        num_heads=2,
        mask_filter_value=-5.0,
    ),
    fused(
        "a bias",
        "Attention",
        *MERGED,
        i32([1, 1, 0], [0, 1, 1]),
        None,
        some(2, 2, 3, 3),
        num_heads=2,
    ),
    fused(
        "other widths",
        "Attention",
        some(1, 3, 4),
        some(4, 10),
        some(10),
        num_heads=2,
        qkv_hidden_sizes=[4, 4, 2],
    ),
    fused("from before", "Attention", *MERGED, None, PAST, num_heads=2, outputs=2),
    fused(
        "from before, causal",
        "Attention",
        *MERGED,
        None,
        PAST,
        num_heads=2,
        unidirectional=1,
        outputs=2,
    ),
    fused("plain", "MultiHeadAttention", *SEPARATE, num_heads=2),
    fused("biases", "MultiHeadAttention", *SEPARATE, some(12), num_heads=2),
    fused(
        "a mask", "MultiHeadAttention", *SEPARATE, None, i32([1] * 5, [1, 1, 1, 0, 0]), num_heads=2
    ),
    fused("a bias", "MultiHeadAttention", *SEPARATE, None, None, some(1, 2, 3, 5), num_heads=2),
    fused(
        "from before",
        "MultiHeadAttention",
        *(some(2, 3, 4) for _ in range(3)),
        None,
        None,
        None,
        some(2, 2, 4, 2),
        some(2, 2, 4, 2),
        num_heads=2,
        outputs=3,
    ),
    fused(
        "causal",
        "MultiHeadAttention",
        *(some(2, 3, 4) for _ in range(3)),
        num_heads=2,
        unidirectional=1,
    ),
]


def main() -> None:
    """Writes both families."""
    for family, edges in (("runtime", RUNTIME), ("runtime_attention", ATTENTION)):
        cases = b""
        for case in edges:
            model = model_of(case)
            outputs, by = answers(model, case)
            assert by == "onnxruntime", case.name
            typed(model, outputs)
            cases += encode(case, outputs, model)
        (HERE / f"{family}.cases").write_bytes(cases)
        print(f"{family}: {len(edges)} cases, {len(cases)} bytes")


if __name__ == "__main__":
    main()
