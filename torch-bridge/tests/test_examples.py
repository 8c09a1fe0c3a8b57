"""The example scripts train, and their losses are eager's."""

import re
import subprocess
import sys

import pytest
from documents import ROOT

pytest.importorskip("sklearn")
pytest.importorskip("onnxruntime")

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "side_by_side")


@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_are_eagers(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--steps", "3", "--eager"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"loss \w+ ([\d.]+), eager ([\d.]+)", done.stdout)
    assert len(pairs) == 3
    for ours, eager in pairs:
        assert float(ours) == pytest.approx(float(eager), rel=1e-3)
    losses = [float(eager) for _, eager in pairs]
    assert len(set(losses)) == 3, "the network does not learn"


def test_the_page_lists_the_scripts():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)\.py`", text, re.MULTILINE)) == SCRIPTS
    assert len(SCRIPTS) == 5
