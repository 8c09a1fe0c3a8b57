"""Maps of element-wise functions (``torch.vmap``) in a graph of Dynamo's.

Owns the rewrite: before  start of a map, sums and products of elements, end   after  the same
operators on all elements at once. ``associative_scan`` combines steps in such maps, as state-space
models do, and a graph with a map cannot be compiled. The rewrite is legal because these operators
neither see the batch dimension nor have rules for autocast, and each result is new memory. A graph
with a map of anything else stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

_START, _END = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_ENTER, _LEAVE = "_add_batch_dim", "_remove_batch_dim"
_PREPARATION = "lazy_load_decompositions"

_OPERATORS = {operator.mul, operator.add, operator.sub, operator.truediv, operator.neg}
_OPERATORS |= {torch.mul, torch.add, torch.sub, torch.div, torch.neg}
_METHODS = {"mul", "add", "sub", "div", "neg"}


class _Stays(Exception):
    """A map that is left as it is."""


def is_transform(node: fx.Node) -> bool:
    """Whether a node enters, leaves or works inside of a transform of ``torch.func``."""
    if node.op not in ("call_function", "call_method"):
        return False
    module = getattr(node.target, "__module__", "") or ""
    return "functorch" in module or _name(node).startswith("_vmap_")


def unmap(graph: fx.Graph) -> None:
    """Writes all maps of a graph as operators, or none of them."""
    transforms = [node for node in graph.nodes if is_transform(node)]
    if not transforms:
        return
    try:
        maps = [_Map(span) for span in _spans(graph)]
    except _Stays:
        return
    spans = {node for one in maps for node in one.span}
    if any(node not in spans and _name(node) != _PREPARATION for node in transforms):
        return
    for one in maps:
        one.replace(graph)
    for node in transforms:
        if node not in spans:
            graph.erase_node(node)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _spans(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each map, from its start to its end."""
    span: list[fx.Node] = []
    for node in graph.nodes:
        name = _name(node) if is_transform(node) else ""
        if name == _START and span:
            raise _Stays
        if name == _START or span:
            span.append(node)
        if name == _END:
            yield span
            span = []
    if span:
        raise _Stays


class _Map:
    """One map. Raises ``_Stays`` if operators on all elements would not be all that it is."""

    def __init__(self, span: list[fx.Node]):
        self.span = span
        #: The value of each node with the batch dimension in front.
        self.values: dict[fx.Node, torch.Tensor] = {}
        self.entering: list[fx.Node] = []
        self.working: list[fx.Node] = []
        self.leaving: list[fx.Node] = []
        leaving = [node for node in span if _name(node) == _LEAVE and is_transform(node)]
        results = [node.meta.get("example_value") for node in leaving]
        if not results or not all(isinstance(value, torch.Tensor) for value in results):
            raise _Stays
        self.has_gradient = any(value.requires_grad for value in results)
        for node in span[1:-1]:
            if not is_transform(node):
                self._work(node)
            elif _name(node) == _ENTER:
                self._enter(node)
            elif _name(node) == _LEAVE:
                self._leave(node)
            elif _name(node) != _PREPARATION:
                raise _Stays
        inside = set(span)
        if any(user not in inside for node in span if node not in leaving for user in node.users):
            raise _Stays

    def _enter(self, node: fx.Node) -> None:
        source, dimension = node.args[0], node.args[1]
        value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
        is_plain = isinstance(value, FakeTensor) and value.is_floating_point() and value.ndim > 1
        if not is_plain or not isinstance(dimension, int) or source in self.values:
            raise _Stays
        with value.fake_mode:
            self.values[node] = value if dimension == 0 else torch.movedim(value, dimension, 0)
        self.entering.append(node)

    def _work(self, node: fx.Node) -> None:
        if node.target not in (_OPERATORS if node.op == "call_function" else _METHODS):
            raise _Stays
        operands = [self._value(arg) for arg in node.args]
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        if node.kwargs or not tensors or len({value.ndim for value in tensors}) != 1:
            raise _Stays
        with tensors[0].fake_mode, torch.set_grad_enabled(self.has_gradient):
            if node.op == "call_function":
                self.values[node] = node.target(*operands)
            else:
                self.values[node] = getattr(operands[0], node.target)(*operands[1:])
        self.working.append(node)

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            if arg not in self.values:
                raise _Stays
            return self.values[arg]
        if type(arg) not in (int, float):
            raise _Stays
        return arg

    def _leave(self, node: fx.Node) -> None:
        source, dimension = node.args[0], node.args[3]
        once = [user for user in source.users if _name(user) == _LEAVE] == [node]
        if source not in self.working or dimension != 0 or not once:
            raise _Stays
        if _facts(self.values[source]) != _facts(node.meta["example_value"]):
            raise _Stays
        self.leaving.append(node)

    def replace(self, graph: fx.Graph) -> None:
        """Writes the operators in front of the map, and removes it."""
        copies: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(self.span[0]):
            for node in self.entering:
                source, dimension = node.args[0], node.args[1]
                copies[node] = source
                if dimension != 0:
                    copies[node] = graph.call_function(torch.movedim, (source, dimension, 0))
                    copies[node].meta = _origin(node) | {"example_value": self.values[node]}
            for node in self.working:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = _origin(node) | {"example_value": self.values[node]}
        for node in self.leaving:
            copied = copies[node.args[0]]
            # Values behind the map are views of the map's own results.
            copied.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(copied)
        for node in reversed(self.span):
            graph.erase_node(node)


def _origin(node: fx.Node) -> dict[str, Any]:
    return {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}


def _facts(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


__all__ = ["is_transform", "unmap"]
