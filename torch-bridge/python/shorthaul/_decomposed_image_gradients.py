"""Backward operators of interpolation, padding and pooling, written with additions at indices.

Owns the rules for gradients of images that ``forward`` asks for. These operators are linear and
work on each dimension on its own: ``y[o] = Σ_j w_j[o] · x[i_j[o]]``. So the gradient adds, for each
dimension in turn, ``w_j · dy`` at the indices ``i_j``. Where gradients are traced, interpolation
takes other operators than elsewhere, so those that the importer lacks are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ._decomposed_elements import with_zero_slope

aten = torch.ops.aten

#: What each output position reads along one dimension: indices, and their weights where not 1.
Taps = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


def _added(dy: torch.Tensor, dim: int, n_in: int, taps: Taps) -> torch.Tensor:
    """The gradient along one dimension, from that of the outputs."""
    shape = [*dy.shape]
    shape[dim] = n_in
    sizes = [-1 if d == dim else 1 for d in range(dy.dim())]
    made = dy.new_zeros(shape)
    for index, weight in taps:
        part = dy if weight is None else dy * weight.to(dy.dtype).reshape(sizes)
        made = made.index_add(dim, index, part)
    return made


def _step(n_in: int, n_out: int, align_corners: bool, scale: float | None) -> float:
    if align_corners:
        return (n_in - 1) / (n_out - 1) if n_out > 1 else 0.0
    return 1 / scale if scale is not None and scale > 0 else n_in / n_out


def _positions(n_in: int, n_out: int, align_corners: bool, scale) -> torch.Tensor:
    step, at = _step(n_in, n_out, align_corners, scale), torch.arange(n_out, dtype=torch.float64)
    return at * step if align_corners else (at + 0.5) * step - 0.5


def linear(n_in: int, n_out: int, align_corners: bool, scale) -> Taps:
    if n_in == n_out:
        return [(torch.arange(n_out), None)]
    at = _positions(n_in, n_out, align_corners, scale).clamp(min=0)
    low = at.floor().clamp(max=n_in - 1)
    share, low = at - low, low.to(torch.int64)
    return [(low, 1 - share), ((low + 1).clamp(max=n_in - 1), share)]


def cubic(n_in: int, n_out: int, align_corners: bool, scale) -> Taps:
    """Keys' cubic kernel with a = −0.75."""
    at, a = _positions(n_in, n_out, align_corners, scale), -0.75
    low = at.floor()
    taps = []
    for j in range(-1, 3):
        size = (at - low - j).abs()
        near = ((a + 2) * size - (a + 3)) * size * size + 1
        far = ((size - 5) * size + 8) * size * a - 4 * a
        index = (low + j).clamp(0, n_in - 1).to(torch.int64)
        taps.append((index, torch.where(size <= 1, near, far)))
    return taps


def nearest(n_in: int, n_out: int, scale) -> Taps:
    """As eager in two dimensions: copied or repeated twice where a size stays or doubles."""
    if n_out in (n_in, 2 * n_in):
        return [(torch.arange(n_out) // (n_out // n_in), None)]
    return _nearest_at(0.0, n_in, n_out, scale)


def _nearest_of_factor(n_in: int, n_out: int, scale) -> Taps:
    return _nearest_at(0.0, n_in, n_out, scale)


def _nearest_exact(n_in: int, n_out: int, scale) -> Taps:
    return _nearest_at(0.5, n_in, n_out, scale)


def _nearest_at(offset: float, n_in: int, n_out: int, scale) -> Taps:
    # As eager computes it: in float32.
    step = _step(n_in, n_out, False, scale)
    at = ((torch.arange(n_out, dtype=torch.float32) + offset) * step).floor()
    return [(at.to(torch.int64).clamp(max=n_in - 1), None)]


def interpolated(make: Callable[..., Taps]):
    """Interpolation itself, for operators that take one position each."""

    def rule(x, output_size, *scales):
        for d, n_out in enumerate(output_size):
            scale = scales[d] if d < len(scales) else None
            ((index, _),) = make(x.shape[2 + d], n_out, scale)
            x = x.index_select(2 + d, index)
        return x

    return rule


def weighted(x: torch.Tensor, dim: int, taps: Taps) -> torch.Tensor:
    """Interpolation along one dimension, the weights in the type of ``x``."""
    sizes = [-1 if d == dim else 1 for d in range(x.dim())]
    made = None
    for index, weight in taps:
        part = x.index_select(dim, index)
        part = part if weight is None else part * weight.to(x.dtype).reshape(sizes)
        made = part if made is None else made + part
    return made


def _interpolation(make: Callable[..., Taps], n_dims: int, has_corners: bool):
    def rule(dy, output_size, input_size, *args):
        corners = args[:1] if has_corners else ()
        scales = [*args[len(corners) :]] + [None] * n_dims
        for d in reversed(range(n_dims)):
            n_in, n_out = input_size[2 + d], dy.shape[2 + d]
            dy = _added(dy, 2 + d, n_in, make(n_in, n_out, *corners, scales[d]))
        return dy

    return rule


def _replication_pad(dy, x, padding):
    made = dy
    for d in range(len(padding) // 2):
        dim = dy.dim() - 1 - d
        index = (torch.arange(dy.shape[dim]) - padding[2 * d]).clamp(0, x.shape[dim] - 1)
        made = _added(made, dim, x.shape[dim], [(index, None)])
    return with_zero_slope(torch.zeros_like(made), x) + made


def _windows(first: torch.Tensor, end: torch.Tensor, n_in: int, longest: int, counts) -> Taps:
    """A mean over the positions from ``first`` to ``end`` that exist."""
    taps = []
    for j in range(longest):
        at = first + j
        inside = (at >= 0) & (at < end) & (at < n_in)
        index = torch.where(inside, at, 0)
        taps.append((index, torch.where(inside, 1.0 / counts, 0.0)))
    return taps


def _each(value: Sequence[int], n: int) -> list[int]:
    return list(value) * n if len(value) == 1 else list(value)


def _avg_pool(n_dims: int):
    def rule(dy, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor=None):
        sizes = _each(kernel, n_dims)
        strides = _each(stride, n_dims) if stride else sizes
        pads, made = _each(padding, n_dims), dy
        for d in range(n_dims):
            dim = dy.dim() - n_dims + d
            n_in = x.shape[dim]
            first = torch.arange(dy.shape[dim]) * strides[d] - pads[d]
            end = (first + sizes[d]).clamp(max=n_in + pads[d])
            counts = end - first
            if divisor is not None:
                counts = torch.ones_like(first)
            elif not count_include_pad:
                counts = end.clamp(max=n_in) - first.clamp(min=0)
            taps = _windows(first, end, n_in, sizes[d], counts.to(torch.float64))
            made = _added(made, dim, n_in, taps)
        made = made if divisor is None else made / divisor
        return with_zero_slope(torch.zeros_like(made), x) + made

    return rule


def _adaptive_avg_pool(n_dims: int):
    def rule(dy, x):
        made = dy
        for dim in range(dy.dim() - n_dims, dy.dim()):
            n_in, n_out = x.shape[dim], dy.shape[dim]
            at = torch.arange(n_out)
            first, end = at * n_in // n_out, ((at + 1) * n_in + n_out - 1) // n_out
            longest = math.ceil(n_in / n_out) + (1 if n_in % n_out else 0)
            taps = _windows(first, end, n_in, longest, (end - first).to(torch.float64))
            made = _added(made, dim, n_in, taps)
        return with_zero_slope(torch.zeros_like(made), x) + made

    return rule


def _max_pool(n_dims: int):
    """``indices`` are places among the positions of a channel."""

    def rule(dy, x, *window_and_indices):
        indices = window_and_indices[-1].flatten(-n_dims)
        made = torch.zeros_like(x).flatten(-n_dims)
        made = made.scatter_add(-1, indices, dy.flatten(-n_dims)).reshape(x.shape)
        return with_zero_slope(torch.zeros_like(made), x) + made

    return rule


def _shrink(dy, x, lambd):
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, dy)


def _cdist(dy, x1, x2, p, distances):
    if p != 2.0:
        return NotImplemented
    is_zero = distances == 0
    ratio = torch.where(is_zero, 0.0, dy / torch.where(is_zero, 1.0, distances))
    return ratio.sum(-1, keepdim=True) * x1 - torch.matmul(ratio, x2)


RULES = {
    aten._upsample_nearest_exact1d.default: interpolated(_nearest_exact),
    aten._upsample_nearest_exact2d.default: interpolated(_nearest_exact),
    aten._upsample_nearest_exact3d.default: interpolated(_nearest_exact),
    aten.upsample_nearest1d.default: interpolated(_nearest_of_factor),
    aten.upsample_nearest2d.default: interpolated(nearest),
    aten.upsample_nearest3d.default: interpolated(_nearest_of_factor),
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool(3),
    aten._cdist_backward.default: _cdist,
    aten._upsample_nearest_exact1d_backward.default: _interpolation(_nearest_exact, 1, False),
    aten._upsample_nearest_exact2d_backward.default: _interpolation(_nearest_exact, 2, False),
    aten._upsample_nearest_exact3d_backward.default: _interpolation(_nearest_exact, 3, False),
    aten.adaptive_max_pool2d_backward.default: _max_pool(2),
    aten.adaptive_max_pool3d_backward.default: _max_pool(3),
    aten.avg_pool2d_backward.default: _avg_pool(2),
    aten.avg_pool3d_backward.default: _avg_pool(3),
    aten.hardshrink_backward.default: _shrink,
    aten.max_pool3d_with_indices_backward.default: _max_pool(3),
    aten.replication_pad1d_backward.default: _replication_pad,
    aten.replication_pad2d_backward.default: _replication_pad,
    aten.replication_pad3d_backward.default: _replication_pad,
    aten.softshrink_backward.default: _shrink,
    aten.upsample_bicubic2d_backward.default: _interpolation(cubic, 2, True),
    aten.upsample_bilinear2d_backward.default: _interpolation(linear, 2, True),
    aten.upsample_linear1d_backward.default: _interpolation(linear, 1, True),
    aten.upsample_nearest1d_backward.default: _interpolation(nearest, 1, False),
    aten.upsample_nearest2d_backward.default: _interpolation(nearest, 2, False),
    aten.upsample_nearest3d_backward.default: _interpolation(nearest, 3, False),
    aten.upsample_trilinear3d_backward.default: _interpolation(linear, 3, True),
}

__all__ = ["RULES", "interpolated", "nearest"]
