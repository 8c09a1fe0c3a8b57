"""Numbers are rounded where PyTorch rounds them, so that what is equal there is equal here."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

N = 1031


def compiled(function):
    return torch.compile(function, backend="shorthaul")


def numbers(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).to(dtype)


def iou(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    sides = (high - low).clamp(min=0)
    inter = sides[:, 0] * sides[:, 1]
    areas = [(box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) for box in (a, b)]
    return inter / (areas[0] + areas[1] - inter)


EQUAL = {
    "difference_of_squares": lambda x, y: (x * x - y * y).sqrt(),
    "is_zero": lambda x, y: x * y - y * x == 0,
    "sign": lambda x, y: torch.sign(x * y - y * x),
    "logarithm": lambda x, y: torch.log(x * x - y * y),
    "determinant": lambda x, y: x * y - y * x,
    "residual": lambda x, y: torch.relu(x * 3 - y * 3),
    "less_maximum": lambda x, y: (x * y).amax() - x * y == 0,
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_rounded_before_the_sum(name, dtype):
    x, given = numbers(N, dtype=dtype), EQUAL[name]
    torch.testing.assert_close(
        compiled(given)(x, x.clone()), given(x, x.clone()), rtol=0, atol=0, equal_nan=True
    )


def test_equal_boxes_overlap_wholly():
    corner, size = numbers(300, 2), numbers(300, 2).abs() + 0.1
    boxes = torch.cat([corner, corner + size], dim=1)
    assert torch.equal(compiled(iou)(boxes, boxes.clone()), iou(boxes, boxes.clone()))


class Scaled(nn.Module):
    """What follows is computed again in several kernels, which have to find the same numbers."""

    def __init__(self, last):
        super().__init__()
        self.conv, self.last = nn.Conv2d(16, 64, 3, padding=1), last
        self.a, self.b, self.c = (nn.Parameter(numbers(64, 1, 1) + i) for i in range(3))

    def forward(self, x):
        return self.last(self.a * self.b + self.conv(x) * self.c)


LAST = {
    "max_pool": nn.MaxPool2d(2),
    "max_pool_overlapping": nn.MaxPool2d(3, 2, 1),
    "adaptive_max_pool": nn.AdaptiveMaxPool2d(5),
    "amax": lambda y: y.amax((2, 3)),
    "amin": lambda y: y.amin((0, 2, 3)),
    "max_of_channels": lambda y: y.max(1).values,
    "largest_norm": lambda y: torch.linalg.vector_norm(y, math.inf, (2, 3)),
}


@pytest.mark.parametrize("name", LAST)
def test_the_largest_number_is_found_again_for_its_gradient(name):
    torch.manual_seed(0)
    network, x = Scaled(LAST[name]), numbers(4, 16, 32, 32)
    found = {}
    for kind, dtype in (
        ("eager", torch.float32),
        ("ours", torch.float32),
        ("exact", torch.float64),
    ):
        own = copy.deepcopy(network).to(dtype)
        given = x.detach().to(dtype).clone().requires_grad_()
        run = compiled(own) if kind == "ours" else own
        run(given).square().mean().backward()
        found[kind] = [given.grad, *(p.grad for p in own.parameters())]
    for ours, eager, exact in zip(found["ours"], found["eager"], found["exact"], strict=True):
        size = exact.abs().max()
        # Where two of a window's numbers nearly agree, either may be the largest.
        worse = ((ours - exact).abs() > 1e-4 * size).double().mean()
        assert worse <= ((eager - exact).abs() > 1e-4 * size).double().mean() + 1e-3


@pytest.mark.parametrize("positive", [None, 3.0])
@pytest.mark.parametrize("target", [0.0, 1.0, 0.3])
def test_slope_of_a_loss_that_is_almost_zero(positive, target):
    """Relative to itself, not to 1: easy negatives are many, and their slopes add up."""
    x = torch.linspace(-30, 30, 241)
    weight = None if positive is None else torch.tensor(positive)

    def loss(x, y):
        return F.binary_cross_entropy_with_logits(x, y, pos_weight=weight, reduction="sum")

    given = x.clone().requires_grad_()
    compiled(loss)(given, torch.full(x.shape, target)).backward()
    # The slope in float64, without the difference that eager takes.
    ours, wide = given.grad.double(), x.double()
    exact = (1 - target) * wide.sigmoid() - (positive or 1.0) * target * (-wide).sigmoid()
    # Between 0 and 1 there is a logit at which both parts of the slope agree, and digits are lost.
    least = 0.0 if target in (0.0, 1.0) else 1e-6
    assert ((ours - exact).abs() <= 2e-6 * exact.abs() + least).all()


WEIGHT = nn.Parameter(torch.full((8,), 0.5, dtype=torch.float16))
BIAS = nn.Parameter(torch.zeros(8, dtype=torch.float16))

HALVES = {
    "deviation_of_large": lambda x: (x * 1000).std(),
    "deviation_of_small": lambda x: (x * 1e-3).std(0),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax": lambda x: F.softmax(x * 4, -1),
    "largest_of_many_equal": lambda x: x[0, :1].expand(70000).clone().amax(0, keepdim=True),
    "broadcast": lambda x: x[:1, :1].expand(1, 1) * torch.tensor([[3e5], [-8e4]]),
    "batch_norm": lambda x: F.batch_norm(
        x[..., None], None, None, WEIGHT.to(x.dtype), BIAS.to(x.dtype), True
    ),
}

#: Gradients of results: their sums over a row or a column are beyond the largest number of float16.
GIVEN = {"log_softmax": 9000.0, "batch_norm": 9000.0}


@pytest.mark.parametrize("name", HALVES)
def test_sums_of_halves_are_wide(name):
    x, function = numbers(16, 8, dtype=torch.float16), HALVES[name]
    found = {}
    for kind in ("eager", "ours", "exact"):
        own = (x.double() if kind == "exact" else x.clone()).requires_grad_()
        result = (compiled(function) if kind == "ours" else function)(own)
        weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)
        result.backward((weights * GIVEN.get(name, 1.0)).to(result.dtype))
        found[kind] = (result.detach().double(), own.grad.double())
    for ours, eager, exact in zip(found["ours"], found["eager"], found["exact"], strict=True):
        near, far = ((one - exact).abs().max() for one in (ours, eager))
        size = exact.abs().max().clamp(min=1e-2)
        assert far <= 0.05 * size, "eager is no measure"
        assert near <= far + 2e-3 * size
