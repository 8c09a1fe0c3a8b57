"""Images: antialiased interpolation, fractional pooling and samples at points of a volume.

Interpolation is two products with matrices of weights that sizes alone decide.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import sym_int
from torch._decomp import decomposition_table

from ._decomposed_elements import with_zero_slope
from ._decomposed_image_gradients import cubic, interpolated, linear, nearest, weighted
from ._straight_through import straight_through

aten = torch.ops.aten


def _triangle(x):
    return (1 - x.abs()).clamp(min=0)


def _cubic(x):
    """Keys' cubic kernel with a = −0.5, as PyTorch's antialiased bicubic filter."""
    size, a = x.abs(), -0.5
    near = ((a + 2) * size - (a + 3)) * size * size + 1
    far = (((size - 5) * size + 8) * size - 4) * a
    return torch.where(size < 1, near, torch.where(size < 2, far, 0.0))


def _weights(n_in: int, n_out: int, align_corners: bool, scale, kernel, reach: int):
    """The share of each input position in each output position: ``[n_out, n_in]``."""
    if align_corners:
        step = (n_in - 1) / (n_out - 1) if n_out > 1 else 0.0
    else:
        step = 1 / scale if scale is not None and scale > 0 else n_in / n_out
    support = reach * step if step >= 1 else float(reach)
    narrow = 1 / step if step >= 1 else 1.0
    centre = step * (torch.arange(n_out, dtype=torch.float64) + 0.5)
    first = (centre - support + 0.5).trunc().clamp(min=0)
    end = (centre + support + 0.5).trunc().clamp(max=n_in)
    position = torch.arange(n_in, dtype=torch.float64)
    at = (position - centre.unsqueeze(-1) + 0.5) * narrow
    inside = (position >= first.unsqueeze(-1)) & (position < end.unsqueeze(-1))
    weights = torch.where(inside, kernel(at), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def _rule(kernel, reach: int):
    def rule(x, output_size, align_corners, scales_h=None, scales_w=None):
        if not x.is_floating_point():
            return NotImplemented
        (height, width), made = output_size, x
        # Along a dimension that keeps its size, eager copies, whatever the scale.
        if width != x.shape[-1]:
            columns = _weights(x.shape[-1], width, align_corners, scales_w, kernel, reach)
            made = torch.matmul(made, columns.to(x.dtype).mT)
        if height != x.shape[-2]:
            rows = _weights(x.shape[-2], height, align_corners, scales_h, kernel, reach)
            made = torch.matmul(rows.to(x.dtype), made)
        return x.clone() if made is x else made

    return rule


def _window_starts(samples, n_in: int, n_out: int, size: int):
    """Where each window begins (Graham, "Fractional Max-Pooling", 2014): ``[…, n_out]``."""
    if n_out == 1:
        return torch.full_like(samples.unsqueeze(-1), n_in - size, dtype=torch.int64)
    step = (n_in - size) / (n_out - 1)
    position = torch.arange(n_out)
    samples = samples.unsqueeze(-1)
    starts = ((position + samples) * step).trunc() - (samples * step).trunc()
    return torch.where(position == n_out - 1, n_in - size, starts).to(torch.int64)


def fractional_max_pool(x, kernel_size, output_size, samples):
    """The largest of each window, and its place among the positions of its channel."""
    n_dims = len(output_size)
    batched = x.dim() == n_dims + 2
    x = x if batched else x.unsqueeze(0)
    sizes, at = x.shape[2:], None
    for d in range(n_dims):
        # Two dimensions draw the last one's sample first.
        sample = samples[..., n_dims - 1 - d] if n_dims == 2 else samples[..., d]
        starts = _window_starts(sample.detach(), sizes[d], output_size[d], kernel_size[d])
        place = starts.unsqueeze(-1) + torch.arange(kernel_size[d])
        shape = [*place.shape[:2], *[1] * (2 * n_dims)]
        shape[2 + d], shape[2 + n_dims + d] = output_size[d], kernel_size[d]
        place = place.reshape(shape)
        at = place if at is None else at * sizes[d] + place
    windows = at.reshape(*at.shape[: 2 + n_dims], -1)
    values = x.flatten(2).gather(2, windows.flatten(2)).reshape(windows.shape)
    chosen = values.detach().argmax(-1, keepdim=True)
    found = values.gather(-1, chosen).squeeze(-1), windows.gather(-1, chosen).squeeze(-1)
    return found if batched else tuple(value.squeeze(0) for value in found)


#: What lies outside of an image, and how values between positions are made, as ATen counts them.
_ZEROS, _REFLECTION = 0, 2
_BILINEAR, _NEAREST = 0, 1


def _coordinate(given, size: int, padding: int, align_corners: bool):
    """Positions along one dimension; −1 and 1 are its ends."""
    ends = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    at = ends[0] + (given + 1) * ((ends[1] - ends[0]) / 2)
    if padding == _REFLECTION:
        span = ends[1] - ends[0]
        if not span:
            return torch.zeros_like(at)
        away = (at - ends[0]).abs()
        flips = (away / span).detach().floor()
        rest = away - flips * span
        at = ends[0] + torch.where(flips.remainder(2) == 0, rest, span - rest)
    if padding == _ZEROS:
        return at
    # Eager's clamp takes what is no number for 0.
    return torch.where(at.isnan(), 0.0, at).clamp(0, size - 1)


def _sampled(x, grid, interpolation_mode, padding_mode, align_corners):
    """Each value from the corners of the cell around a point, or from the nearest one."""
    n, n_channels, *sizes = x.shape
    n_dims = len(sizes)
    # The grid names the last dimension first.
    points = [
        _coordinate(grid[..., n_dims - 1 - d], sizes[d], padding_mode, align_corners)
        for d in range(n_dims)
    ]
    flat, total = x.flatten(2), None
    is_nearest = interpolation_mode == _NEAREST
    lower = [(p.detach().round() if is_nearest else p.detach().floor()) for p in points]
    for corner in itertools.product((0,) if is_nearest else (0, 1), repeat=n_dims):
        weight, inside, at = None, None, None
        for d, step in enumerate(corner):
            place = lower[d] + step
            # Its slope is 1 or -1 also where a point lies on a corner.
            own = points[d] - lower[d] if step else lower[d] + 1 - points[d]
            if is_nearest:
                own = with_zero_slope(torch.ones_like(place), points[d])
            within = (place >= 0) & (place <= sizes[d] - 1)
            # The clamp changes nothing; it says that the index needs no check at a call.
            index = torch.where(within, place, 0.0).to(torch.int64).clamp(0, sizes[d] - 1)
            weight = own if weight is None else weight * own
            inside = within if inside is None else inside & within
            at = index if at is None else at * sizes[d] + index
        shape = [n, n_channels, math.prod(grid.shape[1:-1])]
        values = flat.gather(2, at.reshape(n, 1, -1).expand(shape))
        values = values.reshape(n, n_channels, *grid.shape[1:-1])
        share = torch.where(inside, weight, 0.0).unsqueeze(1) * values
        total = share if total is None else total + share
    return total


def grid_sampler_2d(x, grid, interpolation_mode, padding_mode, align_corners):
    """With eager's result at places that are no numbers; the cubic one is PyTorch's rule."""
    is_cubic = interpolation_mode not in (_BILINEAR, _NEAREST)
    rule = decomposition_table[aten.grid_sampler_2d.default] if is_cubic else _sampled
    found = rule(x, grid, interpolation_mode, padding_mode, align_corners)
    if interpolation_mode == _NEAREST:
        # The places have the gradient zero, not none.
        ghost = ((grid - grid.detach()) * 0).sum(-1)
        return found + torch.where(ghost == 0, ghost, 0.0).unsqueeze(1)
    if padding_mode != _ZEROS or interpolation_mode != _BILINEAR:
        return found
    # Zero, or no number where a place is none. The rule takes such a place for one outside.
    return found + (grid.detach().abs() * 0).sum(-1).unsqueeze(1)


def _of_sizes(make):
    """One dimension after the other, the last first; sums are kept in 32 bits at least."""

    def rule(x, output_size, align_corners, *scales):
        if not x.is_floating_point():
            return NotImplemented  # PyTorch's weights of bytes are fixed-point numbers.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        for d in reversed(range(len(output_size))):
            scale = scales[d] if d < len(scales) else None
            taps = make(x.shape[2 + d], output_size[d], align_corners, scale)
            wide = weighted(wide, 2 + d, taps)
        return wide.to(x.dtype)

    return rule


def _of_scales(make):
    """Along a dimension that keeps its size, eager copies, whatever the scale."""

    def rule(x, output_size, align_corners, scale_factors=None):
        if not x.is_floating_point():
            return NotImplemented
        scales = [None] * (x.dim() - 2) if scale_factors is None else list(scale_factors)
        sizes = output_size
        if sizes is None:
            pairs = zip(x.shape[2:], scales, strict=True)
            sizes = [n * int(s) if int(s) == s else sym_int(n * s) for n, s in pairs]
        return _of_sizes(make)(x, sizes, align_corners, *scales)

    return rule


def upsample_nearest2d(x, output_size, scale_factors):
    """PyTorch's rule, but eager repeats elements once or twice where a size stays or doubles.

    It does so whatever the factor: by 2.1, five elements become 0, 0, 1, 1, ..., not 0, 0, 0, 1.
    """
    if scale_factors is None or not any(1 < factor < 3 for factor in scale_factors):
        return decomposition_table[aten.upsample_nearest2d.vec](x, output_size, scale_factors)
    sizes = [sym_int(n * factor) for n, factor in zip(x.shape[2:], scale_factors, strict=True)]
    return interpolated(nearest)(x, sizes, *scale_factors)


def _nearest(operator):
    """PyTorch's rule, with eager's gradient where a size stays or doubles by a fraction.

    By 2.1, five elements become 0, 0, 0, 1, ...; eager's gradient adds as for 0, 0, 1, 1, ....
    """

    def rule(x, output_size, scale_factors):
        found = decomposition_table[operator](x, output_size, scale_factors)
        if scale_factors is None or not any(1 < f < 3 and f != 2 for f in scale_factors):
            return found
        sizes = [sym_int(n * f) for n, f in zip(x.shape[2:], scale_factors, strict=True)]
        return straight_through(found.detach(), interpolated(nearest)(x, sizes, *scale_factors))

    return rule


def max_pool_backward(dy, x, *window_and_indices):
    """PyTorch's rule, which reads no element of ``x``: in eager, its gradient is zero, not none.

    PyTorch 2.6 has no rule, and later versions decline where algorithms must be deterministic.
    """
    rule = decomposition_table.get(aten.max_pool2d_with_indices_backward.default)
    made = NotImplemented if rule is None else rule(dy, x, *window_and_indices)
    if made is NotImplemented:
        return NotImplemented
    return made + with_zero_slope(torch.zeros_like(made), x)


RULES = {
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.grid_sampler_2d.default: grid_sampler_2d,
    aten.grid_sampler_3d.default: _sampled,
    aten.fractional_max_pool2d.default: fractional_max_pool,
    aten.fractional_max_pool3d.default: fractional_max_pool,
    aten._upsample_bilinear2d_aa.default: _rule(_triangle, 1),
    aten._upsample_bicubic2d_aa.default: _rule(_cubic, 2),
    aten.upsample_bicubic2d.default: _of_sizes(cubic),
    aten.upsample_bicubic2d.vec: _of_scales(cubic),
    aten.upsample_bilinear2d.default: _of_sizes(linear),
    aten.upsample_bilinear2d.vec: _of_scales(linear),
    aten.upsample_linear1d.default: _of_sizes(linear),
    aten.upsample_linear1d.vec: _of_scales(linear),
    aten.upsample_nearest1d.vec: _nearest(aten.upsample_nearest1d.vec),
    aten.upsample_nearest2d.vec: upsample_nearest2d,
    aten.upsample_nearest3d.vec: _nearest(aten.upsample_nearest3d.vec),
    aten.upsample_trilinear3d.default: _of_sizes(linear),
    aten.upsample_trilinear3d.vec: _of_scales(linear),
}

__all__ = ["RULES"]
