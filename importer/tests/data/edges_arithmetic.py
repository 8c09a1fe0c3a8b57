"""Cases of unusual values: arithmetic, activations, conversions, bits, reductions, products."""

import numpy as np
from edges_made import INF, NAN, Edge, edge, f32, i64, ramp
from onnx import TensorProto

I32, U8, I8, I16, F16 = np.int32, np.uint8, np.int8, np.int16, np.float16


def ints(dtype, *values) -> np.ndarray:
    """A vector of integers."""
    return np.array(values, dtype)


SPECIAL = f32(-INF, -1000.0, -1.5, -0.5, -0.0, 0.5, 1.5, 2.5, 1000.0, INF, NAN)
WIDE = f32(-1000.0, -88.0, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0, 88.0, 1000.0)
DIVIDENDS = (7, -7, 7, -7, 0, 6)
DIVISORS = (2, 2, -2, -2, 3, -3)

UNARY = [
    edge("infinities, ties, no number", op, SPECIAL)
    for op in (
        "Abs Ceil Floor Round Neg Relu Sigmoid Tanh Erf Exp Softsign IsNaN IsInf Atan Reciprocal "
        "LeakyRelu HardSigmoid ThresholdedRelu Elu Selu Celu Shrink Softplus"
    ).split()
] + [
    edge("outside of its domain", "Sqrt", f32(-1.0, -0.0, 0.0, 4.0, INF)),
    edge("outside of its domain", "Log", f32(-1.0, 0.0, 1.0, INF)),
    edge("outside of its domain", "Acos", f32(-2.0, -1.0, 1.0, 2.0)),
    edge("outside of its domain", "Asin", f32(-2.0, -1.0, 1.0, 2.0)),
    edge("outside of its domain", "Acosh", f32(0.5, 1.0, 2.0)),
    edge("outside of its domain", "Atanh", f32(-2.0, -1.0, 0.0, 1.0)),
    edge("of a number that is none", "Sin", f32(INF, 0.0)),
    edge("large numbers", "Gelu", WIDE, opset=20),
    edge("large numbers, tanh", "Gelu", WIDE, opset=20, approximate="tanh"),
    edge("large numbers", "Mish", WIDE, by="reference"),
    edge("at its corners", "HardSwish", f32(-1000.0, -3.0, -0.0, 3.0, 1000.0)),
    edge("signs", "Sign", f32(-INF, -2.0, -0.0, 0.0, 3.0, INF)),
    edge("least integer", "Abs", ints(I32, -5, 0, 2**31 - 1)),
    edge("positive alone", "IsInf", f32(-INF, 0.0, INF, NAN), detect_negative=0),
    edge("neither", "IsInf", f32(-INF, 0.0, INF, NAN), detect_negative=0, detect_positive=0),
    edge("one slope for each channel", "PRelu", ramp(1, 2, 3), f32(0.5, -2.0).reshape(2, 1)),
    edge("bias and lambda", "Shrink", SPECIAL[1:-2], lambd=1.0, bias=0.5),
    edge("alpha and infinity", "Celu", f32(-INF, -1.0, 1.0, INF), alpha=2.0),
]

BINARY = [
    *(edge("signs of 32 bits", "Div", ints(t, *DIVIDENDS), ints(t, *DIVISORS)) for t in (I32,)),
    edge("signs of 64 bits", "Div", i64(*DIVIDENDS), i64(*DIVISORS)),
    edge("beyond 53 bits", "Div", i64(2**62 + 3, -(2**62) - 3), i64(2, 2)),
    edge("by zero", "Div", f32(1.0, -1.0, 0.0), f32(0.0, 0.0, 0.0)),
    edge("signs", "Mod", ints(I32, *DIVIDENDS), ints(I32, *DIVISORS)),
    edge("signs as fmod", "Mod", i64(*DIVIDENDS), i64(*DIVISORS), fmod=1),
    edge(
        "fmod of infinities",
        "Mod",
        f32(5.5, -5.5, INF, 5.5, -5.5, 3.0),
        f32(INF, INF, 2.0, -2.0, 2.0, 0.0),
        fmod=1,
    ),
    edge("small bytes", "Mod", ints(I8, -100, 100, -7), ints(I8, 30, -30, 7)),
    edge(
        "no numbers, zeros, infinities",
        "Pow",
        f32(-8.0, 0.0, 0.0, INF, -2.0, -2.0, 1.0, 0.5),
        f32(1 / 3, 0.0, -1.0, 0.0, 3.0, -2.0, INF, INF),
    ),
    edge("integers by floats", "Pow", ints(I32, 2, 9, 10), f32(0.5, 0.5, 2.0)),
    edge("floats by integers", "Pow", f32(-2.0, 2.0, INF), i64(3, -2, 2)),
    edge("integers", "Pow", i64(3, -3, 2, 10), i64(3, 3, 0, 18)),
    edge("negative exponents", "Pow", i64(1, -1, 2, -1), i64(-1, -1, -1, -2)),
    edge("constant square", "Pow", f32(-INF, -3.0, NAN), np.float32(2.0), known=[1]),
    edge("constant cube of integers", "Pow", ints(I32, -3, 4), np.int64(3), known=[1]),
    edge("no numbers", "Max", f32(NAN, 1.0, -INF), f32(1.0, NAN, 0.0), f32(2.0, 2.0, -1.0)),
    edge("no numbers", "Min", f32(NAN, 1.0, INF), f32(1.0, NAN, 0.0), f32(2.0, 2.0, -1.0)),
    edge("of one", "Max", f32(1.0, NAN)),
    edge("broadcast", "Max", i64(1, 5).reshape(2, 1), i64(2, 3, 7)),
    edge("bytes", "Min", ints(U8, 200, 3), ints(U8, 100, 250), opset=12),
    edge("of one", "Sum", f32(1.0, INF)),
    edge("infinities", "Mean", f32(INF, 1.0), f32(-INF, 2.0), f32(0.0, 4.0)),
    edge("no numbers", "Equal", f32(NAN, 0.0, INF), f32(NAN, -0.0, INF)),
    edge("truths", "Equal", np.array([True, False]), np.array([True, True])),
    edge("beyond 53 bits", "Equal", i64(2**53, 2**53 + 1), i64(2**53 + 1, 2**53 + 1)),
    edge("beyond 53 bits", "Less", i64(2**53, 2**53 + 1), i64(2**53 + 1, 2**53)),
    edge("no numbers", "Less", f32(NAN, 1.0), f32(1.0, NAN)),
    edge("no numbers", "GreaterOrEqual", f32(NAN, INF), f32(NAN, INF)),
    edge("no numbers", "Where", np.array([True, False]), f32(1.0, NAN), f32(NAN, 2.0)),
    edge(
        "beyond 53 bits",
        "Where",
        np.array([[True], [False]]),
        i64(2**53 + 1, 1),
        np.int64(-(2**62) - 1),
    ),
    edge("beyond 53 bits", "Mul", i64(3037000499, 2**33), i64(3037000499, 2**31 + 1)),
    edge("beyond 53 bits", "Sub", i64(2**62 + 1), i64(2**61)),
]

CLIPS = [
    edge("least above most", "Clip", f32(-1.0, 2.0, 5.0), np.float32(4.0), np.float32(1.0)),
    edge(
        "constant least above most",
        "Clip",
        f32(-1.0, 5.0),
        np.float32(4.0),
        np.float32(1.0),
        known=[1, 2],
    ),
    edge("no least", "Clip", f32(-1e38, 2.0, INF), None, np.float32(1.0), known=[2]),
    edge("no most", "Clip", f32(-INF, 2.0, 1e38), np.float32(1.0), known=[1]),
    edge("no bounds", "Clip", f32(-1e38, 2.0, 1e38)),
    edge("six", "Clip", f32(-INF, 3.0, INF), np.float32(0.0), np.float32(6.0), known=[1, 2]),
    edge(
        "infinite bounds", "Clip", f32(-5.0, 5.0), np.float32(-INF), np.float32(INF), known=[1, 2]
    ),
    edge("bytes", "Clip", ints(U8, 3, 250), np.uint8(10), np.uint8(200), known=[1, 2]),
    edge("beyond 53 bits", "Clip", i64(2**60, 5), np.int64(7), np.int64(2**53 + 1), known=[1, 2]),
    edge("attributes", "Clip", f32(-5.0, 0.5, 5.0), opset=10, min=-1.0),
]


def cast(name, x, to, **more):
    """A conversion."""
    return edge(name, "Cast", x, to=to, **more)


CASTS = [
    cast("towards zero", f32(-1.7, -0.5, 0.5, 1.7, 2.5), TensorProto.INT32),
    cast("truths", f32(NAN, 0.5, -0.0, -INF, 1e-40), TensorProto.BOOL),
    cast(
        "to half",
        f32(65504.0, 65520.0, 70000.0, 6e-8, 2.9e-8, 1.0009766, 2049.0),
        TensorProto.FLOAT16,
    ),
    cast("half from double", np.array([1 + 2.0**-11 + 2.0**-30, -1e5]), TensorProto.FLOAT16),
    cast("large integers", i64(2**24 + 1, 2**24 + 3, -(2**62) - 1), TensorProto.FLOAT),
    cast("fewer bits", ints(I32, 300, -129, 128, -1), TensorProto.INT8),
    cast("fewer bits of 64", i64(2**32 + 5, -(2**31) - 1, 2**31), TensorProto.INT32),
    cast("unsigned", ints(I8, -1, 5, -128), TensorProto.UINT8),
    cast("signed", ints(U8, 200, 127), TensorProto.INT8),
    cast("overflow", np.array([1e39, -1e39, 1e-46, 0.1]), TensorProto.FLOAT),
    cast("of truths", np.array([True, False]), TensorProto.FLOAT),
    cast("integers to truths", ints(I32, -3, 0, 256), TensorProto.BOOL),
    cast("bytes", f32(0.9, 254.9, 3.5), TensorProto.UINT8),
    cast("large float", f32(1e18, -1e18), TensorProto.INT64),
    cast("from half", np.array([6e-8, 65504, -0.0], F16), TensorProto.FLOAT),
    edge("type of the other", "CastLike", f32(-1.7, 2.5), ints(I32, 0)),
]

BITS = [
    edge("all bits", "BitShift", ints(U8, 255, 255, 1), ints(U8, 1, 8, 7), direction="LEFT"),
    edge("to the right", "BitShift", ints(U8, 255, 255, 128), ints(U8, 1, 8, 7), direction="RIGHT"),
    edge("signs", "BitwiseAnd", i64(-1, -2, 2**62), i64(5, -3, -1)),
    edge("signs", "BitwiseOr", ints(I32, -8, 5, -(2**31)), ints(I32, 3, 2, 1)),
    edge("signs", "BitwiseXor", i64(-1, -2, 2**62), i64(5, -3, -1)),
    edge("bytes", "BitwiseNot", ints(U8, 0, 255, 7)),
    edge("least", "BitwiseNot", i64(-(2**63), 0, -1)),
]

MIXED = f32(1.0, -INF, 3.0, INF, 2.0, -2.0).reshape(2, 3)
REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
    "ReduceProd ReduceSum ReduceSumSquare"
).split()
REDUCED = [
    *(edge("of one number", op, np.float32(-3.0), keepdims=0) for op in REDUCTIONS),
    *(edge("of infinities", op, MIXED, i64(-1), known=[1]) for op in REDUCTIONS),
    *(
        edge("of nothing", op, np.zeros((2, 0, 3), np.float32), i64(1), known=[1])
        for op in ("ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare", "ReduceLogSum")
    ),
    *(
        edge(
            "of nothing",
            op,
            np.zeros((2, 0), np.float32),
            i64(1),
            known=[1],
            opset=20,
            by="reference",
            keepdims=0,
        )
        for op in ("ReduceMax", "ReduceMin")
    ),
    *(edge("no axes", op, ramp(2, 3), i64(), known=[1]) for op in ("ReduceSum", "ReduceMax")),
    *(
        edge("no axes, nothing to do", op, ramp(2, 3), i64(), known=[1], noop_with_empty_axes=1)
        for op in ("ReduceSum", "ReduceMax", "ReduceMean")
    ),
    edge("all minus infinity", "ReduceLogSumExp", f32(-INF, -INF).reshape(1, 2), i64(1), known=[1]),
    edge("large", "ReduceLogSumExp", f32(1000.0, 1000.0, -1000.0), i64(0), known=[1]),
    edge("no numbers", "ReduceMax", f32(1.0, NAN, 3.0), by="reference"),
    edge("integers", "ReduceMean", ints(I32, -1, -2, 0, -4)),
    edge("beyond 53 bits", "ReduceSum", i64(2**60, 1, 2), by="reference"),
    edge("integers", "ReduceProd", ints(I32, -3, 5, 7)),
    edge("beyond 53 bits", "ReduceMin", i64(5, -(2**62) - 1)),
    edge("beyond 53 bits", "ReduceMax", i64(2**62, 2**62 + 1, 3)),
    edge("attributes", "ReduceMean", ramp(2, 3, 2), opset=13, axes=[-1, 0], keepdims=0),
    edge("ties", "ArgMax", f32(1.0, 3.0, 3.0), keepdims=0),
    edge("last of ties", "ArgMin", f32(1.0, 3.0, 1.0, 2.0), select_last_index=1),
    edge("minus infinity", "ArgMax", np.full((2, 2), -INF, np.float32), axis=-1),
    edge("beyond 53 bits", "ArgMax", i64(2**62, 2**62 + 1, 3)),
    edge("integers", "ArgMin", ints(I32, 4, -7, 4).reshape(3, 1), axis=0),
    edge(
        "exclusive of infinity",
        "CumSum",
        f32(1.0, 2.0, INF, 3.0),
        np.int32(0),
        known=[1],
        exclusive=1,
    ),
    edge(
        "exclusive of a large number",
        "CumSum",
        f32(1.0, 1e20, 2.0),
        np.int32(0),
        known=[1],
        exclusive=1,
    ),
    edge(
        "exclusive from behind",
        "CumSum",
        ramp(2, 3),
        np.int32(-1),
        known=[1],
        exclusive=1,
        reverse=1,
    ),
    edge("of nothing", "CumSum", np.zeros((0, 2), np.float32), np.int32(0), known=[1], exclusive=1),
    edge("beyond 53 bits", "CumSum", i64(2**62, 1, 1), np.int64(0), known=[1]),
    edge("integers", "CumSum", ints(I32, 5, -7, 2), np.int64(0), known=[1], reverse=1),
    edge("ties", "TopK", f32(3.0, 1.0, 3.0, 2.0), i64(3), known=[1], outputs=2),
    edge(
        "smallest of infinities",
        "TopK",
        f32(INF, 1.0, -INF, 2.0),
        i64(3),
        known=[1],
        outputs=2,
        largest=0,
    ),
    edge("none", "TopK", ramp(2, 3), i64(0), known=[1], outputs=2),
    edge("all along the first", "TopK", ramp(3, 2), i64(3), known=[1], outputs=2, axis=0),
    edge("beyond 53 bits", "TopK", i64(2**62, 2**62 + 1, 7), i64(2), known=[1], outputs=2),
]

PRODUCTS = [
    edge("of nothing", "MatMul", np.zeros((2, 0), np.float32), np.zeros((0, 3), np.float32)),
    edge("vectors", "MatMul", ramp(3), ramp(3)),
    edge("vector and stack", "MatMul", ramp(3), ramp(2, 3, 4)),
    edge("stacks", "MatMul", ramp(2, 1, 2, 3), ramp(3, 3, 2)),
    edge("integers", "MatMul", i64(3, 5).reshape(1, 2), i64(7, -2).reshape(2, 1)),
    edge(
        "turned, scaled",
        "Gemm",
        ramp(3, 2),
        ramp(4, 3),
        np.float32(2.0),
        alpha=0.5,
        beta=3.0,
        transA=1,
        transB=1,
    ),
    edge("without the third", "Gemm", ramp(2, 3), ramp(3, 2), alpha=2.0),
    edge("a row added", "Gemm", ramp(2, 3), ramp(3, 2), ramp(2)),
    edge("a column added", "Gemm", ramp(2, 3), ramp(3, 2), ramp(2, 1)),
    edge("trace", "Einsum", ramp(3, 3), equation="ii"),
    edge("diagonal", "Einsum", ramp(3, 3), equation="ii->i"),
    edge("implicit", "Einsum", ramp(2, 3), ramp(3, 2), equation="ij,jk"),
    edge("ellipsis", "Einsum", ramp(2, 2, 3), ramp(2, 3, 2), equation="...ij,...jk->...ik"),
]

HALF = np.array([0.001], F16)
QUANTIZED = [
    edge(
        "ties and ends",
        "QuantizeLinear",
        f32(-INF, -5.0, 0.5, 1.5, 2.5, 1e9, INF),
        np.float32(1.0),
        np.uint8(3),
    ),
    edge(
        "signed ties",
        "QuantizeLinear",
        f32(-200.0, -2.5, -1.5, -0.5, 200.0),
        np.float32(1.0),
        np.int8(0),
    ),
    edge(
        "of the last axis",
        "QuantizeLinear",
        ramp(2, 3),
        f32(0.1, 0.2, 0.4),
        ints(U8, 1, 2, 3),
        axis=-1,
    ),
    edge("without a zero point", "QuantizeLinear", ramp(2, 3), np.float32(0.25)),
    edge("blocks", "QuantizeLinear", ramp(2, 4), ramp(2, 2) + 3, opset=21, axis=1, block_size=2),
    edge("of 32 bits", "DequantizeLinear", ints(I32, 100000, -100000), np.float32(0.5)),
    edge(
        "first axis",
        "DequantizeLinear",
        ints(I8, 100, -128, 7, 8).reshape(2, 2),
        f32(0.5, 2.0),
        ints(I8, 1, 2),
        axis=0,
    ),
    edge("half of 32 bits", "DequantizeLinear", ints(I32, 100000, -70001), HALF[0], opset=21),
    edge("half of 16 bits", "DequantizeLinear", ints(I16, 32767, -32767, 4099), HALF[0], opset=21),
    edge("one number", "DynamicQuantizeLinear", np.zeros(4, np.float32), outputs=3),
    edge("negative", "DynamicQuantizeLinear", f32(-3.0, -2.5, -1.0), outputs=3),
    edge("positive", "DynamicQuantizeLinear", f32(3.0, 2.5, 1.0), outputs=3),
    edge(
        "zero points",
        "MatMulInteger",
        ints(U8, 255, 0, 7, 9).reshape(2, 2),
        ints(U8, 255, 1, 3, 0).reshape(2, 2),
        np.uint8(128),
        np.uint8(5),
    ),
    edge(
        "pads with the zero point",
        "ConvInteger",
        ints(U8, *range(9)).reshape(1, 1, 3, 3),
        np.ones((1, 1, 2, 2), U8),
        np.uint8(4),
        pads=[1, 1, 0, 0],
    ),
    edge(
        "cut",
        "QLinearMatMul",
        ints(U8, 255, 255, 0, 1).reshape(2, 2),
        np.float32(1.0),
        np.uint8(0),
        ints(U8, 255, 0, 255, 3).reshape(2, 2),
        np.float32(1.0),
        np.uint8(0),
        np.float32(2.0),
        np.uint8(7),
    ),
    edge(
        "bias",
        "QLinearConv",
        ints(U8, *range(9)).reshape(1, 1, 3, 3),
        np.float32(0.5),
        np.uint8(2),
        ints(I8, 1, -2, 3, -4).reshape(1, 1, 2, 2),
        np.float32(0.25),
        np.int8(0),
        np.float32(0.125),
        np.uint8(100),
        ints(I32, 17),
    ),
]

EDGES: list[Edge] = [*UNARY, *BINARY, *CLIPS, *CASTS, *BITS, *REDUCED, *PRODUCTS, *QUANTIZED]
