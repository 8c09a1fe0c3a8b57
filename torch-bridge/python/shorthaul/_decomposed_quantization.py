"""Rounding to the numbers that an integer type can hold (fake quantization).

``q = clamp(round(x / s) + z)`` and ``y = (q - z) · s``. The gradient of x is that of y where q was
not clamped, and zero elsewhere: the second result of each operator says where.
"""

from __future__ import annotations

import math

import torch

from ._straight_through import straight_through

aten = torch.ops.aten


#: The largest float32 that an int64 can hold. Eager converts to this type before it clamps, and
#: what is larger becomes the least number.
_LARGEST = 2.0**63 - 2.0**39


def _quantized(x, scale, zero_point, low: int, high: int, most: float = math.inf):
    """The result and where it is not clamped; ``scale`` and ``zero_point`` broadcast with x.

    What is no number, or more than ``most``, becomes ``low``.
    """
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    given = x.detach()
    whole = (given * (1.0 / scale)).round() + zero_point
    inside = (whole >= low) & (whole <= high)
    whole = torch.where(whole <= most, whole, low)
    result = ((whole.clamp(low, high) - zero_point) * scale).to(x.dtype)
    return straight_through(result, torch.where(inside, x, 0.0)), inside


def per_tensor(x, scale, zero_point, quant_min, quant_max):
    # Eager's factor is a float32 for all types.
    scale = torch.full((), scale, dtype=torch.float32)
    return _quantized(x, scale, zero_point, quant_min, quant_max)


def per_tensor_of_tensors(x, scale, zero_point, enabled, quant_min, quant_max):
    scale, zero_point = scale.reshape(()), zero_point.reshape(())
    found = _quantized(x, scale, zero_point, quant_min, quant_max)
    if found is NotImplemented:
        return found
    result, inside = found
    is_on = enabled.reshape(()) != 0
    return torch.where(is_on, result, x), inside | ~is_on


def per_channel(x, scale, zero_point, axis, quant_min, quant_max):
    if zero_point.is_floating_point():
        return NotImplemented
    sizes = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    scale, zero_point = scale.reshape(sizes), zero_point.reshape(sizes)
    return _quantized(x, scale, zero_point, quant_min, quant_max, _LARGEST)


RULES = {
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: per_tensor_of_tensors,
    aten.fake_quantize_per_channel_affine_cachemask.default: per_channel,
    aten.fake_quantize_per_tensor_affine_cachemask.default: per_tensor,
}

__all__ = ["RULES"]
