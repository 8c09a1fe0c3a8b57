"""Results as a table, and as the text of a file.

Owns the form of both. Files of earlier runs are read by ``stored``.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys

from . import environment
from .versions import versions

#: They do not change while the bench runs, and asking for them starts programs.
_versions = functools.cache(versions)


def machine() -> dict:
    """Versions, processor and environment, and the command that was run."""
    return {
        **_versions(),
        "processor": _processor(),
        "logical_cpus": os.cpu_count(),
        "command": " ".join(["python -m shorthaul.bench", *sys.argv[1:]]),
        "environment": environment.record(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
        return names[0]
    except (OSError, IndexError):
        return platform.processor()


def text(results: list[dict]) -> str:
    """What the file of ``--json`` holds."""
    return json.dumps({"machine": machine(), "results": results}, indent=1) + "\n"


def print_result(result: dict, title: str) -> None:
    """One table: a line for each variant."""
    print(f"\n{title}, {result['rounds']} rounds")
    print(
        f"{'':<22}{'median ms':>10}{'IQR':>8}{'/shorthaul':>12}{'95 %':>15}{'error':>9}"
        f"{'first s':>9}{'warm s':>8}{'peak MiB':>10}"
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
    line += f"{error_of(entry):>9}"
    if "first_step_error" in entry:
        return f"{line}  {entry['first_step_error']}"
    if "first_step_s" in entry:
        warm = entry.get("warm_first_step")
        line += f"{entry['first_step_s']:>9.1f}"
        line += f"{warm['first_step_s']:>8.1f}" if warm else f"{'–':>8}"
        line += f"{entry['peak_bytes'] / 2**20:>10.0f}"
    return line


def error_of(entry: dict) -> str:
    """The median error of gradients against float64, where it was asked for."""
    found = entry.get("gradient_error", {})
    return f"{found['median']:.1e}" if "median" in found else "failed" if found else ""


def short(value: float) -> str:
    """Three digits, all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_mean(results: list[dict]) -> None:
    """The geometric mean of the ratios to the best peers, where there are several."""
    found = [r["ratios"][r["best_peer"]]["median"] for r in results if r.get("best_peer")]
    if len(found) > 1:
        mean = statistics.geometric_mean(found)
        print(
            f"\n{len(found)} measurements: {mean:.2f} times as fast as the best peer (geometric "
            f"mean), at least {min(found):.2f}"
        )
