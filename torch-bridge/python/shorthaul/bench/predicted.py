"""Predicted times of kernels beside measured ones: ``--predicted``.

Owns the comparison. The compiler predicts the times, and a profile measures them. For each kernel,
the least time of all rounds counts, because other programs only add to it.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import shorthaul

from .options import Setting
from .variants import inputs_of, model_of

#: Kernels that the table lists: those whose error weighs most.
_LISTED = 25
#: Kernels below this part of the step's time are not counted: clocks do not see them well.
_SMALL = 1e-4


def compare(setting: Setting, rounds: int, warmup: int) -> dict[str, Any]:
    """Prints the table and its sums, and returns both."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    example, inputs = setting.example, inputs_of(setting)
    machine = shorthaul.machine()
    measured = shorthaul.profile(
        shorthaul.module(model_of(setting)),
        *inputs,
        rounds=rounds,
        warmup=warmup,
        loss=example.loss,
    ).data
    whole = sum(kernel["least_seconds"] for kernel in measured["kernels"])
    kernels = [k for k in measured["kernels"] if k["least_seconds"] > _SMALL * whole]
    rows = [_row(kernel) for kernel in kernels]
    found = summary(rows)
    print(f"{setting}: predicted and measured (least of {rounds} rounds)\n{machine}")
    print(f"{'predicted':>12}{'measured':>12}{'error':>8}  made by               origin")
    for row in sorted(rows, key=lambda r: -abs(r["predicted_us"] - r["measured_us"]))[:_LISTED]:
        print(
            f"{row['predicted_us']:9.1f} µs{row['measured_us']:9.1f} µs{row['error']:+8.0%}  "
            f"{row['path']:<22}{row['origin']}"
        )
    print(
        f"{len(rows)} kernels: median error {found['median_error']:.1%}, rank correlation "
        f"{found['rank_correlation']:.3f}; all together predicted {found['predicted_us'] / 1e3:.1f}"
        f" ms, measured {found['measured_us'] / 1e3:.1f} ms"
    )
    return {"setting": str(setting), "kernels": rows, **found}


def together(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints a line for each network and one for all kernels together; returns the latter."""
    rows = [row for one in found for row in one.get("kernels", ())]
    if not rows:
        return []
    whole = {"setting": "all networks", "n_kernels": len(rows), **summary(rows)}
    print(f"\n{'kernels':>8}{'median error':>14}{'rank correlation':>18}  network")
    for one in [*(one for one in found if "kernels" in one), whole]:
        n = one.get("n_kernels", len(one.get("kernels", ())))
        error, rank = one["median_error"], one["rank_correlation"]
        print(f"{n:>8}{error:>14.1%}{rank:>18.3f}  {one['setting']}")
    return [whole]


def _row(kernel: dict[str, Any]) -> dict[str, Any]:
    predicted, measured = kernel["predicted"], kernel["least_seconds"] * 1e6 / kernel["calls"]
    return {
        "origin": kernel["origin"],
        "path": kernel["path"],
        "stage": kernel["stage"],
        "predicted_us": predicted["us"],
        "measured_us": measured,
        "error": predicted["us"] / measured - 1,
        "parts": predicted,
        "operations": kernel["operations"],
        "launches": kernel["launches"],
    }


def _rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation; 0 if all numbers of a list are equal."""
    ranks = []
    for values in (a, b):
        order = sorted(values)
        ranks.append([(order.index(x) + len(order) - 1 - order[::-1].index(x)) / 2 for x in values])
    if len(set(a)) < 2 or len(set(b)) < 2:
        return 0.0
    return statistics.correlation(*ranks)


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median error, rank correlation (Spearman's) and sums."""
    predicted = [row["predicted_us"] for row in rows]
    measured = [row["measured_us"] for row in rows]
    return {
        "median_error": statistics.median(abs(row["error"]) for row in rows),
        "rank_correlation": _rank_correlation(predicted, measured),
        "predicted_us": sum(predicted),
        "measured_us": sum(measured),
    }
