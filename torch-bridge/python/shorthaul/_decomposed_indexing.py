"""Reads and writes at indices, written with operators the importer has.

An index that eager would refuse is refused here too: it names an element of a range (``held``),
and look-ups are checked.

A write to places that may repeat keeps the last value of each place, as PyTorch does on one thread;
its gradient reaches every value that was written, as in PyTorch. Places are found by a stable sort
of the indices. What compares every index with every place is PyTorch's beyond ``_N_PAIRS`` pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ._straight_through import straight_through

aten = torch.ops.aten

#: Most indices that are sorted to find the last write: sorting time grows faster than their number.
_N_SORTED = 512

#: Most pairs of an index and a place that a reduction compares.
_N_PAIRS = 1 << 20


def _write_rows(x, dim: int, at, rows):
    """``x`` with ``rows`` at the places ``at`` along ``dim``, the last of each place."""
    if at.shape[0] > _N_SORTED:
        return NotImplemented
    order = at.sort(dim=0, stable=True)[1]
    ordered = at.index_select(0, order)
    ends = torch.ones_like(ordered[:1], dtype=torch.bool)
    is_last = torch.cat([ordered[1:] != ordered[:-1], ends])
    rank = torch.arange(1, at.shape[0] + 1).index_select(0, order)
    winner = torch.zeros_like(at[:1]).expand(x.shape[dim])
    winner = winner.scatter_add(0, ordered, torch.where(is_last, rank, 0))
    written = rows.detach().index_select(dim, (winner - 1).clamp(min=0))
    hit = (winner > 0).reshape([-1 if d == dim else 1 for d in range(x.dim())])
    result = torch.where(hit, written, x)
    if not rows.is_floating_point():
        return result
    moving = torch.where(hit, 0.0, x) + torch.zeros_like(x).index_add(dim, at, rows)
    return straight_through(result.detach(), moving)


def _write_once(x, at, values):
    """``x`` of one dimension with ``values`` at the places ``at``, which all differ."""
    rank = torch.zeros_like(at[:1]).expand(x.shape[0])
    rank = rank.scatter_add(0, at, torch.arange(1, at.shape[0] + 1))
    written = values.index_select(0, (rank - 1).clamp(min=0))
    return torch.where(rank > 0, written, x)


def _flat_write(x, at, values):
    """``x`` of one dimension with ``values`` at the places ``at``, the last of each place."""
    return _write_rows(x, 0, at, values)


def _reshaped(found, shape):
    """A result in another shape; ``NotImplemented`` stays."""
    return found if found is NotImplemented else found.reshape(shape)


def held(index, n: int):
    """The same index, which is refused where it lies outside ``[0, n)``."""
    return torch.arange(n).index_select(0, index.reshape(-1)).reshape(index.shape)


def _places(shape, dim: int, index):
    """The flat place in ``shape`` that each element of ``index`` names along ``dim``."""
    at, stride = None, 1
    for d in reversed(range(len(shape))):
        if d == dim:
            own = held(index, shape[d])
        else:
            sizes = [1] * len(shape)
            sizes[d] = index.shape[d]
            own = torch.arange(index.shape[d]).reshape(sizes)
        own = own * stride
        at = own if at is None else at + own
        stride *= shape[d]
    return at.expand(index.shape).reshape(-1)


def _cropped(source, index):
    """The part of ``source`` that lies within the index's sizes."""
    for d, size in enumerate(index.shape):
        source = source.narrow(d, 0, size)
    return source


def _at_least_1d(*tensors):
    return [value.reshape(1) if value.dim() == 0 else value for value in tensors]


def scatter_src(x, dim, index, source):
    shape = x.shape
    x, index, source = _at_least_1d(x, index, source)
    dim %= x.dim()
    at = _places(x.shape, dim, index)
    found = _flat_write(x.reshape(-1), at, _cropped(source, index).reshape(-1))
    return _reshaped(found, shape)


def scatter_value(x, dim, index, value):
    x1, index1 = _at_least_1d(x, index)
    return x1.scatter(dim, index1, value).reshape(x.shape)


def scatter_add(x, dim, index, source):
    x1, index1, source1 = _at_least_1d(x, index, source)
    return x1.scatter_add(dim, index1, source1).reshape(x.shape)


def gather(x, dim, index, *, sparse_grad=False):
    x1, index1 = _at_least_1d(x, index)
    return x1.gather(dim, index1).reshape(index.shape)


def index_select(x, dim, index):
    return x.reshape(1).index_select(dim, index.reshape(-1)).reshape(x.shape)


def index_add(x, dim, index, source, *, alpha=1):
    x1, index1, source1 = _at_least_1d(x, index, source)
    return x1.index_add(dim, index1, source1, alpha=alpha).reshape(x.shape)


def _along(index, shape, dim: int):
    """A list of indices along ``dim`` as an index for each element of the rest."""
    sizes = [1] * len(shape)
    sizes[dim] = index.numel()
    wanted = [*shape]
    wanted[dim] = index.numel()
    return index.reshape(sizes).expand(wanted)


def index_copy(x, dim, index, source):
    x1, source1 = _at_least_1d(x, source)
    dim %= x1.dim()
    at = held(index.reshape(-1), x1.shape[dim])
    return _reshaped(_write_rows(x1, dim, at, source1), x.shape)


def index_fill(x, dim, index, value):
    x1 = x.reshape(1) if x.dim() == 0 else x
    dim, n = dim % x1.dim(), x1.shape[dim % x1.dim()]
    if index.numel() * n > _N_PAIRS:
        return NotImplemented
    at = torch.arange(n)[index.reshape(-1)]
    hit = (at.unsqueeze(-1) == torch.arange(n)).any(0)
    sizes = [1] * x1.dim()
    sizes[dim] = n
    if isinstance(value, torch.Tensor):
        value = value.to(x.dtype)
    elif isinstance(value, float) and not (x.is_floating_point() or x.is_complex()):
        value = bool(value) if x.dtype is torch.bool else int(value)
    return torch.where(hit.reshape(sizes), value, x1).to(x.dtype).reshape(x.shape)


def diagonal_scatter(x, source, offset=0, dim1=0, dim2=1):
    positions = torch.arange(x.numel()).reshape(x.shape)
    at = positions.diagonal(offset, dim1, dim2).reshape(-1)
    return _write_once(x.reshape(-1), at, source.reshape(-1)).reshape(x.shape)


def put(x, index, source, accumulate=False):
    at = torch.arange(x.numel())[index.reshape(-1)]
    flat, values = x.reshape(-1), source.reshape(-1)
    if accumulate:
        return flat.scatter_add(0, at, values).reshape(x.shape)
    found = _flat_write(flat, at, values)
    return _reshaped(found, x.shape)


def index_put(x, indices, values, accumulate=False):
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return _masked_put(x, indices, values, accumulate)
    values = values.to(x.dtype)
    given = [d for d, i in enumerate(indices) if i is not None]
    if len(given) == 1 and not accumulate:
        return _put_rows(x, given[0], indices[given[0]], values)
    positions = torch.arange(x.numel()).reshape(x.shape)
    at = positions[tuple(slice(None) if i is None else i for i in indices)]
    values = values.expand(at.shape).reshape(-1)
    flat, at = x.reshape(-1), at.reshape(-1)
    if accumulate:
        return flat.scatter_add(0, at, values).reshape(x.shape)
    return _reshaped(_flat_write(flat, at, values), x.shape)


def _put_rows(x, dim: int, index, values):
    """Whole rows along one dimension; the index's dimensions stand for it."""
    shape = [*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]]
    rows = [*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]]
    at = torch.arange(x.shape[dim])[index.reshape(-1)]
    return _write_rows(x, dim, at, values.expand(shape).reshape(rows))


def _masked_put(x, indices, values, accumulate: bool):
    if len(indices) != 1 or indices[0] is None:
        return NotImplemented
    mask = indices[0].to(torch.bool)
    rest = x.shape[mask.dim() :]
    if mask.dim() > x.dim() or any(m != n for m, n in zip(mask.shape, x.shape, strict=False)):
        return NotImplemented  # eager raises an error here, older tracers do not
    if values.dim() > len(rest) and values.shape[0] != 1:
        taken = mask.reshape(-1).to(torch.int64).cumsum(0) - 1
        # Refuses indices if there are fewer rows than places: then ``surplus`` is negative.
        surplus = values.shape[0] - 1 - taken[-1:]
        taken = taken.clamp(min=0) + held(surplus, 1)
        rows = values.expand(values.shape[0], *rest)
        rows = rows.index_select(0, taken).reshape(x.shape)
    else:
        rows = values.expand([1] * (x.dim() - values.dim()) + [*values.shape]).expand(x.shape)
    mask = mask.reshape([*mask.shape] + [1] * len(rest))
    return torch.where(mask, x + rows if accumulate else rows, x)


def masked_scatter(x, mask, source):
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x, mask = x.expand(shape), mask.expand(shape)
    taken = mask.reshape(-1).to(torch.int64).cumsum(0) - 1
    flat = source.reshape(-1)
    values = flat.index_select(0, taken.clamp(min=0)).reshape(shape)
    return torch.where(mask, values, x)


def nonzero_static(x, *, size, fill_value=-1):
    """Where ``x`` is not zero: the first ``size`` places, one row each."""
    if not x.dim():
        return NotImplemented
    mask = (x != 0).reshape(-1)
    rank = mask.to(torch.int64).cumsum(0) - 1
    slot = torch.where(mask & (rank < size), rank, size)
    places = torch.zeros_like(slot[:1]).expand(size + 1)
    places = places.scatter_add(0, slot, torch.arange(x.numel()))[:size]
    columns, stride = [], x.numel()
    for n in x.shape:
        stride //= n
        columns.append((places // stride) % n)
    is_found = (torch.arange(size) < mask.to(torch.int64).sum()).unsqueeze(-1)
    return torch.where(is_found, torch.stack(columns, 1), fill_value)


def _product_at(x, at, values, include_self: bool):
    """``x`` of one dimension, multiplied by the ``values`` at the places ``at``."""
    n, m = x.shape[0], at.shape[0]
    if n * m > _N_PAIRS:
        return NotImplemented
    pairs = at.unsqueeze(0) == torch.arange(n).unsqueeze(1)
    start = x if include_self else torch.where(pairs.any(1), 1.0, x)
    offered = torch.where(pairs, values.unsqueeze(0), 1.0)
    return torch.cat([start.unsqueeze(1), offered], 1).prod(1)


def scatter_reduce(x, dim, index, source, reduce, *, include_self=True):
    if not x.is_floating_point():
        return NotImplemented
    shape = x.shape
    x, index, source = _at_least_1d(x, index, source)
    if reduce in ("amax", "amin"):
        found = x.scatter_reduce(dim, index, source, reduce, include_self=include_self)
        return found.reshape(shape)
    values = _cropped(source, index)
    if reduce == "prod":
        at = _places(x.shape, dim % x.dim(), index)
        found = _product_at(x.reshape(-1), at, values.reshape(-1), include_self)
        return _reshaped(found, shape)
    if include_self and reduce == "sum":
        return x.scatter_add(dim, index, values).reshape(shape)
    hits = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(values)).detach()
    start = x if include_self else torch.where(hits > 0, 0.0, x)
    total = start.scatter_add(dim, index, values)
    if reduce == "mean":
        total = total / (hits + 1 if include_self else torch.where(hits > 0, hits, 1.0))
    return total.reshape(shape)


def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    x1, source1 = _at_least_1d(x, source)
    dim %= x1.dim()
    spread = _along(index.to(torch.int64), x1.shape, dim)
    found = scatter_reduce(x1, dim, spread, source1, reduce, include_self=include_self)
    return _reshaped(found, x.shape)


def _strided_places(x, size, stride, offset):
    """The flat places in ``x``; ``None`` where other memory is read than that of ``x``."""
    reach = sum(step * (n - 1) for n, step in zip(size, stride, strict=True))
    first = 0 if offset is None else offset - x.storage_offset()
    if not x.is_contiguous() or first < 0 or first + reach >= x.numel():
        return None
    at = torch.full((1,), first, dtype=torch.int64)
    for n, step in zip(size, stride, strict=True):
        at = at.unsqueeze(-1) + torch.arange(n) * step
    return at.reshape(-1)


def as_strided(x, size, stride, storage_offset=None):
    at = _strided_places(x, size, stride, storage_offset)
    return NotImplemented if at is None else x.reshape(-1).index_select(0, at).reshape(size)


def _is_apart(size, stride) -> bool:
    """Whether each element has a place of its own."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return True


def as_strided_scatter(x, source, size, stride, storage_offset=None):
    at = _strided_places(x, size, stride, storage_offset)
    if at is None or not _is_apart(size, stride):
        return NotImplemented
    return _write_once(x.reshape(-1), at, source.reshape(-1)).reshape(x.shape)


def take(x, index):
    at = torch.arange(x.numel())[index.reshape(-1)]
    return x.reshape(-1).index_select(0, at).reshape(index.shape)


def repeat(x, repeats):
    """A repetition of once in each dimension is a copy."""
    return x.clone().reshape([1] * (len(repeats) - x.dim()) + [*x.shape])


def unfold(x, dim, size, step):
    if x.dim() == 0:
        return x.reshape(1).narrow(0, 0, size)
    dim %= x.dim()
    n = (x.shape[dim] - size) // step + 1
    at = (torch.arange(n) * step).unsqueeze(-1) + torch.arange(size)
    taken = x.index_select(dim, at.reshape(-1)).unflatten(dim, (n, size))
    return taken.movedim(dim + 1, -1)


def flip(x, dims):
    return x.clone()


def circular_pad(x, pad, mode="constant", value=None):
    """Negative sizes cut first; what is left repeats."""
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        low, high = pad[2 * i], pad[2 * i + 1]
        cut = max(-low, 0), max(-high, 0)
        x = x.narrow(dim, cut[0], x.shape[dim] - sum(cut))
    return torch.nn.functional.pad(x, [max(n, 0) for n in pad], mode)


def _no_dims(arguments: Mapping[str, Any]) -> bool:
    return not arguments["dims"]


def _cuts_circular(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("mode") == "circular" and min(arguments["pad"]) < 0


def _is_once(arguments: Mapping[str, Any]) -> bool:
    return all(isinstance(n, int) and n == 1 for n in arguments["repeats"])


def _some_scalar(arguments: Mapping[str, Any]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dim() == 0 for a in arguments.values())


def _first_is_scalar(arguments: Mapping[str, Any]) -> bool:
    return arguments["self"].dim() == 0


def _is_no_extreme(arguments: Mapping[str, Any]) -> bool:
    """Whether the importer has no node for a reduction: it has those for extremes of floats."""
    has_node = arguments["reduce"] in ("amax", "amin") and arguments["self"].is_floating_point()
    return not has_node or _some_scalar(arguments)


def _is_no_sum(arguments: Mapping[str, Any]) -> bool:
    """Whether the importer has no node for a write: it adds rows, or fills where a mask holds."""
    indices, values = arguments["indices"], arguments["values"]
    is_mask = [i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices]
    if is_mask == [True]:
        return values.numel() != 1 or bool(arguments.get("accumulate"))
    return not arguments.get("accumulate") or any(is_mask) or len(indices) != 1


GUARDED = {
    aten.flip.default: (_no_dims, flip),
    aten.pad.default: (_cuts_circular, circular_pad),
    aten.gather.default: (_some_scalar, gather),
    aten.index_add.default: (_some_scalar, index_add),
    aten.index_put.default: (_is_no_sum, index_put),
    aten.index_select.default: (_first_is_scalar, index_select),
    aten.repeat.default: (_is_once, repeat),
    aten.scatter.value: (_some_scalar, scatter_value),
    aten.scatter_add.default: (_some_scalar, scatter_add),
    aten.scatter_reduce.two: (_is_no_extreme, scatter_reduce),
}

RULES = {
    aten.as_strided.default: as_strided,
    aten.as_strided_copy.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.index_reduce.default: index_reduce,
    aten.masked_scatter.default: masked_scatter,
    aten.nonzero_static.default: nonzero_static,
    aten.put.default: put,
    aten.scatter.src: scatter_src,
    aten.take.default: take,
    aten.unfold.default: unfold,
    aten.unfold_copy.default: unfold,
}

__all__ = ["GUARDED", "RULES", "held"]
