"""Measures one variant in a new process: its peak memory, or its first step.

The process finds the kernels that the measurement of times has left in the cache. Memory is the
largest that a step after the second adds to the loaded libraries and the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from .. import _autograd
from . import environment
from .options import Setting
from .variants import inputs_of, model_of, stepper

#: The option with which a process answers requests, see :func:`serve`.
_SERVE = "--serve"

#: Names the open files to and from a process that answers requests, for processes that share it.
_SHARED = "SHORTHAUL_BENCH_SERVER"

#: Variables of a measurement that its processes need too.
_PASSED_ON = ("SHORTHAUL_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

#: What SIGKILL means if nobody sent it.
KILLED = "the system killed the process, most likely because memory ran out"


class Processes(contextlib.AbstractContextManager):
    """Measures variants of settings, each in a process of its own.

    Loading PyTorch takes longer than most steps, so one process loads it and forks another for each
    request. Processes for single networks share it: see :meth:`shared`.
    """

    def __init__(self):
        self._command = [sys.executable, "-m", "shorthaul.bench", _SERVE]
        self._said = tempfile.TemporaryFile()
        self._process: subprocess.Popen | None = None
        self._to, self._from = None, None
        if _SHARED in os.environ:
            to, back = map(int, os.environ[_SHARED].split(","))
            self._to, self._from = os.fdopen(os.dup(to), "w"), os.fdopen(os.dup(back))

    def _start(self) -> None:
        # If glibc kept free memory, a peak would include it.
        variables = environment.plain()
        with environment.unbound():
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=variables,
                start_new_session=True,
            )
        self._to, self._from = self._process.stdin, self._process.stdout

    @contextlib.contextmanager
    def shared(self) -> Iterator[dict]:
        """Arguments of ``subprocess.run`` with which a process shares the one that answers."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._start()
        files = self._to.fileno(), self._from.fileno()
        yield {"pass_fds": files, "env": os.environ | {_SHARED: ",".join(map(str, files))}}

    def __exit__(self, *error: object) -> None:
        self.end()
        self._said.close()

    def end(self) -> int | None:
        """Ends the process that answers and all that it started; its exit code, if it is known."""
        if self._process is None:
            return None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        code = self._process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdout.close()
        self._process.wait()
        code = self._process.returncode if code is None else code
        self._process = None
        return code

    def alone(self, setting: Setting, variant: str) -> dict:
        """Peak bytes, and for variants that compile the seconds of a first step with full caches.

        Raises ``RuntimeError`` if the process fails, for example for lack of memory.
        """
        found = self._first_step(setting, variant)
        if variant == "shorthaul" or variant.startswith("compile"):
            return {"warm_first_step": found, "peak_bytes": found["peak_bytes"]}
        return {"peak_bytes": found["peak_bytes"]}

    def _first_step(self, setting: Setting, variant: str) -> dict:
        if self._to is None:
            self._start()
        variables = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([asdict(setting), variant, variables]), file=self._to, flush=True)
            line = self._from.readline()
        if not line:
            raise RuntimeError(self._why_ended())
        answer = json.loads(line)
        if answer["code"] == -signal.SIGKILL:
            raise RuntimeError(KILLED)
        if answer["code"]:
            failed = answer["error"] or ending(answer["code"])
            raise RuntimeError(f"a step of {variant} in a new process failed: {failed}")
        return answer["found"]

    def _why_ended(self) -> str:
        """Why the process that answers has ended; the next request starts another one."""
        what = f"`{' '.join(self._command[1:])}` ended"
        self._to = None
        if self._process is None:
            return what
        code = self.end()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        reason = f": {said[-1]}" if said else ""
        return f"{what} with {ending(code)}{reason}"


def serve() -> None:
    """Reads settings and variants, one in each line, and answers each with a line of JSON."""
    with os.fdopen(os.dup(1), "w") as answers:
        # The output of libraries is not an answer.
        os.dup2(2, 1)
        load_tracer()
        with contextlib.suppress(Exception):
            importlib.import_module("torchvision")  # many networks need it
        for line in sys.stdin:
            setting, variant, variables = json.loads(line)
            found = _forked(Setting(**setting), variant, variables)
            print(json.dumps(found), file=answers, flush=True)


def _forked(setting: Setting, variant: str, variables: dict[str, str]) -> dict:
    """What a new process finds, its exit code, and its error."""
    with tempfile.TemporaryFile() as answers:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                found, error = None, None
                try:
                    with open(os.devnull) as nothing:
                        os.dup2(nothing.fileno(), 0)  # the requests are not for this process
                    os.environ |= variables
                    found = first_step(setting, variant)
                except BaseException as raised:
                    error = f"{type(raised).__name__}: {raised}".splitlines()[0]
                answers.write(json.dumps({"found": found, "error": error}).encode())
                answers.flush()
                code = 0 if error is None else 1
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.seek(0)
        written = answers.read() or b'{"found": null, "error": null}'
    return {"code": code} | json.loads(written)


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


def first_step(setting: Setting, variant: str) -> dict:
    """What the process of a variant measures."""
    load_tracer()
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    model, inputs = model_of(setting), inputs_of(setting)
    environment.give_back_free_memory()
    _map_libraries()
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
    """Loads PyTorch's tracer, so that loading it is not part of any variant's first step."""
    importlib.import_module("torch._dynamo")


def _map_libraries() -> None:
    """Makes all loaded libraries resident; a forked process has only parts of them.

    On systems that cannot do this, a peak includes the pages that a step is the first to touch. If
    memory is short, the system drops pages of libraries, and peaks are too small.
    """
    populate_read = 22  # of Linux 5.14 and newer
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        with open("/proc/self/maps", encoding="utf-8") as file:
            mapped = [line.split(maxsplit=5) for line in file]
        for place, rights, *_, path in (line for line in mapped if len(line) == 6):
            if rights.startswith("r") and ".so" in path:
                start, end = (int(address, 16) for address in place.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), populate_read)


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
