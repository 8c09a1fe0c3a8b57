"""The program `shorthaul` answers at once where it has nothing to compute."""

import subprocess

import pytest
from documents import program

resource = pytest.importorskip("resource")

N_RUNS = 20
#: Seconds of the processor for each run, in which the tests' build without optimization starts too.
MOST_SECONDS = 0.05


def processor_seconds():
    """What ended children computed; unlike the time on a clock, it does not depend on the load."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--version"], 0),
        (["optimize", "--help"], 0),
        (["optimize", "junk.onnx", "-o", "out.onnx"], 1),
        (["grad", "junk.onnx", "-o", "out.onnx", "--loss", "mse"], 1),
    ],
    ids=["version", "help", "optimize of a broken file", "grad of a broken file"],
)
def test_an_answer_without_computing(tmp_path, arguments, expected):
    (tmp_path / "junk.onnx").write_bytes(bytes(range(170, 240)))
    words, before = [program(), *arguments], processor_seconds()
    for _ in range(N_RUNS):
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == expected
    assert processor_seconds() - before <= N_RUNS * MOST_SECONDS
    if expected:
        assert "junk.onnx is not an ONNX file" in ended.stderr
        assert not (tmp_path / "out.onnx").exists()
