"""Compilation while eager serves.

Owns the threads that compile in the background. Import, differentiation and the choice of kernels
take a fraction of a second and can refuse a graph, so a caller waits for them; the C compiler's
seconds nobody waits for. Never captures: PyTorch's tracer stays on the caller's thread.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ._capture import Captured
from ._place import Place
from ._program import Program, compile_program

#: More programs than this at once wait for each other.
_MOST = 32

#: Held while C compilers run for a program: they use all processors by themselves.
_turn = threading.Lock()


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    compilers = ThreadPoolExecutor(_MOST, thread_name_prefix="shorthaul-compiler")
    # What nobody waits for is not begun when the process ends.
    threading._register_atexit(lambda: compilers.shutdown(wait=False, cancel_futures=True))
    return compilers


def start_compiling(
    captured: Captured,
    requires_grad: list[bool],
    place: Place,
    templates: object | None = None,
    recipe: str | None = None,
) -> Future[Program]:
    """Returns when the kernels' C text is written, while it is being compiled.

    Raises ``Unsupported`` as :func:`compile_program` does.
    """
    is_written = threading.Event()
    has_turn = threading.Event()

    def listen(done: int, total: int, name: str) -> None:
        if not is_written.is_set():
            is_written.set()
            _turn.acquire()
            has_turn.set()

    # The number of threads is the calling thread's; PyTorch counts it for each thread.
    n_threads = torch.get_num_threads()

    def compile_and_tell() -> Program:
        try:
            return compile_program(
                captured, requires_grad, place, n_threads, listen, templates, recipe
            )
        finally:
            is_written.set()
            if has_turn.is_set():
                _turn.release()

    future = _compilers().submit(compile_and_tell)
    is_written.wait()
    if future.done():
        future.result()
    return future


__all__ = ["start_compiling"]
