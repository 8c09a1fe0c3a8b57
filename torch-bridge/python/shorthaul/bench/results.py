"""Results as a table and as a file, and what changed since another file.

Owns the form of the files; a file that cannot be read is an error in a sentence.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from pathlib import Path

import torch

import shorthaul


class BrokenResults(ValueError):
    """A results file that is missing, or that is none."""


def machine() -> dict:
    """Versions and processor, and the command that was run."""
    return {
        "torch": torch.__version__,
        "shorthaul": shorthaul.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "logical_cpus": os.cpu_count(),
        "command": " ".join(["python -m shorthaul.bench", *sys.argv[1:]]),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
        return names[0]
    except (OSError, IndexError):
        return platform.processor()


def write(path: Path, results: list[dict]) -> None:
    """The file of ``--json``."""
    text = json.dumps({"machine": machine(), "results": results}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> list[dict]:
    """The measurements of a file, without checks of accuracy. Raises :class:`BrokenResults`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["results"]
        return [r for r in found if isinstance(r["name"], str) and "variants" in r]
    except OSError as error:
        raise BrokenResults(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BrokenResults(f"{path} holds no results of the bench") from None


def print_result(result: dict, title: str) -> None:
    """One table: a line for each variant."""
    print(f"\n{title}, {result['rounds']} rounds")
    print(
        f"{'':<22}{'median ms':>10}{'IQR':>8}{'/shorthaul':>12}{'95 %':>15}{'first s':>9}"
        f"{'warm s':>8}{'peak MiB':>10}"
    )
    for variant, entry in result["variants"].items():
        print(f"{variant:<22}{_cells(entry, result['ratios'].get(variant))}")
    best = result["best_peer"]
    if best:
        found = result["ratios"][best]
        print(
            f"{found['median']:.2f} times as fast as the best peer, {best} "
            f"(95 % interval {found['low']:.2f} to {found['high']:.2f})"
        )


def _cells(entry: dict, found: dict | None) -> str:
    if "error" in entry:
        return f" skipped: {entry['error']}"
    line = f"{entry['median_ms']:>10.1f}{entry['iqr_ms']:>8.1f}"
    if found:
        interval = f"{found['low']:.2f}–{found['high']:.2f}"
        line += f"{found['median']:>11.2f}x{interval:>15}"
    else:
        line += f"{'':>27}"
    if "first_step_error" in entry:
        return f"{line}  {entry['first_step_error']}"
    if "first_step_s" in entry:
        warm = entry.get("warm_first_step")
        line += f"{entry['first_step_s']:>9.1f}"
        line += f"{warm['first_step_s']:>8.1f}" if warm else f"{'–':>8}"
        line += f"{entry['peak_bytes'] / 2**20:>10.0f}"
    return line


def print_mean(results: list[dict]) -> None:
    """The geometric mean of the ratios to the best peers, where there are several."""
    found = [r["ratios"][r["best_peer"]]["median"] for r in results if r.get("best_peer")]
    if len(found) > 1:
        mean = statistics.geometric_mean(found)
        print(
            f"\n{len(found)} measurements: {mean:.2f} times as fast as the best peer (geometric "
            f"mean), at least {min(found):.2f}"
        )


def key(result: dict) -> tuple:
    """What makes two measurements comparable; older files lack some fields."""
    fields = {"dtype": "f32", "mode": "train", "optimizer": "adamw", "small": False}
    same = [result.get(name, default) for name, default in fields.items()]
    if result.get("mode", "train") != "step":
        same[2] = None
    return (result["name"], result.get("batch"), result.get("threads"), *same)


def changes(old: list[dict], new: list[dict]) -> list[str]:
    """A sentence for each measurement that both have.

    Compared are times relative to eager's in the same rounds, so that a machine of another speed
    does not count; where a file has no eager, Shorthaul's own times. A change is beyond noise if
    the middle halves of the two sets of rounds do not meet.
    """
    before = {key(result): result for result in old}
    said = []
    for result in new:
        other = before.get(key(result))
        title = f"{result['name']}, batch {result.get('batch')}"
        if other is None:
            said.append(f"{title}: not in the old file")
            continue
        try:
            said.append(f"{title}: {_change(other['variants'], result['variants'])}")
        except (KeyError, TypeError, statistics.StatisticsError):
            said.append(f"{title}: no times to compare")
    return said


def _change(old: dict, new: dict) -> str:
    relative = all("times_ms" in side.get("eager", {}) for side in (old, new))
    before, after = (_samples(side, relative) for side in (old, new))
    was, now = statistics.median(before), statistics.median(after)
    unit = " of eager's time" if relative else " ms"
    numbers = f"{was:.3g}{unit} → {now:.3g}{unit}"
    low, high = _middle_half(before)
    new_low, new_high = _middle_half(after)
    if new_high < low:
        return f"faster, {numbers}"
    if new_low > high:
        return f"slower, {numbers}"
    return f"no change beyond noise, {numbers}"


def _samples(variants: dict, relative: bool) -> list[float]:
    own = variants["shorthaul"]["times_ms"]
    if not relative:
        return own
    return [a / b for a, b in zip(own, variants["eager"]["times_ms"], strict=False)]


def _middle_half(samples: list[float]) -> tuple[float, float]:
    quartiles = statistics.quantiles(samples, n=4)
    return quartiles[0], quartiles[2]
