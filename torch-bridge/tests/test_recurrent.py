"""Layers of ``nn.LSTM`` as loops over time: results and gradients beside PyTorch's in float64."""

from __future__ import annotations

import copy
import warnings

import pytest
import shorthaul
import torch
from torch import nn

CASES = {
    "plain": ((5, 4, 7), {}),
    "one_step": ((1, 3, 7), {}),
    "one_row": ((4, 1, 7), {}),
    "no_rows": ((4, 0, 7), {}),
    "many_rows": ((3, 19, 7), {}),
    "batch_first": ((4, 5, 7), {"batch_first": True}),
    "no_bias": ((3, 4, 7), {"bias": False}),
    "two_layers": ((4, 3, 7), {"num_layers": 2}),
    "both_ways": ((4, 3, 7), {"bidirectional": True}),
    "two_layers_both_ways": ((3, 3, 7), {"num_layers": 2, "bidirectional": True}),
}


class _Layer(nn.Module):
    """All that an LSTM gives, from states that are given."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.lstm = nn.LSTM(7, width, **options)

    def forward(self, x, h0, c0):
        """Results, last hidden states, last cells."""
        y, (h, c) = self.lstm(x, (h0, c0))
        return y, h, c


def _step(model, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    results = model(*inputs)
    loss = sum(
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in results
    )
    loss.backward()
    return [*results, *(x.grad for x in inputs), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("width", [5, 32, 37])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_lstm_equals_pytorch_in_double_precision(case, width, dtype):
    shape, options = CASES[case]
    torch.manual_seed(0)
    exact = _Layer(width, **options).double()
    n_rows = shape[0] if options.get("batch_first") else shape[1]
    n_states = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    states = [torch.randn(n_states, n_rows, width, dtype=torch.float64) for _ in range(2)]
    inputs = [torch.randn(shape, dtype=torch.float64), *states]
    ours = copy.deepcopy(exact).to(dtype)
    expected = _step(exact, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        found = _step(shorthaul.module(ours), [x.to(dtype) for x in inputs])
    # Sums of at most some hundred products of numbers near 1, rounded in 24 or 53 bits.
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_pytorch_runs_an_lstm_with_dropout_between_its_layers():
    model = shorthaul.module(nn.Sequential(nn.Linear(7, 7), nn.LSTM(7, 5, 2, dropout=0.5)))
    with pytest.warns(shorthaul.FallbackWarning, match="dropout between"):
        model(torch.randn(3, 2, 7))


class _Within(nn.Module):
    """An LSTM in a region of ``torch.autocast`` between two linear layers."""

    def __init__(self):
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(7, 7), nn.LSTM(7, 8), nn.Linear(8, 3)

    def forward(self, x):
        """Results of the LSTM and of the linear layer behind it."""
        x = self.before(x)
        with torch.autocast("cpu"):
            y = self.lstm(x)[0]
        return y, self.after(y.float())


@pytest.mark.parametrize("is_around", [False, True])
def test_pytorch_runs_an_lstm_within_autocast(is_around):
    torch.manual_seed(0)
    eager = _Within()
    ours = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(3, 2, 7)
    with torch.autocast("cpu", enabled=is_around):
        expected = eager(x)
        with pytest.warns(shorthaul.FallbackWarning, match="within torch.autocast"):
            found = ours(x)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
