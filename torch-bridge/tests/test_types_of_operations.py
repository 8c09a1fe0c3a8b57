"""The types in which operations compute: conversions, in-place operators, products by letters."""

import pytest
import shorthaul
import torch
from shorthaul.module import original_of
from torch import nn


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def assert_same(function, *inputs, **tolerances):
    """Results and gradients beside eager's."""
    found = []
    for model in (Applied(function), shorthaul.module(Applied(function))):
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        y = model(*own)
        gradients = ()
        if y.requires_grad:
            weights = torch.arange(1.0, y.numel() + 1).view(y.shape)
            wrt = [x for x in own if x.requires_grad]
            gradients = torch.autograd.grad((y * weights).sum(), wrt, allow_unused=True)
        found.append((y, *gradients))
    torch.testing.assert_close(found[1], found[0], equal_nan=True, **tolerances)


@pytest.mark.parametrize("to", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_an_integer_in_between_wraps(of, to):
    """A compiler may turn a conversion to an integer and back into a rounding."""
    x = torch.tensor([0.0, 0.5, 1.0, 1.1, -0.1, 100.0, -100.0], dtype=of)
    assert_same(lambda x: (x * 255).round().to(to).float() / 255, x)
    if to in (torch.int32, torch.int64) and of in (torch.float32, torch.float64):
        far = torch.tensor([3e9, -3e9, 1e20, -1e20, float("nan"), float("inf")], dtype=of)
        assert_same(lambda x: x.to(to).to(of), far)


@pytest.mark.parametrize(
    "equation, first, second",
    [
        ("ij,jk->ik", (3, 1), (4, 5)),
        ("ij,jk->ik", (3, 4), (1, 5)),
        ("ij,ij->i", (3, 1), (3, 4)),
        ("ij,kj->k", (3, 1), (2, 4)),
        ("bij,bjk->bik", (2, 3, 1), (2, 4, 5)),
        ("bij,bjk->bik", (1, 3, 4), (2, 4, 5)),
        ("iij,j->i", (3, 3, 5), (5,)),
        ("iij,kj->ik", (33, 33, 64), (40, 64)),
        ("bii,b->b", (2, 4, 4), (2,)),
        ("ii,jj->ij", (4, 4), (3, 3)),
    ],
)
def test_gradients_of_stretched_and_repeated_letters(equation, first, second):
    """Memory that nothing writes would hold anything; NaN in freed blocks makes that show."""
    torch.manual_seed(0)
    _ = [torch.full(shape, torch.nan) for shape in (first, second) for _ in range(8)]
    del _
    a, b = torch.randn(first), torch.randn(second)
    assert_same(lambda a, b: torch.einsum(equation, a, b), a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda h, f, i: (h * 1).add_(f),
        lambda h, f, i: (h * 1).mul_(f),
        lambda h, f, i: (h * 1).eq_(f),
        lambda h, f, i: (i * 1).ge_(0.5),
        lambda h, f, i: (i * 1).eq_(0.5),
        lambda h, f, i: (i * 1).logical_and_(f),
        lambda h, f, i: (i.int() * 1).remainder_(i + (1 << 40)),
        lambda h, f, i: (i.int() * 1).clamp_(max=i + (1 << 40)),
        lambda h, f, i: (i.bool() & True).eq_(2),
        lambda h, f, i: (i * 1, (i * 1)[:2].gt_(-0.5))[1],
    ],
)
def test_in_place_operators_compute_in_the_type_of_all_operands(function):
    h = torch.tensor([-6e4, 1e-3, 0.1], dtype=torch.float16)
    f, i = torch.tensor([1e5, 1e5, 0.1]), torch.tensor([0, 1, 2])
    with torch.no_grad():
        assert_same(function, h, f, i)


def test_a_slice_is_written_in_its_own_type():
    def write(i):
        a = i * 1
        a[:2].gt_(-0.5)
        return a

    with torch.no_grad():
        assert_same(write, torch.tensor([0, 5, 7]))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = 5  # the name that autograd's leaves have
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_a_function_with_an_attribute_called_variable_is_no_leaf():
    torch.manual_seed(0)
    compiled = shorthaul.module(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)))
    w = torch.randn(6, requires_grad=True)
    found = []
    for model in (original_of(compiled), compiled):
        asked = [w, model[0].weight]
        found.append(torch.autograd.grad(model(Scaled.apply(w)).sum(), asked))
    torch.testing.assert_close(found[1], found[0])
