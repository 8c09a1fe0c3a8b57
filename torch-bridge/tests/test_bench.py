"""The bench runs, and its check compares with float64."""

import json

import pytest
from shorthaul import bench
from torch import nn


@pytest.mark.parametrize("name", ["digits_cnn", "digits_transformer"])
def test_check_finds_no_difference(name, capsys):
    assert bench.main([name, "--check", "--batch", "16"]) == 0
    assert "0 beyond" in capsys.readouterr().out


def test_check_fails_on_a_difference(monkeypatch, capsys):
    found = bench.check

    def worse(*arguments, **options):
        checked = found(*arguments, **options)
        return {**checked, "beyond": checked["tensors"][:1]}

    monkeypatch.setattr(bench, "check", worse)
    assert bench.main(["digits_cnn", "--check", "--batch", "4"]) == 1
    assert "1 beyond" in capsys.readouterr().out


def test_smooth_networks_have_no_relu():
    model = bench._smooth(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU6(), nn.Linear(2, 2))))
    kinds = [type(child) for child in model.modules() if not list(child.children())]
    assert kinds == [nn.SiLU, nn.SiLU, nn.Linear]


def test_measures_every_variant(tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["digits_cnn", "--batch", "8", "--rounds", "2", "--warmup", "1"]
    assert bench.main([*arguments, "--against", "eager", "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert set(result["variants"]) == {"shorthaul", "eager"}
    for entry in result["variants"].values():
        assert entry["median_ms"] > 0 and entry["first_step_s"] > 0 and entry["peak_bytes"] > 0


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["digits_cnn", "--against", "jax"])
    assert "not jax" in capsys.readouterr().err
