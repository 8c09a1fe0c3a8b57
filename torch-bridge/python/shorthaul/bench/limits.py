"""How much of the machine's limits a step uses: ``--limits``.

What a step moves and computes is the compiler's own count; the limits are measured by ``_limits``.
"""

from __future__ import annotations

import torch

import shorthaul

from .._limits import peak
from .._machine import limits
from .options import Setting
from .variants import inputs_of, model_of, precision


def used(setting: Setting, median_ms: float, machine: dict) -> dict:
    """What Shorthaul's step moves and computes, and which parts of the limits that is.

    The optimizer's update is not counted, so a setting with one has no such numbers.
    """
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    with torch.set_grad_enabled(setting.mode != "forward"), precision(setting.dtype):
        data = shorthaul.report(model_of(setting), *inputs_of(setting)).data
    seconds = median_ms / 1e3
    at_peak = sum(k["operations"] / peak(machine, k.get("products")) / 1e9 for k in data["kernels"])
    return {
        "bytes_moved": data["bytes_moved"],
        "bytes_least": data["bytes_least"],
        "operations": data["operations"],
        "of_copy": data["bytes_moved"] / seconds / 1e9 / machine["copy_gb_s"],
        "of_product": at_peak / seconds,
    }


def sentence(found: dict, machine: dict) -> str:
    """One line for the terminal."""
    return (
        f"moves {found['bytes_moved'] / 1e9:.3g} GB at {found['of_copy']:.0%} of a copy's speed "
        f"({machine['copy_gb_s']:.1f} GB/s), computes {found['operations'] / 1e9:.3g} GFLOP at "
        f"{found['of_product']:.0%} of a large product's ({machine['product_gflop_s']:.0f} GFLOP/s"
        + (f", in bf16 {machine['pair_gflop_s']:.0f})" if "pair_gflop_s" in machine else ")")
    )


__all__ = ["limits", "sentence", "used"]
