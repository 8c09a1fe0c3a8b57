"""Sums of thousands of terms, as close to float64 as a few dozen in a chain leave them."""

import copy

import pytest
import shorthaul
import torch
from torch import nn

NETWORKS = {
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.Conv2d(16, 16, 1)
        ),
        (8, 8, 64, 64),
    ),
    "average pool": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.AdaptiveAvgPool2d(1)),
        (8, 8, 64, 64),
    ),
    "windows of two sizes": (
        lambda: nn.Sequential(nn.Conv2d(8, 64, 1), nn.AdaptiveAvgPool2d(2)),
        (8, 8, 47, 47),
    ),
    "bias": (lambda: nn.Linear(64, 64), (16384, 64)),
}


def _results(model: nn.Module, x: torch.Tensor, compiled: bool) -> dict[str, torch.Tensor]:
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    y = (shorthaul.module(model, fallback="error") if compiled else model)(x)
    weights = torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (nn.functional.silu(y) * weights).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_long_sums_are_cut(name, n_threads):
    torch.set_num_threads(n_threads)
    torch.manual_seed(1)
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape) + 0.5
    ours = _results(model, x, True)
    eager = _results(model, x, False)
    exact = _results(model.double(), x.double(), False)
    largest = max(g.norm().item() for g in exact.values())
    for n, want in exact.items():
        # A bias before a norm has a gradient of nothing but rounding.
        if want.norm() <= 1e-6 * largest:
            continue
        error, usual = ((run[n].double() - want).norm() / want.norm() for run in (ours, eager))
        # Eager's own error, or a few roundings where eager is lucky; whole chains leave 6e-7.
        assert error <= max(2 * usual, 2.5e-7), (n, error, usual)


def test_sums_of_equal_terms_round_once():
    # Added one by one, the 5376 equal terms of the gradient of a mean are off by 3e-5.
    def mean(x, bias):
        return (x + bias).mean() + x.new_full((5376, 2), 3.3).mean()

    x, bias = torch.randn(5376, 2), torch.zeros(2, requires_grad=True)
    loss = torch.compile(mean, backend="shorthaul")(x, bias)
    loss.backward()
    assert (bias.grad - 0.5).abs().max() <= 2 * torch.finfo(torch.float32).eps
    exact = x.double().mean() + torch.tensor(3.3).double()
    assert abs(loss.item() - exact) <= 4 * exact * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("n", [2, 3, 9, 16, 17])
def test_sums_over_short_rows_are_cut(n):
    """4,096 terms in one chain of single precision would be off by 1e-6 and more."""

    def mean(x):
        return (x * x).mean((0, 2))

    torch.manual_seed(0)
    x = torch.rand(4096 // n, 4, n) + 1
    ours = torch.compile(mean, backend="shorthaul")(x).double()
    exact = mean(x.double())
    assert ((ours - exact) / exact).abs().max() <= 2 * torch.finfo(torch.float32).eps
