"""Compilation in the background, while PyTorch runs the steps.

Owns the threads that compile in the background. The choice of kernels for a graph's first sizes
can refuse the graph, so a caller waits for it; nobody waits for the C compiler. For later sizes of
a trace a caller waits for the import alone: one thread of low priority makes their programs, in
order, so that each finds the kernels of those before it. Never captures: PyTorch's tracer stays on
the caller's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from ._capture import Captured
from ._place import Place
from ._program import Program, compile_program, import_symbolic

#: Most programs that are compiled at once; further ones wait.
_MOST = 32

#: Held while C compilers run for a program: they use all processors by themselves.
_turn = threading.Lock()


#: What a thread that compiles while training steps run adds to its niceness.
_PATIENCE = 5


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return _lasting(ThreadPoolExecutor(_MOST, thread_name_prefix="shorthaul-compiler"))


@functools.cache
def _compiler_of_sizes() -> ThreadPoolExecutor:
    name = "shorthaul-sizes"
    return _lasting(ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_be_patient))


def _lasting(compilers: ThreadPoolExecutor) -> ThreadPoolExecutor:
    # What nobody waits for is not begun when the process ends.
    threading._register_atexit(lambda: compilers.shutdown(wait=False, cancel_futures=True))
    return compilers


def _be_patient() -> None:
    """Lowers the priority of this thread, and so of the compilers that it starts."""
    with contextlib.suppress(OSError):  # Where a system forbids it, they have the usual one.
        mine = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, mine)
        os.setpriority(os.PRIO_PROCESS, mine, niceness + _PATIENCE)


def start_compiling(
    captured: Captured,
    requires_grad: list[bool],
    place: Place,
    n_threads: int,
    recipe: str | None = None,
    budget: float | None = None,
    templates: object | None = None,
) -> Future[Program]:
    """Returns when the kernels' C text is written, while it is being compiled.

    For a trace with symbolic sizes, returns when the trace is imported. Raises ``Unsupported`` as
    :func:`compile_program` does.
    """
    if captured.symbolic is not None:
        import_symbolic(captured)
        if templates is not None and not templates.has_foreseen:
            # PyTorch's expressions may be used on the caller's thread only.
            expected = captured.expected()
            captured = dataclasses.replace(captured, expected=lambda: expected)
    is_written = threading.Event()
    has_turn = threading.Event()

    def listen(done: int, total: int, name: str) -> None:
        if not is_written.is_set():
            is_written.set()
            _turn.acquire()
            has_turn.set()

    def compile_and_tell() -> Program:
        try:
            return compile_program(
                captured, requires_grad, place, n_threads, listen, recipe, budget, templates
            )
        finally:
            is_written.set()
            if has_turn.is_set():
                _turn.release()

    if captured.symbolic is not None:
        return _compiler_of_sizes().submit(compile_and_tell)
    future = _compilers().submit(compile_and_tell)
    is_written.wait()
    if future.done():
        future.result()
    return future


__all__ = ["start_compiling"]
