"""Binary cross entropy takes numbers between 0 and 1, as in eager."""

import math

import pytest
import shorthaul
import torch
from torch import nn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [1.5, -0.25, math.nan, math.inf])
def test_other_numbers_raise(number, dtype):
    x = torch.tensor([0.5, number, 0.25], dtype=dtype)
    compiled = shorthaul.module(nn.BCELoss(), fallback="error")
    for loss in (nn.BCELoss(), compiled):
        with pytest.raises(RuntimeError, match="between 0 and 1"):
            loss(x, torch.ones_like(x))
    x = torch.tensor([0.5, 0.0, 1.0], dtype=dtype).requires_grad_()
    found, expected = compiled(x, torch.ones_like(x)), nn.BCELoss()(x, torch.ones_like(x))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [3, 5, 8])
def test_other_numbers_of_many_sizes_raise(size):
    compiled = torch.compile(nn.BCELoss(), backend="shorthaul", dynamic=True)
    x = torch.rand(size)
    torch.testing.assert_close(compiled(x, x), nn.BCELoss()(x, x))
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        compiled(x + 1, x)
