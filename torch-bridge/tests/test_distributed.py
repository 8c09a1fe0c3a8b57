"""DDP and FSDP2 in two processes, around a compiled model and inside one; the guide's example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shorthaul
from documents import ROOT, blocks
from loss_curves import N_STEPS, WRAPS, assert_same_curve

KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Losses of each case, by name; the first process's."""
    folder = tmp_path_factory.mktemp("distributed")
    result = folder / "result.json"
    script = Path(__file__).parent / "distributed_training.py"
    environment = {**os.environ, "USE_LIBUV": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "2", folder / "store", result],
            cwd=script.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert result.exists(), "\n".join(said)[-4000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("order", ["compiled inside", "compiled outside"])
def test_to_eagers_losses(found, kind, wrap, order):
    case = found[f"{wrap}, {kind}" if order == "compiled inside" else f"{kind}, {wrap}"]
    assert "error" not in case, case["error"]
    assert_same_curve(case["losses"], found[kind]["losses"])
    assert case["n_calls"] >= N_STEPS, f"{case['n_calls']} calls of programs"


def test_gradients_are_sent_before_the_backward_pass_is_over(found):
    events = found["overlap"]
    first, last = (
        events.index("gradients are sent"),
        max(i for i, event in enumerate(events) if event == "kernels run"),
    )
    assert first < last, events


def test_the_example_of_the_guide_runs_in_two_processes(tmp_path):
    page = blocks(ROOT / "docs" / "src" / "pytorch.md")
    (code,) = (block.text for block in page if "DistributedDataParallel" in block.text)
    (tmp_path / "train.py").write_text(code)
    package = Path(shorthaul.__file__).parents[1]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2", "train.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "USE_LIBUV": "0", "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Two processes share the output, unbuffered: one's line may begin before the other's line feed.
    line = re.compile(r"(DDP|FSDP2), process (\d) of 2: loss \d\.\d\d")
    lines = sorted(line.findall(done.stdout))
    assert lines == [(kind, n) for kind in ("DDP", "FSDP2") for n in "01"]
    shown = next(block.text for block in page if "process 1 of 2" in block.text)
    assert sorted(line.findall(shown)) == lines
