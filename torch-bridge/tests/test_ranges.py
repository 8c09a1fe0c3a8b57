"""Indices whose range is known from the graph are not checked at a call; all others are."""

from __future__ import annotations

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from shorthaul._call import recorded

TABLE = torch.randn(10, 3)
LARGE = 2**31 - 1


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def is_checked(function, *inputs) -> bool:
    """Whether a call checks what the graph computed; its results are eager's."""
    compiled = shorthaul.module(Of(function))
    compiled(*inputs)
    with recorded() as calls:
        found = compiled(*inputs)
    assert calls
    torch.testing.assert_close(found, function(*inputs))
    return any(call.is_checked for call in calls)


KNOWN = {
    "remainder": lambda x: TABLE[x.long() % 10],
    "clamp": lambda x: TABLE[x.long().clamp(0, 9)],
    "bits": lambda x: TABLE[x.long() & 7],
    "sum of digits": lambda x: TABLE[(x.long() % 3) * 3 + x.long() % 4],
    "choice": lambda x: TABLE[torch.where(x > 0, x.long() % 4, 9)],
    "argmax": lambda x: TABLE[x.argmax(1)],
    "maximum": lambda x: TABLE[x.max(1)[1]],
    "sort": lambda x: x.gather(1, x.sort(1)[1]),
    "topk": lambda x: x.gather(1, x.topk(2, 1)[1]),
    "from the end": lambda x: TABLE[-1 - x.long() % 10],
    "positive divisor": lambda x: 100 // (x.long() % 5 + 1),
}

UNKNOWN = {
    "float": lambda x: TABLE[x.clamp(0, 9).long()],
    "quotient": lambda x: TABLE[x.long() % 12 // 2],
    "negative remainder": lambda x: TABLE[x.long() % -10],
    "values": lambda x: TABLE[x.long().max(1)[0] % 10 + x.long().max(1)[0].clamp(max=0)],
    "wraps around": lambda x: TABLE[((x.int() % 9) * LARGE + 1).clamp(max=9) * 0],
    "divisor": lambda x: 100 // (x.long() * 2 + 1),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_range_is_not_checked(name):
    assert not is_checked(KNOWN[name], torch.arange(12.0).reshape(3, 4) - 2)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_range_is_checked(name):
    assert is_checked(UNKNOWN[name], torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_places_of_a_grid_are_not_checked(mode, padding):
    def sampled(x, grid):
        return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=False)

    grid = torch.rand(2, 5, 6, 2) * 3 - 1.5
    grid[0, 0, 0, 0] = torch.nan
    x = torch.randn(2, 4, 7, 8)
    compiled = shorthaul.module(Of(sampled))
    torch.testing.assert_close(compiled(x, grid), sampled(x, grid), equal_nan=True)
    grid[0, 0, 0, 0] = 9.0
    assert not is_checked(sampled, x, grid)


def test_a_long_chain_of_choices_takes_no_time():
    """Each step reads the index before it twice."""

    def moved(x):
        at = x.long() % 7
        for i in range(40):
            at = torch.where(x > i, at + 1, at)
        return torch.ones(60, 2)[at]

    assert not is_checked(moved, torch.arange(5.0))


def test_what_is_checked_is_the_value_before_it_was_expanded():
    def looked_up(x, y):
        at = x.sum(0).long()
        return y.gather(1, at.expand(100, 4))

    x, y = torch.ones(3, 4), torch.randn(100, 4)
    sizes = [c["bytes"] for c in shorthaul.report(Of(looked_up), x, y).data["containers"]]
    assert max(sizes) < 8 * 400
    with pytest.raises((IndexError, RuntimeError)):
        shorthaul.module(Of(looked_up))(2 * x, y)
