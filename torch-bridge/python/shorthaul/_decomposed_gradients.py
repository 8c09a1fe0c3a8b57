"""Backward operators of PyTorch's, written with operators that have gradients of their own.

Owns the rules for gradients that ``forward`` asks for: PyTorch's own, and that of a convolution.
With ``y[n, o, p] = Σ x[n, c, p·s + k·d - pad] · w[o, c, k]``, the gradient of x is the transposed
convolution of dy, and that of w a convolution of x with dy over the batch, with stride and dilation
exchanged. Never decides where they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format

from . import _decomposed_image_gradients

aten = torch.ops.aten

#: Operators whose backward pass reads statistics that they give. PyTorch has no gradient of the
#: statistics, so its second derivative through them is incomplete; they are decomposed.
_WITH_STATISTICS = [
    getattr(aten, name)
    for name in (
        "_fused_rms_norm",
        "_native_batch_norm_legit",
        "_weight_norm_interface",
        "batch_norm_with_update",
        "native_batch_norm",
        "native_group_norm",
        "native_layer_norm",
    )
    if hasattr(aten, name)
]


def _convolution_backward(
    dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
):
    """Gradients of input, weight and bias, each where ``mask`` asks for it."""
    n_dims = x.dim() - 2
    stride, padding, dilation = (_each(v, n_dims) for v in (stride, padding, dilation))
    window = (stride, padding, dilation)
    dx = dw = db = None
    if mask[0] and transposed:
        dx = aten.convolution(dy, w, None, *window, False, [0] * n_dims, groups)
    elif mask[0]:
        # What the windows do not reach at the far end.
        rest = [
            x.shape[2 + i] - ((dy.shape[2 + i] - 1) * s - 2 * p + d * (w.shape[2 + i] - 1) + 1)
            for i, (s, p, d) in enumerate(zip(*window, strict=True))
        ]
        dx = aten.convolution(dy, w, None, *window, True, rest, groups)
    if mask[1]:
        between = (x, dy) if transposed else (dy, x)
        # Where the channels of one operand are innermost, so are those of eager's gradient.
        orders = [suggest_memory_format(t) for t in (x, w)]
        order = next((o for o in orders if o != torch.contiguous_format), orders[0])
        found = _weight_gradient(*between, w.shape, window, groups)
        dw = found.contiguous(memory_format=order)
    if mask[2]:
        db = dy.sum([0, *range(2, dy.dim())])
    return dx, dw, db


def _weight_gradient(dy, x, shape: Sequence[int], window, groups: int):
    """The weight gradient of a convolution from x to y that is not transposed."""
    stride, padding, dilation = window
    n, channels, *size = x.shape
    each = channels // groups
    # Groups of samples take the place of channels: the sum is over samples.
    x = x.reshape(n, groups, each, *size).permute(2, 1, 0, *range(3, x.dim() + 1))
    x = x.reshape(each, groups * n, *size)
    dy = dy.transpose(0, 1)
    none = [0] * len(size)
    found = aten.convolution(x, dy, None, dilation, padding, stride, False, none, groups)
    for axis, k in enumerate(shape[2:], 2):
        found = found.narrow(axis, 0, k)
    return found.transpose(0, 1)


def _softplus_backward(dy, x, beta, threshold):
    """PyTorch's rule has an exponential, whose overflow would reach the second derivative."""
    steep = x * beta
    # At the threshold itself, eager's second derivative is 0.
    below = torch.where(steep >= threshold, threshold, steep)
    return torch.where(steep > threshold, dy, dy * torch.sigmoid(below))


def _elu_backward(dy, alpha, scale, input_scale, is_result, x):
    """As PyTorch's, without an exponential of positive numbers; at 0 the slope is constant."""
    below = torch.where(x < 0, x, 0.0)
    if is_result:
        slope = input_scale * (below + alpha * scale)
    else:
        slope = input_scale * alpha * scale * torch.exp(below * input_scale)
    return torch.where(x <= 0, dy * slope, dy * scale)


def _log_sigmoid_backward(dy, x, buffer):
    """PyTorch's rule has the absolute value of x, whose second derivative at 0 would be lost."""
    return dy * torch.sigmoid(-x)


def _huber_loss_backward(dy, x, target, reduction, delta):
    """As PyTorch's, whose second derivative is that of the parabola within ``delta`` alone."""
    d = x - target
    within = torch.where(d.isnan(), torch.nan, d)
    factor = dy / x.numel() if reduction == 1 else dy
    return factor * torch.where(d <= -delta, -delta, torch.where(d >= delta, delta, within))


def _each(value: Sequence[int], n: int) -> list[int]:
    return list(value) * n if len(value) == 1 else list(value)


@functools.cache
def table() -> dict[Any, Callable]:
    """The rules by operator."""
    rules = {
        op: rule
        for op, rule in decomposition_table.items()
        if "backward" in str(op) and str(op).startswith("aten.")
    }
    rules |= {
        aten.convolution_backward.default: _convolution_backward,
        aten.elu_backward.default: _elu_backward,
        aten.huber_loss_backward.default: _huber_loss_backward,
        aten.log_sigmoid_backward.default: _log_sigmoid_backward,
        aten.softplus_backward.default: _softplus_backward,
    }
    for packet in _WITH_STATISTICS:
        for name in packet.overloads():
            operator = getattr(packet, name)
            if operator in decomposition_table:
                rules[operator] = decomposition_table[operator]
    return rules | _decomposed_image_gradients.RULES


__all__ = ["table"]
