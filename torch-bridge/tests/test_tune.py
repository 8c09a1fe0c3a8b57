"""Tuning: decisions by measurement, what is learned, and what is kept of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings

import pytest
import shorthaul
import torch
from against_eager import assert_matches
from shorthaul import _native, _tune
from shorthaul._tuning_database import Database
from torch import nn


def network(width: int = 96) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 16))


@pytest.fixture(autouse=True)
def database(monkeypatch, tmp_path):
    """Every test learns in a file of its own."""
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(_tune, "Database", lambda: Database(path))
    return path


@pytest.fixture
def clock(monkeypatch):
    """Kernels take as long as this says, not as the machine does: others are twice as fast."""
    asked = []

    def times(items, seconds):
        asked.append(len(items))
        return [[2.0, 2.0, 2.0], *([[1.0, 1.0, 1.0]] * (len(items) - 1))]

    half = {name: getattr(_native, name) for name in dir(_native)} | {"time_kernels": times}
    monkeypatch.setattr(
        _tune, "_native", type("Half", (), {k: _static(v) for k, v in half.items()})
    )
    return asked


def _static(value):
    return value if isinstance(value, type) or not callable(value) else staticmethod(value)


def test_faster_ways_are_taken_and_mean_the_same(clock):
    inputs = torch.randn(128, 64)
    tuned = shorthaul.tune(network(), inputs, seconds=5, check=False)
    assert tuned.kept and tuned.tried > 0 and tuned.known == 0
    assert tuned.changes and not tuned.notes
    loaded = shorthaul.Recipe.parse(tuned.text)
    again = shorthaul.recipe(network(), inputs, recipe=loaded)
    assert [(d.key, d.blocking) for d in again.changes] == [
        (d.key, d.blocking) for d in tuned.changes
    ]
    wrap = lambda model: shorthaul.module(model, recipe=tuned)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.RecipeWarning)
        assert_matches(network(), inputs, wrap=wrap)


def test_it_starts_from_a_recipe_with_other_kernels(clock):
    inputs = torch.randn(128, 64)
    plain = shorthaul.recipe(network(), inputs)
    applied = [d for d in plain.decisions if d.kind != "blocking" and d.applied and d.may_change]
    starts = [plain.without(decision) for decision in applied]
    more = [s for s in starts if s.programs[0].n_kernels > plain.programs[0].n_kernels]
    assert more, "no decision saves a kernel"
    start = more[0]
    tuned = shorthaul.tune(network(), inputs, seconds=5, check=False, recipe=start)
    assert tuned.kept
    kept = {decision.key for decision in tuned.changes}
    assert {decision.key for decision in start.changes} <= kept


def test_contractions_are_cut_in_faster_ways(clock, monkeypatch):
    monkeypatch.setattr(_tune._Search, "_worth", lambda search: [])
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=5, check=False)
    assert {d.kind for d in tuned.changes} == {"blocking"} and not tuned.notes


def test_another_network_starts_from_what_was_learned(clock, database):
    # As many threads for both, however small they are.
    torch.set_num_threads(1)
    inputs = torch.randn(128, 64)
    shorthaul.tune(network(), inputs, seconds=5, check=False)
    n_asked = len(clock)
    # The same first product and activation, and one layer more.
    torch.manual_seed(0)
    other = nn.Sequential(*network(), nn.Linear(16, 16))
    tuned = shorthaul.tune(other, inputs, seconds=0, check=False)
    assert len(clock) == n_asked, "no time was left to ask the clock again"
    assert tuned.known > 0 and tuned.kept
    assert f"{tuned.known} known from earlier runs" in str(tuned)


def test_an_interruption_keeps_what_was_learned(monkeypatch, clock, database):
    real, calls = _tune._native.time_kernels, []

    def interrupted(items, seconds):
        calls.append(items)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(items, seconds)

    monkeypatch.setattr(_tune._native, "time_kernels", staticmethod(interrupted))
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=60)
    assert tuned.interrupted and len(tuned.kept) == 1
    assert "interrupted" in str(tuned)
    assert json.loads(database.read_text())["ratios"]


def test_an_interruption_while_steps_are_measured_keeps_the_recipe(monkeypatch, clock):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(_tune._profile, "steps", interrupted)
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=1)
    assert tuned.interrupted and tuned.changes and tuned.ratio is None


def test_a_kernel_that_does_not_compile_is_counted(monkeypatch, clock):
    def broken(items, seconds):
        raise _native.CompileFailure("no compiler takes it")

    monkeypatch.setattr(_tune._native, "time_kernels", staticmethod(broken))
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=1, check=False)
    assert tuned.failed > 0 and tuned.tried == 0 and not tuned.changes


def test_a_decision_is_one_way_however_many_kernels_it_changes(monkeypatch, clock, database):
    others_are_faster = _tune._native.time_kernels

    def equal(items, seconds):
        return [[1.0, 1.0, 1.0] for _ in others_are_faster(items, seconds)]

    monkeypatch.setattr(_tune._native, "time_kernels", staticmethod(equal))
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=5, check=False)
    assert tuned.tried == len(json.loads(database.read_text())["ratios"])


def test_a_recipe_that_is_not_faster_is_dropped(monkeypatch, clock):
    monkeypatch.setattr(_tune._profile, "steps", lambda *given: [[1.0, 1.0], [1.0, 1.1]])
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=1)
    assert not tuned.changes and tuned.ratio == 1.0 and tuned.tried > 0


def test_a_damaged_database_is_set_aside(database):
    for text in ("not json", '{"format": 7, "ratios": {}}', '{"format": 1, "ratios": {"a": "b"}}'):
        database.write_text(text)
        with pytest.warns(UserWarning, match="is not a tuning database") as caught:
            found = Database(database)
        assert len(caught) == 1 and not found.ratios
        assert database.with_suffix(".damaged").read_text() == text
    found.learn(["a"], ["b", "c"], 0.5)
    found.save()
    other = Database(database)
    assert other.ratio(["a"], ["c", "b"]) == 0.5 and other.n_used == 1
    assert found.ratio(["a"], ["c", "b"]) == 0.5 and found.n_used == 0


def test_a_file_that_cannot_be_read_stays_where_it_is(database):
    database.mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        found = Database(database)
    found.learn(["a"], ["b"], 0.5)
    with pytest.warns(UserWarning, match="what was tuned is not kept"):
        found.save()
    assert database.is_dir() and not database.with_suffix(".damaged").exists()


def test_a_ratio_that_is_no_number_does_not_damage_the_file(database):
    found = Database(database)
    for ratio in (math.inf, math.nan):
        found.learn(["a"], ["b"], ratio)
    found.learn(["a"], ["c"], 0.5)
    found.save()
    assert json.loads(database.read_text())["ratios"] == {"a>c": 0.5}


def test_no_answer_of_processes_that_write_at_the_same_time_is_lost(database):
    code = f"""
import sys
from pathlib import Path
from shorthaul._tuning_database import Database
sys.stdin.readline()
for n in range(40):
    database = Database(Path({str(database)!r}))
    database.learn(["a"], [f"{{sys.argv[1]}}.{{n}}"], 0.5)
    database.save()
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], stdin=subprocess.PIPE, text=True)
        for n in range(3)
    ]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    names = json.loads(database.read_text())["ratios"]
    assert names.keys() == {f"a>{writer}.{n}" for writer in range(3) for n in range(40)}


def test_kernels_are_really_timed():
    tuned = shorthaul.tune(network(), torch.randn(128, 64), seconds=2, check=False)
    assert tuned.tried > 0
    for line in tuned.kept:
        ratio = float(line.split(" of ")[-2].split(", ")[-1])
        assert ratio <= 0.97


def test_cutting_is_checked(clock):
    own = shorthaul.recipe(network(), torch.randn(128, 64))
    decision = next(d for d in own.decisions if d.kind == "blocking")
    wrong = own.cut(decision, "0.9.9.9.9.9.9.9")
    assert any("not possible for these sizes" in note for note in wrong.notes)
    assert own.cut(decision, decision.blocking).cut(decision, None).text == own.text
    with pytest.raises(ValueError, match="`cut` chooses another one"):
        own.without(decision)
    with pytest.raises(ValueError, match="not about a contraction"):
        own.cut(next(d for d in own.decisions if d.kind != "blocking"), "1")
    damaged = own.cut(decision, decision.blocking).text.replace(decision.blocking, "1.2")
    with pytest.raises(shorthaul.RecipeError, match="no blocking is called `1.2`"):
        shorthaul.Recipe.parse(damaged)
