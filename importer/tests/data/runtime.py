"""Writes cases of ONNX Runtime's own operators for the tests of importer and tests.

Run `python importer/tests/data/runtime.py` with the PyPI packages `onnx`, `onnxruntime` and
`numpy`; it rewrites `runtime.cases`, `runtime_attention.cases` and `decoders.cases` beside itself,
in the form that `generate.py` describes. The expected outputs are ONNX Runtime's.
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

#: Heads of 16 elements: four for queries, two for keys and values.
HEADS = {"num_heads": 4, "kv_num_heads": 2}
ANGLES = np.outer(np.arange(12), 1 / 10 ** (np.arange(8) / 8)).astype(np.float32)
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)


def grouped(name: str, steps: int, kept: int, *more, lengths=None, batch=2, packed=False, **rest):
    """A call of GroupQueryAttention with ``kept`` keys from before; ``lengths`` of sequences."""
    total = steps + kept
    new = (some(batch, steps, 64), some(batch, steps, 32), some(batch, steps, 32))
    if packed:
        new = (some(batch, steps, 128), None, None)
    past = (some(batch, 2, kept, 16), some(batch, 2, kept, 16)) if kept else (None, None)
    last = i32(*[n - 1 for n in lengths or [total] * batch])
    counts = (last, np.array([total], np.int32))
    op = "GroupQueryAttention"
    return fused(name, op, *new, *past, *counts, *more, outputs=3, **HEADS, **rest)


def quantized(n_rows: int, length: int, block: int, bits: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Random numbers of few bits and their scales."""
    n_blocks = -(-length // block)
    shape = (n_rows, n_blocks, block * bits // 8)
    numbers = RANDOM.integers(0, 256, shape).astype(np.uint8)
    return numbers, np.abs(some(n_rows, n_blocks)).ravel() + np.float32(0.1)


def product(name: str, length: int, block: int, zeros=None, bits: int = 4, bias=None) -> Edge:
    """A call of MatMulNBits with five columns."""
    numbers, scales = quantized(5, length, block, bits)
    size = {"K": length, "N": 5, "bits": bits, "block_size": block}
    inputs = (some(2, 3, length), numbers, scales, zeros, None, bias)
    return fused(name, "MatMulNBits", *inputs, **size)


def table(name: str, zeros=None, **rest) -> Edge:
    """A call of GatherBlockQuantized with six rows of 32 elements in blocks of 16."""
    numbers = RANDOM.integers(0, 256, (6, 16)).astype(np.uint8)
    scales = np.abs(some(6, 2)) + np.float32(0.1)
    chosen = np.array([[0, 5, 3], [2, 2, -1]], np.int64)
    size = {"bits": 4, "block_size": 16, "quantize_axis": 1, "gather_axis": 0}
    return fused(name, "GatherBlockQuantized", numbers, chosen, scales, zeros, **size, **rest)


DECODERS = [
    grouped("a prompt", 3, 0),
    grouped("one more token", 1, 4),
    grouped("more tokens", 3, 4, batch=1),
    grouped("sequences of other lengths", 1, 4, lengths=[5, 3]),
    grouped("one tensor", 3, 0, packed=True),
    grouped("angles of a prompt", 3, 0, COS, SIN, do_rotary=1),
    grouped("angles of one more token", 1, 4, COS, SIN, do_rotary=1),
    grouped("angles of other lengths", 1, 4, COS, SIN, lengths=[5, 3], do_rotary=1),
    grouped("interleaved angles", 3, 0, COS, SIN, do_rotary=1, rotary_interleaved=1),
    grouped(
        "positions",
        3,
        0,
        COS,
        SIN,
        np.array([[4, 0, 2], [1, 1, 9]], np.int64),
        do_rotary=1,
    ),
    grouped("a scale and a window", 5, 0, scale=0.5, local_window_size=2),
    grouped("a window and kept keys", 1, 6, local_window_size=3),
    grouped("bounded scores", 3, 0, softcap=0.5),
    grouped("a smooth softmax", 3, 0, smooth_softmax=1),
    grouped("sinks", 3, 0, None, None, None, None, some(4)),
    grouped("a bias", 1, 4, None, None, None, some(1, 4, 1, 5)),
    product("usual", 32, 16),
    product("a part of a block", 40, 16),
    product("zero points", 32, 16, RANDOM.integers(0, 256, 5).astype(np.uint8)),
    product("zero points of three blocks", 48, 16, RANDOM.integers(0, 256, 10).astype(np.uint8)),
    product("real zero points", 32, 16, some(10)),
    product("eight bits and a bias", 32, 16, bits=8, bias=some(5)),
    table("usual"),
    table("zero points", RANDOM.integers(0, 256, (6, 1)).astype(np.uint8)),
    grouped("defaults", 3, 0, smooth_softmax=-1, do_rotary=0, softcap=-1.0, qk_output=0),
    grouped("a padded prompt and a window", 5, 0, lengths=[5, 2], local_window_size=2),
    grouped("sequences of other lengths and a window", 1, 4, lengths=[5, 3], local_window_size=2),
]


def main() -> None:
    """Writes all families."""
    families = (("runtime", RUNTIME), ("runtime_attention", ATTENTION), ("decoders", DECODERS))
    for family, edges in families:
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
