"""Recurrent layers beside PyTorch's own: times of both passes, or of the forward pass.

Owns the measurement: both ways run in turns in one process, on the same parameters and inputs. The
table gives medians, and the median of the ratios of neighbours:

    .venv/bin/python bench/recurrent.py --threads 2
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import shorthaul
import torch
from torch import nn

#: Steps, rows, inputs, width, layers, both directions.
SIZES = (
    (100, 32, 128, 128, 1, False),
    (35, 20, 200, 200, 2, False),
    (35, 20, 650, 650, 2, False),
    (50, 64, 512, 512, 1, False),
    (60, 16, 256, 256, 1, True),
    (200, 1, 64, 128, 1, False),
    (20, 1, 1024, 1024, 1, False),
    (10, 256, 32, 64, 1, False),
)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["LSTM", "GRU", "RNN"])
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| steps, rows, inputs, width | layer | Shorthaul | eager | eager divided by Shorthaul |")
    print("|---|---|---|---|---|")
    for sizes in SIZES:
        for kind in arguments.kinds:
            print(_row(kind, sizes, arguments), flush=True)


def _row(kind: str, sizes: tuple, arguments: argparse.Namespace) -> str:
    n_steps, n_rows, n_inputs, width, n_layers, both = sizes
    torch.manual_seed(0)
    eager = getattr(nn, kind)(n_inputs, width, n_layers, bidirectional=both)
    ours = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(n_steps, n_rows, n_inputs)
    steps = [_step(model, x, arguments.forward) for model in (eager, ours)]
    for step in steps * 3:
        step()
    times: list[tuple[float, ...]] = []
    for _ in range(arguments.rounds):
        times.append(tuple(_seconds(step) for step in steps))
    slow, fast = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    layer = f"{n_layers} × {kind}" if n_layers > 1 else kind
    layer += ", both directions" if both else ""
    numbers = f"{n_steps}, {n_rows}, {n_inputs}, {width}"
    return f"| {numbers} | {layer} | {fast:.2f} ms | {slow:.2f} ms | {ratio:.2f} |"


def _step(model: nn.Module, x: torch.Tensor, is_forward: bool) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            model(x)

    def both() -> None:
        y = model(x)[0]
        (y * y).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return forward if is_forward else both


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
