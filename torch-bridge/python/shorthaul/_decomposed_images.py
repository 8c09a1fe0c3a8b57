"""Antialiased interpolation as two products with matrices of weights that sizes alone decide."""

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


RULES = {
    aten._upsample_bilinear2d_aa.default: _rule(_triangle, 1),
    aten._upsample_bicubic2d_aa.default: _rule(_cubic, 2),
}

__all__ = ["RULES"]
