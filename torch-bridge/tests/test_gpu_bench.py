"""The scripts for a machine with a GPU run through without one: correctness, files, exit status."""

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest
import shorthaul
import torch
from shorthaul import _native

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
        ("optimizer", "", 4),
    ],
)
def test_dry_runs_check_and_flush(script, tmp_path, name, only, least):
    status, data = run(script(name), tmp_path, "--only", only)
    assert status == 0, data["items"]
    assert len(data["items"]) >= least and data["machine"]["torch"] == torch.__version__
    for item in data["items"]:
        for times in item.get("times", {}).values():
            assert "skipped" in times or times["median_us"] in times["samples_us"]


def test_a_table_of_products_is_written_and_decides(script, tmp_path, monkeypatch):
    status, data = run(script("tables"), tmp_path, "--only", "table of a product 16x16x16 bias")
    assert status == 0, data["items"]
    bias, gelu = data["items"]
    assert bias["products"] == bias["new_products"] == 3, bias
    path = tmp_path / "products.json"
    device, _, _, workspace_bytes, n = _native.cuda_table(path)
    assert (device, workspace_bytes) == ("emulator", 1024) and n >= 3
    table = json.loads(path.read_text())
    kinds = {e["rest"]: [c["kind"] for c in e["candidates"]] for e in table["entries"]}
    assert kinds["bias"] == ["own", "library", "library_then_map"], kinds
    assert kinds["nothing"] == ["own", "library"], kinds
    (digest,) = set(kinds) - {"bias", "nothing"}
    assert kinds[digest] == ["own", "library_then_map"], kinds

    model = torch.nn.Linear(16, 16).requires_grad_(False)
    x = torch.randn(16, 16)
    for fastest, expected in [("own", "simt"), ("library", "cublaslt")]:
        for entry in table["entries"]:
            for candidate in entry["candidates"]:
                candidate["microseconds"] = 1.0 if candidate["kind"] == fastest else 2.0
        path.write_text(json.dumps(table))
        monkeypatch.setenv(shorthaul.products.TABLE_VARIABLE, str(path))
        compiled = shorthaul.module(copy.deepcopy(model), backend="cuda-emulated")
        torch.testing.assert_close(compiled(x), model(x))
        report = shorthaul.report(compiled, x)
        (product,) = [k for k in report.data["kernels"] if "choice" in k]
        assert product["path"] == expected and "1 us in" in product["choice"], product
        assert product["choice"] in str(report)

    path.write_text(path.read_text().replace('"version": 1', '"version": 7'))
    with pytest.raises(shorthaul.CompileError, match=r"products.json, line 1: this is version 7"):
        shorthaul.module(copy.deepcopy(model), backend="cuda-emulated")(x)


def test_a_table_has_convolutions_and_decides_them(script, tmp_path, monkeypatch):
    status, data = run(script("tables"), tmp_path, "--only", "table of a convolution")
    assert status == 0, data["items"]
    plain, rectified = data["items"]
    assert plain["products"] == 3 and rectified["products"] >= 1, data["items"]
    path = tmp_path / "products.json"
    table = json.loads(path.read_text())
    entries = [e for e in table["entries"] if e["product"].startswith("convolution ")]
    directions = {e["product"].split(";")[0] for e in entries}
    gradients = {"convolution data gradient", "convolution filter gradient"}
    assert directions == {"convolution forward"} | gradients, directions
    kinds = {e["rest"]: [c["kind"] for c in e["candidates"]] for e in entries}
    assert kinds["nothing"] == ["own", "library"], kinds

    model = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False).requires_grad_(False)
    x = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    for entry in table["entries"]:
        for candidate in entry["candidates"]:
            candidate["microseconds"] = 1.0 if candidate["kind"] == "library" else 2.0
    path.write_text(json.dumps(table))
    monkeypatch.setenv(shorthaul.products.TABLE_VARIABLE, str(path))
    compiled = shorthaul.module(copy.deepcopy(model), backend="cuda-emulated")
    torch.testing.assert_close(compiled(x), model(x))
    report = shorthaul.report(compiled, x)
    (convolution,) = [k for k in report.data["kernels"] if "choice" in k]
    assert convolution["path"] == "cudnn" and "1 us in" in convolution["choice"], convolution


def test_a_table_has_attention_and_decides_it(script, tmp_path, monkeypatch):
    status, data = run(script("tables"), tmp_path, "--only", "table of attention")
    assert status == 0, data["items"]
    (item,) = data["items"]
    told = item["candidates"]["torch_flash forward and backward"]
    assert "it takes bf16 and f16, not f32" in told["left out"], told
    path = tmp_path / "products.json"
    table = json.loads(path.read_text())
    kinds = {e["rest"]: [c["kind"] for c in e["candidates"]] for e in table["entries"]}
    assert kinds == {"gradients": ["own", "torch_efficient"], "nothing": ["own", "torch_efficient"]}
    for entry in table["entries"]:
        for candidate in entry["candidates"]:
            candidate["microseconds"] = 1.0 if candidate["kind"] == "torch_efficient" else 2.0
    path.write_text(json.dumps(table))
    monkeypatch.setenv(shorthaul.products.TABLE_VARIABLE, str(path))
    model = script("attention").Stacked(False)
    x = torch.randn(1, 8, 3, 2, 8)
    compiled = shorthaul.module(model, backend="cuda-emulated")
    torch.testing.assert_close(compiled(x), model(x))
    report = shorthaul.report(compiled, x).data
    (kernel,) = [k for k in report["kernels"] if k["path"] == "torch_efficient"]
    (reason,) = report["attentions"]
    assert "PyTorch's memory-efficient attention: 1 us in" in reason, reason
    assert kernel["bytes_copied"] > 0


@pytest.mark.parametrize("tile", [2, 4])
def test_products_of_warpgroups_train_where_they_are_asked_for(tile):
    linear = torch.nn.Linear(64, 72).bfloat16()
    x = torch.randn(40, 64).bfloat16()
    runs = {}
    for kind in ("own", "wgmma"):
        with shorthaul.products.every(kind, tile, 1024):
            compiled = shorthaul.module(copy.deepcopy(linear), backend="cuda-emulated")
            given = x.clone().requires_grad_()

            def step(compiled=compiled, given=given):
                compiled(given).float().square().sum().backward()

            kinds = {t.kind for t in shorthaul.products.timed(compiled, (given,), step)}
            assert kinds == {kind}
            runs[kind] = [compiled(given).detach(), given.grad, compiled.weight.grad]
    # Both round exact sums of the same products, in another order.
    for by_warpgroups, by_warps in zip(runs["wgmma"], runs["own"], strict=True):
        torch.testing.assert_close(by_warpgroups, by_warps, rtol=2**-7, atol=2**-7)


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
