"""Largest and smallest elements of rows, beside eager: every length of a last vector, and NaN."""

from __future__ import annotations

import math

import pytest
import shorthaul
import torch
from torch import nn


class Extremes(nn.Module):
    """Along rows and columns, and softmax, which needs them."""

    def forward(self, x):
        return x.amax(1), x.amin(1), x.amax(0), x.amin(0), x.softmax(1), x.log_softmax(1)


ROWS = {
    "numbers": lambda n: torch.randn(n),
    "one nan": lambda n: torch.where(torch.arange(n) == n - 1, math.nan, torch.randn(n)),
    "one negative nan": lambda n: torch.where(torch.arange(n) == 0, -math.nan, torch.randn(n)),
    "nothing but nan": lambda n: torch.full((n,), math.nan),
    "all infinite": lambda n: torch.full((n,), math.inf),
    "all negative infinite": lambda n: torch.full((n,), -math.inf),
    "all negative": lambda n: -1 - torch.rand(n),
    "subnormal": lambda n: torch.full((n,), -1e-42),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [3, 15, 16, 17, 20, 21, 22, 33, 49, 67])
def test_rows_of_every_length_and_kind(n, dtype):
    torch.manual_seed(n)
    x = torch.stack([make(n) for make in ROWS.values()]).to(dtype)
    compiled = shorthaul.module(Extremes(), fallback="error")
    found, expected = compiled(x), Extremes()(x)
    for one, other in zip(found[:4], expected[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(found[4:], expected[4:], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
