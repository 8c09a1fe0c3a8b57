"""Runs one program in eager and under a wrap, from one state, and says how it ended.

Owns the restoring of global state, the time limit and processes of their own. Never prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import shorthaul
import torch
from shorthaul._pytorch_version import VERSION
from torch.nn.modules import module as nn_module

from .compare import Refused, differences, is_own
from .facts import observe
from .ran import watched
from .registry import Program
from .wraps import WRAPS, eager

SAME, REFUSED, DIFFERS, CRASHED, HUNG = "same", "refused", "differs", "crashed", "hung"
#: What a program uses came to PyTorch later.
NEWER = "newer"

_GLOBAL_HOOKS = [name for name in vars(nn_module) if name.startswith("_global_")]


@dataclass(frozen=True)
class Outcome:
    """How a program ended under a wrap; ``reasons`` say why it is not the same.

    ``ran`` says who ran it (``ran.COMPILED`` and so on), ``outside`` what PyTorch ran of it.
    """

    program: str
    kind: str
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    ran: str = ""
    outside: tuple[str, ...] = ()


class _TimeIsUp(BaseException):
    pass


@contextlib.contextmanager
def fresh_state() -> Iterator[None]:
    """Seeds all random numbers, and puts back what a program may change for the whole process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    hooks = {name: getattr(nn_module, name) for name in _GLOBAL_HOOKS}
    held = {name: dict(value) for name, value in hooks.items() if isinstance(value, dict)}
    dtype, n_threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", shorthaul.InternalErrorWarning)
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_device(None)
        if torch.get_num_threads() != n_threads:
            torch.set_num_threads(n_threads)
        for name, value in hooks.items():
            setattr(nn_module, name, value)
        for name, entries in held.items():
            hooks[name].clear()
            hooks[name].update(entries)


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(signum, frame):
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def observed(program: Program, wrap: Callable) -> Any:
    """What ``program`` sees under ``wrap``, from a fresh state."""
    with fresh_state():
        return observe(program.run(wrap))


def run_here(program: Program, wrap_name: str, seconds: int = 120) -> Outcome:
    """Runs ``program`` in this process, in eager first."""
    began = time.monotonic()

    watch = None

    def ended(kind: str, *reasons: str) -> Outcome:
        seconds = time.monotonic() - began
        if watch is None:
            return Outcome(program.full_name, kind, reasons, seconds)
        outside = tuple(watch.outside)
        return Outcome(program.full_name, kind, reasons, seconds, watch.ran, outside)

    if program.since > VERSION:
        return ended(NEWER, "it needs PyTorch {}.{}".format(*program.since))
    try:
        expected = observed(program, eager)
    except Exception:
        return ended(CRASHED, "in eager: " + traceback.format_exc())
    try:
        with _time_limit(seconds), watched() as watch:
            found = observed(program, WRAPS[wrap_name])
        lines = differences(expected, found, program.slack)
    except _TimeIsUp:
        return ended(HUNG, f"not done after {seconds} s")
    except Refused as refusal:
        return ended(REFUSED, str(refusal))
    except Exception as error:
        first = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if is_own(error):
            return ended(REFUSED, first)
        return ended(DIFFERS, f"raised {first}", _where(error))
    return ended(DIFFERS, *lines) if lines else ended(SAME)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in reversed(frames[-4:]))


@dataclass
class _Child:
    """A process that runs programs one after the other and writes their outcomes to a pipe."""

    waiting: list[Program]
    pid: int
    pipe: int
    began: float
    received: bytes = b""

    def take_outcomes(self) -> list[Outcome]:
        """The outcomes that have arrived whole, one line each."""
        *lines, self.received = self.received.split(b"\n")
        for _ in lines:
            del self.waiting[0]
            self.began = time.monotonic()
        return [Outcome(**json.loads(line)) for line in lines]


def _start_child(batch: list[Program], wrap_name: str, seconds: int) -> _Child:
    """Forks a process for ``batch``; this process must not have started threads."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(list(batch), pid, reader, time.monotonic())
    os.close(reader)
    os.setpgid(0, 0)
    for program in batch:
        outcome = run_here(program, wrap_name, seconds)
        os.write(writer, json.dumps(vars(outcome)).encode() + b"\n")
    os._exit(0)


def _end_child(child: _Child, reason: str | None = None) -> Outcome | None:
    """Waits for the end of a process; the outcome of the program that it did not finish."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    if not child.waiting:
        return None
    program = child.waiting.pop(0)
    kind = CRASHED if reason is None else HUNG
    if reason is None:
        code = os.waitstatus_to_exitcode(status)
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return Outcome(program.full_name, kind, (reason,), time.monotonic() - child.began)


def run_in_children(
    chosen: list[Program], wrap_name: str, jobs: int = 2, seconds: int = 120, at_most: int = 25
) -> Iterator[Outcome]:
    """Runs programs in forked processes, ``jobs`` at a time, ``at_most`` programs in each.

    A process that crashes or hangs costs one program; the next process goes on after it.
    """
    together = [program for program in chosen if not program.alone]
    batches = [[program] for program in chosen if program.alone]
    batches += [together[k : k + at_most] for k in range(0, len(together), at_most)]
    running: dict[int, _Child] = {}
    while batches or running:
        while batches and len(running) < jobs:
            child = _start_child(batches.pop(0), wrap_name, seconds)
            running[child.pipe] = child
        ready, _, _ = select.select(list(running), [], [], 0.5)
        for pipe, child in list(running.items()):
            # Eager's run counts too, and the child's own limit comes first.
            late = time.monotonic() - child.began > 2 * seconds + 10
            data = os.read(pipe, 1 << 16) if pipe in ready else b""
            child.received += data
            yield from child.take_outcomes()
            if late or (pipe in ready and not data):
                del running[pipe]
                unfinished = _end_child(
                    child, f"no answer in {2 * seconds + 10} s" if late else None
                )
                if unfinished is not None:
                    yield unfinished
                if child.waiting:
                    batches.insert(0, child.waiting)


def run_in_fresh_interpreter(
    chosen: list[Program], wrap_name: str, seconds: int = 120
) -> list[Outcome]:
    """Runs programs in forks of an interpreter that has not started a thread yet."""
    names = [program.full_name for program in chosen]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "outcomes.json")
        command = [sys.executable, "-m", __package__, *names, "--json", path]
        command += ["--wrap", wrap_name, "--limit", str(seconds)]
        tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        subprocess.run(command, cwd=tests, stdout=subprocess.DEVNULL, check=False)
        with open(path) as file:
            return [Outcome(**fields) for fields in json.load(file)]
