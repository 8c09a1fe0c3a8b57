"""Cases of unusual values: windows, resizing, sampling, normalizations."""

import numpy as np
from edges_made import INF, NAN, Edge, edge, f32, i64, ramp

IMAGE = ramp(1, 1, 4, 5)
LOWEST = np.full((1, 1, 3, 3), -3e38, np.float32)
CORNER = ramp(1, 1, 2, 2).copy()
CORNER[0, 0, 0, 0] = INF

POOLED = [
    edge("very low", "MaxPool", LOWEST, kernel_shape=[2, 2], pads=[1, 1, 1, 1]),
    edge(
        "negative beside pads",
        "MaxPool",
        IMAGE - 9,
        kernel_shape=[3, 3],
        pads=[1, 1, 1, 1],
        outputs=2,
    ),
    edge("rounded up", "MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    edge("gaps", "MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[2, 3], outputs=2),
    edge(
        "same, upper", "MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"
    ),
    edge(
        "same, lower", "MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_LOWER"
    ),
    edge(
        "bytes",
        "MaxPool",
        (IMAGE * 20 + 100).astype(np.uint8),
        kernel_shape=[2, 2],
        pads=[1, 1, 0, 0],
    ),
    edge(
        "columns first",
        "MaxPool",
        ramp(1, 2, 3, 4),
        kernel_shape=[2, 2],
        outputs=2,
        storage_order=1,
    ),
    edge("stride beyond the window", "AveragePool", IMAGE, kernel_shape=[1, 2], strides=[2, 3]),
    edge(
        "pads counted, rounded up",
        "AveragePool",
        IMAGE,
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        ceil_mode=1,
        count_include_pad=1,
    ),
    edge(
        "pads left out, rounded up",
        "AveragePool",
        IMAGE,
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1, 1, 1, 1],
        ceil_mode=1,
    ),
    edge("same, lower", "AveragePool", IMAGE, kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    edge(
        "gaps",
        "AveragePool",
        IMAGE,
        kernel_shape=[2, 2],
        dilations=[2, 2],
        opset=19,
        pads=[1, 0, 1, 0],
    ),
    edge("first power", "LpPool", IMAGE, kernel_shape=[2, 2], p=1),
    edge("third power", "LpPool", IMAGE, kernel_shape=[2, 3], p=3, pads=[0, 1, 0, 1]),
    edge("very low", "GlobalMaxPool", LOWEST),
    edge("one dimension", "GlobalAveragePool", ramp(2, 3, 4)),
]

CONVOLVED = [
    edge("same, lower", "Conv", IMAGE, ramp(2, 1, 2, 2), auto_pad="SAME_LOWER", strides=[2, 2]),
    edge("valid", "Conv", IMAGE, ramp(2, 1, 2, 2), ramp(2), auto_pad="VALID"),
    edge(
        "one dimension", "Conv", ramp(1, 2, 6), ramp(2, 1, 3), group=2, dilations=[2], pads=[3, 1]
    ),
    edge("unequal pads", "Conv", IMAGE, ramp(1, 1, 3, 3), pads=[0, 2, 1, 0], strides=[2, 1]),
    edge("no images", "Conv", np.zeros((0, 1, 3, 3), np.float32), ramp(2, 1, 2, 2)),
    edge(
        "output padding",
        "ConvTranspose",
        ramp(1, 1, 2, 3),
        ramp(1, 2, 3, 3),
        strides=[2, 2],
        output_padding=[1, 0],
    ),
    edge(
        "output shape",
        "ConvTranspose",
        ramp(1, 1, 2, 3),
        ramp(1, 2, 3, 3),
        strides=[2, 2],
        output_shape=[5, 8],
    ),
    edge(
        "same, upper",
        "ConvTranspose",
        ramp(1, 1, 2, 3),
        ramp(1, 2, 3, 3),
        strides=[2, 2],
        auto_pad="SAME_UPPER",
    ),
    edge(
        "same, lower",
        "ConvTranspose",
        ramp(1, 1, 2, 3),
        ramp(1, 2, 3, 3),
        strides=[2, 1],
        auto_pad="SAME_LOWER",
    ),
    edge(
        "groups, gaps",
        "ConvTranspose",
        ramp(1, 4, 3),
        ramp(4, 1, 2),
        group=2,
        dilations=[2],
        pads=[1, 0],
    ),
]


def resized(name, x, scales=None, sizes=None, opset=18, **attrs):
    """A resized image."""
    given = [
        np.array(scales, np.float32) if scales else None,
        np.array(sizes, np.int64) if sizes else None,
    ]
    while given and given[-1] is None:
        given.pop()
    inputs = ([] if opset < 11 else [None]) + given
    known = [n + 1 for n, a in enumerate(inputs) if a is not None]
    return edge(name, "Resize", x, *inputs, known=known, opset=opset, **attrs)


LINE = f32(INF, 1.0, 2.0, 4.0).reshape(1, 1, 1, 4)
RESIZED = [
    resized("infinity at the start", LINE, [1, 1, 1, 2], mode="linear"),
    resized("one side left out, cubic", IMAGE, [1, 1, 1, 2], mode="cubic", exclude_outside=1),
    edge(
        "infinity at the start, cut out",
        "Resize",
        LINE,
        f32(0, 0, 0, 0.5, 1, 1, 1, 1.5),
        None,
        i64(1, 1, 1, 4),
        known=[1, 3],
        by="reference",
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=7.0,
    ),
    resized("half, floor", IMAGE, [1, 1, 0.5, 0.6], nearest_mode="floor"),
    resized("half, up at ties", IMAGE, [1, 1, 0.5, 2.5], nearest_mode="round_prefer_ceil"),
    resized(
        "half, ceil of asymmetric",
        IMAGE,
        [1, 1, 1.5, 2],
        nearest_mode="ceil",
        coordinate_transformation_mode="asymmetric",
    ),
    resized(
        "to one element",
        IMAGE,
        None,
        [1, 1, 1, 1],
        mode="linear",
        coordinate_transformation_mode="align_corners",
    ),
    resized(
        "to one element of PyTorch",
        IMAGE,
        None,
        [1, 1, 1, 3],
        mode="linear",
        coordinate_transformation_mode="pytorch_half_pixel",
    ),
    resized(
        "corners",
        IMAGE,
        None,
        [1, 1, 7, 3],
        mode="cubic",
        coordinate_transformation_mode="align_corners",
    ),
    resized(
        "symmetric",
        IMAGE,
        [1, 1, 1.3, 0.7],
        mode="linear",
        opset=19,
        coordinate_transformation_mode="half_pixel_symmetric",
    ),
    resized("without aliasing", IMAGE, [1, 1, 0.5, 0.4], mode="linear", antialias=1),
    resized("before version 11", IMAGE, [1, 1, 1.7, 2], opset=10),
    resized("before version 11, linear", IMAGE, [1, 1, 2, 0.5], opset=10, mode="linear"),
    resized("not larger", IMAGE, None, [7, 7], axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    resized(
        "not smaller", IMAGE, None, [7, 7], axes=[2, 3], keep_aspect_ratio_policy="not_smaller"
    ),
    edge("floor", "Upsample", IMAGE, f32(1, 1, 1.5, 2), known=[1], opset=9),
    edge("attributes", "Upsample", IMAGE, opset=7, scales=[1.0, 1.0, 2.0, 3.0], mode="linear"),
]

GRID = f32(-1.5, -1.5, -1, -1, 0.3, -0.2, 0.9, 1.7, 3.0, 0.0, 0.0, -2.6).reshape(1, 2, 3, 2)
SAMPLED = [
    *(
        edge(
            f"{mode}, {padding}",
            "GridSample",
            IMAGE,
            GRID,
            opset=20,
            mode=mode,
            padding_mode=padding,
            align_corners=corners,
        )
        for mode, corners in (("linear", 0), ("nearest", 1), ("cubic", 0))
        for padding in ("zeros", "border", "reflection")
    ),
    edge(
        "infinity beside the outside",
        "GridSample",
        CORNER,
        f32(-1.8, -1.8, 0.9, 0.9).reshape(1, 1, 2, 2),
        opset=20,
    ),
    edge(
        "ties",
        "GridSample",
        ramp(1, 1, 1, 4),
        f32(-0.5, 0, 0.0, 0, 0.5, 0).reshape(1, 1, 3, 2),
        opset=20,
        mode="nearest",
    ),
    edge(
        "one element reflected",
        "GridSample",
        ramp(1, 1, 1, 1),
        f32(-3, 2.5).reshape(1, 1, 1, 2),
        opset=20,
        padding_mode="reflection",
        align_corners=1,
    ),
    edge("old names", "GridSample", IMAGE, GRID, opset=16, mode="bicubic", padding_mode="border"),
]

REGIONS = f32(-2, -1, 3, 2, 0.5, 0.5, 0.5, 0.5, 6, 7, 9, 9).reshape(3, 4)
REGION_SIZES = {"output_height": 2, "output_width": 2, "sampling_ratio": 2}
ALIGNED = [
    edge("outside", "RoiAlign", IMAGE, REGIONS, i64(0, 0, 0), **REGION_SIZES),
    edge(
        "outside, before version 16",
        "RoiAlign",
        IMAGE,
        REGIONS,
        i64(0, 0, 0),
        opset=10,
        **REGION_SIZES,
    ),
    edge("scaled", "RoiAlign", IMAGE, REGIONS, i64(0, 0, 0), spatial_scale=0.5, **REGION_SIZES),
    edge(
        "largest",
        "RoiAlign",
        IMAGE,
        REGIONS,
        i64(0, 0, 0),
        by="reference",
        mode="max",
        **REGION_SIZES,
    ),
    edge(
        "pads, gaps, factors",
        "DeformConv",
        ramp(1, 2, 4, 4),
        ramp(2, 2, 2, 2),
        ramp(1, 8, 4, 4),
        ramp(2),
        ramp(1, 4, 4, 4),
        opset=19,
        pads=[1, 1, 1, 1],
        dilations=[2, 2],
    ),
]

ROWS = f32(-INF, 1.0, 2.0, 1000.0, 1000.0, -1000.0, -INF, -INF, 0.0).reshape(3, 3)
NORMALIZED = [
    *(edge("infinities, large numbers", op, ROWS) for op in ("Softmax", "LogSoftmax")),
    edge("all minus infinity", "Softmax", f32(-INF, -INF).reshape(1, 2)),
    edge("plus infinity", "Softmax", f32(INF, 1.0).reshape(1, 2)),
    edge("first axis", "Softmax", ROWS, axis=0),
    *(
        edge("before version 13", op, ramp(2, 3, 2), opset=11)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
    ),
    edge(
        "no variance",
        "BatchNormalization",
        ramp(1, 2, 3),
        f32(1, 2),
        f32(0, 1),
        f32(0.5, 0),
        f32(0, 0),
        epsilon=0.01,
    ),
    edge("constant rows", "LayerNormalization", np.full((2, 3), 5.0, np.float32), ramp(3), ramp(3)),
    edge("negative axis", "LayerNormalization", ramp(2, 3, 4), ramp(3, 4), axis=-2, outputs=3),
    edge("one element", "InstanceNormalization", ramp(1, 2, 1), f32(1, 2), f32(3, 4)),
    edge("few channels", "LRN", ramp(1, 3, 2, 1), size=5, alpha=0.5, bias=2.0),
    edge("rows of zeros", "LpNormalization", f32(0, 0, 3, -4).reshape(2, 2), p=1),
    edge("columns of zeros", "LpNormalization", f32(0, 3, 0, -4).reshape(2, 2), axis=0, p=2),
    edge("all axes", "MeanVarianceNormalization", ramp(2, 3, 2), axes=[0, 2]),
]

NOTHING_IS_A_NUMBER = edge("no number", "Softmax", f32(NAN, 1.0).reshape(1, 2))

EDGES: list[Edge] = [
    *POOLED,
    *CONVOLVED,
    *RESIZED,
    *SAMPLED,
    *ALIGNED,
    *NORMALIZED,
    NOTHING_IS_A_NUMBER,
]
