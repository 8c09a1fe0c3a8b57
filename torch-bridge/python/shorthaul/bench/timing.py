"""Times of one step for every variant, and the ratio to the best peer.

Owns the measurement: variants interleaved round by round in one process, so that the machine is the
same for all; medians and interquartile ranges; a ratio from pairs of the same round, with a 95 %
interval by resampling. A variant that fails is left out, and its error is kept; the others go on.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from . import limits
from .alone import Processes, load_tracer
from .options import Setting
from .variants import has_images, inputs_of, model_of, stepper

#: Fewest and most rounds of a measurement that is given seconds.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 50

#: Resamples of a ratio's interval; the seed makes a file's interval the same each time.
_RESAMPLES, _SEED = 1000, 0


def measure(
    setting: Setting,
    variants: list[str],
    *,
    rounds: int,
    warmup: int,
    processes: Processes | None = None,
    with_counts: bool = False,
    seconds: float | None = None,
) -> dict:
    """The result of one setting: milliseconds by variant, and the ratio to the best peer.

    With ``seconds``, rounds run for that long, whatever ``rounds`` says: at least 3, at most 50.
    With ``processes``, these measure peak memory, and the first step is timed with an empty cache
    of compiled kernels. With ``with_counts``, ``counted`` is the report on Shorthaul's step.
    """
    caches = contextlib.nullcontext()
    if processes is not None:
        load_tracer()
        caches = _empty_caches()
    with caches:
        return _measure(setting, variants, rounds, warmup, processes, with_counts, seconds)


def _measure(
    setting: Setting,
    variants: list[str],
    rounds: int,
    warmup: int,
    processes: Processes | None,
    with_counts: bool,
    seconds: float | None,
) -> dict:
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    model, inputs = model_of(setting), inputs_of(setting)
    if not has_images(inputs):
        variants = [v for v in variants if v != "channels_last"]
    entries: dict[str, dict] = {}
    ran_out: dict[str, bool] = {}
    steps: dict[str, Callable[[], object]] = {}
    for variant in variants:
        try:
            start = time.perf_counter()
            step = stepper(setting, variant, model, inputs)
            step()
            entries[variant] = {"first_step_s": time.perf_counter() - start}
            steps[variant] = step
        except Exception as error:
            entries[variant] = {"error": _first_line(error)}
            ran_out[variant] = is_out_of_memory(error)
    if not steps and ran_out["shorthaul"] and ran_out.get("eager", True):
        raise MemoryError
    # Variants that were idle while others were compiled run again before they are measured.
    for variant, step in [*steps.items()] * (warmup - 1):
        try:
            step()
        except Exception as error:
            entries[variant] = {"error": _first_line(error)}
            steps.pop(variant, None)
    times = interleaved(steps, rounds, seconds)
    for variant, taken in times.items():
        entries[variant] = summary(taken) | (entries[variant] if processes else {})
    counted = None
    if with_counts and "shorthaul" in times:
        # PyTorch may run all of a network; there is nothing to count then.
        with contextlib.suppress(ValueError):
            counted = limits.count(setting, steps["shorthaul"].model, inputs)
    if processes is not None:
        _measure_alone(processes, setting, entries)
    result = asdict(setting) | {
        "rounds": max((len(taken) for taken in times.values()), default=0),
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "variants": {variant: entries[variant] for variant in variants},
        "counted": counted,
    }
    return result | ratios(times)


def _measure_alone(processes: Processes, setting: Setting, entries: dict[str, dict]) -> None:
    """Adds what new processes measure to the entries of variants that ran."""
    for variant, entry in entries.items():
        if "error" in entry:
            continue
        try:
            entry |= processes.alone(setting, variant)
        except RuntimeError as error:
            entry["first_step_error"] = str(error)


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """Empty caches of compiled kernels, for this process and those that it starts."""
    names = ("SHORTHAUL_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="shorthaul-bench-", ignore_cleanup_errors=True) as new:
        os.environ |= dict.fromkeys(names, new)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def interleaved(
    steps: dict[str, Callable[[], object]], rounds: int, seconds: float | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each step in each round; every other round goes through them backwards.

    :func:`measure` explains ``seconds``.
    """
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    begin = time.perf_counter()
    for i in range(_MOST_ROUNDS if seconds else rounds):
        if seconds and i >= _LEAST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        order = list(steps) if i % 2 == 0 else list(reversed(steps))
        for variant in order:
            start = time.perf_counter()
            steps[variant]()
            times[variant].append((time.perf_counter() - start) * 1e3)
    return times


def summary(taken: list[float]) -> dict:
    """Median and interquartile range of milliseconds."""
    quartiles = statistics.quantiles(taken, n=4) if len(taken) > 1 else [taken[0]] * 3
    return {
        "median_ms": statistics.median(taken),
        "iqr_ms": quartiles[2] - quartiles[0],
        "times_ms": taken,
    }


def ratios(times: dict[str, list[float]]) -> dict:
    """How many times as long each peer takes, and which peer is the best."""
    own = times.get("shorthaul")
    peers = {variant: taken for variant, taken in times.items() if variant != "shorthaul"}
    if not own or not peers:
        return {"best_peer": None, "ratios": {}}
    return {
        "best_peer": min(peers, key=lambda variant: statistics.median(peers[variant])),
        "ratios": {variant: ratio(taken, own) for variant, taken in peers.items()},
    }


def ratio(above: list[float], below: list[float]) -> dict:
    """The median of the quotients of pairs, with an interval that has 95 % of the resamples."""
    quotients = [a / b for a, b in zip(above, below, strict=True)]
    generator = random.Random(_SEED)
    medians = sorted(
        statistics.median(generator.choices(quotients, k=len(quotients))) for _ in range(_RESAMPLES)
    )
    return {
        "median": statistics.median(quotients),
        "low": medians[round(0.025 * (_RESAMPLES - 1))],
        "high": medians[round(0.975 * (_RESAMPLES - 1))],
    }


def is_out_of_memory(error: Exception) -> bool:
    """Whether a request for memory failed, in Python or in PyTorch."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"[:300]
