"""Compiles the kernels of networks with different flags: what that costs, and how fast they run.

Owns the measurement: processor seconds of the C compilers with an empty cache, and times of steps
(forward and backward), interleaved in one process. The first way is the flags that Shorthaul
chooses; each ``--also`` adds some behind them. Of two flags that contradict each other, the last
one counts. With GCC, its own ``-O3`` is:

    .venv/bin/python bench/compilers.py torchvision:mobilenet_v2 --also="-O3 -fschedule-insns2"
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import shorthaul
import torch
from shorthaul.bench.options import network
from torch import nn


def main() -> None:
    """Prints a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="+", help="names as of shorthaul-bench")
    parser.add_argument("--also", action="append", default=[], metavar="FLAGS")
    parser.add_argument("--batch", type=int, help="rows of the batch; default: the network's own")
    parser.add_argument("--compiler", default=os.environ.get("SHORTHAUL_CC", "gcc"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.networks:
            _measure(name, arguments, Path(tempfile.mkdtemp(dir=folder)))


def _measure(name: str, arguments: argparse.Namespace, folder: Path) -> None:
    example = network(name)
    model, inputs = example.make().train(), example.inputs(arguments.batch or example.batch)
    steps: list[Callable[[], None]] = []
    compilers = []
    for number, flags in enumerate(["", *arguments.also]):
        _use(arguments.compiler, flags, folder / str(number))
        before = _seconds_of_children()
        steps.append(_step(example, copy.deepcopy(model), inputs))
        compilers.append(_seconds_of_children() - before)
    times = _interleaved(steps, arguments.rounds)
    print(f"{name}, batch {inputs[0].shape[0]}, threads {arguments.threads}")
    for flags, seconds, taken in zip(["", *arguments.also], compilers, times, strict=True):
        ratio = statistics.median(a / b for a, b in zip(taken, times[0], strict=True))
        print(
            f"  {flags or 'flags as chosen':32} compilers {seconds:6.1f} s   "
            f"fastest step {min(taken) * 1e3:8.2f} ms   median ratio {ratio:.3f}"
        )


def _use(compiler: str, flags: str, folder: Path) -> None:
    """Lets programs be compiled with these flags from now on, into an empty cache."""
    folder.mkdir()
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" {shlex.join(shlex.split(flags))}\n')
    script.chmod(0o755)
    os.environ["SHORTHAUL_CC"] = str(script)
    os.environ["SHORTHAUL_CACHE_DIR"] = str(folder / "cache")


def _step(example, model: nn.Module, inputs) -> Callable[[], None]:
    compiled = shorthaul.module(model)

    def step() -> None:
        example.loss(compiled(*inputs)).backward()

    for _ in range(2):
        step()
    return step


def _interleaved(steps: list[Callable[[], None]], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        order = range(len(steps)) if number % 2 == 0 else reversed(range(len(steps)))
        for at in order:
            begun = time.perf_counter()
            steps[at]()
            times[at].append(time.perf_counter() - begun)
    return times


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
