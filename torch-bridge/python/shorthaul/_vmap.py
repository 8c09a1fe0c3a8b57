"""``torch.vmap`` in a graph of Dynamo's.

Owns the rewrite: before  start of a map, operators on one element, end   after  operators on all
elements at once. PyTorch's own batching rules say which operators those are. State-space models map
the steps of their scans, and a graph with a map could not be compiled at all. A map stays where a
rewrite could be seen: where it draws random numbers, or gives a view of what it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

_START, _END = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_PREPARATION = "lazy_load_decompositions"
_PARTS = {_START, _END, _PREPARATION, "_add_batch_dim", "_remove_batch_dim"}


_level = torch._C._functorch.maybe_current_level


class _Stays(Exception):
    """A map that is left as it is."""


def is_transform(node: fx.Node) -> bool:
    """Whether a node enters, leaves or works inside of a transform of ``torch.func``."""
    if node.op not in ("call_function", "call_method"):
        return False
    module = getattr(node.target, "__module__", "") or ""
    return "functorch" in module or _name(node).startswith("_vmap_")


def unmap(graph_module: fx.GraphModule) -> None:
    """Writes each outermost map of a graph as operators; other transforms keep the graph as it is.

    The code of ``graph_module`` is not written anew: it computes the same.
    """
    graph = graph_module.graph
    transforms = [node for node in graph.nodes if is_transform(node)]
    if not transforms or any(_name(node) not in _PARTS for node in transforms):
        return
    for span in list(_spans(graph)):
        try:
            _replace(graph_module, span)
        except _Stays:
            return
    for node in graph.nodes:
        if is_transform(node) and _name(node) == _PREPARATION:
            graph.erase_node(node)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _spans(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost map, from its start to its end."""
    depth, span = 0, []
    for node in graph.nodes:
        name = _name(node) if is_transform(node) else ""
        depth += name == _START
        if depth:
            span.append(node)
        if name == _END:
            depth -= 1
            if depth == 0:
                yield span
                span = []


def _replace(graph_module: fx.GraphModule, span: list[fx.Node]) -> None:
    inside = set(span)
    read = {arg: None for node in span for arg in node.all_input_nodes if arg not in inside}
    outputs = [node for node in span if any(user not in inside for user in node.users)]
    values = [node.meta.get("example_value") for node in read]
    if not all(isinstance(value, (torch.Tensor, torch.SymInt)) for value in values):
        raise _Stays
    modes = {value.fake_mode for value in values if isinstance(value, FakeTensor)}
    if len(modes) != 1:
        raise _Stays
    fakes = modes.pop()
    has_gradient = any(out.meta["example_value"].requires_grad for out in outputs)
    with fakes, torch.set_grad_enabled(has_gradient):
        flat = _traced(_subgraph(graph_module, span, list(read), outputs), values)
        noted = _Noting(flat)
        found = noted.run(*values)
    _check(flat, values, found, outputs)
    _insert(graph_module.graph, flat, noted.values, span, list(read), outputs)


def _subgraph(root: fx.GraphModule, span, read, outputs) -> fx.GraphModule:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in read}
    for node in span:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(root, graph)


def _traced(module: fx.GraphModule, values: list[Any]) -> fx.GraphModule:
    level = _level()
    try:
        return make_fx(functools.partial(fx.Interpreter.run, fx.Interpreter(module)))(*values)
    except Exception as error:
        while _level() != level:
            torch._C._functorch._vmap_decrement_nesting()
        # What a map refuses, it refuses when PyTorch runs it, with an error of the model's.
        raise _Stays from error


class _Noting(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, module: fx.GraphModule):
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def _check(flat: fx.GraphModule, values: list[Any], found: tuple, outputs: list[fx.Node]) -> None:
    """Raises ``_Stays`` where the operators would not be all that the map is."""
    for node in flat.graph.nodes:
        if node.op == "get_attr" or (
            isinstance(node.target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            raise _Stays
    storages = {v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)}
    for value, output in zip(found, outputs, strict=True):
        expected = output.meta["example_value"]
        is_view = value.untyped_storage()._cdata in storages
        if is_view or _facts(value) != _facts(expected):
            raise _Stays


def _facts(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _insert(graph, flat, values, span, read, outputs) -> None:
    # Where a result comes from is said of the last operator on elements.
    origin = {k: v for k, v in span[-2].meta.items() if k in ("stack_trace", "nn_module_stack")}
    copies = dict(zip(flat.graph.find_nodes(op="placeholder"), read, strict=True))
    with graph.inserting_before(span[0]):
        for node in flat.graph.nodes:
            if node.op != "call_function":
                continue
            copies[node] = copied = graph.node_copy(node, copies.__getitem__)
            if isinstance(node.target, torch._ops.OpOverload):
                # Named as in Dynamo's graphs.
                copied.target = node.target.overloadpacket
            copied.meta = origin | {"example_value": values[node]}
    (results,) = flat.graph.find_nodes(op="output")[0].args
    inside = set(span)
    for old, result in zip(outputs, results, strict=True):
        new = copies[result]
        # Values behind the map are views of the map's own results.
        new.meta["example_value"] = old.meta["example_value"]
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for node in reversed(span):
        graph.erase_node(node)
