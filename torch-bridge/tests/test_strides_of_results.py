"""Results lie in memory as eager's do, also those of operators that others are written with."""

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from torch import nn


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def image():
    return torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last)


def matrix():
    return torch.randn(6, 5).t()


AT = torch.tensor([0, 2])

CASES = {
    "bilinear": (lambda x: F.interpolate(x, size=(7, 3), mode="bilinear"), image),
    "bicubic": (lambda x: F.interpolate(x, size=(7, 3), mode="bicubic"), image),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), image),
    "a fraction": (lambda x: F.interpolate(x, scale_factor=2.1), image),
    "antialiased": (lambda x: F.interpolate(x, (7, 3), mode="bilinear", antialias=True), image),
    "viewed": (lambda x: F.interpolate(x, scale_factor=2).transpose(1, 2), image),
    "cumprod": (lambda x: x.cumprod(1), matrix),
    "index_put": (lambda x: x.index_put((AT,), x[:2]), matrix),
    "put": (lambda x: x.put(AT, x[0, :2]), matrix),
    "masked_scatter": (lambda x: x.masked_scatter(x > 0, x), matrix),
    "diagonal_scatter": (lambda x: torch.diagonal_scatter(x, x.diagonal()), matrix),
}


@pytest.mark.parametrize("case", CASES)
def test_results_have_the_strides_of_eager(case):
    function, make = CASES[case]
    torch.manual_seed(0)
    x = make()
    compiled = shorthaul.module(Function(function), fallback="error")
    found, expected = compiled(x), function(x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [5, 6, 9])
def test_results_of_many_sizes_have_the_strides_of_eager(size):
    def resized(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear"), x.flatten(2).mT.cumprod(1)

    compiled = torch.compile(resized, backend="shorthaul", dynamic=True)
    x = torch.randn(2, 4, size, 6).to(memory_format=torch.channels_last)
    for found, expected in zip(compiled(x), resized(x), strict=True):
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
