"""Where a region ends because the caller sees a value on which later results depend.

The caller, or ``torch.autograd.grad`` in the graph, may ask for the gradient of that value or hook
it. Then autograd too must see it between the inputs and those results. Owns which values are seen,
under all of their names, and the cuts behind them. Never decides who runs a node.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ._nodes import is_in_place, is_operand_itself, is_view, needs_gradient, value_of


class Visible:
    """The values of a graph that need a gradient and are seen, as by ``return``."""

    def __init__(self, graph: fx.Graph):
        #: Each node with the first one that gives the same tensor, object and history.
        self.first: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            source = _same_tensor(node)
            self.first[node] = node if source is None else self.first[source]
        output = next(iter(reversed(graph.nodes)))
        readers = [output, *(n for n in graph.nodes if n.target is torch.autograd.grad)]
        seen = {node for reader in readers for node in reader.all_input_nodes}
        self.seen = {self.first[node] for node in seen if needs_gradient(node)}

    def cut(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Nodes cut behind each visible value from which another visible value is computed."""
        cuts = []
        # Between a value and a write to it, PyTorch would write what a region keeps.
        held: set[int] = set()
        for k, node in enumerate(nodes):
            if is_in_place(node):
                held.update(range(nodes.index(self._first_of(node, nodes)) + 1, k + 1))
        for i, node in enumerate(nodes):
            if self.first[node] not in self.seen or node is not self._first_of(node, nodes):
                continue
            # A write comes before what is computed from the written elements.
            names = [k for k, n in enumerate(nodes) if self._is_same(n, node)]
            end = max((k for k in names if k > i and is_in_place(nodes[k])), default=i) + 1
            if end not in held and self._is_read(nodes[end:], node):
                cuts.append(end)
        if not cuts:
            return [list(nodes)]
        pieces: list[list[fx.Node]] = []
        bounds = sorted(set(cuts))
        for start, end in zip([0, *bounds], [*bounds, len(nodes)], strict=True):
            piece = list(nodes[start:end])
            if pieces:
                # Items of a tuple stay with the node that made the tuple.
                before = {n for earlier in pieces for n in earlier}
                items = [n for n in piece if is_item(n) and n.args[0] in before]
                pieces[-1].extend(items)
                piece = [n for n in piece if n not in items]
            pieces.append(piece)
        return [piece for piece in pieces if piece]

    def _is_same(self, a: fx.Node, b: fx.Node) -> bool:
        return self.first[a] is self.first[b]

    def _first_of(self, node: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node:
        return next(n for n in nodes if self._is_same(n, node))

    def _is_read(self, later: Sequence[fx.Node], source: fx.Node) -> bool:
        """Whether another visible value is computed from ``source`` by later nodes."""
        same, computed = {source}, set()
        for node in later:
            operands = node.all_input_nodes
            if self._is_same(node, source):
                same.add(node)
            elif any(operand in computed for operand in operands):
                computed.add(node)
            elif any(operand in same or self._is_same(operand, source) for operand in operands):
                (same if is_view(node) else computed).add(node)
            if node in computed and self.first[node] in self.seen:
                return True
        return False


def is_item(node: fx.Node) -> bool:
    """Whether this is an item of a tuple, which belongs to the node that made the tuple."""
    return node.target is operator.getitem and not isinstance(value_of(node.args[0]), torch.Tensor)


def _same_tensor(node: fx.Node) -> fx.Node | None:
    """The operand that a node returns itself, written or not; ``None`` if it makes a tensor."""
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return None
    source, value = node.all_input_nodes[0], value_of(node)
    if not isinstance(value, torch.Tensor) or not isinstance(value_of(source), torch.Tensor):
        return None
    is_same = value_of(source) is value or is_in_place(node) or is_operand_itself(node)
    return source if is_same else None


__all__ = ["Visible", "is_item"]
