"""Tools to choose which kernels compute products, convolutions and attention on CUDA devices.

By default, Shorthaul's own kernels compute all of them. The environment variable
``SHORTHAUL_CUDA_TABLE=FILE`` names a table of measured times. Where the table says that a library
was faster on this device, the library is used: cuBLASLt for products, cuDNN for convolutions,
PyTorch for attention. A table of another device or of other library versions raises
``CompileError``; the emulator accepts any table. ``bench/gpu/tables.py`` writes a table; you need
this module only to measure one yourself. The format is described in
``kernels/cuda/src/vendor/table.rs``.

Owns that variable, the forced choice under which tables are measured, and the times of single
products. Never decides by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _native, cuda

#: The environment's variable with a table's file.
TABLE_VARIABLE = "SHORTHAUL_CUDA_TABLE"

#: What may compute a product, as tables call it.
KINDS = ("own", "library", "library_then_map", "wgmma")
#: What may compute attention besides ``own``: operators of PyTorch's.
ATTENTION_KINDS = ("torch_flash", "torch_efficient", "torch_cudnn")

_decree: contextvars.ContextVar[tuple[str, int, int] | None] = contextvars.ContextVar(
    "shorthaul_products", default=None
)


def table_file() -> str | None:
    """The table that programs are compiled with."""
    return os.environ.get(TABLE_VARIABLE) or None


@contextlib.contextmanager
def every(kind: str, rank: int, workspace_bytes: int) -> Iterator[None]:
    """Makes programs that are compiled inside this context use one candidate wherever possible.

    - ``kind``: one of ``KINDS`` or, for attention, of ``ATTENTION_KINDS``, which have no rank.
    - ``rank``: the position of an algorithm in the library's own order; for ``wgmma`` (Shorthaul's
      kernel for Hopper), the number of its tile.
    - ``workspace_bytes``: the workspace that each product of the library may use.

    Shorthaul's own kernels compute the rest. Tables are ignored.
    """
    if kind not in KINDS + ATTENTION_KINDS:
        raise ValueError(f"kind is one of {KINDS + ATTENTION_KINDS}, not {kind!r}")
    token = _decree.set((kind, rank, workspace_bytes))
    try:
        yield
    finally:
        _decree.reset(token)


def arguments() -> dict[str, object]:
    """How products are chosen, as the native half wants to know it."""
    decree = _decree.get()
    return {"table": None if decree else table_file(), "every": decree}


@dataclass(frozen=True)
class Timed:
    """One product of a program in one step: what it is, what computed it, and how long it took."""

    product: str
    rest: str
    kind: str
    rank: int | None
    origin: str
    microseconds: float


def timed(model: nn.Module, inputs: tuple[Any, ...], step: Callable[[], object]) -> list[Timed]:
    """Times the products of a compiled ``model`` while ``step`` calls it once on ``inputs``.

    ``step`` may run the backward pass too. Events in the stream time each launch from the end of
    the previous one; afterwards the function waits for the stream. The emulator's times say nothing
    about a device.
    """
    from . import _autograd
    from ._report import programs_of

    programs = programs_of(model, inputs)
    if len(programs) != 1:
        raise ValueError(
            f"the model runs as {len(programs)} programs, but only products of one can be timed; "
            f"time a part of the model that compiles as one"
        )
    program = programs[0].native
    maps = {"forward": program.launch_kernels(False), "backward": program.launch_kernels(True)}
    before, _autograd.timings = _autograd.timings, []
    try:
        step()
        taken = _autograd.timings
    finally:
        _autograd.timings = before
    seconds: dict[int, float] = defaultdict(float)
    for which, launches in maps.items():
        own = [time for timed in taken if timed.stage == which for _, time in timed.launches]
        if own and len(own) != len(launches):
            raise ValueError(
                f"`step` must call the model once, but it made {len(own)} launches of the {which} "
                f"pass, which has {len(launches)}"
            )
        for at, time in zip(launches, own, strict=False):
            seconds[at] += time
    return [
        Timed(product, rest, kind, rank, origin, sum(seconds[first + i] for i in range(n)) * 1e6)
        for first, n, product, rest, kind, rank, origin in program.cuda_products()
        if first in seconds
    ]


def launched(step: Callable[[], object]) -> float:
    """Returns the microseconds of all launches of compiled modules during ``step``.

    PyTorch's operators between them count too. Waits for the stream afterwards.
    """
    from . import _autograd

    before, _autograd.timings = _autograd.timings, []
    try:
        step()
        return sum(s for timed in _autograd.timings for _, s in timed.launches) * 1e6
    finally:
        _autograd.timings = before


def machine(is_emulated: bool = False) -> dict[str, str]:
    """Returns the current device, its driver and the library versions, as tables name them.

    Fails without a device, without cuBLASLt, or with a cuDNN that cannot be used. Without cuDNN,
    its version is left out, and Shorthaul's own kernels compute all convolutions.
    """
    if is_emulated:
        return {"device": "emulator", "driver": "none", "cublaslt": "none"}
    driver, rows = _native.cuda_devices()
    version, _ = _native.cublaslt_version(cuda.nvrtc_folders())
    device = rows[torch.cuda.current_device()]
    found = {"device": device[1], "driver": driver, "cublaslt": version}
    if cudnn := _native.cudnn_version(cuda.nvrtc_folders()):
        found["cudnn"], _ = cudnn
    return found


__all__ = [
    "ATTENTION_KINDS",
    "KINDS",
    "TABLE_VARIABLE",
    "Timed",
    "every",
    "launched",
    "machine",
    "table_file",
    "timed",
]
