"""The scripts for a machine with a GPU run through without one: correctness, files, exit status."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "bench/gpu"


@pytest.fixture
def script(monkeypatch):
    """A script of the folder, imported under its own name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def run(module, tmp_path, *arguments):
    path = tmp_path / "results.json"
    status = module.main(["--dry-run", "--out", str(path), *arguments])
    return status, json.loads(path.read_text())


@pytest.mark.parametrize(
    "name, only, least",
    [
        ("probe", "gelu", 1),
        ("probe", "copy", 1),
        ("tables", "bias", 3),
        ("tables", "attention", 1),
        ("layer", "", 1),
        ("step", "cnn", 1),
    ],
)
def test_dry_runs_check_and_flush(script, tmp_path, name, only, least):
    status, data = run(script(name), tmp_path, "--only", only)
    assert status == 0, data["items"]
    assert len(data["items"]) >= least and data["machine"]["torch"] == torch.__version__
    for item in data["items"]:
        for times in item.get("times", {}).values():
            assert "skipped" in times or times["median_us"] in times["samples_us"]


def test_a_wrong_result_is_not_timed_and_fails_the_run(script, tmp_path, monkeypatch):
    tables = script("tables")
    monkeypatch.setattr(tables, "check", lambda *_: {"ok": False, "tensors": {}})
    status, data = run(tables, tmp_path, "--only", "softmax")
    assert status == 1 and "times" not in data["items"][0]


def test_a_failing_item_leaves_the_others(script, tmp_path, monkeypatch):
    probe = script("probe")

    def fail(bench):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(probe, "copy_bandwidth", fail)
    monkeypatch.setattr(probe, "cases", lambda size: ())
    status, data = run(probe, tmp_path)
    first, *others = data["items"]
    assert status == 1 and first["failed"] == "RuntimeError: no such thing"
    assert [item.get("ok", True) for item in others] == [True] * 3
