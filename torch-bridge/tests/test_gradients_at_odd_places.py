"""Gradients and values that eager has by its own formulas: few elements, zero factors, NaN."""

import math

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from torch import nn

TYPES = (torch.float32, torch.float64)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def of_each(x):
    return torch.fake_quantize_per_channel_affine(
        x, torch.tensor([0.1, 0.2]), torch.tensor([0, 3], dtype=torch.int32), 0, -128, 127
    )


#: Of a matrix, `[2, 5]`, and the operators whose results are not finite.
CASES = {
    "variance": lambda x: x[:, :3].var(1, correction=5),
    "variance of all": lambda x: x.var(correction=12, keepdim=True),
    "variance of all but none": lambda x: x.var(correction=10),
    "deviation of all": lambda x: x.std(correction=12),
    "variance of enough": lambda x: x.var(1, correction=4),
    "deviation": lambda x: x[:, :3].std(1, correction=5),
    "softplus": lambda x: F.softplus(x, 0.0),
    "polar": lambda x: torch.view_as_real(torch.polar(x - 1, x * 2)),
    "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127),
    "channels quantized": of_each,
}
QUANTIZED = [[math.nan, math.inf, -math.inf, 2.0, 100.0], [0.5, math.nan, 1e30, -1e30, -99.0]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype):
    given = [[0.5, -1.5, 2.0, 0.25, 1.0], [3.0, -2.0, 1.0, 1.5, -0.5]]
    x = torch.tensor(QUANTIZED if "quantized" in case else given, dtype=dtype)
    leaf = x.clone().requires_grad_()
    x.requires_grad_()
    found = shorthaul.module(Function(CASES[case]), fallback="error")(x)
    expected = CASES[case](leaf)
    weights = torch.arange(1.0, 1 + expected.numel(), dtype=dtype).view_as(expected)
    for y in (found, expected):
        y.backward(weights)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(x.grad, leaf.grad, equal_nan=True)
