"""Recipes: decisions are the same in every run, may be changed, saved, read and applied."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import shorthaul
import torch
from against_eager import assert_matches
from torch import nn

#: A model in another process, and the places of its decisions.
_ELSEWHERE = """
import sys, torch, shorthaul
sys.path.insert(0, sys.argv[1])
from test_recipe import network
for decision in shorthaul.recipe(network(), torch.randn(int(sys.argv[2]), 48)).decisions:
    print(decision.place)
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 96), nn.GELU(), nn.LayerNorm(96), nn.Dropout(0.0), nn.Linear(96, 8), nn.Tanh()
    )


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(1)
    return torch.randn(64, 48)


@pytest.fixture(scope="module")
def own(inputs):
    return shorthaul.recipe(network(), inputs)


def test_decisions_are_data(own):
    assert {d.kind for d in own.decisions} >= {"inline", "epilogue"}
    assert any(d.applied for d in own.decisions) and any(not d.applied for d in own.decisions)
    assert len({d.key for d in own.decisions}) == len(own.decisions)
    for decision in own.decisions:
        assert decision.sentence and (decision.applied or decision.reason)
    assert own.programs[0].bytes_moved >= own.programs[0].bytes_least > 0
    assert not own.changes and not own.notes


def test_places_are_the_same_in_every_run_and_for_every_size(own):
    places = [d.place for d in own.decisions]
    again = shorthaul.recipe(network(), torch.randn(64, 48))
    assert [d.place for d in again.decisions] == places
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-c", _ELSEWHERE, folder, "64"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == places
    larger = shorthaul.recipe(network(), torch.randn(128, 48))
    assert larger.programs[0].structure == own.programs[0].structure
    assert {d.place for d in larger.decisions} == set(places)


def test_a_decision_is_left_out_and_taken_back(own):
    # The compiler decides one by one: leaving out an epilogue may make room for a better one.
    moved = own.programs[0].bytes_moved
    epilogues = [d for d in own.decisions if d.applied and d.kind == "epilogue"]
    applied = next(d for d in epilogues if own.without(d).programs[0].bytes_moved > moved)
    less = own.without(applied)
    assert [d.key for d in less.changes] == [applied.key]
    assert not next(d for d in less.decisions if d.key == applied.key).applied
    assert any(line.startswith("-") and applied.place in line for line in less.diff(own))
    back = less.with_(applied)
    assert not back.changes and not back.diff(own)
    assert back.text == own.text
    with pytest.raises(ValueError, match="is applied already"):
        own.with_(applied)
    impossible = next(d for d in own.decisions if not d.may_change)
    with pytest.raises(ValueError, match="is not possible"):
        own.with_(impossible)


def test_a_recipe_is_saved_read_and_applied(own, inputs, tmp_path):
    applied = [d for d in own.decisions if d.applied and d.kind in ("inline", "epilogue")]
    told = own
    for decision in applied[:3]:
        if next(d for d in told.decisions if d.key == decision.key).applied:
            told = told.without(decision)
    path = tmp_path / "model.toml"
    told.save(path)
    loaded = shorthaul.Recipe.load(path)
    assert [d.key for d in loaded.changes] == [d.key for d in told.changes]
    assert not loaded.diff(told)
    assert loaded.programs[0].bytes_moved is None
    planned = shorthaul.recipe(network(), inputs, recipe=path)
    assert planned.text == told.text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = shorthaul.module(network(), recipe=path)
        compiled(inputs).sum().backward()
    report = shorthaul.report(compiled, inputs)
    assert report.data["bytes_moved"] == told.programs[0].bytes_moved
    assert_matches(network(), inputs, wrap=lambda m: shorthaul.module(m, recipe=told))


def test_a_recipe_of_another_model_is_named(own, inputs, tmp_path):
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    told = own.without(next(d for d in own.decisions if d.applied))
    compiled = shorthaul.module(other, recipe=told)
    with pytest.warns(shorthaul.RecipeWarning, match="the recipe belongs to another model"):
        compiled(torch.randn(2, 3, 8, 8))


def test_what_no_longer_exists_is_named(own, inputs):
    text = own.text.replace("applied = true", "applied = true\ntake = true", 1)
    first = next(d for d in own.decisions if d.applied)
    text = text.replace(f'container = "{first.container}"', 'container = "nowhere"', 1)
    told = shorthaul.Recipe.parse(text)
    compiled = shorthaul.module(network(), recipe=told)
    with pytest.warns(shorthaul.RecipeWarning, match="there is no decision in this program"):
        compiled(inputs)
    planned = shorthaul.recipe(network(), inputs, recipe=told)
    assert len(planned.notes) == 1 and not planned.diff(own)


def test_damaged_files_are_refused_in_a_sentence(own, inputs, tmp_path):
    for text, message in [
        (
            own.text.replace('stage = "forward"', 'stage = "forw', 1),
            "this is not a recipe of Shorthaul",
        ),
        ("weights = [1, 2]", "it has no `format`"),
        (own.text.replace("format = 1", "format = 2"), "has format 2, and this version"),
        (own.text.replace('kind = "inline"', 'kind = "bend"', 1), "no kind is called `bend`"),
    ]:
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(shorthaul.RecipeError, match=message) as caught:
            shorthaul.module(network(), recipe=path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(shorthaul.RecipeError, match="this is not a recipe"):
        shorthaul.Recipe.load(path)
