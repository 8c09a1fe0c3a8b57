"""Times of whole steps of small models beside PyTorch's eager, as a table.

Owns the measurement of the scripts that name models here: both ways run in turns in one process,
on the same parameters and inputs. The table gives medians, and the median of the ratios of
neighbours.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import shorthaul
import torch
from torch import nn

#: How to make a model, and its step.
Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]


def main(description: str, cases: Mapping[str, Case]) -> None:
    """Prints a table of the cases, by name."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| model | Shorthaul | eager | eager divided by Shorthaul |")
    print("|---|---|---|---|")
    for name, (make, step) in cases.items():
        print(_row(name, make, step, arguments.rounds), flush=True)


def _row(name: str, make: Callable, step: Callable, n_rounds: int) -> str:
    torch.manual_seed(0)
    eager = make()
    ours = shorthaul.module(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            _seconds(eager, step)
            _seconds(ours, step)
    times = [(_seconds(eager, step), _seconds(ours, step)) for _ in range(n_rounds)]
    slow, fast = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    return f"| {name} | {fast:.2f} ms | {slow:.2f} ms | {ratio:.2f} |"


def _seconds(model: nn.Module, step: Callable[[nn.Module], None]) -> float:
    model.zero_grad()
    start = time.perf_counter()
    step(model)
    return time.perf_counter() - start
