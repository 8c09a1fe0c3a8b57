"""The demonstration runs and draws."""

import sys

import pytest
import shorthaul
from shorthaul import demo
from shorthaul.models import EXAMPLES

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_one_epoch_draws_the_curves(tmp_path, capsys, recwarn):
    assert demo.main(["--small", "--epochs", "1", "--out", str(tmp_path)]) == 0
    assert sys.stdout.line_buffering, "`cargo xtask demo` reads lines from a pipe"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".png", ".png"]
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert "loss" in capsys.readouterr().out
    assert not [one for one in recwarn if issubclass(one.category, shorthaul.FallbackWarning)]


def test_larger_networks_are_timed_and_compared_with_float64_if_asked(monkeypatch, capsys):
    monkeypatch.setattr(demo, "EXAMPLES", {"resnet50": EXAMPLES["digits_cnn"]})
    demo._one_step("resnet50", errors=False)
    timed = capsys.readouterr().out
    assert timed.count("ms/step") == 2 and "float64" not in timed
    demo._one_step("resnet50", errors=True)
    assert "errors against float64 over" in capsys.readouterr().out
