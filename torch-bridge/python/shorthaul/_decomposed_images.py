"""Images: antialiased interpolation and fractional pooling, with operators the importer has.

Interpolation is two products with matrices of weights that sizes alone decide.
"""

from __future__ import annotations

import torch

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
        height, width = output_size
        rows = _weights(x.shape[-2], height, align_corners, scales_h, kernel, reach)
        columns = _weights(x.shape[-1], width, align_corners, scales_w, kernel, reach)
        return torch.matmul(rows.to(x.dtype), torch.matmul(x, columns.to(x.dtype).mT))

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


RULES = {
    aten.fractional_max_pool2d.default: fractional_max_pool,
    aten.fractional_max_pool3d.default: fractional_max_pool,
    aten._upsample_bilinear2d_aa.default: _rule(_triangle, 1),
    aten._upsample_bicubic2d_aa.default: _rule(_cubic, 2),
}

__all__ = ["RULES"]
