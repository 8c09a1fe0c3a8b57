"""Reductions of what an index sends to each place, beside eager: ties, NaN, places without any."""

from __future__ import annotations

import math
import warnings

import pytest
import shorthaul
import torch
from torch import nn

KINDS = ("sum", "mean", "amax", "amin")


class _Reduce(nn.Module):
    def __init__(self, dim: int, kind: str, include_self: bool):
        super().__init__()
        self.dim, self.kind, self.include_self = dim, kind, include_self

    def forward(self, x, index, source):
        """The operand joined with the source."""
        joined = x.scatter_reduce(
            self.dim, index, source, self.kind, include_self=self.include_self
        )
        return joined * 2


def _run(model, x, index, source, learns):
    if not learns:
        return (model(x, index, source),)
    x, source = x.clone().requires_grad_(), source.clone().requires_grad_()
    y = model(x, index, source)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y, x.grad, source.grad


def _same(model, *arguments, learns=True):
    """The result is eager's, and so are the gradients if it ``learns``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        found = _run(shorthaul.module(model), *arguments, learns)
    for ours, eager in zip(found, _run(model, *arguments, learns), strict=True):
        torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_and_columns(kind, include_self, dtype):
    """Whole numbers, so that many are equal; the operand is larger than the source."""
    torch.manual_seed(0)
    x, source = (torch.randn(9, 8) * 2).round().to(dtype), (torch.randn(7, 6) * 2).round().to(dtype)
    for dim in (0, 1, -1):
        index = torch.randint(0, 5, (7, 6))
        _same(_Reduce(dim, kind, include_self), x, index, source)


@pytest.mark.parametrize("include_self", [True, False])
def test_a_nan_and_maxima_that_equal_the_operand(include_self):
    torch.manual_seed(1)
    source = torch.randn(9, 3).relu()
    source[3, 1] = math.nan
    index = torch.randint(0, 3, (9, 1)).expand(9, 3)
    _same(_Reduce(0, "amax", include_self), torch.zeros(4, 3), index, source)


def test_a_number_at_one_place():
    model = _Reduce(0, "amin", True)
    _same(model, torch.tensor(1.0), torch.tensor(0), torch.tensor(-3.0))


@pytest.mark.parametrize("kind", ["amax", "amin", "mean"])
def test_rows_by_a_list(kind):
    class Rows(nn.Module):
        def forward(self, x, index, source):
            return x.index_reduce(0, index, source, kind, include_self=False)

    torch.manual_seed(2)
    _same(Rows(), torch.randn(5, 4), torch.randint(0, 5, (9,)), torch.randn(9, 4))


@pytest.mark.parametrize("size", [300, 3000])
def test_many_rows_stay_in_our_kernels(size):
    """Maxima of messages over the edges of a graph."""
    torch.manual_seed(3)
    source = torch.randn(10 * size, 8)
    index = torch.randint(0, size, (10 * size, 1)).expand_as(source)
    _same(_Reduce(0, "amax", False), torch.zeros(size, 8), index, source)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "prod"])
def test_a_source_larger_than_the_index(kind, include_self):
    """Elements of the source beyond the index are not read; eager has no gradients then."""
    torch.manual_seed(4)
    x, source = torch.randn(4, 6), torch.randn(9, 8)
    for dim, top in ((0, 4), (1, 6)):
        index = torch.randint(0, top, (3, 5))
        _same(_Reduce(dim, kind, include_self), x, index, source, learns=False)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "prod"])
def test_an_index_without_elements(kind, include_self):
    """Eager has no gradients then."""
    empty = torch.empty(0, 4, dtype=torch.int64)
    given = torch.randn(3, 4), empty, torch.randn(2, 4)
    _same(_Reduce(0, kind, include_self), *given, learns=False)


@pytest.mark.parametrize("kind", ["sum", "amax", "amin", "prod", "mean"])
def test_integers_stay_pytorchs(kind):
    torch.manual_seed(5)
    x, source = torch.randint(-9, 9, (5, 4)), torch.randint(-9, 9, (7, 4))
    index = torch.randint(0, 5, (7, 4))
    for dtype in (torch.int64, torch.int32):
        model = _Reduce(0, kind, include_self=True)
        given = (x.to(dtype), index, source.to(dtype))
        with pytest.warns(shorthaul.FallbackWarning, match="scatter_reduce"):
            torch.testing.assert_close(shorthaul.module(model)(*given), model(*given))
