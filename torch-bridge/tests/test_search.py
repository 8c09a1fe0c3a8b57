"""The search by prediction: never worse than the compiler's own plan, and the same in every run."""

from __future__ import annotations

import dataclasses

import pytest
import shorthaul
import torch
from against_eager import assert_matches
from shorthaul import _machine
from shorthaul._recipe import with_entries
from torch import nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8))


@pytest.fixture(autouse=True)
def assumed(monkeypatch):
    """Every machine gives the same predictions."""
    monkeypatch.setattr(_machine, "kept_text", lambda: None)


def test_the_result_is_not_worse_and_the_same_again():
    inputs = torch.randn(64, 48)
    found = shorthaul.search(network(), inputs, plans=6)
    assert 0 < found.bound_us <= found.after_us <= found.before_us
    assert len(found.tried) == 6 and 0 <= found.gap < 1
    again = shorthaul.search(network(), inputs, plans=6)
    assert again.text == found.text and again.tried == found.tried
    assert "search: " in str(found) and "a gap of" in str(found)


def test_what_was_forbidden_for_no_reason_is_found_again(monkeypatch):
    """From a plan without decisions the search finds better ones, which mean the same."""
    inputs = torch.randn(64, 48)
    slow = dataclasses.replace(_machine.assumed().memory, bytes_per_us=100)
    tiny = dataclasses.replace(slow, bytes=1)
    machine = dataclasses.replace(_machine.assumed(), memory=slow, l2=tiny, l3=tiny)
    monkeypatch.setattr(_machine, "kept_text", lambda: machine.text)
    own = shorthaul.recipe(network(), inputs)
    refused = [d for d in own.decisions if not d.applied and d.may_change and d.bytes > 0]
    found = shorthaul.search(network(), inputs, plans=12)
    kept = [move for move in found.tried if move["kept"]]
    assert bool(kept) == bool(found.changes) == (found.after_us < found.before_us)
    assert refused or not kept
    wrap = lambda model: shorthaul.module(model, recipe=found)  # noqa: E731
    assert_matches(network(), inputs, wrap=wrap)


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 8),
    )


def test_layouts_are_chosen_together_and_the_report_has_the_numbers():
    found = shorthaul.search(images(), torch.randn(2, 3, 8, 8), plans=1)
    (gain,) = found.layouts
    assert gain["n_containers"] > 4 and gain["n_contractions"] >= 5
    assert 0 < gain["bound_us"] <= gain["chosen_us"] <= gain["rule_us"]
    assert gain["chosen_us"] <= gain["row_major_us"]
    assert bool(gain["n_changed"]) == (gain["chosen_us"] < gain["rule_us"])
    assert "layouts: contractions and conversions take" in str(found)


def test_an_order_that_a_recipe_asks_for_is_laid_out_and_means_the_same(tmp_path):
    inputs = torch.randn(2, 3, 8, 8)
    own = shorthaul.recipe(images(), inputs)
    laid_out = [d for d in own.decisions if d.kind == "layout" and d.applied]
    four = [d for d in laid_out if d.order == "0.2.3.1"]
    assert four, "activations of convolutions have channels last"
    chosen = [dataclasses.asdict(d) | {"take": True, "order": "0.2.1.3"} for d in four]
    changed = with_entries(own, 0, chosen)
    orders = {d.container: d.order for d in changed.decisions if d.kind == "layout"}
    assert all(orders[d.container] == "0.2.1.3" for d in four) and not changed.notes
    path = tmp_path / "orders.toml"
    changed.save(path)
    assert 'order = "0.2.1.3"' in path.read_text()
    wrap = lambda model: shorthaul.module(model, recipe=path)  # noqa: E731
    assert_matches(images(), inputs, wrap=wrap)
    wrong = with_entries(own, 0, [chosen[0] | {"order": "0.2"}])
    assert "not possible" in wrong.notes[0] and "each of its dimensions" in wrong.notes[0]


def test_no_plans_change_nothing():
    found = shorthaul.search(network(), torch.randn(64, 48), plans=0)
    assert not found.changes and not found.tried and found.n_untried > 0
    assert "none of 0 changes" in str(found)
    with pytest.raises(ValueError, match="at least 0"):
        shorthaul.search(network(), torch.randn(64, 48), plans=-1)
