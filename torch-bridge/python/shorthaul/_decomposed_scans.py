"""Cumulative operators and order statistics, written with operators the importer has.

A scan doubles its reach in each step: log2(n) passes over the values. What is in order comes from
``sort``, whose indices of equal values are the first ones.
"""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten

#: Most elements that are sorted to find one of them; kernels on a GPU compare all pairs.
_N_SORTED = 512


def _scan(x, dim: int, join):
    """Each element joined with all before it: ``join(earlier, later)`` of equal shapes."""
    n, reach = x[0].shape[dim], 1
    while reach < n:
        earlier = [value.narrow(dim, 0, n - reach) for value in x]
        later = [value.narrow(dim, reach, n - reach) for value in x]
        joined = join(earlier, later)
        x = [
            torch.cat([value.narrow(dim, 0, reach), new], dim)
            for value, new in zip(x, joined, strict=True)
        ]
        reach *= 2
    return x


def cumprod(x, dim, *, dtype=None):
    kind = dtype or (torch.int64 if not x.is_floating_point() else x.dtype)
    x = x.to(kind)
    if x.dim() == 0:
        return x.clone()
    # PyTorch multiplies in double precision too: errors grow with the length.
    wide = x.double() if x.is_floating_point() else x
    return _scan([wide], dim, lambda a, b: [a[0] * b[0]])[0].to(kind)


def logcumsumexp(x, dim):
    if x.dim() == 0:
        return x.clone()

    def join(earlier, later):
        a, b = earlier[0], later[0]
        top = torch.maximum(a, b).detach()
        top = torch.where(top.isinf(), 0.0, top)
        return [((a - top).exp() + (b - top).exp()).log() + top]

    return _scan([x], dim, join)[0]


def _extreme_rule(is_later):
    """The largest or smallest so far with its last position; a NaN stays."""

    def rule(x, dim):
        if x.dim() == 0:
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        n = x.shape[dim]
        shape = [1] * x.dim()
        shape[dim] = n
        position = torch.arange(n).reshape(shape).expand(x.shape)

        def join(earlier, later):
            takes = is_later(later[0], earlier[0]) | later[0].isnan()
            return [torch.where(takes, new, old) for old, new in zip(earlier, later, strict=True)]

        _, at = _scan([x.detach(), position], dim, join)
        return x.gather(dim, at), at

    return rule


def _kept(value, dim: int, keepdim: bool):
    return value if keepdim else value.squeeze(dim)


def kthvalue(x, k, dim=-1, keepdim=False):
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if x.shape[dim] > _N_SORTED:
        return NotImplemented
    at = x.detach().sort(dim=dim, stable=True)[1].narrow(dim, k - 1, 1)
    return _kept(x.gather(dim, at), dim, keepdim), _kept(at, dim, keepdim)


def _median_at(x, dim: int, *, ignores_nan: bool):
    """Position of the lower median, or of a NaN if there is one that counts."""
    is_nan = x.isnan()
    order = torch.where(is_nan, math.inf, x).detach().sort(dim=dim, stable=True)[1]
    if ignores_nan:
        n_numbers = (~is_nan).to(torch.int64).sum(dim, keepdim=True)
        middle = order.gather(dim, ((n_numbers - 1).clamp(min=0)) // 2)
    else:
        n_numbers = None
        middle = order.narrow(dim, (x.shape[dim] - 1) // 2, 1)
    first_nan = is_nan.to(torch.int64).argmax(dim, keepdim=True)
    has_nan = is_nan.any(dim, keepdim=True)
    if ignores_nan:
        return torch.where(n_numbers == 0, first_nan, middle)
    return torch.where(has_nan, first_nan, middle)


def _median_rules(ignores_nan: bool):
    def along(x, dim=-1, keepdim=False):
        if not x.is_floating_point():
            return NotImplemented
        if x.dim() == 0:
            return x.clone(), torch.zeros_like(x, dtype=torch.int64)
        if x.shape[dim] > _N_SORTED:
            return NotImplemented
        at = _median_at(x, dim, ignores_nan=ignores_nan)
        return _kept(x.gather(dim, at), dim, keepdim), _kept(at, dim, keepdim)

    def whole(x):
        found = along(x.reshape(-1), 0)
        if found is NotImplemented:
            return found
        # Equal elements share the gradient, as those of the largest element do.
        value = found[0].detach()
        is_equal = (x == value) | (x.isnan() & value.isnan())
        return torch.where(is_equal, x, -math.inf).max()

    return along, whole


_median_along, _median = _median_rules(False)
_nanmedian_along, _nanmedian = _median_rules(True)


def mode(x, dim=-1, keepdim=False):
    """The smallest of the most frequent values, and its last position."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if x.shape[dim] > _N_SORTED:
        return NotImplemented
    moved = x.detach().movedim(dim, -1)
    same = moved.unsqueeze(-1) == moved.unsqueeze(-2)
    count = same.to(torch.int64).sum(-1)
    is_most = count == count.amax(-1, keepdim=True)
    if moved.dtype is torch.bool:
        largest = True
    else:
        largest = math.inf if moved.is_floating_point() else torch.iinfo(moved.dtype).max
    value = torch.where(is_most, moved, largest).amin(-1, keepdim=True)
    position = torch.arange(x.shape[dim])
    at = torch.where(moved == value, position, -1).amax(-1, keepdim=True).movedim(-1, dim)
    return _kept(x.gather(dim, at), dim, keepdim), _kept(at, dim, keepdim)


def searchsorted(ordered, values, *, out_int32=False, right=False, side=None, sorter=None):
    is_tensor = isinstance(values, torch.Tensor)
    if ordered.shape[-1] * (values.numel() if is_tensor else 1) > 1 << 20:
        return NotImplemented
    if sorter is not None:
        ordered = ordered.gather(-1, sorter)
    # A tensor without dimensions and a number do not widen the type of the boundaries.
    kind = torch.result_type(ordered, values)
    given = values.to(kind) if is_tensor else torch.full((1,), values, dtype=kind)
    ordered = ordered.to(kind)
    given, ordered, shape = given.detach(), ordered.detach(), given.shape
    if ordered.dim() == 1:
        given = given.reshape(-1)
    is_right = right or side == "right"
    left, at = ordered.unsqueeze(-2), given.unsqueeze(-1)
    # NaN is behind all, since no comparison with it holds.
    is_behind = left > at if is_right else left >= at
    n = ordered.shape[-1]
    if n:
        found = torch.where(is_behind, torch.arange(n), n).amin(-1)
    else:
        found = torch.zeros(given.shape, dtype=torch.int64)
    found = found.reshape(shape if is_tensor else ())
    return found.to(torch.int32) if out_int32 else found


def bucketize(x, boundaries, *, out_int32=False, right=False):
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


RULES = {
    aten.bucketize.Tensor: bucketize,
    aten.bucketize.Scalar: bucketize,
    aten.cumprod.default: cumprod,
    aten.logcumsumexp.default: logcumsumexp,
    aten.cummax.default: _extreme_rule(torch.ge),
    aten.cummin.default: _extreme_rule(torch.le),
    aten.kthvalue.default: kthvalue,
    aten.median.default: _median,
    aten.median.dim: _median_along,
    aten.nanmedian.default: _nanmedian,
    aten.nanmedian.dim: _nanmedian_along,
    aten.mode.default: mode,
    aten.searchsorted.Tensor: searchsorted,
    aten.searchsorted.Scalar: searchsorted,
}

__all__ = ["RULES"]
