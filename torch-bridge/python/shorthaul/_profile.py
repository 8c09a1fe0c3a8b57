"""``shorthaul.profile``: measured times of a step's kernels, beside what they move and compute.

Owns the measurement, and joins it with the report's numbers. ``_tables`` shows it in notebooks, and
``_trace`` writes the file for trace viewers.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from . import _autograd, _limits, _machine, _tables, _trace
from ._autograd import TimedPass
from ._program import Program
from ._report import compiled_of, data_of, programs_of, slow_sentences, unchanged

#: Kernels that are far from the limits take so many times their roofline, at least this part of all
#: kernels' time and these seconds; as the compiler's ``slow.rs`` has it for predicted times.
_FAR, _LEAST_PART, _LEAST_SECONDS = 5.0, 0.01, 20e-6

#: How many kernels ``str()`` lists, and how many modules.
_LISTED, _LISTED_MODULES = 40, 20


class Profile:
    """A measured step: ``data`` is a dictionary, ``str()`` a text; a table in a notebook.

    ``data`` has the entries of a :class:`shorthaul.Report`, and these:

    - ``kernels``: each kernel also has ``calls``, the number of its calls in a step, and for all
      these calls together ``seconds`` (median of the rounds), ``least_seconds`` (the least of the
      rounds), ``bytes_moved``, ``roofline_seconds`` (the least time that the machine's limits
      allow), ``distance`` (``seconds`` divided by ``roofline_seconds``), ``gb_s`` and ``gflop_s``.
      If it has a ``bound``, it has ``mue``, the memory usage efficiency in percent. If a program
      runs on one thread, these are CPU times.
    - ``mue``: the memory usage efficiency of the step.
    - ``modules``: for each module path ``seconds``, ``bytes_moved`` and ``roofline_seconds``. The
      numbers of a kernel are divided equally among its operators, and count for their modules.
    - ``slow``: kernels that were measured to take more than five times their ``roofline_seconds``,
      at least 20 microseconds and one percent of the kernels' time, the slowest first. Each has
      ``program``, ``kernel`` (its name), ``origin``, ``seconds``, ``roofline_seconds`` and
      ``sentence``.
    - ``step_seconds``, ``kernel_seconds`` and ``outside_seconds``: the time of a step, of its
      kernels, and of the rest (PyTorch's operators between compiled regions, autograd, Python).
      Each is a separate median, so they need not add up.
    - ``limits``: the measured ``copy_gb_s`` and ``product_gflop_s``, and ``pair_gflop_s`` if bf16
      has instructions of its own; also ``rounds`` and ``threads``.
    """

    def __init__(self, data: dict[str, Any], step: _trace.Step):
        self.data = data
        self._step = step

    def trace(self, path: str | os.PathLike) -> None:
        """Writes the round with the median time as JSON for Perfetto or ``chrome://tracing``."""
        Path(path).write_text(_trace.document(self.data, self._step), encoding="utf-8")

    def __str__(self) -> str:
        data = self.data
        kernels = sorted(data["kernels"], key=lambda kernel: -kernel["seconds"])
        lines = [
            f"{'ms':>9}{'%':>6}  {'stage':<9}{'made by':<22}{'GB/s':>7}{'GFLOP/s':>9}"
            f"{'bound ms':>10}{'× bound':>9}  origin",
            *(self._row(kernel) for kernel in kernels[:_LISTED]),
        ]
        if rest := kernels[_LISTED:]:
            seconds = sum(kernel["seconds"] for kernel in rest)
            lines.append(f"{seconds * 1e3:9.3f}{'':>6}  {len(rest)} more kernels")
        modules = sorted(data["modules"].items(), key=lambda item: -item[1]["seconds"])
        lines += ["", f"{'ms':>9}{'%':>6}  module"]
        for path, own in modules[:_LISTED_MODULES]:
            seconds = own["seconds"]
            lines.append(
                f"{seconds * 1e3:9.3f}{self._percent(seconds):>6}  {path or '(no module)'}"
            )
        if rest := modules[_LISTED_MODULES:]:
            seconds = sum(own["seconds"] for _, own in rest)
            lines.append(f"{seconds * 1e3:9.3f}{'':>6}  {len(rest)} more modules")
        return "\n".join([*lines, "", *sentences_of(self.data), *slow_sentences(data["slow"])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sentences = sentences_of(self.data) + slow_sentences(self.data["slow"])
        return _tables.profile(self.data, sentences)

    def _percent(self, seconds: float) -> str:
        whole = sum(kernel["seconds"] for kernel in self.data["kernels"])
        return f"{100 * seconds / whole:.1f}" if whole else ""

    def _row(self, kernel: dict[str, Any]) -> str:
        return (
            f"{kernel['seconds'] * 1e3:9.3f}{self._percent(kernel['seconds']):>6}  "
            f"{kernel['stage']:<9}{kernel['path']:<22}{kernel['gb_s']:>7.1f}"
            f"{kernel['gflop_s']:>9.1f}{kernel['roofline_seconds'] * 1e3:>10.3f}"
            f"{kernel['distance']:>9.1f}  {kernel['origin']}"
        )


def sentences_of(data: dict[str, Any]) -> list[str]:
    """The whole step in three lines."""
    machine = data["limits"]
    bound = sum(kernel["roofline_seconds"] for kernel in data["kernels"])
    n_launches = sum(kernel["launches"] * kernel["calls"] for kernel in data["kernels"])
    efficiency = f", MUE {data['mue']:.1f}" if "mue" in data else ""
    return [
        f"a step takes {data['step_seconds'] * 1e3:.3f} ms (median of {data['rounds']}); "
        f"{n_launches} launches of {len(data['kernels'])} kernels take "
        f"{data['kernel_seconds'] * 1e3:.3f} ms, at best {bound * 1e3:.3f} ms{efficiency}",
        f"PyTorch and Python between the kernels take {data['outside_seconds'] * 1e3:.3f} ms",
        f"limits with {data['threads']} threads, f32: {machine['copy_gb_s']:.1f} GB/s copied, "
        f"{machine['product_gflop_s']:.0f} GFLOP/s in a large product"
        + (f", {machine['pair_gflop_s']:.0f} in bf16" if "pair_gflop_s" in machine else ""),
    ]


def profile(
    model: nn.Module,
    *inputs: Any,
    rounds: int = 20,
    warmup: int = 3,
    loss: Callable[[Any], torch.Tensor] | None = None,
    limits: dict[str, float] | None = None,
    **kwargs: Any,
) -> Profile:
    """Runs steps of ``model`` on these inputs, forward and backward, and times every kernel.

    The backward pass starts from ``loss`` of the model's result. Without ``loss``, it starts from a
    gradient of ones for every result that needs one; inside ``torch.no_grad()`` there is no
    backward pass. Parameters, their ``grad``, buffers and PyTorch's random numbers are restored
    afterwards.

    - ``rounds``, ``warmup``: the number of measured steps, and of steps that run before them.
    - ``limits``: ``copy_gb_s`` and ``product_gflop_s`` of the machine, and ``pair_gflop_s`` if it
      multiplies in bf16 (AMX, AVX512-BF16). If not given, they are measured once in a process, in
      one to three seconds.

    Raises the same errors as a call of the compiled module, and ``ValueError`` if no part of the
    model is compiled for these inputs, or if its kernels are emulated.
    """
    return together([model], inputs, kwargs, rounds, warmup, loss, limits)[0]


def together(
    models: Sequence[nn.Module],
    inputs: tuple,
    kwargs: dict[str, Any],
    rounds: int = 20,
    warmup: int = 3,
    loss: Callable[[Any], torch.Tensor] | None = None,
    limits: dict[str, float] | None = None,
) -> list[Profile]:
    """:func:`profile` of several models on the same inputs, with a step of each in every round.

    So other work on the machine disturbs all of them alike.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"`rounds` is at least 1 and `warmup` at least 0, not rounds={rounds}, warmup={warmup}"
        )
    subjects = [_Subject(model, inputs, kwargs, loss) for model in models]
    with contextlib.ExitStack() as stack:
        for subject in subjects:
            stack.enter_context(unchanged(subject.compiled))
        for _ in range(warmup):
            for subject in subjects:
                subject.step()
        for _ in range(rounds):
            for subject in subjects:
                subject.taken.append(_timed(subject.step))
    threads = torch.get_num_threads()
    if limits is None:
        limits = _machine.limits(threads, 0.3, str(subjects[0].device))
    common = {"limits": dict(limits), "rounds": rounds, "threads": threads}
    return [subject.profile(common) for subject in subjects]


def steps(
    models: Sequence[nn.Module],
    inputs: tuple,
    kwargs: dict[str, Any],
    rounds: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> list[list[float]]:
    """Seconds of whole steps of several models, with a step of each in every round.

    Single kernels are not timed. With one thread, this is CPU time, so other programs do not count.
    """
    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    subjects = [_Subject(model, inputs, kwargs, loss) for model in models]
    times: list[list[float]] = [[] for _ in subjects]
    with contextlib.ExitStack() as stack:
        for subject in subjects:
            stack.enter_context(unchanged(subject.compiled))
            subject.step()
        for _ in range(rounds):
            for subject, own in zip(subjects, times, strict=True):
                started = now()
                subject.step()
                own.append(now() - started)
    return times


class _Subject:
    """A model whose steps are timed."""

    def __init__(self, model: nn.Module, inputs: tuple, kwargs: dict[str, Any], loss: Any):
        self.compiled = compiled_of(model)
        self.inputs, self.kwargs, self.loss = inputs, kwargs, loss
        self.calls = Counter(programs_of(self.compiled, inputs, kwargs))
        self.programs = list(self.calls)
        self.device = self.programs[0].place.device
        places = [program.place for program in self.programs]
        if any(place.runs_cuda_text and not place.is_cuda for place in places):
            raise ValueError(
                "emulated kernels are not timed: their times say nothing about a device. Profile a "
                "model without backend='cuda-emulated'"
            )
        self.leaves = [
            tensor
            for tensor in [*self.compiled.parameters(), *_pytree.tree_leaves((inputs, kwargs))]
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]
        self.taken: list[_Round] = []

    def step(self) -> None:
        """Forward and backward."""
        result = self.compiled(*self.inputs, **self.kwargs)
        _differentiate(result if self.loss is None else self.loss(result), self.leaves)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def profile(self, common: dict[str, Any]) -> Profile:
        """The rounds so far, joined with the report."""
        data = data_of(self.programs) | common
        _join(data, self.programs, self.calls, self.taken)
        median = sorted(self.taken, key=lambda one: one.seconds)[len(self.taken) // 2]
        positions = {program: i for i, program in enumerate(self.programs)}
        passes = [
            _trace.Pass(positions[one.program], one.program.title, _kernels_of(one), one)
            for one in median.passes
        ]
        return Profile(data, _trace.Step(median.started, median.seconds, passes))


class _Round(NamedTuple):
    """One measured step."""

    started: float
    seconds: float
    passes: list[TimedPass]


def _timed(step: Callable[[], None]) -> _Round:
    before, _autograd.timings = _autograd.timings, []
    try:
        started = time.perf_counter()
        step()
        return _Round(started, time.perf_counter() - started, _autograd.timings)
    finally:
        _autograd.timings = before


def _differentiate(result: Any, leaves: Sequence[torch.Tensor]) -> None:
    """Computes the gradients of ``leaves`` and keeps none."""
    wanted = [
        tensor
        for tensor in _pytree.tree_leaves(result)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    if wanted and leaves:
        ones = [torch.ones_like(tensor) for tensor in wanted]
        torch.autograd.grad(wanted, leaves, ones, allow_unused=True)


def _kernels_of(one: TimedPass) -> list[int]:
    """The position of the kernel of each launch, in the report of its program."""
    return one.program.native.launch_kernels(one.stage == "backward")


def _join(
    data: dict[str, Any], programs: list[Program], calls: Counter, taken: list[_Round]
) -> None:
    """Adds what was measured to the report's numbers."""
    rounds = [_seconds_by_kernel(one) for one in taken]
    machine, at = data["limits"], Counter()
    for kernel in data["kernels"]:
        program = programs[kernel["program"]]
        key = (program, at[program])
        at[program] += 1
        n_calls = calls[program]
        seconds = statistics.median(one.get(key, 0.0) for one in rounds)
        moved = kernel["bytes_read"] + kernel["bytes_written"] + kernel.get("bytes_copied", 0)
        products = kernel.get("products")
        bound = n_calls * _limits.roofline_s(moved, kernel["operations"], machine, products)
        kernel |= {
            "calls": n_calls,
            "seconds": seconds,
            "least_seconds": min(one.get(key, 0.0) for one in rounds),
            "bytes_moved": moved * n_calls,
            "roofline_seconds": bound,
            "gb_s": moved * n_calls / seconds / 1e9 if seconds else 0.0,
            "gflop_s": kernel["operations"] * n_calls / seconds / 1e9 if seconds else 0.0,
            "distance": seconds / bound if bound else 0.0,
        }
        if "bound" in kernel and seconds:
            least = n_calls * kernel["bound"]["compulsory_bytes"]
            kernel["mue"] = 100 * least / seconds / 1e9 / machine["copy_gb_s"]
    data["modules"] = _modules_of(data["kernels"])
    data["step_seconds"] = statistics.median(one.seconds for one in taken)
    sums = [sum(one.values()) for one in rounds]
    data["kernel_seconds"] = statistics.median(sums)
    # Q/D · B/B̂ with B = D/time, which is Q/(time · B̂).
    if data["kernel_seconds"]:
        rate = data["bytes_least"] / data["kernel_seconds"] / 1e9
        data["mue"] = 100 * rate / machine["copy_gb_s"]
    data["slow"] = _slow(data["kernels"], data["kernel_seconds"])
    data["outside_seconds"] = statistics.median(
        one.seconds - own for one, own in zip(taken, sums, strict=True)
    )


def _slow(kernels: list[dict[str, Any]], whole: float) -> list[dict[str, Any]]:
    """The kernels that are far from the limits, the slowest first."""
    found = []
    for kernel in sorted(kernels, key=lambda kernel: -kernel["seconds"]):
        seconds, bound = kernel["seconds"], kernel["roofline_seconds"]
        if seconds > max(_FAR * bound, _LEAST_PART * whole, _LEAST_SECONDS):
            said = (
                f"{kernel['origin']} ({kernel['stage']}, {kernel['path']}): measured "
                f"{seconds * 1e3:.2f} ms, and {bound * 1e3:.2f} ms at the limits of the machine"
            )
            own = {key: kernel[key] for key in ("program", "origin", "seconds", "roofline_seconds")}
            found.append(own | {"kernel": kernel["name"], "sentence": said})
    return found


def _seconds_by_kernel(one: _Round) -> dict[tuple[Program, int], float]:
    """Seconds of each kernel of each program in one step."""
    found: dict[tuple[Program, int], float] = defaultdict(float)
    for timed in one.passes:
        for kernel, (_, seconds) in zip(_kernels_of(timed), timed.launches, strict=True):
            found[timed.program, kernel] += seconds
    return found


def _modules_of(kernels: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of kernels by module path: equal parts for the operators of a kernel."""
    found: dict[str, dict[str, float]] = {}
    for kernel in kernels:
        for operator in kernel["operators"]:
            own = found.setdefault(operator["module"], defaultdict(float))
            for key in ("seconds", "bytes_moved", "roofline_seconds"):
                own[key] += kernel[key] / len(kernel["operators"])
    return {path: dict(own) for path, own in found.items()}
