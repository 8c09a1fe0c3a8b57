"""Which operands a node of Dynamo's graph writes, whatever the form of the call.

Owns that question. Never decides what follows from a write (``_partition``, ``_checkpoint``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ._nodes import is_in_place, name_of

#: Functions that write statistics without saying so: the argument that says whether they do, and
#: what it is by default.
_WRITES_STATISTICS = {
    functional.batch_norm: ("training", False),
    functional.instance_norm: ("use_input_stats", True),
}


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands in which a node changes elements; items of lists count one by one."""
    if node.op not in ("call_function", "call_method"):
        return []
    found: list[Any] = [node.kwargs.get("out"), *written_statistics(node)]
    schema = _schema(node.target)
    if schema is not None:
        for i, argument in enumerate(schema.arguments):
            if argument.is_write:
                given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                found.append(given)
    elif is_in_place(node):
        is_list = name_of(node).startswith("_foreach_")
        found.extend(node.args[:1] if is_list else node.all_input_nodes[:1])
    nodes: list[fx.Node] = []
    fx.node.map_arg(found, nodes.append)
    return nodes


def written_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a node updates."""
    if node.target not in _WRITES_STATISTICS:
        return []
    flag, default = _WRITES_STATISTICS[node.target]
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    if not given.get(flag, default):
        return []
    statistics = [given.get(name) for name in ("running_mean", "running_var")]
    return [each for each in statistics if isinstance(each, fx.Node)]


def _schema(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = target.overloads()
        target = getattr(target, overloads[0]) if len(overloads) == 1 else None
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


__all__ = ["written_operands", "written_statistics"]
