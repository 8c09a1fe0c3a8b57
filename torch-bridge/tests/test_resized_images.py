"""Interpolation beside eager, where a size stays or doubles by a factor that is a fraction."""

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from torch import nn

TYPES = (torch.float32, torch.float64)


class Resized(nn.Module):
    """An image in several sizes, and sums whose weights differ between positions."""

    def __init__(self, factors, **options):
        super().__init__()
        self.factors, self.options = factors, options

    def forward(self, x):
        found = [F.interpolate(x, scale_factor=f, **self.options) for f in self.factors]
        sums = [(y.flatten() * torch.arange(1.0, y.numel() + 1, dtype=x.dtype)) for y in found]
        return found, sum(one.sum() for one in sums)


def check(model, x):
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled = shorthaul.module(model, fallback="error")
    found, total = compiled(leaf)
    expected, expected_total = model(other)
    total.backward()
    expected_total.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(leaf.grad, other.grad)
    torch.testing.assert_close(compiled(x)[0], expected)
    assert all(one.data_ptr() != leaf.data_ptr() for one in found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_images_keep_a_size(mode, dtype):
    x = torch.arange(30.0, dtype=dtype).square().view(1, 1, 6, 5)
    factors = [(1.1, 1.1), (1.0, 1.0), (1.1, 2.1), (0.5, 1.1)]
    check(Resized(factors, mode=mode, antialias=True), x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n_dims", [1, 2, 3])
def test_gradients_of_repeated_elements(n_dims, dtype):
    x = torch.arange(2.0 * 5**n_dims, dtype=dtype).view(1, 2, *[5] * n_dims)
    check(Resized([1.1, 2.0, 2.1, 2.5, 3.1]), x)
