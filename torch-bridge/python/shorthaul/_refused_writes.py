"""Writes that eager refuses because of how tensors lie in memory.

Owns the rule: what is written in place has each element once, and no operand lies over a part of
it. PyTorch runs such a write in place of a kernel, and raises its own error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._errors import CaptureError, Refused
from ._origins import source_node


def leave_overlaps_to_eager(graph: fx.Graph) -> None:
    """Raises ``Refused`` for writes of a traced graph that eager refuses."""
    reasons = {}
    for node in graph.nodes:
        if not _writes_first(node):
            continue
        values = [
            leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
            for leaf in pytree.tree_leaves((node.args, node.kwargs))
        ]
        written, *others = (value for value in values if isinstance(value, torch.Tensor))
        if _repeats(written) or any(_is_over_a_part(written, other) for other in others):
            error = CaptureError("PyTorch writes no element twice, nor one that it still reads")
            if not source_node(node):
                raise error
            reasons[source_node(node)] = str(error)
    if reasons:
        raise Refused(reasons)


def _writes_first(node: fx.Node) -> bool:
    """Whether this is an operator in place, such as ``copy_`` or ``add_``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    if not schema.is_mutable or not schema.name.endswith("_"):
        return False
    is_view = torch.Tag.inplace_view in node.target.tags
    return not is_view and bool(node.args) and isinstance(_value(node.args[0]), torch.Tensor)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether an expanded dimension has one element several times."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(type(step) is type(n) is int and step == 0 and n > 1 for n, step in pairs)


def _is_over_a_part(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors share some elements, but are not the same."""
    if written.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    spans = [_span(tensor) for tensor in (written, other)]
    if None in spans or written.dtype != other.dtype:
        return False
    (start, end), (first, last) = spans
    if spans[0] == spans[1]:
        return written.stride() != other.stride() and written.numel() > 1
    return start < last and first < end


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first element in its storage and the one behind the last; ``None`` if not dense."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    if any(type(n) is not int for n in (*sizes, *strides, tensor.storage_offset())):
        return None
    dense = 1
    for n, step in sorted(zip(sizes, strides, strict=True), key=lambda pair: pair[::-1]):
        if n != 1 and step != dense:
            return None
        dense *= n
    return tensor.storage_offset(), tensor.storage_offset() + dense


__all__ = ["leave_overlaps_to_eager"]
