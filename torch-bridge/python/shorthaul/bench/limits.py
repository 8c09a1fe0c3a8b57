"""What the machine can do at most, and how much of it a step uses: ``--limits``.

Owns two measurements: bytes copied per second and operations of a large product per second, each
the best of many runs, since a limit is what is reached at best. What a step moves and computes is
the compiler's own count.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

import shorthaul

from .options import Setting
from .variants import inputs_of, model_of

#: Elements of the array that is copied (far more than caches hold), and sides of the product.
_COPIED, _SIDE = 1 << 26, 2048


@functools.cache
def limits(threads: int, copied: int = _COPIED, side: int = _SIDE, seconds: float = 1.0) -> dict:
    """Gigabytes per second of a copy (read and written), and GFLOP/s of a product, in f32."""
    torch.set_num_threads(threads)
    source, target = torch.ones(copied), torch.empty(copied)
    a, b = torch.randn(side, side), torch.randn(side, side)
    product = torch.empty(side, side)
    copy_s = _best(lambda: target.copy_(source), seconds)
    product_s = _best(lambda: torch.mm(a, b, out=product), seconds)
    return {
        "copy_gb_s": 2 * source.nbytes / copy_s / 1e9,
        "product_gflop_s": 2 * side**3 / product_s / 1e9,
    }


def _best(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def used(setting: Setting, median_ms: float, machine: dict) -> dict:
    """What Shorthaul's step moves and computes, and which parts of the limits that is.

    The optimizer's update is not counted, so a setting with one has no such numbers.
    """
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    with torch.set_grad_enabled(setting.mode != "forward"):
        data = shorthaul.report(model_of(setting), *inputs_of(setting)).data
    seconds = median_ms / 1e3
    return {
        "bytes_moved": data["bytes_moved"],
        "bytes_least": data["bytes_least"],
        "operations": data["operations"],
        "of_copy": data["bytes_moved"] / seconds / 1e9 / machine["copy_gb_s"],
        "of_product": data["operations"] / seconds / 1e9 / machine["product_gflop_s"],
    }


def sentence(found: dict, machine: dict) -> str:
    """One line for the terminal."""
    return (
        f"moves {found['bytes_moved'] / 1e9:.3g} GB at {found['of_copy']:.0%} of a copy's speed "
        f"({machine['copy_gb_s']:.1f} GB/s), computes {found['operations'] / 1e9:.3g} GFLOP at "
        f"{found['of_product']:.0%} of a large product's ({machine['product_gflop_s']:.0f} GFLOP/s)"
    )
