"""Times of single kernels: ``--profile``."""

from __future__ import annotations

import statistics

import torch

import shorthaul

from .. import _autograd
from .options import Setting
from .variants import inputs_of, model_of


def print_profile(setting: Setting, rounds: int, warmup: int) -> None:
    """The slowest kernels of a training step: medians over the rounds."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    example, inputs = setting.example, inputs_of(setting)
    model = shorthaul.module(model_of(setting))
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(warmup + rounds):
        _autograd.timings = []
        example.loss(model(*inputs)).backward()
        if i >= warmup:
            for which, launch, seconds in _autograd.timings:
                times.setdefault((which, launch), []).append(seconds)
    _autograd.timings = None
    kernels = shorthaul.report(model, *inputs).data["kernels"]
    rows = []
    for (which, launch), seconds in times.items():
        name = launch.removeprefix("k_")
        made = max(
            (k for k in kernels if k["stage"] == which and name.startswith(k["name"])),
            key=lambda k: len(k["name"]),
            default={"origin": "", "path": "", "operations": 0},
        )
        rows.append((statistics.median(seconds) * 1e3, which, launch, made))
    rows.sort(key=lambda row: -row[0])
    print(f"{example.name}: {sum(row[0] for row in rows):.1f} ms in {len(rows)} launches")
    for ms, which, launch, made in rows[:40]:
        rate = made["operations"] / ms / 1e6
        print(
            f"{ms:9.2f} ms {which:<9}{made['path']:<12}{rate:8.1f} GFLOP/s  "
            f"{launch}  {made['origin'][:60]}"
        )
    by_path: dict[str, float] = {}
    for ms, which, _, made in rows:
        by_path[f"{which} {made['path']}"] = by_path.get(f"{which} {made['path']}", 0.0) + ms
    print(", ".join(f"{path}: {ms:.1f} ms" for path, ms in sorted(by_path.items())))
