"""Memory budgets: the planned memory keeps them, and gradients stay what they are."""

from __future__ import annotations

import functools

import pytest
import shorthaul
import torch
from against_eager import assert_matches, assert_network_matches
from torch import nn


class Attention(nn.Module):
    """A layer of a transformer whose attention is written out, with dropout."""

    def __init__(self, dropout: float):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = self.dropout(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1))
        x = self.norm(x + self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.inner(x))


def convolutions(depth: int = 3) -> nn.Module:
    """Its products compute the normalized activations: what can be computed again are products."""
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 144, 5))


def _report(model, inputs, budget):
    compiled = shorthaul.module(model, memory_budget=budget)
    return shorthaul.recipe(compiled, inputs).programs[0]


@pytest.mark.parametrize(("depth", "budget"), [(3, 0.97), (3, 0.94), (9, 0.8), (12, 0.65)])
def test_convolutions_keep_a_budget(depth, budget):
    torch.manual_seed(0)
    model, inputs = convolutions(depth), torch.randn(4, 3, 12, 12)
    program = _report(model, inputs, budget)
    default = shorthaul.recipe(convolutions(depth), inputs).programs[0]
    assert program.budget["default_bytes"] == default.peak_bytes
    assert program.peak_bytes <= budget * default.peak_bytes
    memory = program.memory
    assert program.peak_bytes == memory["saved_bytes"] + max(
        memory["forward_arena_bytes"], memory["backward_arena_bytes"]
    )
    again = [d for d in program.decisions if d.kind == "recompute" and d.applied]
    assert again and all(d.operations > 0 for d in again)
    assert sum(d.memory_bytes for d in again) > 0
    assert 0 < program.budget["least_us"] <= program.budget["added_us"]
    wrap = functools.partial(shorthaul.module, memory_budget=budget)
    assert_network_matches(convolutions(depth), inputs, wrap=wrap)


def test_attention_keeps_a_budget():
    torch.manual_seed(0)
    inputs = torch.randn(2, 24, 32, requires_grad=True)
    default = shorthaul.recipe(Attention(0.0), inputs).programs[0]
    budget = int(default.peak_bytes * 0.8)
    assert _report(Attention(0.0), inputs, budget).peak_bytes <= budget
    wrap = functools.partial(shorthaul.module, memory_budget=budget)
    assert_matches(Attention(0.0), inputs, wrap=wrap)


def test_dropout_drops_the_same_elements_again():
    torch.manual_seed(0)
    model, inputs = Attention(0.3), torch.randn(2, 24, 32)
    gradients = []
    for budget in (None, 0.8):
        compiled = shorthaul.module(model, memory_budget=budget)
        model.zero_grad()
        torch.manual_seed(5)
        compiled(inputs).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_choice_is_a_recipe():
    torch.manual_seed(0)
    model, inputs = convolutions(), torch.randn(4, 3, 12, 12)
    chosen = shorthaul.recipe(model, inputs, memory_budget=0.94)
    again = shorthaul.recipe(model, inputs, recipe=shorthaul.Recipe.parse(chosen.text))
    assert again.text == chosen.text and not again.notes
    assert again.programs[0].peak_bytes == chosen.programs[0].peak_bytes
    kept = next(d for d in chosen.decisions if d.kind == "recompute" and d.applied)
    assert (
        chosen.without(kept).programs[0].memory["saved_bytes"]
        >= (chosen.programs[0].memory["saved_bytes"])
    )


def test_the_report_shows_the_curve():
    torch.manual_seed(0)
    report = shorthaul.report(
        convolutions(), torch.randn(4, 3, 12, 12), memory_budgets=[0.94, 0.01]
    )
    none, some, too_little = report.data["memory_curve"]
    assert some["peak_bytes"] <= 0.94 * none["peak_bytes"]
    assert some["predicted_us"] > none["predicted_us"]
    assert "cannot be kept" in too_little["refused"]
    assert "memory_budget=0.94: peak" in str(report)


def test_bad_budgets_are_refused():
    model, inputs = convolutions(), torch.randn(4, 3, 12, 12)
    for budget in (0, -1, 1.5, "half", True):
        with pytest.raises(ValueError, match="memory_budget is a whole number of bytes"):
            shorthaul.module(model, memory_budget=budget)
    with pytest.raises(shorthaul.BudgetError, match="is the least that was found"):
        shorthaul.module(model, memory_budget=1000)(inputs)
    # A pass without gradients keeps nothing for another one.
    with torch.no_grad():
        shorthaul.module(convolutions(), memory_budget=0.5)(inputs)
