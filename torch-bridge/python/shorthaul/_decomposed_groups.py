"""Values joined by group (segments, bags, bins), written with operators the importer has.

A table says which value belongs to which group; beyond ``_N_PAIRS`` entries the operator stays
PyTorch's, whose way takes less memory.
"""

from __future__ import annotations

import math

import torch

from ._decomposed_indexing import held

aten = torch.ops.aten

#: Entries of a table of groups and values.
_N_PAIRS = 1 << 20


def _segments(lengths, offsets, n: int):
    """For each segment and value whether the value is in it."""
    if offsets is not None:
        starts, ends = offsets[:-1], offsets[1:]
    else:
        ends = lengths.cumsum(-1)
        starts = ends - lengths
    position = torch.arange(n)
    return (position >= starts.unsqueeze(-1)) & (position < ends.unsqueeze(-1))


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}


def segment_reduce(
    data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None
):
    given = offsets if offsets is not None else lengths
    is_simple = indices is None and given is not None and given.dim() == 1 and axis == 0
    if not is_simple or given.shape[0] * data.numel() > _N_PAIRS:
        return NotImplemented
    n = data.shape[0]
    if offsets is not None:
        offsets = held(offsets, n + 1)
    else:
        # Together they are as long as the data, which eager checks too.
        lengths = held(lengths, n + 1) + held((n - lengths.sum()).reshape(1), 1)
    inside = _segments(lengths, offsets, n)
    inside = inside.reshape([*inside.shape] + [1] * (data.dim() - 1))
    values = torch.where(inside, data.unsqueeze(0), _NEUTRAL[reduce])
    counts = inside.to(data.dtype).sum(1)
    if reduce in ("sum", "mean"):
        total = values.sum(1) if initial is None else values.sum(1) + initial
        if reduce == "mean":
            total = total / counts.clamp(min=1)
            if initial is None:
                total = torch.where(counts == 0, math.nan, total)
        return total
    if reduce == "prod":
        found = values.prod(1)
        return found if initial is None else found * initial
    found = values.amax(1) if reduce == "max" else values.amin(1)
    if initial is None:
        return found
    join = torch.maximum if reduce == "max" else torch.minimum
    return join(found, torch.full_like(found, initial))


def _bin_of(x, n_bins: int, low, high):
    """The bin of each value, and whether it lies in one."""
    at = ((x - low) * n_bins / (high - low)).floor()
    at = torch.where(x == high, n_bins - 1, at)
    inside = (x >= low) & (x <= high)
    return torch.where(inside, at, 0).to(torch.int64).clamp(0, n_bins - 1), inside


def histc(x, bins=100, min=0, max=0):  # noqa: A002  (the schema's names)
    # The range of the data may be none, which eager refuses.
    if not x.is_floating_point() or not min < max:
        return NotImplemented
    flat = x.detach().reshape(-1)
    low, high = torch.full_like(flat[0], min), torch.full_like(flat[0], max)
    at, inside = _bin_of(flat, bins, low, high)
    return torch.zeros_like(flat[:1].expand(bins)).scatter_add(0, at, inside.to(x.dtype))


def histogram_bins(x, bins, *, weight=None, density=False):
    """Counts between given edges."""
    flat, n = x.detach().reshape(-1), bins.shape[0] - 1
    if flat.shape[0] * n > _N_PAIRS:
        return NotImplemented
    low, high = bins[:-1].unsqueeze(-1), bins[1:].unsqueeze(-1)
    is_last = (torch.arange(n) == n - 1).unsqueeze(-1)
    inside = (flat >= low) & ((flat < high) | (is_last & (flat == high)))
    weights = torch.ones_like(flat) if weight is None else weight.reshape(-1)
    counts = torch.where(inside, weights, 0.0).sum(1)
    if density:
        counts = counts / counts.sum() / (bins[1:] - bins[:-1])
    return counts, bins.clone()


def histogram_count(x, bins=100, *, range=None, weight=None, density=False):  # noqa: A002
    """Counts in bins of equal width."""
    if range is None or not range[0] < range[1]:
        return NotImplemented
    flat = x.detach().reshape(-1)
    low, high = torch.full_like(flat[0], range[0]), torch.full_like(flat[0], range[1])
    edges = low + (high - low) / bins * torch.arange(bins + 1)
    edges = torch.where(torch.arange(bins + 1) == bins, high, edges)
    return histogram_bins(x, edges, weight=weight, density=density)


#: How the members of a bag are joined.
_SUM, _MEAN, _MAX = 0, 1, 2


def embedding_bag(
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=_SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    n_bags = offsets.shape[0] - (1 if include_last_offset else 0)
    n = indices.shape[0]
    if scale_grad_by_freq or sparse or mode == _MAX or not n or n_bags * n > _N_PAIRS:
        return NotImplemented
    starts = held(offsets, n + 1)[:n_bags]
    position = torch.arange(n)
    bag = (starts.unsqueeze(-1) <= position).to(torch.int64).sum(0) - 1
    counted = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx >= 0:
        counted = indices != padding_idx
    inside = (bag == torch.arange(n_bags).unsqueeze(-1)) & counted
    rows = weight.index_select(0, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    rows = torch.where(counted.unsqueeze(-1), rows, 0.0)
    total = torch.zeros_like(rows[:1]).expand(n_bags, -1).index_add(0, bag, rows)
    size = inside.to(torch.int64).sum(1)
    if mode == _MEAN:
        total = total / size.clamp(min=1).unsqueeze(-1).to(total.dtype)
    # The last is for the largest of a bag, which these modes do not ask for.
    return total, bag, size, torch.zeros_like(size)


RULES = {
    aten.segment_reduce.default: segment_reduce,
    aten.histc.default: histc,
    aten.histogram.bins_tensor: histogram_bins,
    aten.histogram.bin_ct: histogram_count,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
}

__all__ = ["RULES"]
