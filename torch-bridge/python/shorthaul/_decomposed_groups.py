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
    """Whether a value is in a segment, for each segment and value."""
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


def _range_of(values, given):
    """Where bins begin and end: as given, or at the least and the largest value."""
    if given is not None:
        low, high = (torch.full_like(values[0], end) for end in given)
    else:
        low, high = values.amin(), values.amax()
        # What eager refuses becomes the index 1 in a range of one element, which is refused.
        is_wrong = (low.isfinite() & high.isfinite()).logical_not().to(torch.int64)
        low = low + held(is_wrong.reshape(1), 1).reshape(()).to(low.dtype)
    is_one = low == high
    return torch.where(is_one, low - 0.5, low), torch.where(is_one, high + 0.5, high)


def _edges(low, high, n_bins: int):
    """Ends of bins of equal width, counted from the nearer end as in ``linspace``."""
    at, step = torch.arange(n_bins + 1), (high - low) / n_bins
    from_low, from_high = low + step * at, high - step * (n_bins - at)
    return torch.where(at < (n_bins + 1) // 2, from_low, from_high)


def histogram_count(x, bins=100, *, range=None, weight=None, density=False):  # noqa: A002
    """Counts in bins of equal width."""
    if range is not None and range[0] > range[1]:
        return NotImplemented
    low, high = _range_of(x.detach().reshape(-1), range)
    return histogram_bins(x, _edges(low, high, bins), weight=weight, density=density)


def _ends_of_dimension(x, d: int, bins, given):
    """The edges of a dimension's bins: given, or of equal width."""
    if isinstance(bins[d], torch.Tensor):
        return bins[d]
    own = None if given is None else given[2 * d : 2 * d + 2]
    return _edges(*_range_of(x[:, d], own), bins[d])


def histogramdd(x, bins, *, range=None, weight=None, density=False):  # noqa: A002
    """Counts in boxes; a point belongs to the box of its bins."""
    points = x.detach().reshape(-1, x.shape[-1])
    ends = [_ends_of_dimension(points, d, bins, range) for d in _dims_of(x)]
    if points.shape[0] * max(end.shape[0] for end in ends) > _N_PAIRS:
        return NotImplemented
    box, inside, n_boxes = None, None, 1
    for d, end in enumerate(ends):
        n = end.shape[0] - 1
        values = points[:, d].unsqueeze(-1)
        own = (
            (end[1:-1] <= values).to(torch.int64).sum(-1)
            if n > 1
            else torch.zeros_like(points[:, d], dtype=torch.int64)
        )
        within = (points[:, d] >= end[0]) & (points[:, d] <= end[-1])
        box = own if box is None else box * n + own
        inside = within if inside is None else inside & within
        n_boxes *= n
    weights = torch.ones_like(points[:, 0]) if weight is None else weight.detach().reshape(-1)
    counts = torch.zeros_like(weights[:1].expand(n_boxes))
    counts = counts.scatter_add(0, box, torch.where(inside, weights, 0.0))
    counts = counts.reshape([end.shape[0] - 1 for end in ends])
    if density:
        counts = counts / counts.sum()
        for d, end in enumerate(ends):
            shape = [1] * len(ends)
            shape[d] = end.shape[0] - 1
            counts = counts / (end[1:] - end[:-1]).reshape(shape)
    return counts


def histogramdd_edges(x, bins, *, range=None, weight=None, density=False):  # noqa: A002
    points = x.detach().reshape(-1, x.shape[-1])
    return [_ends_of_dimension(points, d, bins, range) for d in _dims_of(x)]


def _dims_of(x):
    return range(x.shape[-1])


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
    aten._histogramdd_bin_edges.default: histogramdd_edges,
    aten._histogramdd_from_bin_cts.default: histogramdd,
    aten._histogramdd_from_bin_tensors.default: histogramdd,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
}

__all__ = ["RULES"]
