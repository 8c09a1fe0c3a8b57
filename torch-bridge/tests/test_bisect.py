"""``shorthaul.bisect`` names the decision that makes numbers wrong, and says so when none does."""

from __future__ import annotations

import types

import pytest
import shorthaul
import torch
from shorthaul import _native, _program
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4), nn.Tanh()
    )


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(1)
    return torch.randn(16, 24)


def wrong_where_applied(monkeypatch, guilty: shorthaul.Decision) -> list[bool]:
    """Makes every compiled program wrong in which a decision is not forbidden, as a wrong rewrite
    would: its normalization has another epsilon."""
    compiled = []

    def compile_program(document, *rest):
        recipe = next((text for text in rest if isinstance(text, str) and "format" in text), None)
        told = shorthaul.Recipe.parse(recipe).decisions if recipe else []
        forbidden = any(d.key == guilty.key and d.take is False for d in told)
        compiled.append(forbidden)
        if not forbidden:
            assert "1e-05" in document
            document = document.replace("1e-05", "0.5")
        return _native.Program.compile(document, *rest)

    half = types.SimpleNamespace(**{name: getattr(_native, name) for name in dir(_native)})
    half.Program = types.SimpleNamespace(compile=compile_program)
    monkeypatch.setattr(_program, "_native", half)
    return compiled


def test_nothing_differs(inputs):
    found = shorthaul.bisect(network(), inputs)
    assert found.decision is None and not found.differs and found.runs == 1
    assert str(found).startswith("nothing differs")


@pytest.mark.parametrize("position", [0, -1])
def test_a_wrong_rewrite_is_named(inputs, monkeypatch, position):
    decisions = shorthaul.recipe(network(), inputs).decisions
    taken = [d for d in decisions if d.applied and d.may_change and d.kind != "blocking"]
    assert len(taken) > 4
    guilty = taken[position]
    compiled = wrong_where_applied(monkeypatch, guilty)
    model = network()
    before = [p.clone() for p in model.parameters()]
    found = shorthaul.bisect(model, inputs)
    assert found.decision.key == guilty.key and found.differs and not found.differs_without
    assert found.runs <= 3 + len(taken).bit_length() and True in compiled
    assert guilty.place in str(found)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [(d.key, d.take) for d in found.recipe.changes] == [(guilty.key, False)]


def test_what_no_decision_causes_is_said(inputs, monkeypatch):
    decision = shorthaul.recipe(network(), inputs).decisions[0]
    nowhere = shorthaul.Decision("inline", "forward", "nowhere", "nothing", True)
    assert nowhere.key != decision.key
    wrong_where_applied(monkeypatch, nowhere)
    found = shorthaul.bisect(network(), inputs)
    assert found.decision is None and found.differs_without
    assert "no decision is the cause" in str(found)


def test_random_numbers_are_refused(inputs):
    model = nn.Sequential(nn.Linear(24, 8), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="random numbers"):
        shorthaul.bisect(model, inputs)
