"""Errors against float64 beside the times: ``--errors``."""

import json
import os

import pytest
import torch
from bench_results import measured
from shorthaul import bench
from shorthaul.bench import accuracy, page, stored
from shorthaul.bench.options import Setting, parse

QUICK = ["--rounds", "2", "--warmup", "1", "--no-first-step"]


def test_errors_stand_beside_the_times(tmp_path, capsys):
    path, drawn = tmp_path / "new.json", tmp_path / "new.html"
    asked = ["digits_cnn", "--batch", "8", *QUICK, "--against", "eager", "--errors"]
    assert bench.main([*asked, "--json", str(path), "--html", str(drawn)]) == 0
    said = capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    for entry in result["variants"].values():
        found = entry["gradient_error"]
        # f32 rounds to 2^-24 of a number; a gradient is a sum of many.
        assert 1e-9 < found["median"] < 1e-4 and found["median"] <= found["largest"]
        assert f"<td>{found['median']:.1e}</td>" in drawn.read_text()
        assert f"{found['median']:.1e}" in said
    (again,) = stored.read(path).results
    for variant, entry in again["variants"].items():
        assert entry["gradient_error"] == result["variants"][variant]["gradient_error"]


def test_an_error_is_of_the_largest_value(monkeypatch):
    setting = Setting("digits_cnn", 4, 2)
    found = accuracy._gradients

    def worse(setting, variant, *given):
        exact = found(setting, "float64", *given)
        return {n: x + 0.25 * x.abs().max() * (variant == "eager") for n, x in exact.items()}

    monkeypatch.setattr(accuracy, "_gradients", worse)
    errors = accuracy.gradient_errors(setting, ["eager"])["eager"]
    assert errors == pytest.approx({"median": 0.25, "largest": 0.25})


@pytest.mark.parametrize("variant", ["jax", "onnxruntime", "channels_last"])
def test_errors_of_peers_are_those_of_their_type(variant):
    setting = Setting("digits_cnn", 4, len(os.sched_getaffinity(0)))
    found = accuracy.gradient_errors(setting, [variant, "float64"])
    assert 1e-9 < found[variant]["median"] < 1e-4
    assert found["float64"] == {"median": 0.0, "largest": 0.0}


def test_bf16_is_further_from_float64_than_f32():
    setting = Setting("digits_cnn", 4, 2, dtype="bf16")
    found = accuracy.gradient_errors(setting, ["shorthaul", "shorthaul-f32"])
    assert 1e-4 < found["shorthaul"]["median"] < 0.5
    assert found["shorthaul-f32"]["median"] < 1e-4


def test_a_peer_without_gradients_says_why(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no C++ compiler here\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    found = accuracy.gradient_errors(Setting("digits_cnn", 4, 2), ["compile"])
    assert found == {"compile": {"error": "RuntimeError: no C++ compiler here"}}
    result = measured()
    result["variants"]["eager"]["gradient_error"] = found["compile"]
    assert "<td>failed</td>" in page.page([result], [{}])


def test_without_exact_gradients_every_variant_says_why(monkeypatch):
    def broken(setting, variant, *given):
        raise MemoryError("no room\nand more")

    monkeypatch.setattr(accuracy, "_gradients", broken)
    found = accuracy.gradient_errors(Setting("digits_cnn", 4, 2), ["shorthaul", "eager"])
    said = {"error": "eager in float64: MemoryError: no room"}
    assert found == {"shorthaul": said, "eager": said}


def test_errors_are_of_gradients_below_float64(capsys):
    for asked, said in ((["--mode", "forward"], "gradients"), (["--dtype", "f64"], "f64")):
        with pytest.raises(SystemExit):
            parse(["digits_cnn", "--errors", *asked])
        assert f"--errors {'is about' if said == 'gradients' else 'compares'}" in (
            capsys.readouterr().err
        )
