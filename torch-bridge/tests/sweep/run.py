"""Runs networks, each in a forked process with a time limit, and says how each ended.

Owns the order of the steps, the process, and the record. Never prints.

Where an input of a ReLU is within rounding of 0, its gradient in float32 may be that of the other
side; where a router's weights are 0, any expert may be chosen. Such a step differs with these
weights only. So a step that differs runs again with weights that are a little different, and
differs only if one tensor does so each time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import shorthaul
import torch
from shorthaul.models import without_dropout
from shorthaul.module import runner_of
from torch import nn

from . import observe
from .compare import Difference, judge

SAME, DIFFERS, ONCE, RAISES, SLOW, CRASHED, NOT_MADE, UNSTABLE = (
    "same",
    "differs",
    "once",
    "raises",
    "too slow",
    "crashed",
    "not made",
    "unstable",
)
KINDS = (SAME, DIFFERS, ONCE, RAISES, SLOW, CRASHED, UNSTABLE, NOT_MADE)
#: A step that differs runs again with this many other sets of weights.
_OTHER_WEIGHTS = 4
#: By this part of itself a weight moves.
_MOVED = 1e-3


class NotMade(Exception):
    """A network that cannot be made, or that eager cannot run."""


@dataclass(frozen=True)
class Step:
    """One call: named inputs, with a backward pass or in evaluation without gradients."""

    name: str
    inputs: dict[str, Any]
    training: bool = True


@dataclass(frozen=True)
class Network:
    """A network by name. ``make`` gives the module and its steps, or raises ``NotMade``."""

    name: str
    make: Callable[[], tuple[nn.Module, list[Step]]]


@dataclass
class Outcome:
    """How a network ended, and what was measured on the way."""

    network: str
    kind: str = CRASHED
    reasons: list[str] = field(default_factory=list)
    made: str = ""
    stage: str = "making it"
    steps_done: int = 0
    n_judged: int = 0
    n_unstable: int = 0
    outside: list[str] = field(default_factory=list)
    first_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    warm_ratio: float = 0.0
    seconds: float = 0.0


def run_here(
    network: Network,
    n_steps: int | None = None,
    say: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Runs ``network`` in this process. ``say`` gets the outcome so far before each stage."""
    outcome = Outcome(network.name)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            say(outcome)
            torch.manual_seed(0)
            model, steps = network.make()
            n_parameters = sum(p.numel() for p in model.parameters())
            outcome.made = f"{type(model).__name__}, {n_parameters} parameters"
        except Exception as error:
            outcome.kind, outcome.reasons = NOT_MADE, [_line(error)]
            return outcome
        with contextlib.suppress(_Ended):
            _run_steps(model, steps[:n_steps], outcome, say)
    return outcome


class _Ended(Exception):
    pass


def _run_steps(model: nn.Module, steps: list[Step], outcome: Outcome, say) -> None:
    _drop_nothing(model)
    eager, double, original = copy.deepcopy(model), copy.deepcopy(model).double(), model
    if hasattr(double, "set_experts_implementation"):
        # Grouped products have no float64.
        double.set_experts_implementation("eager")
    compiled = shorthaul.module(copy.deepcopy(model))
    outside = runner_of(compiled).compiler.outside
    for step in steps:
        outcome.stage = step.name
        say(outcome)
        for one in (eager, double, compiled):
            one.train(step.training)
        try:
            expected = observe.step(eager, step.inputs, step.training)
            with observe.float64():
                inputs = {key: observe.wide(value) for key, value in step.inputs.items()}
                exact = observe.step(double, inputs, step.training)
        except Exception as error:
            if outcome.steps_done == 0:
                outcome.kind, outcome.reasons = NOT_MADE, [f"eager: {_line(error)}"]
                raise _Ended from None
            continue
        outcome.stage = f"{step.name}, compiled"
        say(outcome)
        began = time.monotonic()
        try:
            found = observe.step(compiled, step.inputs, step.training)
        except Exception as error:
            outcome.kind = RAISES
            outcome.reasons = [f"{step.name}: {_line(error)}", _where(error)]
            outcome.outside = list(outside)
            raise _Ended from None
        outcome.step_seconds.append(time.monotonic() - began)
        outcome.first_seconds = outcome.step_seconds[0]
        outcome.outside = list(outside)
        verdict = judge(found, expected, exact, _again(original, step))
        outcome.n_judged += verdict.n_judged
        outcome.n_unstable += verdict.n_unstable
        outcome.steps_done += 1
        if outcome.steps_done == 1:
            outcome.warm_ratio = _warm_ratio(compiled, eager, step)
        if verdict.differences:
            differed_before, outcome.kind = outcome.kind == DIFFERS, DIFFERS
            outcome.reasons += [f"{step.name}: {one}" for one in verdict.differences[:8]]
            outcome.reasons.append(f"{len(verdict.differences)} tensors of {step.name}")
            outcome.stage = f"{step.name}, other weights"
            say(outcome)
            models = (compiled, eager, double)
            always = with_other_weights(models, original, step, verdict.differences)
            outcome.kind = DIFFERS if always or differed_before else ONCE
            outcome.reasons[-1] += f", {len(always)} of them with all weights tried"
            outcome.reasons += [f"with all weights: {one.what}" for one in always[:8]]
    if outcome.kind not in (DIFFERS, ONCE):
        outcome.kind = SAME if outcome.n_judged > outcome.n_unstable else UNSTABLE


def with_other_weights(
    models: tuple[nn.Module, nn.Module, nn.Module],
    original: nn.Module,
    step: Step,
    differences: list[Difference],
) -> list[Difference]:
    """The ones of ``differences`` whose tensors differ with every set of weights.

    ``models`` are the compiled one, eager and float64, and keep their states.
    """
    left = differences
    held = [{k: v.clone() for k, v in one.state_dict().items()} for one in models]
    compiled, eager, double = models
    for seed in range(_OTHER_WEIGHTS):
        moved = copy.deepcopy(original).train(step.training)
        observe.moved(moved, seed, _MOVED)
        for one in models:
            one.load_state_dict(moved.state_dict())
        found = observe.step(compiled, step.inputs, step.training)
        expected = observe.step(eager, step.inputs, step.training)
        with observe.float64():
            inputs = {key: observe.wide(value) for key, value in step.inputs.items()}
            exact = observe.step(double, inputs, step.training)
        verdict = judge(found, expected, exact, _again(moved, step))
        differing = {one.what for one in verdict.differences}
        left = [one for one in left if one.what in differing]
        if not left:
            break
    for one, state in zip(models, held, strict=True):
        one.load_state_dict(state)
    return left


def _again(model: nn.Module, step: Step) -> Callable[[], list[observe.Observed]]:
    def run():
        runs = []
        for seed in range(3):
            one = copy.deepcopy(model).train(step.training)
            observe.rounded_anew(one, seed)
            runs.append(observe.step(one, step.inputs, step.training))
        return runs

    return run


def _warm_ratio(compiled: nn.Module, eager: nn.Module, step: Step) -> float:
    """Shorthaul's time of a warm step over eager's: the shortest of three, taken in turns."""
    times = {id(compiled): [], id(eager): []}
    held = [{k: b.clone() for k, b in m.named_buffers()} for m in (compiled, eager)]
    for _ in range(3):
        for one in (compiled, eager):
            began = time.monotonic()
            observe.step(one, step.inputs, step.training)
            times[id(one)].append(time.monotonic() - began)
    with torch.no_grad():
        for one, buffers in zip((compiled, eager), held, strict=True):
            for name, buffer in one.named_buffers():
                buffer.copy_(buffers[name])
    return min(times[id(compiled)]) / min(times[id(eager)])


def _drop_nothing(model: nn.Module) -> None:
    """Sets every probability of dropping something to 0, in modules and configurations."""
    without_dropout(model)
    holders = [*model.modules()]
    holders += [m.config for m in model.modules() if hasattr(m, "config")]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float) and not name.startswith("_"):
                with contextlib.suppress(Exception):
                    setattr(holder, name, 0.0)


def _line(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {' '.join(str(inner).split())[:300]}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in reversed(frames[-6:]))


def run_in_child(network: Network, limit: int, n_steps: int | None = None) -> Outcome:
    """Runs ``network`` in a forked process, which is ended after ``limit`` seconds."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.setpgid(0, 0)

        def say(outcome: Outcome) -> None:
            os.write(writer, json.dumps(asdict(outcome)).encode() + b"\n")

        try:
            say(run_here(network, n_steps, say))
        finally:
            os._exit(0)
    os.close(writer)
    *lines, last = _received(reader, began + limit)
    late = time.monotonic() >= began + limit
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    outcome = Outcome(**json.loads(lines[-1])) if lines else Outcome(network.name)
    outcome.seconds = time.monotonic() - began
    if late and outcome.kind in (CRASHED, DIFFERS, ONCE):
        making = outcome.stage == "making it" or not outcome.stage.endswith("compiled")
        kind, outcome.kind = outcome.kind, NOT_MADE if making and not outcome.steps_done else SLOW
        if outcome.reasons:
            # A step differed before.
            outcome.kind = kind
        outcome.reasons.append(f"{outcome.stage} was not done after {limit} s")
    elif outcome.kind == CRASHED:
        outcome.reasons.append(f"status {status} in {outcome.stage}")
    return outcome


def _received(pipe: int, until: float) -> list[bytes]:
    received = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        received += part
    return received.split(b"\n")


def outcomes(networks: list[Network], limit: int, n_steps: int | None) -> Iterator[Outcome]:
    """The outcome of each network, one process at a time."""
    for network in networks:
        yield run_in_child(network, limit, n_steps)
