"""The machine's limits: measured once, kept, read again, and what the compiler predicts by them."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
import shorthaul
import torch
from shorthaul import _limits, _machine
from torch import nn


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A cache folder for limits alone, and quick measurements."""
    monkeypatch.setattr(_machine, "file_of_this_machine", lambda kind: tmp_path / f"{kind}.json")
    monkeypatch.setattr(_limits, "passed", lambda n_bytes, threads, passes: 2e10 * threads)
    product = {"copy_gb_s": 1.0, "product_gflop_s": 123.4}
    monkeypatch.setattr(_limits, "limits", lambda *given, **named: product)
    monkeypatch.setattr(_limits, "pairs", lambda *given, **named: 1234.0)
    _machine._read.cache_clear()
    yield tmp_path
    _machine._read.cache_clear()


def test_limits_are_measured_once(folder, monkeypatch):
    assert _machine.kept() is None and not _machine.assumed().measured
    found = shorthaul.machine()
    assert found.measured and found.product_operations_per_us == 120_000
    assert found.memory.bytes_per_us == 20_000
    monkeypatch.setattr(_limits, "passed", lambda *given, **named: 1e10)
    assert shorthaul.machine() == found == _machine.kept()
    assert shorthaul.machine(again=True).memory.bytes_per_us == 10_000
    assert "measured" in str(found) and "assumed" in str(_machine.assumed())


@pytest.mark.parametrize("assumed", [0, 960_000])
def test_products_in_bf16_are_measured_where_there_are_instructions(folder, monkeypatch, assumed):
    before = dataclasses.replace(_machine.assumed(), pair_operations_per_us=assumed)
    monkeypatch.setattr(_machine, "assumed", lambda: before)
    found = shorthaul.machine()
    assert found.pair_operations_per_us == (1_200_000 if assumed else 0)
    assert ("products in bf16: 1200 GFLOP/s" in str(found)) == bool(assumed)
    assert _machine.kept() == found


def test_limits_kept_before_there_was_one_for_bf16_are_read(folder):
    numbers = json.loads(_machine.assumed().text)
    del numbers["pair_operations_per_us"]
    (folder / "machine.json").write_text(json.dumps(numbers))
    assert _machine.kept().pair_operations_per_us == 0


def test_the_rate_of_bf16_products_is_measured_by_own_kernels(monkeypatch):
    made, module = [], shorthaul.module
    monkeypatch.setattr(shorthaul, "module", lambda model: made.append(module(model)) or made[-1])
    assert 0.01 < _limits.pairs(1, side=192, seconds=0.01) < 1e5
    (report,) = [shorthaul.report(model, *[torch.ones(8, 8).bfloat16()] * 2) for model in made]
    assert [kernel["path"] for kernel in report.data["kernels"]]


def test_a_profile_says_the_limit_of_bf16_products(monkeypatch):
    before = dataclasses.replace(_machine.assumed(), pair_operations_per_us=960_000)
    monkeypatch.setattr(_machine, "assumed", lambda: before)
    monkeypatch.setattr(_limits, "pairs", lambda threads: 1234.0)
    monkeypatch.setattr(
        _limits, "limits", lambda *given, **named: {"copy_gb_s": 1.0, "product_gflop_s": 10.0}
    )
    found = shorthaul.profile(nn.Linear(4, 4), torch.randn(2, 4), rounds=1, warmup=1)
    assert "10 GFLOP/s in a large product, 1234 in bf16" in str(found)


def test_a_product_in_pairs_has_a_limit_of_its_own():
    machine = {"copy_gb_s": 1.0, "product_gflop_s": 100.0, "pair_gflop_s": 1000.0}
    assert _limits.roofline_s(0, 1e12, machine) == 10.0
    assert _limits.roofline_s(0, 1e12, machine, "f32") == 10.0
    assert _limits.roofline_s(0, 1e12, machine, "bf16") == 1.0
    del machine["pair_gflop_s"]
    assert _limits.roofline_s(0, 1e12, machine, "bf16") == 10.0


def test_a_damaged_file_is_named(folder):
    (folder / "machine.json").write_text('{"l2": 3}')
    with pytest.warns(UserWarning, match="does not hold the limits of a machine"):
        assert _machine.kept() is None


def test_slower_memory_is_predicted_to_take_longer(folder, monkeypatch):
    def predicted(**changes):
        machine = dataclasses.replace(_machine.assumed(), **changes)
        monkeypatch.setattr(_machine, "kept_text", lambda: machine.text)
        data = shorthaul.report(nn.GELU(), torch.randn(1 << 20, requires_grad=True)).data
        return [kernel["predicted"] for kernel in data["kernels"]]

    own = predicted()
    memory = dataclasses.replace(_machine.assumed().memory, bytes_per_us=100)
    slow = predicted(memory=memory)
    assert all(a["movement_us"] < b["movement_us"] for a, b in zip(own, slow, strict=True))
    assert all(one["us"] > 0 for one in own)
    assert own == predicted(), "the same machine, the same plan"


def test_the_bench_compares_predictions(capsys, folder):
    from shorthaul.bench import main
    from shorthaul.bench.predicted import summary

    assert main(["digits_cnn", "--small", "--predicted", "--threads", "1", "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    assert "median error" in said and "rank correlation" in said
    assert said.splitlines()[-1].endswith("  all networks")
    rows = [
        {"predicted_us": p, "measured_us": m, "error": p / m - 1}
        for p, m in ((1, 2), (3, 3), (9, 6))
    ]
    found = summary(rows)
    assert found["median_error"] == statistics.median([0.5, 0.0, 0.5])
    assert found["rank_correlation"] == pytest.approx(1.0)
