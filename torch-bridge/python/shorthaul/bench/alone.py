"""Measures one variant in a new process: its peak memory, or its first step.

The process finds the kernels that the measurement of times has left in the cache. Memory is the
largest that a step after the second adds to the loaded libraries and the model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import signal
import subprocess
import sys
import time

import torch

from .. import _autograd
from . import environment
from .options import Setting
from .variants import inputs_of, model_of, stepper


def alone(setting: Setting, variant: str) -> dict:
    """Peak bytes, and for variants that compile the seconds of a first step with a filled cache.

    Raises ``RuntimeError`` where the process fails, for example for lack of memory.
    """
    found = _in_process(setting, variant)
    if variant == "shorthaul" or variant.startswith("compile"):
        return {"warm_first_step": found, "peak_bytes": found["peak_bytes"]}
    return {"peak_bytes": found["peak_bytes"]}


def crash(setting: Setting, variant: str) -> str | None:
    """How the process of a variant crashes; ``None`` if it does not."""
    with environment.unbound():
        done = subprocess.run(_command(setting, variant), capture_output=True, check=False)
    return ending(done.returncode) if done.returncode < 0 else None


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _command(setting: Setting, variant: str) -> list[str]:
    return [sys.executable, "-m", "shorthaul.bench", *setting.arguments(), "--alone", variant]


def _in_process(setting: Setting, variant: str) -> dict:
    command = _command(setting, variant)
    # In memory that glibc keeps, a peak would count what is free.
    variables = environment.plain()
    with environment.unbound():
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode == -signal.SIGKILL:
        raise RuntimeError("the system killed the process, most likely because memory ran out")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"`{' '.join(command[1:])}` failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def first_step(setting: Setting, variant: str) -> dict:
    """What the process of :func:`alone` measures."""
    load_tracer()
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    model, inputs = model_of(setting), inputs_of(setting)
    environment.give_back_free_memory()
    base = _resident_bytes()
    start = time.perf_counter()
    step = stepper(setting, variant, model, inputs)
    del model  # `step` has a copy, which takes its place in `base`
    step()
    first = time.perf_counter() - start
    step()
    environment.give_back_free_memory()  # what is left over from compilation
    _forget_peak()
    step()
    return {
        "first_step_s": first,
        "export_s": _autograd.export_seconds(),
        "peak_bytes": max(0, _peak_bytes() - base),
    }


def load_tracer() -> None:
    """Loads PyTorch's tracer: for every variant, it is code and no part of a first step."""
    importlib.import_module("torch._dynamo")


def _resident_bytes() -> int:
    return _status_bytes("VmRSS") or _peak_bytes()


def _peak_bytes() -> int:
    """The largest resident size since the process began, or since :func:`_forget_peak`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_bytes("VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def _status_bytes(field: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
    except (OSError, StopIteration):
        return None


def _forget_peak() -> None:
    """Resets the peak, so that compilation does not count, if the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
