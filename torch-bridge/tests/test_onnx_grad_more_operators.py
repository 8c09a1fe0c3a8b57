"""Gradients of further operators, as nodes of a model, are those of PyTorch in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from file_gradients import TOLERANCE, assert_gradients, ints, named, only, parsed, stored, uniform
from torchvision.ops import deform_conv2d, roi_align

#: Where something is computed in single precision whatever the model's type is.
SINGLE = 2e-6


def case(nodes, function, constants=None, name="", opset=22, tolerance=TOLERANCE, **given):
    """Nodes whose outputs `y`, `z` and so on are those of a function with the same inputs.

    A shape stands for random numbers from -1 to 1. Constants are stored and not differentiated.
    """
    words = nodes.split("=", 1)[1].split()
    label = f"{words[0]} {name}".strip()
    return pytest.param(nodes, function, constants or {}, opset, tolerance, given, id=label)


def distinct(*shape, seed=0):
    """Numbers from -1 to 1 that differ by more than rounding."""
    n = int(np.prod(shape))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return (order.double() * 2 / n - 1 + 0.5 / n).reshape(shape)


ELEMENTWISE = [
    case("y = Acos (x)", only(torch.acos), x=0.9 * uniform((3, 5))),
    case("y = Acosh (x)", only(torch.acosh), x=2.5 + uniform((3, 5))),
    case("y = Asin (x)", only(torch.asin), x=0.9 * uniform((3, 5))),
    case("y = Asinh (x)", only(torch.asinh), x=3 * uniform((3, 5))),
    case("y = Atanh (x)", only(torch.atanh), x=0.9 * uniform((3, 5))),
    case("y = Cosh (x)", only(torch.cosh), x=(3, 5)),
    case("y = Sinh (x)", only(torch.sinh), x=(3, 5)),
    case("y = Identity (x)", only(lambda x: x), x=(3, 5)),
    case("y = Dropout (x)", only(lambda x: x), x=(3, 5)),
    case("y = Mean (a, b, c)", only(lambda a, b, c: (a + b + c) / 3), a=(3, 5), b=(5,), c=(3, 1)),
    case("y = Sum (a, b, c)", only(lambda a, b, c: a + b + c), a=(3, 5), b=(5,), c=(3, 1)),
    case(
        "y = Mod <fmod = 1> (a, b)",
        only(torch.fmod),
        a=5 * uniform((3, 5)),
        b=2 + uniform((5,), 1),
    ),
    case(
        "y = Shrink <lambd = 0.25, bias = 0.125> (x)",
        only(lambda x: torch.where(x > 0.25, x - 0.125, (x + 0.125) * (x < -0.25))),
        x=(3, 5),
    ),
    case("y = ThresholdedRelu <alpha = 0.25> (x)", only(lambda x: x * (x > 0.25)), x=(3, 5)),
    case(
        "y = Swish <alpha = 1.5> (x)",
        only(lambda x: x * torch.sigmoid(1.5 * x)),
        opset=24,
        x=(3, 5),
    ),
    case(
        "y = SwiGLU <alpha = 1.5> (a, b)",
        only(lambda a, b: a * torch.sigmoid(1.5 * a) * b),
        opset=28,
        a=(3, 5),
        b=(3, 5),
    ),
    case("y = Cast <to = 11> (x)", only(lambda x: x), x=(3, 5)),
    case(
        "s = Cast <to = 1> (x) t = Sin (s) y = Cast <to = 11> (t)",
        only(torch.sin),
        name="to float",
        tolerance=SINGLE,
        x=(3, 5),
    ),
    case(
        "s = CastLike (x, like) t = Sin (s) y = CastLike (t, x)",
        only(torch.sin),
        {"like": np.float32(0)},
        tolerance=SINGLE,
        x=(3, 5),
    ),
]

#: Functions that are constant but for steps: only what they are multiplied with has a gradient.
STEPS = [
    case(f"s = {operator} (x) y = Mul (s, x)", only(function), x=3 * uniform((3, 5)))
    for operator, function in (
        ("Ceil", lambda x: x.ceil() * x),
        ("Floor", lambda x: x.floor() * x),
        ("Round", lambda x: x.round() * x),
        ("Sign", lambda x: x.sign() * x),
        ("Hardmax", lambda x: F.one_hot(x.argmax(-1), 5) * x),
    )
]

ROWS = ints(2, 0)
PLACES = ints(0, 3, 3, 1).reshape(2, 2)


def scattered(reduction):
    return only(lambda x, u: x.scatter_reduce(1, torch.from_numpy(PLACES), u, reduction))


def scattered_rows(reduction):
    rows = torch.from_numpy(np.array([2, 0, 2])).reshape(3, 1).expand(3, 5)
    return only(lambda x, u: x.scatter_reduce(0, rows, u, reduction))


def reversed_parts(x):
    """Of `[time, batch, …]`, the first 7, 3 and 1 elements of time in reverse order."""
    parts = [torch.cat([x[:n, b].flip(0), x[n:, b]]) for b, n in enumerate((7, 3, 1))]
    return torch.stack(parts, 1)


def written(cache, update, circular):
    """Two rows of `update` at position 3 and 1 of `cache`, which has 4."""
    rows = []
    for b, first in enumerate((3, 1) if circular else (2, 1)):
        places = torch.arange(first, first + 2) % 4
        rows.append(cache[b].index_copy(0, places, update[b]))
    return torch.stack(rows)


INDEXING = [
    case(
        "y, z = Split <axis = 1> (x, sizes)",
        named(lambda x: x.split([2, 3], 1)),
        {"sizes": ints(2, 3)},
        x=(3, 5),
    ),
    case(
        "y, z, u = Split <axis = 0, num_outputs = 3> (x)",
        named(lambda x: (x[:3], x[3:6], x[6:])),
        name="with a rest",
        x=(7, 3),
    ),
    case(
        "y = Compress <axis = 1> (x, kept)",
        only(lambda x: x[:, [0, 3]]),
        {"kept": np.array([True, False, False, True])},
        x=(3, 5),
    ),
    case(
        "y = Compress (x, kept)",
        only(lambda x: x.flatten()[[1, 2]]),
        {"kept": np.array([False, True, True])},
        name="of all elements",
        x=(3, 5),
    ),
    case(
        "y = GatherND (x, i)",
        only(lambda x: x[[0, 2, 2], [1, -1, 1]]),
        {"i": ints(0, 1, 2, -1, 2, 1).reshape(3, 2)},
        x=(3, 4, 5),
    ),
    case(
        "y = GatherND <batch_dims = 1> (x, i)",
        only(lambda x: x[[[0], [1]], [[1, 1], [0, 2]]]),
        {"i": ints(1, 1, 0, 2).reshape(2, 2, 1)},
        name="in batches",
        x=(2, 3, 5),
    ),
    case(
        "y = ScatterND (x, i, u)",
        only(lambda x, u: x.index_copy(0, torch.from_numpy(ROWS), u)),
        {"i": ROWS.reshape(2, 1)},
        x=(3, 5),
        u=(2, 5),
    ),
    *(
        case(
            f'y = ScatterND <reduction = "{ours}"> (x, i, u)',
            scattered_rows(theirs),
            {"i": ints(2, 0, 2).reshape(3, 1)},
            name=ours,
            x=distinct(4, 5),
            u=distinct(3, 5, seed=1) * 0.97,
        )
        for ours, theirs in (("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin"))
    ),
    *(
        case(
            f'y = ScatterElements <axis = 1, reduction = "{ours}"> (x, i, u)',
            scattered(theirs),
            {"i": PLACES},
            name=ours,
            x=distinct(2, 4),
            u=distinct(2, 2, seed=1) * 0.97,
        )
        for ours, theirs in (("mul", "prod"), ("max", "amax"), ("min", "amin"))
    ),
    case(
        "y = ScatterElements <axis = 1> (x, i, u)",
        only(lambda x, u: x.scatter(1, torch.tensor([[0, 3], [2, 1]]), u)),
        {"i": ints(0, -1, 2, 1).reshape(2, 2)},
        name="replaces",
        x=(2, 4),
        u=(2, 2),
    ),
    case(
        "y = Scatter <axis = 1> (x, i, u)",
        only(lambda x, u: x.scatter(1, torch.tensor([[0, 3], [2, 1]]), u)),
        {"i": ints(0, 3, 2, 1).reshape(2, 2)},
        opset=10,
        x=(2, 4),
        u=(2, 2),
    ),
    case(
        "y = OneHot <axis = 0> (i, depth, values)",
        only(lambda v: torch.where(F.one_hot(torch.tensor([0, 4, 3]), 5).T > 0, v[1], v[0])),
        {"i": ints(0, 4, -2), "depth": np.array(5)},
        values=(2,),
    ),
    case(
        "y = ReverseSequence (x, lengths)",
        only(reversed_parts),
        {"lengths": ints(7, 3, 1)},
        x=(7, 3, 2),
    ),
    case(
        "y = ReverseSequence <batch_axis = 0, time_axis = 1> (x, lengths)",
        only(lambda x: reversed_parts(x.transpose(0, 1)).transpose(0, 1)),
        {"lengths": ints(7, 3, 1)},
        name="batch first",
        x=(3, 7, 2),
    ),
    case(
        "y = TensorScatter (cache, update, first)",
        only(lambda c, u: written(c, u, False)),
        {"first": ints(2, 1)},
        opset=24,
        cache=(2, 4, 5),
        update=(2, 2, 5),
    ),
    case(
        'y = TensorScatter <mode = "circular", axis = 1> (cache, update, first)',
        only(lambda c, u: written(c, u, True)),
        {"first": ints(3, 1)},
        name="circular",
        opset=24,
        cache=(2, 4, 5),
        update=(2, 2, 5),
    ),
    case(
        "y = CenterCropPad (x, sizes)",
        only(lambda x: F.pad(x[1:4], (1, 1))),
        {"sizes": ints(3, 5)},
        x=(5, 3),
    ),
    case(
        "y = Col2Im <strides = [2, 1], pads = [1, 0, 1, 0]> (x, sizes, block)",
        only(lambda x: F.fold(x, (5, 6), (3, 2), padding=(1, 0), stride=(2, 1))),
        {"sizes": ints(5, 6), "block": ints(3, 2)},
        x=(2, 3 * 6, 15),
    ),
    case(
        "y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (x, i)",
        only(lambda x: F.pad(x.reshape(24, 1), (0, 3)).reshape(2, 3, 4, 4)),
        {"i": ints(*range(0, 96, 4)).reshape(2, 3, 2, 2)},
        x=(2, 3, 2, 2),
    ),
]

SUMS = [
    *(
        case(
            f"y = {operator} <exclusive = {exclusive}, reverse = {reverse}> (x, axis)",
            only(lambda x, f=function, e=exclusive, r=reverse: running(f, x, e, r)),
            {"axis": np.array(1)},
            name=f"{exclusive} {reverse}",
            opset=opset,
            x=(3, 5, 2),
        )
        for operator, function, opset in (
            ("CumSum", torch.cumsum, 22),
            ("CumProd", torch.cumprod, 26),
        )
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    case("y = Det (x)", only(torch.linalg.det), x=(2, 3, 3)),
    case("y = Det (x)", only(torch.linalg.det), name="of one element", x=(4, 1, 1)),
    *(
        case(
            f"y = LpPool <p = {p}, kernel_shape = [3, 2], strides = [2, 1]> (x)",
            only(lambda x, p=p: (6 * F.avg_pool2d(x.abs() ** p, (3, 2), (2, 1))) ** (1 / p)),
            name=f"p = {p}",
            x=(2, 3, 7, 5),
        )
        for p in (1, 2, 3)
    ),
    case(
        "y = MaxPool <kernel_shape = [3, 2], dilations = [2, 1], strides = [1, 2],"
        " ceil_mode = 1> (x)",
        only(lambda x: F.max_pool2d(x, (3, 2), (1, 2), 0, (2, 1), True)),
        x=(2, 3, 7, 5),
    ),
    case(
        "y = ConvTranspose <dilations = [2, 1], strides = [1, 2], pads = [1, 0, 1, 0]> (x, w, b)",
        only(lambda x, w, b: F.conv_transpose2d(x, w, b, (1, 2), (1, 0), 0, 1, (2, 1))),
        x=(2, 3, 5, 4),
        w=(3, 2, 3, 2),
        b=(2,),
    ),
]


def running(function, x, exclusive, reverse):
    """Sums or products along dimension 1 of all elements up to each, or before it."""
    x = x.flip(1) if reverse else x
    if exclusive:
        first = torch.full_like(x[:, :1], function is torch.cumprod)
        x = torch.cat([first, x[:, :-1]], 1)
    y = function(x, 1)
    return y.flip(1) if reverse else y


def spectrum(function, axis=1, **options):
    """A transform of a complex or real signal whose last dimension has the two parts or one."""

    def transformed(x):
        x = torch.view_as_complex(x) if x.shape[-1] == 2 else x[..., 0]
        return torch.view_as_real(function(x, dim=axis, **options))

    return only(transformed)


def short_time(signal, window):
    frames = signal[..., 0].unfold(1, 6, 3) * window
    return torch.view_as_real(torch.fft.rfft(frames))


SIGNALS = [
    case(
        'y = DFT (x, "", axis)',
        spectrum(torch.fft.fft),
        {"axis": np.array(1)},
        x=(3, 7, 2),
    ),
    case(
        'y = DFT <inverse = 1> (x, "", axis)',
        spectrum(torch.fft.ifft),
        {"axis": np.array(1)},
        name="inverse",
        x=(3, 7, 2),
    ),
    case(
        'y = DFT <onesided = 1> (x, "", axis)',
        spectrum(torch.fft.rfft, 2),
        {"axis": np.array(-2)},
        name="one side",
        x=(2, 3, 7, 1),
    ),
    *(
        case(
            "y = DFT (x, n, axis)",
            spectrum(torch.fft.fft, n=n),
            {"n": np.array(n), "axis": np.array(1)},
            name=f"of {n} of 7",
            x=(3, 7, 2),
        )
        for n in (5, 9)
    ),
    case(
        "y = DFT <axis = 1> (x)",
        spectrum(torch.fft.fft),
        name="version 17",
        opset=17,
        x=(3, 7, 1),
    ),
    case(
        "y = STFT (signal, step, window, length)",
        only(short_time),
        {"step": np.array(3), "length": np.array(6)},
        signal=(2, 17, 1),
        window=(6,),
    ),
]


def resized(size, mode, **options):
    return only(lambda x: F.interpolate(x, size=size, mode=mode, **options))


RESIZED = [
    case(
        f'y = Resize <{attributes}> (x, "", "", sizes)',
        resized(size, mode, **options),
        {"sizes": ints(2, 3, *size)},
        name=f"{name} {size}",
        # As in ONNX Runtime, the weights of an interpolation are of single precision.
        tolerance=TOLERANCE if mode == "nearest" else SINGLE,
        x=(2, 3, *((5, 4) if len(size) == 2 else (5,))),
    )
    for name, attributes, mode, options, sizes in (
        ("linear", 'mode = "linear"', "bilinear", {}, [(7, 9), (3, 2)]),
        ("linear of rows", 'mode = "linear"', "linear", {}, [(9,), (3,)]),
        (
            "linear, corners",
            'mode = "linear", coordinate_transformation_mode = "align_corners"',
            "bilinear",
            {"align_corners": True},
            [(7, 9)],
        ),
        ("cubic", 'mode = "cubic"', "bicubic", {}, [(7, 9), (3, 2)]),
        (
            "nearest",
            'mode = "nearest", coordinate_transformation_mode = "asymmetric",'
            ' nearest_mode = "floor"',
            "nearest",
            {},
            [(7, 9), (3, 2)],
        ),
    )
    for size in sizes
]
RESIZED.append(
    case(
        'y = Upsample <mode = "nearest"> (x, scales)',
        only(lambda x: F.interpolate(x, scale_factor=(2, 3))),
        {"scales": np.array([1, 1, 2, 3], np.float32)},
        opset=9,
        x=(2, 3, 5, 4),
    )
)

GRID = 1.3 * uniform((2, 3, 4, 2), 5)
#: Rows of the image's number and the corners.
REGIONS = torch.tensor([[1, 0.5, 1.5, 9, 7], [0, 2, 0, 6, 9.5]], dtype=torch.float64)

GRIDS = [
    *(
        case(
            f"y = AffineGrid <align_corners = {corners}> (theta, sizes)",
            only(lambda t, n=sizes, c=corners: F.affine_grid(t, n, bool(c))),
            {"sizes": ints(*sizes)},
            name=f"{len(sizes) - 2}-D {corners}",
            theta=(2, len(sizes) - 2, len(sizes) - 1),
        )
        for sizes in ((2, 3, 5, 4), (2, 1, 3, 2, 4))
        for corners in (0, 1)
    ),
    *(
        case(
            f'y = GridSample <mode = "{ours}", padding_mode = "{outside}",'
            f" align_corners = {corners}> (x, grid)",
            only(
                lambda x, g, m=theirs, o=outside, c=corners: F.grid_sample(x, g, m, o, bool(c)),
            ),
            name=f"{ours} {outside} {corners}",
            x=(2, 3, 5, 4),
            grid=GRID,
        )
        for ours, theirs in (("linear", "bilinear"), ("cubic", "bicubic"))
        for outside in ("zeros", "border", "reflection")
        for corners in (0, 1)
    ),
    *(
        case(
            f'y = GridSample <mode = "nearest", padding_mode = "{outside}"> (x, grid)',
            only(lambda x, o=outside: F.grid_sample(x, GRID, "nearest", o, False)),
            {"grid": GRID},
            name=f"nearest {outside}",
            x=(2, 3, 5, 4),
        )
        for outside in ("zeros", "border", "reflection")
    ),
    case(
        "y = GridSample (x, grid)",
        only(lambda x, g: F.grid_sample(x, g, align_corners=False)),
        name="3-D",
        x=(2, 3, 3, 4, 2),
        grid=1.2 * uniform((2, 2, 3, 2, 3), 5),
    ),
    case(
        "y = DeformConv <kernel_shape = [3, 2], pads = [1, 0, 1, 0], strides = [2, 1],"
        " offset_group = 2> (x, w, offset, b, mask)",
        only(
            lambda x, w, offset, b, mask: deform_conv2d(x, offset, w, b, (2, 1), (1, 0), mask=mask)
        ),
        x=(2, 4, 5, 4),
        w=(3, 4, 3, 2),
        offset=(2, 2 * 2 * 6, 3, 3),
        b=(3,),
        mask=(2, 2 * 6, 3, 3),
    ),
    case(
        "y = RoiAlign <output_height = 3, output_width = 2, sampling_ratio = 2,"
        " spatial_scale = 0.5> (x, rois, batch)",
        only(lambda x: roi_align(x, REGIONS, (3, 2), 0.5, 2, aligned=True)),
        {"rois": np.array([[0.5, 1.5, 9, 7], [2, 0, 6, 9.5]]), "batch": ints(1, 0)},
        x=(2, 3, 6, 5),
    ),
]

CASES = [*ELEMENTWISE, *STEPS, *INDEXING, *SUMS, *SIGNALS, *RESIZED, *GRIDS]


@pytest.mark.parametrize(("nodes", "function", "constants", "opset", "tolerance", "given"), CASES)
def test_gradients_of_nodes(nodes, function, constants, opset, tolerance, given):
    model = parsed(nodes, opset)
    stored(model, constants)
    given = {
        name: uniform(value, n) if isinstance(value, tuple) else value
        for n, (name, value) in enumerate(given.items())
    }
    assert_gradients(model, function, given, tolerance=tolerance)
