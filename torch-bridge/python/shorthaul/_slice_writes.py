"""Writes to slices of a tensor that a graph made itself, as a new tensor.

Owns the rewrite, for graphs that ``torch.export`` traced. Without it PyTorch would have to trace
the whole graph again to find what such a write changes.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._functionalize import computes_in_another_type, out_of_place

aten = torch.ops.aten

#: What puts a part back where these operators took it from.
_INVERSE = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}


def spell_out_slice_writes(graph: fx.Graph) -> bool:
    """before  v = slice(x, …), fill_(v, 0), f(x)   after  y = slice_scatter(x, fill(v, 0), …), f(y)

    Legal where the graph made x and, after the write, nothing reads its memory by another name.
    Returns whether it found any.
    """
    names = _Names(graph)
    found = False
    for node in list(graph.nodes):
        written = _written(node)
        if written is None:
            continue
        views = []
        while written.op == "call_function" and written.target in _INVERSE:
            views.append(written)
            written = written.args[0]
        if views and names.is_private(written, node, views):
            _spell_out(node, written, views, names)
            found = True
    return found


def _written(node: fx.Node) -> fx.Node | None:
    """The tensor that an operator without a used result writes; it writes nothing else."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.users:
        return None
    schema = node.target._schema
    writes = [i for i, argument in enumerate(schema.arguments) if argument.is_write]
    if writes != [0] or out_of_place(node.target) is None or not isinstance(node.args[0], fx.Node):
        return None
    if computes_in_another_type(node):
        return None
    return node.args[0]


class _Names:
    """Where each node stands, and which nodes name a memory."""

    def __init__(self, graph: fx.Graph):
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.of_memory: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            self.note(node)

    def note(self, node: fx.Node) -> None:
        """Notes the node as a name of the memory of its results."""
        for memory in _memories(node):
            self.of_memory.setdefault(memory, []).append(node)

    def is_private(self, base: fx.Node, writer: fx.Node, views: list[fx.Node]) -> bool:
        """Whether only ``base`` names its memory once ``writer`` has run."""
        if base.op != "call_function" or not isinstance(base.meta.get("val"), torch.Tensor):
            return False
        here = self.position[writer]
        for other in (other for memory in _memories(base) for other in self.of_memory[memory]):
            if other is base or other is writer or other not in self.position:
                continue
            # What comes later is made from the base, or from a name that then has a later user.
            is_later = self.position[other] > here
            if other.op == "placeholder" or (not is_later and self._is_used_after(here, other)):
                return False
        return not any(self._is_used_after(here, view) for view in views)

    def _is_used_after(self, here: int, node: fx.Node) -> bool:
        return any(self.position[user] > here for user in node.users)


def _memories(node: fx.Node) -> set[int]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _with_defaults(node: fx.Node) -> tuple:
    """The operands, with the defaults that a graph leaves out: the other form may have none."""
    places = [place for place in node.target._schema.arguments if not place.kwarg_only]
    left_out = (p for p in places[len(node.args) :] if p.name not in node.kwargs)
    return *node.args, *(p.default_value for p in left_out)


def _spell_out(node: fx.Node, base: fx.Node, views: list[fx.Node], names: _Names) -> None:
    graph, position, mode = node.graph, names.position, base.meta["val"].fake_mode

    def made(operator, args, like: fx.Node, kwargs) -> fx.Node:
        new = graph.call_function(operator, args, kwargs)
        with mode:
            new.meta = {**node.meta, "val": torch.empty_like(like.meta["val"])}
        position[new] = position[node]
        return new

    with graph.inserting_before(node):
        value = made(out_of_place(node.target), _with_defaults(node), node.args[0], node.kwargs)
        for view in views:
            around = view.args[0]
            args = (around, value, *view.args[1:])
            value = made(_INVERSE[view.target], args, around, view.kwargs)
        # The views that are made later lie in the base's memory.
        value.meta["val"] = base.meta["val"]
        names.note(value)
    for user in list(base.users):
        if position[user] > position[node]:
            user.replace_input_with(base, value)
    graph.erase_node(node)
    del position[node]


__all__ = ["spell_out_slice_writes"]
