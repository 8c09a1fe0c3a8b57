"""Running sums, sorts and first elements of long axes, beside PyTorch's in float64.

Axes longer than 8 are loops; the lengths here are on both sides of that, of the list of first
elements, and of a sort's first runs.
"""

from __future__ import annotations

import math

import pytest
import shorthaul
import torch
from torch import nn

LENGTHS = (5, 9, 33, 70, 129, 300)


class _Every(nn.Module):
    """All of them along an axis of every length."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        """Values, and positions where there are some."""
        n = x.shape[self.dim]
        few, most = x.topk(min(4, n), self.dim), x.topk(n - 1, self.dim, largest=False)
        order = x.sort(dim=self.dim, descending=True, stable=True)
        total = x.cumsum(self.dim)
        return total, total.flip(self.dim).cumsum(self.dim), *few, *most, *order


def _run(model, x):
    x = x.clone().requires_grad_()
    results = model(x)
    floats = [y for y in results if y.is_floating_point()]
    loss = sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in floats)
    loss.backward()
    return [*results, x.grad]


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_that_change(dim, dtype):
    torch.manual_seed(0)
    model = shorthaul.module(_Every(dim))
    for n in LENGTHS:
        shape = [3, 2, 4]
        shape[dim] = n
        # No two numbers are equal, so an order of PyTorch's that is not stable is the same.
        x = torch.randperm(math.prod(shape)).double().view(shape) / math.prod(shape) - 0.5
        for found, expected in zip(_run(model, x.to(dtype)), _run(_Every(dim), x), strict=True):
            assert found.dtype == (dtype if expected.is_floating_point() else expected.dtype)
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-4)


TYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def _with_ties(n: int, dtype) -> torch.Tensor:
    """Rows with equal elements and, of floats, with all that is not an ordinary number."""
    torch.manual_seed(n)
    if dtype == torch.bool:
        return torch.rand(3, n, 2) > 0.5
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        x = torch.randint(max(low, -(2**40)), min(high, 2**40), (3, n, 2)).to(dtype)
        x[0] = x[0] % 7
        x[1, ::5], x[1, ::7] = low, high
        return x
    x = torch.randn(3, n, 2).to(dtype)
    x[0] = (x[0] * 2).round()
    x[1, ::5], x[1, 1::5], x[1, 2::7], x[1, 3::7] = -0.0, 0.0, math.nan, -math.inf
    return x


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_first_elements_of_every_type_are_those_of_a_stable_sort(dtype, largest):
    class Both(nn.Module):
        def forward(self, x, k):
            order = x.sort(dim=1, descending=largest, stable=True)
            if x.dtype == torch.bool:  # PyTorch has no topk of it.
                return *order, order[0][:, :k], order[1][:, :k]
            return *order, *x.topk(k, 1, largest=largest)

    for n, k in ((40, 12), (127, 127), (128, 100), (600, 150), (2000, 300)):
        x = _with_ties(n, dtype)
        compiled = shorthaul.module(Both(), fallback="error")
        values, places, first, first_places = compiled(x, k)
        expected = x.sort(dim=1, descending=largest, stable=True)
        torch.testing.assert_close(values, expected[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places, expected[1])
        torch.testing.assert_close(first, expected[0][:, :k], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(first_places, expected[1][:, :k])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_sums_of_16_bits_are_kept_in_32(dtype):
    x = torch.randn(5, 400).to(dtype)
    assert torch.equal(shorthaul.module(Cumsum(), fallback="error")(x.t()), Cumsum()(x.t()))


def test_long_axes_are_loops():
    report = shorthaul.report(_Every(-1), torch.randn(3, 2, 70, requires_grad=True)).data
    loops = [k for k in report["kernels"] if k["path"] == "loop along an axis"]
    assert sorted({k["stage"] for k in loops}) == ["backward", "forward"]
    assert sum(k["stage"] == "forward" for k in loops) == 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8])
def test_running_sums_of_integers_have_pytorchs_type_and_wrap(dtype):
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (40, 3)).to(dtype)
    if dtype == torch.int64:
        x[0, 0] = torch.iinfo(dtype).max
    eager = Cumsum()
    found, expected = shorthaul.module(Cumsum())(x), eager(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


class Cumsum(nn.Module):
    """Along the first dimension."""

    def forward(self, x):
        """Sums up to each position."""
        return x.cumsum(0)


def test_sorts_of_special_values_are_eagers():
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0])
    x = special.repeat(40)[torch.randperm(240, generator=torch.Generator().manual_seed(0))]

    class Sorted(nn.Module):
        def forward(self, x):
            up, down = x.sort(stable=True), x.sort(stable=True, descending=True)
            return *up, *down, x.topk(50)[0], x.topk(50, largest=False)[0]

    for found, expected in zip(shorthaul.module(Sorted())(x), Sorted()(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
