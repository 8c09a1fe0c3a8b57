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
from .results import short
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
    moved, computed = found["bytes_moved"] / 1e9, found["operations"] / 1e9
    in_bf16 = f", {machine['pair_gflop_s']:,.0f} in bf16" if "pair_gflop_s" in machine else ""
    return (
        f"moves {short(moved)} GB ({100 * found['of_copy']:.0f} % of the copy bandwidth, "
        f"{machine['copy_gb_s']:.1f} GB/s); computes {short(computed)} GFLOP "
        f"({100 * found['of_product']:.0f} % of a large matrix product's "
        f"{machine['product_gflop_s']:,.0f} GFLOP/s{in_bf16})"
    )


__all__ = ["count", "limits", "sentence", "used"]
