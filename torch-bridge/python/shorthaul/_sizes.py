"""Sizes as symbols: numbers for them, and what PyTorch's tracer decided about them.

Owns expressions of sizes, how Dynamo's graphs write them, and the conditions under which a trace
holds. PyTorch notes each decision as a guard in its ``ShapeEnv``; a trace serves a call only if all
guards hold for the call's sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._errors import CaptureError
from ._pytorch_names import has_unbacked


class Outside(CaptureError):
    """A trace does not hold for some sizes; the message says why."""


def write_out_sizes(graph: fx.Graph) -> None:
    """before  size = torch.Size([n, 3]); y = x.view(size)   after  y = x.view((n, 3))

    A view of a region's result is made again outside of it, from numbers and tensors.

    before  size = y.size(); m = size[0]; z = x.view(m, -1)   after  z = x.view(n, -1)

    where n is an input of the graph, or a number. ``y`` then does not have to leave its region.

    before  size = x.size(); y = x.new_zeros(size)   after  y = x.new_zeros((n, 3))
    """
    _take_from_inputs(graph)
    for node in list(graph.nodes):
        if node.target is not torch.Size or not (
            node.args and isinstance(node.args[0], list | tuple)
        ):
            continue
        items = tuple(node.args[0])
        for user in list(node.users):
            if isinstance(user.meta.get("example_value"), torch.Tensor):
                _replace_operand(user, node, items)
        if not node.users:
            graph.erase_node(node)


def _take_from_inputs(graph: fx.Graph) -> None:
    known = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            known.setdefault(expression(value), node)
    for node in reversed(list(graph.nodes)):
        if not _reads_sizes(node):
            continue
        value = node.meta["example_value"]
        if isinstance(value, (list, tuple)):
            items = tuple(known.get(size, size) for size in map(expression, value))
            if all(isinstance(item, (int, fx.Node)) for item in items):
                for user in list(node.users):
                    if isinstance(user.meta.get("example_value"), torch.Tensor):
                        _replace_operand(user, node, items)
            if not node.users:
                graph.erase_node(node)
            continue
        size = expression(value)
        if isinstance(size, int) or (isinstance(size, sympy.Basic) and size in known):
            for user in list(node.users):
                _replace_operand(user, node, known.get(size, size))
        if not node.users:
            graph.erase_node(node)


def _reads_sizes(node: fx.Node) -> bool:
    """Whether a node gives sizes of a tensor, or some of such sizes."""
    if not _are_integers(node.meta.get("example_value")):
        return False
    if node.target is operator.getitem:
        return _are_integers(node.args[0].meta.get("example_value"))
    return node.target == "size" or (node.target is getattr and node.args[1:] == ("shape",))


def _are_integers(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(v, (int, torch.SymInt)) for v in values)


def _replace_operand(user: fx.Node, operand: fx.Node, by: Any) -> None:
    def replaced(one):
        return by if one is operand else one

    user.args = fx.map_arg(user.args, replaced)
    user.kwargs = fx.map_arg(user.kwargs, replaced)


#: Operators for which a number and a tensor without dimensions are the same operand.
_OF_FACTORS = frozenset({operator.mul, operator.truediv, operator.add, operator.sub})


def is_factor(number: fx.Node, nodes: Iterable[fx.Node]) -> bool:
    """Whether a fraction that follows from sizes only joins tensors, whose type it leaves alone."""
    if not isinstance(number.meta.get("example_value"), torch.SymFloat):
        return False
    for node in nodes:
        if number not in node.all_input_nodes:
            continue
        operands = [a.meta.get("example_value") for a in node.args if isinstance(a, fx.Node)]
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        if node.target not in _OF_FACTORS or len(node.args) != 2 or len(tensors) != 1:
            return False
        # Half precision computes with the number in float32; a tensor would be rounded first.
        if not tensors[0].dim() or tensors[0].dtype not in (torch.float32, torch.float64):
            return False
    return True


def expression(value: Any) -> Any:
    """A symbolic number as a SymPy expression, and any other value as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        found = value.node.expr
        if found.is_Integer:
            return int(found)
        return float(found) if found.is_Float else found
    return value


def with_numbers(value: Any, numbers: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
    """The number that an expression is for these sizes, and any other value as it is."""
    if not isinstance(value, sympy.Basic):
        return value
    found = value.xreplace(dict(numbers))
    if found.is_Integer:
        return int(found)
    if found.is_Float or found.is_Rational:
        return float(found)
    raise Outside(f"the size {value} has no value")


@dataclass
class Conditions:
    """What PyTorch's tracer decided about the sizes of one graph."""

    #: The sizes of each input, or the number that it is: numbers and expressions of symbols.
    inputs: list[Any]
    guards: list[sympy.Basic]
    ranges: dict[sympy.Symbol, Any]

    @classmethod
    def of_graph(cls, placeholders: Iterable[Any]) -> Conditions:
        """The conditions of a traced graph with these values of its users' inputs.

        Raises ``Outside`` where the graph may hold for less than its guards say.
        """
        values = list(placeholders)
        inputs = [look_of(value) for value in values]
        guards: list[sympy.Basic] = []
        ranges: dict[sympy.Symbol, Any] = {}
        for env in _envs_of(values):
            if env.frozen or env.counter["ignored_backward_guard"]:
                raise Outside("PyTorch stopped recording guards during the trace")
            if env.deferred_runtime_asserts or has_unbacked(env):
                raise Outside("a size follows from values of tensors")
            # A symbol that equals another stands for it among the inputs as well.
            guards += [env.replace(guard.expr) for guard in env.guards]
            ranges |= env.var_to_range
        return cls(inputs, list(dict.fromkeys(guards)), ranges)

    def numbers_of(self, looks: Sequence[Any]) -> dict[sympy.Symbol, sympy.Integer]:
        """The values of the symbols for inputs of these sizes. Raises ``Outside``."""
        pairs = [
            pair
            for expected, found in zip(self.inputs, looks, strict=True)
            for pair in _pairs(expected, found)
        ]
        numbers = {
            expected: sympy.Integer(found)
            for expected, found in pairs
            if isinstance(expected, sympy.Symbol)
        }
        for expected, found in pairs:
            if with_numbers(expected, numbers) != found:
                raise Outside(f"the trace takes {expected} where {found} is given")
        for symbol, number in numbers.items():
            if symbol in self.ranges and number not in self.ranges[symbol]:
                allowed = self.ranges[symbol]
                raise Outside(f"it takes {allowed.lower} to {allowed.upper}, not {number}")
        for guard in self.guards:
            if guard.xreplace(numbers) is not sympy.true:
                raise Outside(f"it holds only where {guard}")
        return numbers


def go_on_noting(placeholders: Iterable[Any]) -> None:
    """Makes PyTorch note guards also for what is done with an exported graph from here on."""
    for env in _envs_of(placeholders):
        env.frozen = False


def _envs_of(values: Iterable[Any]) -> list[Any]:
    """Where PyTorch notes its decisions about the sizes of traced inputs; each once."""
    envs = {}
    for value in pytree.tree_leaves(list(values)):
        if isinstance(value, torch.Tensor):
            env = getattr(getattr(value, "fake_mode", None), "shape_env", None)
        else:
            env = value.node.shape_env if isinstance(value, torch.SymInt) else None
        if env is not None:
            envs[id(env)] = env
    return list(envs.values())


def look_of(value: Any) -> Any:
    """The sizes of a tensor, or a number."""
    if isinstance(value, torch.Tensor):
        return tuple(expression(size) for size in value.shape)
    return expression(value)


def _pairs(expected: Any, found: Any) -> list[tuple[Any, Any]]:
    if isinstance(expected, tuple):
        return list(zip(expected, found, strict=True))
    return [(expected, found)]


__all__ = ["Conditions", "Outside", "expression", "go_on_noting", "look_of", "with_numbers"]
