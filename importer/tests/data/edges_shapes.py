"""Cases of unusual values: indices, slices, shapes, constants, sequences."""

from functools import partial

import numpy as np
from edges_made import INF, NAN, Edge, edge, f32, i64, ramp
from onnx import helper

LAST, FIRST = 2**63 - 1, -(2**63)
INFINITE = f32(1.0, INF, -INF, NAN, 5.0)

GATHERED = [
    edge("negative indices", "Gather", ramp(3, 2), i64(-1, 0, -3)),
    edge("one index", "Gather", ramp(3, 2), np.int64(-1), axis=1),
    edge("no indices", "Gather", ramp(3, 2), np.zeros((0,), np.int64)),
    edge("small indices", "Gather", INFINITE, np.array([[1, 2], [3, -1]], np.int32), axis=-1),
    edge("negative indices", "GatherElements", ramp(3, 2), i64(-1, 0, -3, 1).reshape(2, 2), axis=0),
    edge("negative axis", "GatherElements", ramp(2, 3), i64(-1, 0).reshape(2, 1), axis=-1),
    edge("negative indices", "GatherND", ramp(2, 3), i64(-1, -1, 0, 2).reshape(2, 2)),
    edge("batches", "GatherND", ramp(2, 3, 2), i64(-1, 0).reshape(2, 1), batch_dims=1),
    edge("rows", "GatherND", ramp(2, 3, 2), i64(1).reshape(1, 1)),
]


def scattered(name, op, *inputs, **attrs):
    """Elements written at indices."""
    return edge(name, op, *inputs, **attrs)


TWICE = i64(1, 1, -1)
SCATTERED = [
    scattered("beside infinities", "ScatterElements", INFINITE, i64(0, -1), f32(7.0, -INF)),
    scattered(
        "negative axis",
        "ScatterElements",
        ramp(2, 3),
        i64(-1, 0).reshape(2, 1),
        ramp(2, 1),
        axis=-1,
    ),
    scattered(
        "nothing", "ScatterElements", ramp(3), np.zeros((0,), np.int64), np.zeros((0,), np.float32)
    ),
    scattered("beyond 53 bits", "ScatterElements", i64(1, 2, 3), i64(1), i64(2**62 + 1)),
    scattered(
        "truths",
        "ScatterElements",
        np.array([True, False, True]),
        i64(0, 1),
        np.array([False, True]),
    ),
    *(
        scattered(
            f"twice, {r}",
            "ScatterElements",
            f32(1.0, 2.0, 3.0),
            TWICE,
            f32(5.0, -7.0, INF),
            reduction=r,
        )
        for r in ("add", "mul", "max", "min")
    ),
    *(
        scattered(
            f"integers, {r}", "ScatterElements", i64(1, 2, 3), TWICE, i64(5, -7, 9), reduction=r
        )
        for r in ("add", "mul", "max", "min")
    ),
    scattered(
        "no number, max",
        "ScatterElements",
        f32(1.0, NAN, 3.0),
        i64(0, 1),
        f32(2.0, 9.0),
        by="reference",
        reduction="max",
    ),
    scattered("beside infinities", "ScatterND", INFINITE, i64(0, -1).reshape(2, 1), f32(7.0, -INF)),
    scattered("rows", "ScatterND", ramp(3, 2), i64(-1).reshape(1, 1), ramp(1, 2) * 3),
    scattered("elements", "ScatterND", ramp(3, 2), i64(-1, -2).reshape(1, 2), f32(INF)),
    *(
        scattered(
            f"twice, {r}",
            "ScatterND",
            f32(1.0, 2.0, 3.0),
            TWICE.reshape(3, 1),
            f32(5.0, -7.0, 0.5),
            reduction=r,
        )
        for r in ("add", "mul", "max", "min")
    ),
    scattered(
        "nothing", "ScatterND", ramp(3), np.zeros((0, 1), np.int64), np.zeros((0,), np.float32)
    ),
]

PLACED = [
    edge(
        "out of range, negative", "OneHot", i64(0, -1, 3, -4, 2), i64(3), f32(0.5, 2.0), known=[1]
    ),
    edge("first axis", "OneHot", i64(0, 1), np.int64(3), i64(0, 1), known=[1], axis=0),
    edge("of infinities", "OneHot", i64(1, 0), np.int64(2), f32(-INF, INF), known=[1], axis=-1),
    edge("infinities", "Trilu", np.full((3, 3), INF, np.float32), np.int64(1), known=[1]),
    edge("below, far", "Trilu", np.full((2, 3), NAN, np.float32), np.int64(-7), known=[1], upper=0),
    edge("integers", "Trilu", np.arange(6).reshape(2, 3), np.int64(0), known=[1], upper=0),
    edge("far", "EyeLike", ramp(2, 3), k=-5),
    edge("of infinities", "EyeLike", np.full((2, 3), INF, np.float32), k=1),
    edge("ties", "Hardmax", f32(2.0, 5.0, 5.0, -INF).reshape(2, 2)),
    edge("first axis", "Hardmax", ramp(3, 2), axis=0),
    edge(
        "negative axis", "Compress", ramp(2, 3), np.array([False, True, True]), known=[1], axis=-1
    ),
    edge("short, of all", "Compress", ramp(2, 3), np.array([False, True]), known=[1]),
    edge("none", "Compress", ramp(2, 3), np.array([False, False]), known=[1], axis=0),
    edge("truths", "NonZero", np.array([[True, False], [True, True]]), known=[0]),
    edge("lengths", "ReverseSequence", ramp(4, 2), i64(1, 4), batch_axis=1, time_axis=0),
    edge("batch first", "ReverseSequence", ramp(2, 3), i64(3, 2), batch_axis=0, time_axis=1),
]


def cut(name, x, starts, ends, axes=None, steps=None):
    """A slice whose bounds are constants."""
    inputs = [np.array(a, np.int64) if a is not None else None for a in (starts, ends, axes, steps)]
    known = [n + 1 for n, a in enumerate(inputs) if a is not None]
    return edge(name, "Slice", x, *inputs, known=known)


CUT = [
    cut("all, backwards", ramp(5), [-1], [FIRST], [0], [-1]),
    cut("every second, backwards", ramp(7), [LAST], [-7], [0], [-2]),
    cut("beyond both ends", ramp(5), [-100], [100], [0], [3]),
    cut("beyond, backwards", ramp(5), [100], [-100], [0], [-3]),
    cut("nothing", ramp(5), [3], [3]),
    cut("nothing, ends before it starts", ramp(5), [4], [1]),
    cut("nothing, backwards", ramp(5), [1], [3], [0], [-1]),
    cut("starts after the end", ramp(5), [9], [LAST]),
    cut("negative axes", ramp(3, 4), [1, -2], [LAST, -1], [-2, -1]),
    cut("axes in another order", ramp(3, 4), [1, 0], [3, 2], [1, 0]),
    cut("no axes, steps", ramp(3, 4), [0, 0], [3, 4], None, [2, 3]),
    cut("of nothing", np.zeros((0, 2), np.float32), [0], [LAST]),
    cut("of nothing, backwards", np.zeros((0, 2), np.float32), [-1], [FIRST], [0], [-1]),
    cut("step beyond the end", ramp(5), [1], [5], [0], [LAST]),
    edge("attributes", "Slice", ramp(3, 4), opset=9, starts=[1, -3], ends=[2**31 - 1, -1]),
    edge("unequal", "Split", ramp(7), i64(2, 0, 5), known=[1], outputs=3),
    edge("smaller last", "Split", ramp(2, 7), outputs=3, axis=-1, num_outputs=3),
    edge("attributes", "Split", ramp(5, 2), opset=11, outputs=2, split=[1, 4]),
    edge(
        "of nothing",
        "Concat",
        np.zeros((0, 2), np.float32),
        ramp(1, 2),
        np.zeros((0, 2), np.float32),
        axis=0,
    ),
    edge(
        "all of nothing",
        "Concat",
        np.zeros((2, 0), np.float32),
        np.zeros((2, 0), np.float32),
        axis=-1,
    ),
    edge("negative pads", "Pad", ramp(3, 4), i64(-1, 1, 0, -2), known=[1]),
    edge("infinity", "Pad", ramp(3), i64(1, 2), np.float32(-INF), known=[1, 2]),
    edge("beyond 53 bits", "Pad", i64(1, 2), i64(1, 0), np.int64(2**53 + 1), known=[1, 2]),
    edge("reflected", "Pad", ramp(2, 4), i64(3, 2), None, i64(-1), known=[1, 3], mode="reflect"),
    edge("edges", "Pad", ramp(2, 3), i64(2, 0, 0, 4), known=[1], mode="edge"),
    edge("wrapped", "Pad", ramp(4), i64(3, 2), known=[1], mode="wrap", opset=19),
    edge("cut and reflected", "Pad", ramp(5), i64(-1, 2), known=[1], mode="reflect"),
    edge("cut and edges", "Pad", ramp(5), i64(2, -2), known=[1], mode="edge"),
    edge("attributes", "Pad", ramp(2), opset=10, pads=[1, 1], value=0.1),
    edge("of nothing", "Pad", np.zeros((0, 2), np.float32), i64(1, 0, 1, 0), known=[1]),
    edge("cut and padded", "CenterCropPad", ramp(5, 2), i64(2, 5), known=[1]),
    edge("negative axis", "CenterCropPad", ramp(5, 3), i64(2), known=[1], axes=[-2]),
]

SHAPED = [
    edge("zero copies", "Reshape", ramp(2, 3, 4), i64(0, -1), known=[1]),
    edge("to nothing", "Reshape", np.zeros((2, 0), np.float32), i64(0, 7), known=[1], allowzero=1),
    edge("to one number", "Reshape", ramp(1, 1), np.zeros((0,), np.int64), known=[1]),
    edge("smaller target", "Expand", ramp(2, 3), i64(1, 1), known=[1]),
    edge("more dimensions", "Expand", ramp(3, 1), i64(2, 1, 4), known=[1]),
    edge("to nothing", "Expand", ramp(1, 2), i64(0, 1), known=[1]),
    edge("of one number", "Expand", np.float32(3.0), i64(2), known=[1]),
    edge("first", "Flatten", ramp(2, 3, 4), axis=0),
    edge("last", "Flatten", ramp(2, 3, 4), axis=3),
    edge("negative", "Flatten", ramp(2, 3, 4), axis=-1),
    edge("of one number", "Flatten", np.float32(2.0), axis=0),
    edge("all ones", "Squeeze", ramp(1, 3, 1)),
    edge("negative", "Squeeze", ramp(1, 3, 1), i64(-1), known=[1]),
    edge("attributes", "Squeeze", ramp(1, 3, 1), opset=11, axes=[-3]),
    edge("negative", "Unsqueeze", ramp(2, 3), i64(-1, 0), known=[1]),
    edge("of one number", "Unsqueeze", np.float32(2.0), i64(0, -1), known=[1]),
    edge("zero times", "Tile", ramp(2, 3), i64(2, 0), known=[1]),
    edge("one number", "Transpose", np.float32(2.0)),
    edge("of nothing", "Transpose", np.zeros((0, 3), np.float32), perm=[1, 0]),
    edge("columns first", "DepthToSpace", ramp(1, 8, 1, 2), blocksize=2, mode="CRD"),
    edge("depth first", "DepthToSpace", ramp(1, 8, 1, 2), blocksize=2),
    edge("a part", "Shape", ramp(2, 3, 4), start=-2, end=100),
    edge("nothing", "Shape", ramp(2, 3), start=2, end=1),
    edge("of nothing", "Size", np.zeros((2, 0), np.float32)),
    edge("one number", "ConstantOfShape", np.zeros((0,), np.int64), known=[0]),
    edge("nothing", "ConstantOfShape", i64(2, 0), known=[0]),
    edge("backwards", "Range", i64(5)[0], i64(-2)[0], i64(-3)[0], known=[0, 1, 2]),
    edge("nothing", "Range", i64(5)[0], i64(5)[0], i64(1)[0], known=[0, 1, 2]),
    edge("floats", "Range", np.float32(0.5), np.float32(2.0), np.float32(0.4), known=[0, 1, 2]),
    edge("in evaluation", "Dropout", INFINITE, outputs=2),
]


def chained(name, nodes, inputs, known=(), outputs=("y",), opset=18):
    """Several nodes, each given as operator, inputs, outputs, attributes."""
    made = [helper.make_node(op, ins.split(), outs.split(), **a) for op, ins, outs, a in nodes]
    return Edge(f"several: {name}", made, inputs, list(outputs), tuple(known), opset)


PARTS = {"a": ramp(2, 2), "b": ramp(2, 2) * 3, "at": np.int64(-1)}
SEQUENCES = [
    chained(
        "the last of a sequence",
        [("SequenceConstruct", "a b", "s", {}), ("SequenceAt", "s at", "y", {})],
        PARTS,
        ["at"],
    ),
    chained(
        "put before the last",
        [
            ("SequenceConstruct", "a a", "s", {}),
            ("SequenceInsert", "s b at", "t", {}),
            ("ConcatFromSequence", "t", "y", {"axis": -1}),
        ],
        PARTS,
        ["at"],
    ),
    chained(
        "a new last axis",
        [
            ("SequenceConstruct", "a b", "s", {}),
            ("ConcatFromSequence", "s", "y", {"axis": -1, "new_axis": 1}),
        ],
        {"a": PARTS["a"], "b": PARTS["b"]},
    ),
    chained(
        "the last is taken away",
        [
            ("SequenceConstruct", "a b a", "s", {}),
            ("SequenceErase", "s", "t", {}),
            ("SequenceLength", "t", "y", {}),
        ],
        {"a": PARTS["a"], "b": PARTS["b"]},
    ),
    chained(
        "unequal parts",
        [("SplitToSequence", "x n", "s", {"axis": -1}), ("SequenceAt", "s at", "y", {})],
        {"x": ramp(2, 5), "n": np.int64(2), "at": np.int64(-1)},
        ["n", "at"],
    ),
    chained(
        "parts without their dimension",
        [
            ("SplitToSequence", "x", "s", {"axis": 0, "keepdims": 0}),
            ("SequenceAt", "s at", "y", {}),
        ],
        {"x": ramp(3, 2), "at": np.int64(1)},
        ["at"],
    ),
    chained(
        "an empty sequence",
        [
            ("SequenceEmpty", "", "s", {}),
            ("SequenceInsert", "s a", "t", {}),
            ("SequenceLength", "t", "y", {}),
        ],
        {"a": PARTS["a"]},
    ),
    chained(
        "sizes of an input",
        [
            ("Shape", "x", "s", {}),
            ("Gather", "s last", "n", {}),
            ("Mod", "n two", "m", {}),
            ("Sub", "m n", "d", {}),
            ("Div", "d two", "y", {}),
        ],
        {"x": ramp(2, 5), "last": np.int64(-1), "two": np.int64(2)},
        ["last", "two"],
    ),
    chained(
        "sizes in floats",
        [
            ("Shape", "x", "s", {}),
            ("Cast", "s", "f", {"to": 1}),
            ("Mul", "f half", "h", {}),
            ("Ceil", "h", "c", {}),
            ("Cast", "c", "y", {"to": 7}),
        ],
        {"x": ramp(3, 5), "half": np.float32(0.5)},
        ["half"],
    ),
]

PORT = partial(helper.make_tensor_value_info, elem_type=1, shape=[2])
BODY = helper.make_graph(
    [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Mul", ["t", "x"], ["u"])],
    "body",
    [PORT("s"), PORT("x")],
    [PORT("t"), PORT("u")],
)
SCAN = {"body": BODY, "num_scan_inputs": 1, "directions": [1]}
SCANNED = Edge(
    "Scan: batches, backwards",
    [helper.make_node("Scan", ["", "a", "x"], ["last", "all"], **SCAN)],
    {"a": ramp(2, 2), "x": ramp(2, 3, 2)},
    ["last", "all"],
    opset=8,
)

EDGES: list[Edge] = [*GATHERED, *SCATTERED, *PLACED, *CUT, *SHAPED, *SEQUENCES, SCANNED]
