"""The environment that all variants run in, and its record in the results.

Owns the variables of memory allocation that the bench sets, the restart that makes them effective,
and the processors that the user chose. Shorthaul keeps its blocks of memory and asks for huge
pages; with these variables PyTorch and glibc do so for every variant.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

#: PyTorch asks for huge pages for its blocks from 2 MiB on, and glibc keeps freed memory: large
#: blocks come from the heap, not from ``mmap``, and the heap does not shrink. All are read once,
#: when a process starts. ``MALLOC_MMAP_THRESHOLD_`` alone is not enough: older glibc refuses one
#: above 32 MiB.
VARIABLES = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

#: Names the variables that the bench has set; if it exists, the bench does not start again.
_SET = "SHORTHAUL_BENCH_SET"

#: Prefixes of other variables that change times.
_RECORDED = (
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ONEDNN_",
    "DNNL_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def start_again(variables: dict[str, str] = VARIABLES) -> None:
    """Replaces this process with the same command with ``variables``, but only once.

    Variables that the user has set stay. Only Linux has these variables.
    """
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if sys.platform != "linux" or not missing or _SET in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.sched_setaffinity(0, processors())
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, os.environ | missing | {_SET: ",".join(missing)})


def plain() -> dict[str, str]:
    """The variables as the user gave them."""
    own = {_SET, *os.environ.get(_SET, "").split(",")}
    return {name: value for name, value in os.environ.items() if name not in own}


def processors() -> set[int]:
    """The processors on which the user lets this process run.

    With ``OMP_PROC_BIND`` and the like, OpenMP binds the first thread to one of its places as soon
    as PyTorch is loaded, and new processes would inherit that.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0) | _openmp_places()


def _openmp_places() -> set[int]:
    """The processors of OpenMP's places; none if threads are not bound."""
    found: set[int] = set()
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "omp" in line}
        named = [p for p in paths if Path(p).name.startswith(("libgomp", "libiomp5", "libomp."))]
        for library in map(ctypes.CDLL, named):
            for place in range(library.omp_get_num_places()):
                ids = (ctypes.c_int * library.omp_get_place_num_procs(place))()
                library.omp_get_place_proc_ids(place, ids)
                found |= set(ids)
    except (OSError, AttributeError):
        return set()
    return found


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Lets processes that start inside run on all processors that the user allows."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors())
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def record() -> dict:
    """What the results say about the environment."""
    found = {
        "huge_pages": _chosen("enabled"),
        "huge_pages_defrag": _chosen("defrag"),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in VARIABLES or name.startswith(_RECORDED)
        },
        "set_by_bench": [name for name in os.environ.get(_SET, "").split(",") if name],
        "processors": sorted(processors()),
        "allocator": os.environ.get("LD_PRELOAD") or _libc(),
    }
    is_plain = any(os.environ.get(name) != value for name, value in VARIABLES.items())
    return found | {"is_plain": is_plain}


def sentence(recorded: object) -> str:
    """One line about a record; older files have none."""
    if not isinstance(recorded, dict):
        return "in an environment that was not recorded"
    if recorded.get("is_plain", True):
        return "in a plain environment"
    return "with huge pages and an allocator that keeps freed memory, for all variants"


def give_back_free_memory() -> None:
    """Gives memory that is free back to the system, where it is glibc's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _chosen(name: str) -> str | None:
    """The word in brackets in a file such as ``always [madvise] never``."""
    try:
        text = (_HUGE_PAGES / name).read_text(encoding="utf-8")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def _libc() -> str | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.confstr("CS_GNU_LIBC_VERSION")
    return None
