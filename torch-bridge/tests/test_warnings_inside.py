"""``warnings.warn`` and masks of ``nn.Transformer`` inside of a model do not break its graph."""

from __future__ import annotations

import warnings

import pytest
import shorthaul
import torch
from shorthaul._pytorch_version import VERSION
from torch import nn

repeats_warnings = pytest.mark.skipif(VERSION < (2, 15), reason="older tracers break the graph")


class _Warns(nn.Module):
    def __init__(self, **where):
        super().__init__()
        self.linear, self.where = nn.Linear(3, 3), where

    def forward(self, x):
        """Warns between two operations."""
        y = self.linear(x)
        warnings.warn(f"an old way to call {type(self).__name__}", FutureWarning, **self.where)
        return y.relu()


def _messages(model, x, n_calls: int, action: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for _ in range(n_calls):
            model(x)
    return [(str(w.message), w.category, w.filename, w.lineno) for w in caught]


@repeats_warnings
@pytest.mark.parametrize("action", ["always", "default"])
def test_every_call_warns_as_in_eager(action):
    model, x = _Warns(), torch.randn(2, 3)
    compiled = torch.compile(model, backend="shorthaul", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x)
    found, expected = _messages(compiled, x, 3, action), _messages(model, x, 3, action)
    assert found == expected and len(found) == (3 if action == "always" else 1)
    torch.testing.assert_close(compiled(x), model(x))


@repeats_warnings
def test_a_warning_that_is_an_error_is_raised():
    model, x = _Warns(), torch.randn(2, 3)
    compiled = shorthaul.module(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x)
        warnings.simplefilter("error", FutureWarning)
        with pytest.raises(FutureWarning, match="an old way to call _Warns"):
            compiled(x)


def test_a_warning_about_a_caller_outside_of_the_graph():
    """Nobody knows that line while the graph is captured: the graph breaks, and Python warns."""
    model, x = _Warns(stacklevel=9), torch.randn(2, 3)
    found = _messages(shorthaul.module(model), x, 2, "always")
    texts = [text for text, kind, *_ in found if kind is FutureWarning]
    assert texts == ["an old way to call _Warns"] * 2


@repeats_warnings
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_transformer_with_all_its_masks(is_causal):
    """Masks of two types, as in many tutorials, for which PyTorch warns."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    source, target = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    if not is_causal:
        mask = torch.where(torch.rand(5, 5) > 0.8, -1e9, 0.0).fill_diagonal_(0.0)
    masks = {"tgt_mask": mask, "src_mask": torch.zeros(6, 6)}
    masks["tgt_key_padding_mask"] = torch.arange(5).expand(2, 5) > 3

    def run(function):
        model.zero_grad()
        y = function(source, target, **masks)
        y.square().sum().backward()
        return [y, *(p.grad.clone() for p in model.parameters())]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = run(torch.compile(model, backend="shorthaul", fullgraph=True))
        expected = run(model)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
