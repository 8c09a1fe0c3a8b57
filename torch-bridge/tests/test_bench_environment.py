"""The environment of the bench: set once, recorded; what the user has set stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shorthaul
from shorthaul.bench import environment, results

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these variables are Linux's")

#: Starts again and tells how often it was started, and what it sees.
TELL = """
import json, os, sys
from pathlib import Path
from shorthaul.bench import environment
with Path(sys.argv[1]).open("a") as file:
    file.write("started\\n")
environment.start_again()
print(json.dumps(environment.record() | {"given": sys.argv[2:]}))
"""

#: Megabytes of heap after an allocation of 200 MB and after its release, and of huge pages.
HEAP = """
import ctypes, json, torch
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
start = libc.sbrk(0)
block = libc.malloc(200 << 20)
grown = libc.sbrk(0) - start
libc.free(block)
kept = libc.sbrk(0) - start
held = torch.ones(64 << 20, dtype=torch.uint8)
try:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
except OSError:
    lines = []
huge = [int(line.split()[1]) >> 10 for line in lines if line.startswith("AnonHugePages")]
print(json.dumps([grown >> 20, kept >> 20, huge]))
"""


def _python(arguments, variables=()):
    """Runs Python without the bench's variables, but with these."""
    paths = [str(Path(shorthaul.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    own = {"SHORTHAUL_BENCH_SET", *environment.VARIABLES}
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=kept | {"PYTHONPATH": os.pathsep.join(paths)} | dict(variables),
    ).stdout


def _told(tmp_path, variables=()):
    starts = tmp_path / "starts"
    starts.unlink(missing_ok=True)
    told = _python(["-c", TELL, str(starts), "an argument"], variables)
    found = json.loads(told)
    assert found.pop("given") == ["an argument"]
    return found, starts.read_text().count("started")


def test_starts_again_once_with_what_is_missing(tmp_path):
    found, n_starts = _told(tmp_path)
    assert n_starts == 2 and not found["is_plain"]
    assert found["set_by_bench"] == list(environment.VARIABLES)
    assert found["variables"].items() >= environment.VARIABLES.items()
    given = {"THP_MEM_ALLOC_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    found, n_starts = _told(tmp_path, given)
    assert n_starts == 2 and found["variables"].items() >= given.items()
    assert "THP_MEM_ALLOC_ENABLE" not in found["set_by_bench"]


def test_does_not_start_again_in_vain(tmp_path):
    found, n_starts = _told(tmp_path, environment.VARIABLES)
    assert n_starts == 1 and not found["is_plain"] and found["set_by_bench"] == []
    # A wrapper that takes the variables away again.
    found, n_starts = _told(tmp_path, {"SHORTHAUL_BENCH_SET": "THP_MEM_ALLOC_ENABLE"})
    assert n_starts == 1 and found["is_plain"]


def test_processors_are_those_that_the_user_gave(tmp_path):
    own = sorted(os.sched_getaffinity(0))
    for bound in ({"OMP_PROC_BIND": "true"}, {}):
        found, _ = _told(tmp_path, bound)
        assert found["processors"] == own
    one = own[-1]
    os.sched_setaffinity(0, {one})
    try:
        found, _ = _told(tmp_path)
    finally:
        os.sched_setaffinity(0, own)
    assert found["processors"] == [one]


def test_processes_of_a_bound_thread_are_not_bound():
    text = (
        "import os, subprocess, sys, torch\n"
        "from shorthaul.bench import environment\n"
        "tell = [sys.executable, '-c', 'import os; print(len(os.sched_getaffinity(0)))']\n"
        "before = os.sched_getaffinity(0)\n"
        "with environment.unbound():\n"
        "    subprocess.run(tell)\n"
        "assert os.sched_getaffinity(0) == before\n"
    )
    assert int(_python(["-c", text], {"OMP_PROC_BIND": "true"})) == len(os.sched_getaffinity(0))


def test_the_variables_do_what_they_are_set_for():
    if environment.record()["allocator"].partition(" ")[0] != "glibc":
        pytest.skip("another allocator than glibc's")
    grown, kept, huge = json.loads(_python(["-c", HEAP], environment.VARIABLES))
    assert grown >= 190 and kept >= 190
    if environment.record()["huge_pages"] == "madvise":
        _, plain_kept, plain_huge = json.loads(_python(["-c", HEAP]))
        assert plain_kept < 100
        if not huge or huge[0] < 32:
            pytest.skip("the system does not tell of huge pages, or has none that are free")
        assert plain_huge[0] < 32


@pytest.mark.parametrize("options", [[], ["--plain-environment"], ["--separate"]])
def test_results_record_the_environment(options, tmp_path):
    path = tmp_path / "new.json"
    asked = ["digits_cnn", "--batch", "2", "--rounds", "2", "--warmup", "1", "--no-first-step"]
    asked += ["--against", "", "--json", str(path), *options]
    _python(["-m", "shorthaul.bench", *asked])
    written = json.loads(path.read_text())
    assert [r["name"] for r in written["results"]] == ["digits_cnn"]
    recorded = written["machine"]["environment"]
    is_plain = options == ["--plain-environment"]
    assert recorded["is_plain"] == is_plain
    assert ("THP_MEM_ALLOC_ENABLE" in recorded["variables"]) == (not is_plain)
    assert recorded["huge_pages"] in ("always", "madvise", "never", None)
    assert written["machine"]["command"].endswith(" ".join(asked))


def test_other_settings_that_change_times_are_recorded(monkeypatch):
    for name, value in (("KMP_BLOCKTIME", "0"), ("LD_PRELOAD", "libnone.so"), ("UNRELATED", "1")):
        monkeypatch.setenv(name, value)
    recorded = results.machine()["environment"]
    assert recorded["variables"]["KMP_BLOCKTIME"] == "0" and recorded["allocator"] == "libnone.so"
    assert "UNRELATED" not in recorded["variables"]
    plain, fair = ({"is_plain": is_plain} for is_plain in (True, False))
    said = [environment.sentence(record) for record in (None, "text", plain, fair)]
    assert said[0] == said[1] == "in an environment that was not recorded"
    assert said[2:] == [
        "in a plain environment",
        "with huge pages and an allocator that keeps freed memory, for all variants",
    ]
