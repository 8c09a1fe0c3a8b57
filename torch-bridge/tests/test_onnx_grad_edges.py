"""Gradients of training graphs at zeros, ties, bounds and large numbers are those of PyTorch."""

import numpy as np
import onnx
import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
from file_gradients import assert_gradients, parsed, stored, uniform, with_inputs, with_total
from training_graphs import run


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


ZEROS = numbers([0, 2, 3], [0, 0, 4], [1, 2, 3])
TIES = numbers([1, 1, 0], [2, 2, 2], [0, 1, 0])
EQUAL = torch.ones(1, 2, 5, 5, dtype=torch.float64)
LARGE = numbers(0, -800, 800, 30, -40, 19, 21)
LOGITS = numbers([800, 0, -800], [1, 2, 3])
KINK = numbers(0, -1, 1)
BOUNDS = numbers(-0.5, 0.5, 0.1, 2)


def case(name, nodes, function, constants=None, **given):
    return pytest.param(nodes, function, constants or {}, given, id=name)


REDUCTIONS = {
    "ReduceMax": lambda x: x.amax(1, True),
    "ReduceMin": lambda x: x.amin(1, True),
    "ReduceProd": lambda x: x.prod(1, True),
    "ReduceL1": lambda x: x.abs().sum(1, True),
    "ReduceL2": lambda x: x.norm(dim=1, keepdim=True),
}
INFINITE = numbers(float("inf"), 2)
FIRST = torch.tensor([True, False])

CASES = [
    *(
        case(f"{operator} of {name}", f"y = {operator} (x, axis)", f, {"axis": np.array([1])}, x=x)
        for operator, f in REDUCTIONS.items()
        for name, x in (("zeros", ZEROS), ("ties", TIES), ("zeros only", torch.zeros_like(TIES)))
    ),
    case(
        "CumProd of zeros",
        "y = CumProd (x, axis)",
        lambda x: x.cumprod(1),
        {"axis": np.array(1)},
        x=ZEROS,
    ),
    case(
        "LpPool of a window of zeros",
        "y = LpPool <kernel_shape = [2], strides = [2]> (x)",
        lambda x: F.lp_pool1d(x, 2, 2),
        x=numbers([[0, 0, 3, -4]]),
    ),
    case("Max of ties", "y = Max (p, q)", torch.maximum, p=TIES, q=TIES.flip(0)),
    case("Min of ties", "y = Min (p, q)", torch.minimum, p=TIES, q=TIES.flip(0)),
    case(
        "Pow of zeros",
        "y = Pow (p, q)",
        torch.pow,
        p=numbers(0, 0, 0, 0, 2),
        q=numbers(2, 1, 3, 0, 0),
    ),
    case(
        "Pow of a negative base",
        "y = Pow (p, q)",
        lambda p: p ** numbers(2, 3),
        {"q": np.array([2.0, 3.0])},
        p=numbers(-2, -2),
    ),
    case("Abs", "y = Abs (x)", torch.abs, x=KINK),
    case("Relu", "y = Relu (x)", F.relu, x=KINK),
    case(
        "LeakyRelu", "y = LeakyRelu <alpha = 0.125> (x)", lambda x: F.leaky_relu(x, 0.125), x=KINK
    ),
    case("PRelu", "y = PRelu (x, w)", F.prelu, x=KINK[:, None], w=numbers(0.25)),
    case("Elu", "y = Elu (x)", F.elu, x=KINK),
    case("Celu", "y = Celu (x)", F.celu, x=KINK),
    case(
        "Clip",
        "y = Clip (x, low, high)",
        lambda x: x.clamp(-0.5, 0.5),
        {"low": np.array(-0.5), "high": np.array(0.5)},
        x=BOUNDS,
    ),
    case(
        "Clip, and its limits",
        "y = Clip (x, low, high)",
        torch.clamp,
        x=numbers(-0.75, 0.75, 0.1),
        low=numbers(-0.5)[0],
        high=numbers(0.5)[0],
    ),
    case("HardSwish", "y = HardSwish (x)", F.hardswish, x=numbers(-3, 3, 0.1, 4, -4)),
    case(
        "HardSigmoid",
        "y = HardSigmoid <alpha = 0.25, beta = 0.5> (x)",
        lambda x: (x * 0.25 + 0.5).clamp(0, 1),
        x=numbers(-2, 2, 0.1, 3),
    ),
    case("Shrink", "y = Shrink <lambd = 0.5> (x)", lambda x: F.hardshrink(x, 0.5), x=BOUNDS),
    case(
        "ThresholdedRelu",
        "y = ThresholdedRelu <alpha = 0.5> (x)",
        lambda x: F.threshold(x, 0.5, 0.0),
        x=BOUNDS,
    ),
    *(
        case(f"{operator} of large numbers", f"y = {operator} (x)", f, x=LARGE)
        for operator, f in (
            ("Softplus", F.softplus),
            ("Sigmoid", torch.sigmoid),
            ("Mish", F.mish),
            ("Tanh", torch.tanh),
            ("Gelu", F.gelu),
            ("Elu", F.elu),
            ("Celu", F.celu),
            ("Swish", F.silu),
        )
    ),
    case("Asinh of large numbers", "y = Asinh (x)", torch.asinh, x=numbers(1e200, -1e200, 0, -5)),
    case("Softmax of large numbers", "y = Softmax (x)", lambda x: x.softmax(-1), x=LOGITS),
    case(
        "LogSoftmax of large numbers", "y = LogSoftmax (x)", lambda x: x.log_softmax(-1), x=LOGITS
    ),
    case(
        "SoftmaxCrossEntropyLoss of large numbers",
        "y = SoftmaxCrossEntropyLoss (x, labels)",
        lambda x: F.cross_entropy(x, torch.tensor([0, 2])),
        {"labels": np.array([0, 2])},
        x=LOGITS,
    ),
    case(
        "MaxPool of ties",
        "y = MaxPool <kernel_shape = [3, 3]> (x)",
        lambda x: F.max_pool2d(x, 3, 1),
        x=EQUAL,
    ),
    case("GlobalMaxPool of ties", "y = GlobalMaxPool (x)", lambda x: x.amax((2, 3), True), x=EQUAL),
    case(
        "LayerNormalization of equal numbers",
        "y = LayerNormalization (x, s)",
        lambda x, s: F.layer_norm(x, (5,), s),
        x=EQUAL,
        s=numbers(1, 2, 3, 4, 5),
    ),
    case(
        "ScatterElements multiplying zeros",
        'y = ScatterElements <axis = 1, reduction = "mul"> (x, i, u)',
        lambda x, u: x.scatter_reduce(1, torch.zeros(2, 2).long(), u, "prod"),
        {"i": np.zeros((2, 2), np.int64)},
        x=numbers([0, 2], [2, 2]),
        u=numbers([0, 3], [0, 3]),
    ),
    case(
        "Det of a matrix that needs exchanged rows",
        "y = Det (x)",
        torch.linalg.det,
        x=numbers([0, 1, 2], [1, 0, 3], [4, -3, 8]),
    ),
    case(
        "Mod of multiples",
        "y = Mod <fmod = 1> (p, q)",
        torch.fmod,
        p=numbers(4, -4, 5),
        q=numbers(2, 2, -3),
    ),
    case(
        "Where of infinite numbers",
        "y = Where (c, p, q)",
        lambda p, q: torch.where(FIRST, p, q),
        {"c": FIRST.numpy()},
        p=INFINITE.flip(0),
        q=INFINITE,
    ),
]


@pytest.mark.parametrize(("nodes", "function", "constants", "given"), CASES)
def test_gradients_at_edges(nodes, function, constants, given):
    model = parsed(nodes, opset=26)
    stored(model, constants)
    assert_gradients(model, lambda **given: {"y": function(*given.values())}, given)


#: Nodes, what is differentiated, and what is read beside it.
NOT_WRITTEN = {
    "Einsum": (
        'y = Einsum <equation = "bii->bi"> (x)',
        {"x": (2, 4, 4)},
        {},
        (2, 4),
    ),
    "LayerNormalization": (
        "n, y = LayerNormalization (x, s)",
        {"x": (3, 5)},
        {"s": np.ones(5)},
        (3, 1),
    ),
    "BatchNormalization": (
        'n, y, "" = BatchNormalization <training_mode = 1> (x, s, s, s, s)',
        {"x": (4, 3)},
        {"s": np.ones(3)},
        (3,),
    ),
    "SoftmaxCrossEntropyLoss": (
        "y = SoftmaxCrossEntropyLoss (x, labels, w)",
        {"w": (5,), "x": (3, 5)},
        {"labels": np.array([0, 4, 2])},
        (),
    ),
}


@pytest.mark.parametrize("operator", NOT_WRITTEN)
def test_what_cannot_be_written_is_refused_by_name(operator):
    """Letters that an operand has twice; statistics and weights of classes in the loss."""
    nodes, shapes, constants, shape = NOT_WRITTEN[operator]
    model = parsed(nodes)
    stored(model, constants)
    with_inputs(model, {name: uniform(size) for name, size in shapes.items()})
    with_total(model, {"y": torch.empty(shape)}, torch.float64)
    model.graph.node[0].name = "first"
    with pytest.raises(shorthaul.onnx.OnnxError, match=f"^first .{operator}, .*cannot be written"):
        shorthaul.onnx.grad(model, loss="total", wrt=list(shapes))


def test_weights_of_classes_are_not_parameters():
    model = parsed("z = MatMul (x, m) total = SoftmaxCrossEntropyLoss (z, l, w)", 22)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0], dtype=torch.float64)
    given = {"x": uniform((3, 4), 1), "l": torch.tensor([0, 4, 2])}
    matrix = uniform((4, 5)).requires_grad_()
    stored(model, {"m": matrix.detach(), "w": weights})
    with_inputs(model, given)
    model.graph.output.append(onnx.helper.make_tensor_value_info("total", 11, []))
    found = run(shorthaul.onnx.grad(model, loss="total"), given)
    F.cross_entropy(given["x"] @ matrix, given["l"], weights).backward()
    assert set(found) == {"loss", "m.grad"}
    torch.testing.assert_close(found["m.grad"], matrix.grad)
