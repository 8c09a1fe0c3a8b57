"""Complex numbers as pairs of real ones, which kernels can hold.

Owns the rewrite of Dynamo's graphs: a tensor z of sizes [...] becomes its pair, a real tensor of
sizes [..., 2] with the strides of ``view_as_real(z)``. The rotary embeddings of Meta's LLaMA,
Llama 4 and DeepSeek use complex numbers. A complex tensor that something else reads stays as it
is, and PyTorch computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ._nodes import (
    is_in_place,
    is_operand_itself,
    name_of,
    needs_gradient,
    run_again,
    storage_of,
    value_of,
)
from ._sizes import expression

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _is_complex(node: Any) -> bool:
    """Whether a node gives a complex tensor."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype in _REAL


class _Pairs:
    """The pairs of a graph's complex tensors, and the nodes that are made for them."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self.known: dict[fx.Node, fx.Node] = {}
        #: The node that is being replaced.
        self.now: fx.Node | None = None

    def of(self, node: fx.Node) -> fx.Node:
        """The pair of a complex tensor; of one that stays, PyTorch's view of its memory."""
        if node not in self.known:
            after = node
            while after.next.op == "placeholder":
                after = after.next
            whole = node
            if value_of(node).is_conj():
                # PyTorch conjugates later; what is still to be conjugated has no pair in memory.
                with self.graph.inserting_after(after):
                    whole = after = self.graph.call_function(torch.resolve_conj, (node,))
                self._note(whole, node)
            with self.graph.inserting_after(after):
                self.known[node] = self.graph.call_function(torch.view_as_real, (whole,))
            self._note(self.known[node], node)
        return self.known[node]

    def call(self, method: str, *args: Any) -> fx.Node:
        """A call of a tensor's method."""
        return self._made(self.graph.call_method, method, args)

    def function(self, target: Callable, *args: Any) -> fx.Node:
        """A call of a function."""
        return self._made(self.graph.call_function, target, args)

    def parts(self, node: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Real and imaginary part."""
        pair = self.of(node)
        return self.call("select", pair, -1, 0), self.call("select", pair, -1, 1)

    def joined(self, real: fx.Node, imaginary: fx.Node) -> fx.Node:
        """The pair of the node that is being replaced, with its order in memory."""
        order = _order(value_of(self.now))
        if order == sorted(order):
            return self.function(torch.stack, [real, imaginary], -1)
        parts = [self.call("permute", part, *order) for part in (real, imaginary)]
        back = [order.index(d) for d in range(len(order))]
        return self.call("permute", self.function(torch.stack, parts, -1), *back, len(order))

    def _made(self, make: Callable, target: Any, args: tuple) -> fx.Node:
        with self.graph.inserting_before(self.now):
            node = make(target, args)
        self._note(node, self.now)
        return node

    def _note(self, node: fx.Node, like: fx.Node) -> None:
        with torch.set_grad_enabled(needs_gradient(like)):
            found = run_again(node, value_of(like).fake_mode)
        node.meta = like.meta | {"example_value": found}


def _order(value: torch.Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory; ``None`` where there is space in between."""
    sizes, strides = ([_hint(n) for n in ns] for ns in (value.shape, value.stride()))
    # Where a dimension of one element lies says nothing: it keeps its place.
    order = sorted(range(len(sizes)), key=lambda d: -strides[d])
    dense = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != dense:
            return None
        dense *= sizes[d]
    return order


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint


def _product(pairs: _Pairs, node: fx.Node) -> fx.Node:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i"""
    (a, b), (c, d) = map(pairs.parts, node.args)

    def product(x, y):
        return pairs.function(operator.mul, x, y)

    real = pairs.function(operator.sub, product(a, c), product(b, d))
    return pairs.joined(real, pairs.function(operator.add, product(a, d), product(b, c)))


def _conjugate(pairs: _Pairs, node: fx.Node) -> fx.Node:
    real, imaginary = pairs.parts(node.args[0])
    return pairs.joined(real, pairs.function(operator.neg, imaginary))


def _polar(pairs: _Pairs, node: fx.Node) -> fx.Node:
    """r·(cos φ + i·sin φ). Eager's gradient of r has the sign of r as a factor."""
    size, angle = node.args
    if needs_gradient(size):
        still = pairs.call("detach", size)
        turned = pairs.function(operator.add, still, pairs.function(operator.sub, still, size))
        # An infinite size would become no number.
        is_negative = pairs.function(
            operator.and_,
            pairs.function(operator.lt, still, 0),
            pairs.function(torch.isfinite, still),
        )
        is_zero = pairs.function(operator.eq, still, 0)
        size = pairs.function(torch.where, is_negative, turned, size)
        size = pairs.function(torch.where, is_zero, still, size)
    parts = (pairs.function(f, angle) for f in (torch.cos, torch.sin))
    return pairs.joined(*(pairs.function(operator.mul, size, part) for part in parts))


def _of_parts(pairs: _Pairs, node: fx.Node) -> fx.Node:
    return pairs.joined(*node.args)


def _sized(pairs: _Pairs, node: fx.Node) -> fx.Node:
    """view(z, sizes) → view(pair, [sizes, 2])"""
    sizes = node.args[1:] if _is_flat(node) else node.args[1]
    return pairs.call(node.target, pairs.of(node.args[0]), *sizes, 2)


def _is_flat(node: fx.Node) -> bool:
    return len(node.args) != 2 or not isinstance(node.args[1], (list, tuple))


def _of_dimensions(pairs: _Pairs, node: fx.Node) -> fx.Node:
    """Dimensions that count from the end are one further away from it."""
    dims = [d - 1 if d < 0 else d for d in node.args[1:]]
    return pairs.call(node.target, pairs.of(node.args[0]), *dims)


def _item(pairs: _Pairs, node: fx.Node) -> fx.Node:
    z, index = node.args
    if index is Ellipsis:
        index = (index,)
    if isinstance(index, tuple) and any(i is Ellipsis for i in index):
        index = (*index, slice(None))
    return pairs.function(operator.getitem, pairs.of(z), index)


def _same(pairs: _Pairs, node: fx.Node) -> fx.Node:
    """A method without arguments."""
    return pairs.call(node.target, pairs.of(node.args[0]))


def _pair_itself(pairs: _Pairs, node: fx.Node) -> fx.Node:
    return node.args[0]


def _as_real(pairs: _Pairs, node: fx.Node) -> fx.Node:
    """A view of its own, as in eager."""
    pair = pairs.of(node.args[0])
    return pairs.call("view_as", pair, pair)


def _part(position: int) -> Callable[[_Pairs, fx.Node], fx.Node]:
    return lambda pairs, node: pairs.call("select", pairs.of(node.args[0]), -1, position)


def _are_alike(nodes: Sequence[Any]) -> bool:
    values = [value_of(node) if isinstance(node, fx.Node) else None for node in nodes]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    return len({(tuple(map(expression, v.shape)), v.dtype) for v in values}) == 1


def _rule(node: fx.Node) -> Callable[[_Pairs, fx.Node], fx.Node] | None:
    """How a node is written with pairs; ``None`` where it is not."""
    if node.op not in ("call_function", "call_method") or node.kwargs or not node.args:
        return None
    name, is_method, first = name_of(node), node.op == "call_method", node.args[0]
    if not _is_complex(node):
        return _reader(node) if _is_complex(first) else None
    if name == "view_as_complex":
        return _pair_itself
    if name in ("complex", "polar"):
        made = _polar if name == "polar" else _of_parts
        return made if len(node.args) == 2 and _are_alike(node.args) else None
    if not _is_complex(first) or value_of(first).dtype != value_of(node).dtype:
        return None
    if name == "mul" and len(node.args) == 2:
        if not _is_complex(node.args[1]) or value_of(node.args[1]).dtype != value_of(node).dtype:
            return None
        return _product if _order(value_of(node)) is not None else None
    if name == "conj":
        return _conjugate if _order(value_of(node)) is not None else None
    if node.target is operator.getitem:
        return _item
    rest = node.args[1:]
    are_numbers = all(isinstance(d, int) for d in rest)
    if is_method and name in ("view", "reshape", "expand"):
        return _sized if rest and not isinstance(rest[0], torch.dtype) else None
    if is_method and name in ("unsqueeze", "transpose", "select", "squeeze") and rest:
        return _of_dimensions if are_numbers and (name != "select" or rest[1] >= 0) else None
    return _same if is_method and name in ("contiguous", "clone", "detach") and not rest else None


def _reader(node: fx.Node) -> Callable[[_Pairs, fx.Node], fx.Node] | None:
    """How a real tensor is read out of a complex one."""
    name = name_of(node)
    if name == "getattr" and len(node.args) == 2:
        name = node.args[1]
    return {"view_as_real": _as_real, "real": _part(0), "imag": _part(1)}.get(name)


def write_out_complex_numbers(graph: fx.Graph) -> None:
    """before  view_as_real(view_as_complex(x) * w)   after  products of parts

    Legal because a pair has the elements and strides of its tensor. The terms of a product are
    those of PyTorch's. Left as they are: tensors that an operator without a rule reads, tensors
    that are written in place, and sums and products with real numbers: PyTorch makes these complex,
    and multiplying infinity by their zero imaginary parts gives NaN.
    """
    values = [value_of(node) for node in graph.nodes if _is_complex(node)]
    if not values or not all(isinstance(value, FakeTensor) for value in values):
        return
    _drop_conversions(graph)
    memory = {storage_of(node) for node in graph.nodes if _is_complex(node)}
    written = (n.all_input_nodes[0] for n in graph.nodes if n.all_input_nodes and is_in_place(n))
    if memory.intersection(map(storage_of, written)):
        return
    rules = {node: rule for node in graph.nodes if (rule := _rule(node)) is not None}
    while True:
        out = [n for n in rules if not _holds(n, rules)]
        if not out:
            break
        for node in out:
            del rules[node]
    pairs = _Pairs(graph)
    for node in list(graph.nodes):
        if node not in rules:
            continue
        pairs.now = node
        found = rules[node](pairs, node)
        if _is_complex(node):
            pairs.known[node] = found
        else:
            node.replace_all_uses_with(found)
    for node in reversed(list(graph.nodes)):
        if node in rules:
            graph.erase_node(node)


def _drop_conversions(graph: fx.Graph) -> None:
    """before  z.to(device) that is z itself   after  z"""
    for node in list(graph.nodes):
        if _is_complex(node) and is_operand_itself(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _holds(node: fx.Node, rules: dict[fx.Node, Any]) -> bool:
    """Whether a node can be replaced if all of ``rules`` are."""
    if _is_complex(node):
        return all(user in rules for user in node.users)
    return node.args[0] in rules


__all__ = ["write_out_complex_numbers"]
