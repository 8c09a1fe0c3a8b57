"""The demonstration runs and draws."""

import sys

import pytest
from shorthaul import demo

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def test_one_epoch_draws_the_curves(tmp_path, capsys):
    assert demo.main(["--small", "--epochs", "1", "--out", str(tmp_path)]) == 0
    assert sys.stdout.line_buffering, "`cargo xtask demo` reads lines from a pipe"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".png", ".png"]
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())
    assert "loss" in capsys.readouterr().out
