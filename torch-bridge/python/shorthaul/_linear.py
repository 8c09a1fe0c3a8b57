"""Whether a traced function is linear in some of its operands.

Owns the one question, with a table of operators: f(0) = 0 and f(a + b) = f(a) + f(b), by the way
that f is written. Operators that are not in the table count as not linear. Never rewrites.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


class Kind(enum.Enum):
    """How a value depends on the operands in question."""

    #: Not at all.
    CONSTANT = enum.auto()
    #: Not at all, and all its elements are zero.
    ZERO = enum.auto()
    LINEAR = enum.auto()


class NotLinear(Exception):
    """The operator by which a function is not linear."""


#: Operators that are linear in their first operand, whatever the others are.
_FIRST = frozenset(
    "_reshape_alias _to_copy _unsafe_view alias as_strided clone cumsum detach detach_copy "
    "diagonal div expand flip gather getitem index index_select mean narrow neg permute repeat "
    "reshape roll select slice split split_with_sizes squeeze sum t threshold_backward to "
    "transpose tril triu unbind unfold unsqueeze view".split()
)

#: Operators that are linear in each of two operands alone.
_PRODUCTS = frozenset("bmm dot matmul mm mul mv".split())

#: Operators that give zeros.
_ZEROS = frozenset("new_zeros zeros zeros_like".split())

#: Operators that fill a tensor with a number, and which argument the number is.
_FILLS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}

#: Operators that read no elements of their operands.
_UNREAD = frozenset("new_ones ones_like sym_numel sym_size sym_stride".split())


def kinds_of(traced: fx.GraphModule, operands: Sequence[int]) -> list[Kind | None]:
    """How each result of a traced function depends on its placeholders at ``operands``.

    ``None`` for results that are no tensors. Raises ``NotLinear``.
    """
    kinds: dict[fx.Node, Kind] = {}
    for i, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        kinds[node] = Kind.LINEAR if i in operands else Kind.CONSTANT
    for node in traced.graph.nodes:
        if node.op == "call_function":
            kinds[node] = _kind(node, lambda one: _known(kinds, one))
        elif node.op == "get_attr":
            kinds[node] = Kind.CONSTANT
        elif node.op == "output":
            return [kinds[n] if isinstance(n, fx.Node) else None for n in node.args[0]]
    raise NotLinear("no results")


def _known(kinds: dict[fx.Node, Kind], value: Any) -> Kind:
    """The kind of an operand: a node, a number, or a list."""
    if isinstance(value, fx.Node):
        return kinds[value]
    if isinstance(value, (list, tuple)):
        found = [_known(kinds, one) for one in value]
        return Kind.LINEAR if Kind.LINEAR in found else Kind.CONSTANT
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Kind.ZERO if is_number and value == 0 else Kind.CONSTANT


def _kind(node: fx.Node, known: Callable[[Any], Kind]) -> Kind:
    name, args = _name(node), node.args
    if name in _ZEROS:
        return Kind.ZERO
    if name in _FILLS:
        return known(args[_FILLS[name]])
    if name in _UNREAD:
        return Kind.CONSTANT
    kinds = [known(arg) for arg in (*args, *node.kwargs.values())]
    terms = [known(term) for term in _terms(name, node)]
    if Kind.LINEAR not in kinds:
        are_zero = terms or (kinds[:1] if name in _FIRST and name != "div" else [])
        return Kind.ZERO if set(are_zero) == {Kind.ZERO} else Kind.CONSTANT
    if _gives_floats(node) and not node.kwargs.get("rounding_mode"):
        if name in _FIRST and Kind.LINEAR not in kinds[1:]:
            return Kind.LINEAR
        if name in _PRODUCTS and kinds.count(Kind.LINEAR) == 1:
            return Kind.LINEAR
        if name == "convolution" and args[2] is None and kinds.count(Kind.LINEAR) == 1:
            return Kind.LINEAR
        if terms and Kind.CONSTANT not in terms and kinds.count(Kind.LINEAR) <= len(terms):
            return Kind.LINEAR if Kind.LINEAR in terms else Kind.ZERO
    raise NotLinear(name)


def _terms(name: str, node: fx.Node) -> Sequence[Any]:
    """What an operator adds up, or takes each element from; nothing if it does neither."""
    if name in ("add", "sub"):
        return node.args[:2]
    if name in ("cat", "stack"):
        return node.args[0]
    if name in ("slice_scatter", "select_scatter"):
        return node.args[:2]
    if name == "where":
        return node.args[1:3]
    if name == "masked_fill":
        return (node.args[0], node.args[2])
    if name == "constant_pad_nd":
        return (node.args[0], node.args[2] if len(node.args) > 2 else 0)
    return ()


def _gives_floats(node: fx.Node) -> bool:
    """Whether results are real numbers: a conversion to integers is not linear."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return all(v.is_floating_point() for v in values if isinstance(v, torch.Tensor))


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


__all__ = ["Kind", "NotLinear", "kinds_of"]
