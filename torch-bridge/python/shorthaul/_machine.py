"""``shorthaul.machine``: the limits by which the compiler predicts times.

Owns their measurement and the file in the cache folder that keeps it. What the compiler does with
them is the compiler's part; what it assumes where nothing was measured is ``assumed_machine`` of
the native half. Knows no model.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import _limits, _native, cache

#: Bytes of the arrays by which a level's speed is measured: far from the edges of usual caches.
_L2_BYTES, _MEMORY_BYTES = 1 << 20, 1 << 28
#: Sizes of arrays by which the third level's capacity is found.
_SEARCHED_BYTES = [1 << n for n in range(22, 28)]
#: The part of its speed that a level reaches at least while it holds the arrays.
_HELD = 0.6
#: Side of the product that shows the peak: its operands fit into a core's cache.
_SIDE = 256


@dataclass(frozen=True)
class Level:
    """A level of memory: its bytes, and the bytes per microsecond of one thread and of all."""

    bytes: int
    bytes_per_us: int
    shared_bytes_per_us: int


@dataclass(frozen=True)
class Machine:
    """The limits from which the compiler predicts times. Equal limits give equal plans.

    Products and loops in f32 are given in operations per microsecond of one thread; an addition
    and a multiplication count as two. ``pair_operations_per_us`` is the rate of products in bf16 if
    it is higher (AMX, AVX512-BF16), else 0. ``launch_ns`` is the time from the end of a kernel to
    the start of the next; ``barrier_ns`` is added if threads wait for each other. ``measured`` is
    false for limits that the compiler assumes.
    """

    product_operations_per_us: int
    loop_operations_per_us: int
    l2: Level
    l3: Level
    memory: Level
    launch_ns: int
    barrier_ns: int
    pair_operations_per_us: int = 0
    measured: bool = False

    @property
    def text(self) -> str:
        """The limits as JSON, as the compiler reads them."""
        numbers = asdict(self)
        del numbers["measured"]
        return json.dumps(numbers)

    def __str__(self) -> str:
        lines = [
            f"{'measured' if self.measured else 'assumed'}: products "
            f"{self.product_operations_per_us / 1e3:.0f} GFLOP/s, loops "
            f"{self.loop_operations_per_us / 1e3:.0f} G operations/s, of one thread"
        ]
        if self.pair_operations_per_us:
            lines.append(f"products in bf16: {self.pair_operations_per_us / 1e3:.0f} GFLOP/s")
        for name, level in (("L2", self.l2), ("L3", self.l3), ("memory", self.memory)):
            holds = f"{level.bytes / 2**20:.1f} MiB, " if level.bytes < 1 << 50 else ""
            shared = level.shared_bytes_per_us
            together = f", all threads {shared / 1e3:.1f} GB/s" if shared < 1 << 50 else ""
            lines.append(f"{name}: {holds}{level.bytes_per_us / 1e3:.1f} GB/s{together}")
        return "\n".join(lines)


def machine(again: bool = False) -> Machine:
    """Returns this machine's limits; measures them if the cache folder does not have them yet.

    A measurement takes about five seconds and is kept in the cache folder; ``again=True`` measures
    again. Programs that are compiled afterwards are planned with these limits. If none were
    measured, the compiler assumes those of a server's core.
    """
    found = None if again else kept()
    if found is None:
        found = _measured()
        _keep(found)
        _read.cache_clear()
    return found


def limits(threads: int, seconds: float = 1.0, device: str = "cpu") -> dict[str, float]:
    """Measured limits of all threads together, with those of bf16 if it has instructions."""
    found = dict(_limits.limits(threads, seconds=seconds, device=device))
    if device == "cpu" and assumed().pair_operations_per_us:
        found["pair_gflop_s"] = _limits.pairs(threads)
    return found


def assumed() -> Machine:
    """What the compiler assumes of this machine where nothing was measured."""
    return _machine_of(json.loads(_native.assumed_machine()), measured=False)


def kept() -> Machine | None:
    """The measured limits in the cache folder, if there are any."""
    return _read(str(file_of_this_machine("machine")))


def kept_text() -> str | None:
    """The measured limits as JSON for the compiler, if there are any."""
    found = kept()
    return None if found is None else found.text


@functools.cache
def _read(path: str) -> Machine | None:
    try:
        return _machine_of(json.loads(Path(path).read_text(encoding="utf-8")), measured=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"{path} does not hold the limits of a machine ({error}); assumed limits are used "
            "until `shorthaul.machine(again=True)` measures them",
            stacklevel=2,
        )
        return None


def _machine_of(data: dict[str, Any], measured: bool) -> Machine:
    levels = {name: Level(**data.pop(name)) for name in ("l2", "l3", "memory")}
    found = Machine(**data, **levels, measured=measured)
    numbers = [*data.values(), *(n for level in levels.values() for n in asdict(level).values())]
    if not all(isinstance(n, int) and 0 <= n < 1 << 64 for n in numbers):
        raise ValueError("a limit is not a whole number")
    return found


@functools.cache
def file_of_this_machine(kind: str) -> Path:
    """A file in the cache folder for this CPU alone: several machines may share the folder."""
    return Path(cache.info().folder) / f"{kind}-{_native.machine_key()}.json"


def _keep(found: Machine) -> None:
    write_whole(file_of_this_machine("machine"), found.text)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _measured() -> Machine:
    """Each number is the best of many runs, rounded so that noise does not show."""
    before, n_threads = assumed(), torch.get_num_threads()
    ratio = before.loop_operations_per_us / before.product_operations_per_us
    product = _limits.limits(1, copied=1 << 20, side=_SIDE, seconds=1.5)["product_gflop_s"] * 1e3
    pairs = _limits.pairs(1, seconds=0.5) * 1e3 if before.pair_operations_per_us else 0
    l2 = _copied(_L2_BYTES, 1)
    rates = [_copied(n, 1) for n in _SEARCHED_BYTES]
    holding = [n for n, rate in zip(_SEARCHED_BYTES, rates, strict=True) if rate > _HELD * rates[0]]
    memory = _copied(_MEMORY_BYTES, 1)
    together = memory if n_threads == 1 else max(memory, _copied(_MEMORY_BYTES, n_threads))
    # The system knows the size of a core's own cache. Others use a part of the shared one.
    l2_bytes = _system_cache_bytes(2) or before.l2.bytes
    return Machine(
        product_operations_per_us=_rounded(product),
        loop_operations_per_us=_rounded(product * ratio),
        l2=Level(l2_bytes, _rounded(l2), before.l2.shared_bytes_per_us),
        l3=Level(max(holding), _rounded(rates[0]), before.l3.shared_bytes_per_us),
        memory=Level(before.memory.bytes, _rounded(memory), _rounded(together)),
        launch_ns=before.launch_ns,
        barrier_ns=before.barrier_ns,
        pair_operations_per_us=_rounded(pairs),
        measured=True,
    )


def _rounded(number: float) -> int:
    """The number rounded to two digits."""
    return int(float(f"{number:.1e}"))


def _copied(n_bytes: int, threads: int) -> float:
    """Bytes per microsecond of a pass over arrays with this total size in bytes."""
    passes = max(6, min(200, (1 << 30) // n_bytes))
    return _limits.passed(n_bytes, threads, passes) / 1e6


def _system_cache_bytes(level: int) -> int | None:
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (folder / "level").read_text().strip() == str(level):
                size = (folder / "size").read_text().strip()
                return int(size.rstrip("K")) * 1024
        except (OSError, ValueError):
            continue
    return None


__all__ = ["Level", "Machine", "assumed", "kept", "kept_text", "machine"]
