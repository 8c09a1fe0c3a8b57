"""Writes in place that eager refuses because of how tensors lie in memory, and such that it has."""

import pytest
import torch


def shifted(x):
    y = x * 1
    y[1:].copy_(y[:-1])
    return y


def added(x):
    y = x * 1
    y[1:].add_(y[:-1])
    return y


def expanded(x):
    y = x[0] * 1
    y.expand(3, 4).copy_(x)
    return y


def apart(x):
    y = x * 1
    y[2:].copy_(y[:2])
    y[0].copy_(y[3]).add_(y[0])
    return y


@pytest.mark.parametrize("function", [shifted, added, expanded])
def test_eager_raises_and_so_does_a_compiled_model(function):
    x = torch.arange(12.0).view(3, 4)
    with pytest.raises(RuntimeError, match="memory location"):
        function(x)
    with pytest.raises(RuntimeError, match="memory location"):
        torch.compile(function, backend="shorthaul")(x)


def test_parts_that_lie_apart_are_written():
    x = torch.arange(16.0).view(4, 4)
    assert torch.equal(torch.compile(apart, backend="shorthaul")(x), apart(x))
