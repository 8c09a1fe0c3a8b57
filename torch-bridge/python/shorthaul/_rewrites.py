"""Small rewrites of Dynamo's graphs, after which more nodes fit into one region.

Owns rewrites that need no other part of the compiler. Each is legal for all values and leaves
results, their memory and their histories as they were. Never decides who runs a node
(``_partition``).
"""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ._nodes import is_empty, name_of, needs_gradient, storage_of, value_of
from ._sizes import expression


def drop_empty_operands(graph: fx.Graph) -> None:
    """before  cat([empty, x])   after  cat([x]), where ``empty`` decides neither type nor gradient.

    Caches of keys and values begin empty; a region that takes an empty tensor runs in PyTorch.
    """
    for node in graph.nodes:
        if node.target not in (torch.cat, torch.concat) or not node.args:
            continue
        operands = node.args[0]
        if not isinstance(operands, (list, tuple)) or value_of(node) is None:
            continue
        dtype = value_of(node).dtype
        kept = [one for one in operands if not is_empty(one) or needs_gradient(one)]
        if kept and all(value_of(one).dtype == dtype for one in kept):
            node.args = (kept, *node.args[1:])


def copy_into_results(graph: fx.Graph) -> None:
    """before  y = f(x, out=v)   after  y = v.copy_(f(x)), where ``v`` has the result's look.

    Legal because ``out=`` refuses tensors with a history. Spectral norms write their vectors so.
    """
    for node in list(graph.nodes):
        target = node.kwargs.get("out")
        if node.op != "call_function" or not isinstance(target, fx.Node):
            continue
        written = value_of(target)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        values, named = fx.node.map_arg((node.args, kwargs), value_of)
        if not isinstance(written, FakeTensor) or value_of(node) is not written:
            continue
        operands: list[fx.Node] = []
        fx.node.map_arg((node.args, kwargs), operands.append)
        # Eager refuses operands that overlap with the result; `empty` leaves it as it was.
        if storage_of(target) in map(storage_of, operands) or name_of(node).startswith("empty"):
            continue
        with written.fake_mode, torch.no_grad():
            result = node.target(*values, **named)
        if not isinstance(result, torch.Tensor) or _metadata(result) != _metadata(written):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(node.target, node.args, kwargs)
            copied = graph.call_method("copy_", (target, made))
        made.meta = node.meta | {"example_value": result}
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)


def _metadata(tensor: torch.Tensor) -> tuple:
    return tuple(map(expression, tensor.shape)), tensor.dtype, tensor.device


__all__ = ["copy_into_results", "drop_empty_operands"]
