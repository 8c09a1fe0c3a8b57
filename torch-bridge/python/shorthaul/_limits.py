"""The limits of the machine: bytes copied per second, operations per second.

Owns the measurements, each the best of many runs, since a limit is what is reached at best.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

#: Elements of the array that is copied (far more than caches hold), and sides of the product.
COPIED, SIDE = 1 << 26, 2048
#: Bytes that a pass over large arrays reads and writes at a time.
_PIECE = 1 << 18


@functools.cache
def limits(
    threads: int,
    copied: int = COPIED,
    side: int = SIDE,
    seconds: float = 1.0,
    device: str = "cpu",
) -> dict[str, float]:
    """Gigabytes per second of a copy (read and written), and GFLOP/s of a product, in f32.

    ``threads``: how many of PyTorch's threads take part; afterwards there are as many as before.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.ones(copied, device=device)
        target = torch.empty_like(source)
        a, b = (torch.randn(side, side, device=device) for _ in range(2))
        product = torch.empty_like(a)
        wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else _nothing
        copy_s = _best(lambda: target.copy_(source), wait, seconds)
        product_s = _best(lambda: torch.mm(a, b, out=product), wait, seconds)
    finally:
        torch.set_num_threads(before)
    return {
        "copy_gb_s": 2 * source.nbytes / copy_s / 1e9,
        "product_gflop_s": 2 * side**3 / product_s / 1e9,
    }


@functools.cache
def pairs(threads: int, side: int = SIDE, seconds: float = 0.3) -> float:
    """GFLOP/s of a product of bf16 matrices in kernels of our own, on the CPU.

    PyTorch's are no measure: on a virtual machine that hides the size of its tiles (AMX), they end
    with an illegal instruction, or do without tiles.
    """
    import shorthaul  # the package imports this module

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = (torch.randn(side, side, dtype=torch.bfloat16) for _ in range(2))
        product = shorthaul.module(_Product())
        with torch.no_grad():
            product_s = _best(lambda: product(a, b), _nothing, seconds)
    finally:
        torch.set_num_threads(before)
    return 2 * side**3 / product_s / 1e9


class _Product(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def passed(n_bytes: int, threads: int, passes: int = 6) -> float:
    """Bytes per second of a pass over a block that reads one half of it and writes the other.

    The arrays are passed in pieces, and the best time of each piece counts, so that one undisturbed
    moment for each is enough; the time of a call that does next to nothing is taken off.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        none = torch.ones(16)
        source = torch.ones(n_bytes // 8)
        target = torch.empty_like(source)
        length = _PIECE // 8 * (1 if threads == 1 else 8 * threads)
        pieces = list(zip(source.split(length), target.split(length), strict=True))
        best = [float("inf")] * len(pieces)
        for _ in range(passes):
            for n, (a, b) in enumerate(pieces):
                start = time.perf_counter()
                torch.add(a, 1, out=b)
                best[n] = min(best[n], time.perf_counter() - start)
        call_s = _best(lambda: torch.add(none, 1, out=none), _nothing, 0.02)
    finally:
        torch.set_num_threads(before)
    return n_bytes / max(sum(best) - call_s * len(pieces), 1e-9)


def peak(machine: dict[str, float], products: str | None) -> float:
    """GFLOP/s of large products: in f32, or of bf16 numbers in pairs where that was measured.

    ``products``: a kernel's entry of that name in a report, the type of the numbers it multiplies.
    """
    f32 = machine["product_gflop_s"]
    return max(f32, machine.get("pair_gflop_s", 0.0)) if products == "bf16" else f32


def roofline_s(
    n_bytes: float, operations: float, machine: dict[str, float], products: str | None = None
) -> float:
    """Seconds that the limits allow at best: of moving the bytes or of computing, the longer.

    ``products``: as in :func:`peak`.
    """
    computing = operations / peak(machine, products) / 1e9
    return max(n_bytes / machine["copy_gb_s"] / 1e9, computing)


def _nothing() -> None:
    """A CPU's operators are done when their call returns."""


def _best(run: Callable[[], object], wait: Callable[[], None], seconds: float) -> float:
    run()
    wait()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
