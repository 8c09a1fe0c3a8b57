"""Writes single operators of an exported graph with simpler ones; the others stay as they are.

PyTorch's ``run_decompositions`` traces the whole graph again, which takes a third of the time of a
first step; most graphs have few operators that need it, or none. Owns when one operator can be
traced alone: its sizes are known, it writes nothing or its first operand only, and nothing but
operators on tensors comes of it. Never chooses rules: ``_decompositions`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

try:
    from torch.export.exported_program import (
        _override_composite_implicit_decomp as overriding,
    )
    from torch.export.exported_program import (
        _split_decomp_table_to_cia_and_python_decomp as split,
    )
except ImportError:  # a version that has them elsewhere decomposes whole graphs
    overriding = split = None


_COPY = torch.ops.aten.copy_.default


def decompose(
    module: fx.GraphModule, operators: Mapping[fx.Node, str], table: dict[Any, Callable]
) -> bool:
    """Replaces nodes by what the rules of ``table`` make of them.

    ``operators`` has the names of operators that do the same and write nothing. Returns whether
    all were replaced; otherwise the graph is as it was.
    """
    if overriding is None or not all(map(_may_be_alone, operators)):
        return False
    values = [value for node in operators for value in _tensors(node)]
    fake_mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if fake_mode is None:
        return False
    composite, others = split(dict(table))
    made = []
    with torch.no_grad(), fake_mode, overriding(composite), enable_python_dispatcher():
        for node, name in operators.items():
            graph = _traced(node, _operator(name), others)
            if graph is None:
                return False
            made.append(graph)
    for node, graph in zip(operators, made, strict=True):
        _replace(node, graph)
    module.recompile()
    return True


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    values = [arg.meta.get("val") for arg in node.all_input_nodes] + [node.meta.get("val")]
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _may_be_alone(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    operands = (arg.meta.get("val") for arg in node.all_input_nodes)
    if not all(isinstance(value, torch.Tensor) for value in operands):
        return False
    return all(type(n) is int for value in _tensors(node) for n in (*value.shape, *value.stride()))


def _operator(name: str) -> torch._ops.OpOverload:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _traced(node: fx.Node, operator, rules: dict[Any, Callable]) -> fx.Graph | None:
    """What the rules make of one operator: a graph of its operands, as its arguments have them."""
    leaves, spec = pytree.tree_flatten((tuple(node.args), dict(node.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

    def call(*operands):
        given = list(leaves)
        for i, operand in zip(places, operands, strict=True):
            given[i] = operand
        args, kwargs = pytree.tree_unflatten(given, spec)
        return operator(*args, **kwargs)

    graph = make_fx(call, decomposition_table=rules)(*(leaves[i].meta["val"] for i in places)).graph
    return graph if all(map(_is_plain, graph.nodes)) else None


def _is_plain(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    is_item = getattr(node.target, "__name__", "") == "getitem"
    return is_item or isinstance(node.target, torch._ops.OpOverload)


def _replace(node: fx.Node, graph: fx.Graph) -> None:
    """Puts the graph in the node's place; its operators have the node's origin and marks."""
    leaves = pytree.tree_leaves((tuple(node.args), dict(node.kwargs)))
    operands = iter([leaf for leaf in leaves if isinstance(leaf, fx.Node)])
    made: dict[fx.Node, fx.Node] = {}
    results: Any = None
    with node.graph.inserting_before(node):
        for inner in graph.nodes:
            if inner.op == "placeholder":
                made[inner] = next(operands)
            elif inner.op == "output":
                results = inner.args[0]
            else:
                copied = made[inner] = node.graph.node_copy(inner, made.__getitem__)
                copied.meta = {**node.meta, "val": inner.meta.get("val")}
                copied.meta.pop("tensor_meta", None)
    ours = set(made.values()) - set(node.all_input_nodes)
    if node.target._schema.is_mutable:
        # What follows goes on to see the write.
        node.target, node.args, node.kwargs = _COPY, (node.args[0], made[results]), {}
        return
    if isinstance(results, fx.Node):
        _stand_for(node, made[results], ours)
        return
    for item in list(node.users):
        _stand_for(item, made[results[item.args[1]]], ours)
    node.graph.erase_node(node)


def _stand_for(node: fx.Node, value: fx.Node, ours: set[fx.Node]) -> None:
    node.replace_all_uses_with(value)
    name = node.name
    node.graph.erase_node(node)
    if value in ours:
        value._rename(name)  # as near as the names that are taken allow
        ours.remove(value)


__all__ = ["decompose"]
