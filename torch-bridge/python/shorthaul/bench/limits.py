"""How much of the machine's limits a step uses: ``--limits``.

What a step moves and computes is the compiler's own count; the limits are measured by ``_limits``.
"""

from __future__ import annotations

import torch
from torch import nn

import shorthaul

from .._limits import peak
from .._machine import limits
from ..models.example import Inputs
from .options import Setting
from .variants import precision


def count(setting: Setting, model: nn.Module, inputs: Inputs) -> dict:
    """The report on the step of a compiled model.

    The optimizer's update is not counted, so a setting with one has no such numbers.
    """
    with torch.set_grad_enabled(setting.mode != "forward"), precision(setting.dtype):
        return shorthaul.report(model, *inputs).data


def used(counted: dict, median_ms: float, machine: dict) -> dict:
    """What Shorthaul's step moves and computes, and which parts of the limits that is."""
    seconds = median_ms / 1e3
    kernels = counted["kernels"]
    at_peak = sum(k["operations"] / peak(machine, k.get("products")) / 1e9 for k in kernels)
    return {
        "bytes_moved": counted["bytes_moved"],
        "bytes_least": counted["bytes_least"],
        "operations": counted["operations"],
        "of_copy": counted["bytes_moved"] / seconds / 1e9 / machine["copy_gb_s"],
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


__all__ = ["count", "limits", "sentence", "used"]
