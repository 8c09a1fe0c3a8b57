"""A measured step as a trace for Perfetto or ``chrome://tracing``.

Owns the file's form: complete events ("X") of the Trace Event Format, in microseconds from the
beginning of the step, on one track for the step, one for passes of programs, and one for kernels.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ._autograd import TimedPass

_STEP, _PASSES, _KERNELS = 0, 1, 2


class Pass(NamedTuple):
    """A pass of a program in a step: the program's position and title, each launch's kernel."""

    program: int
    title: str
    kernels: list[int]
    timed: TimedPass


class Step(NamedTuple):
    """One round: when it began (seconds of a clock), how long it took, its passes in order."""

    started: float
    seconds: float
    passes: list[Pass]


def document(data: dict[str, Any], step: Step) -> str:
    """The trace as JSON text. Launches of a pass follow each other, as they were timed."""
    kernels: dict[int, list[dict[str, Any]]] = {}
    for kernel in data["kernels"]:
        kernels.setdefault(kernel["program"], []).append(kernel)
    events = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "Shorthaul"}},
        *(
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in ((_STEP, "step"), (_PASSES, "regions"), (_KERNELS, "kernels"))
        ),
        _event("step", "step", _STEP, 0.0, step.seconds, {}),
    ]
    for one in step.passes:
        at = one.timed.started - step.started
        whole = sum(seconds for _, seconds in one.timed.launches)
        stage = one.timed.stage
        events.append(_event(f"{stage}: {one.title}", stage, _PASSES, at, whole, {}))
        for kernel_idx, (launch, seconds) in zip(one.kernels, one.timed.launches, strict=True):
            kernel = kernels[one.program][kernel_idx]
            events.append(
                _event(kernel["name"], stage, _KERNELS, at, seconds, _facts(kernel, launch))
            )
            at += seconds
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _event(
    name: str, category: str, tid: int, at: float, seconds: float, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": at * 1e6,
        "dur": seconds * 1e6,
        "args": facts,
    }


def _facts(kernel: dict[str, Any], launch: str) -> dict[str, Any]:
    names = ("origin", "path", "bytes_read", "bytes_written", "operations")
    rates = ("gb_s", "gflop_s", "distance")
    return (
        {"launch": launch}
        | {name: kernel[name] for name in names}
        | {f"median_{name}": kernel[name] for name in rates}
    )
