"""Indices that a program takes from its caller, and the range that eager checks.

Owns the check that embeddings, look-ups and class labels stay within their tables. It costs one
pass over those inputs, which are small beside what they look up. Indices and divisors that the
graph computes are results of it too, and checked before anything is written or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from ._errors import CaptureError, DivisionByZero, InputError, OutOfRange
from ._functionalize import FunctionalNode, Ref
from ._ranges import SAME, Range, ranges_of
from ._sizes import expression

#: Operators whose results have the same elements as their operands, in some type.
_SAME = SAME | {"aten._to_copy.default", "aten.to.dtype"}
_CLASSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward"})


@dataclass(frozen=True)
class Bound:
    """What one operator demands of one input: elements in ``[low, high)``, or ``ignored``.

    The ends are expressions if a trace has symbolic sizes, until :meth:`at` gives their numbers.
    """

    placeholder: str
    #: What a message calls it.
    given: str
    low: int | sympy.Basic
    high: int | sympy.Basic
    ignored: int | None
    #: The operator with its place, for the message.
    use: str

    def at(self, number: Callable[[Any], Any]) -> Bound:
        """The same with the numbers of one set of sizes."""
        return replace(self, low=number(self.low), high=number(self.high))

    def check(self, indices: torch.Tensor) -> None:
        """Raises ``OutOfRange`` with the first element outside."""
        if not indices.numel():
            return
        least, most = torch.aminmax(indices)
        if least >= self.low and most < self.high:
            return
        outside = (indices < self.low) | (indices >= self.high)
        if self.ignored is not None:
            outside &= indices != self.ignored
        if outside.any():
            allowed = "" if self.ignored is None else f" or {self.ignored}"
            raise OutOfRange(
                f"{self.given} holds {indices[outside][0].item()}, but {self.use} "
                f"takes {self.low} to {self.high - 1}{allowed}"
            )


@dataclass(frozen=True)
class DivisorBound:
    """The condition that an integer division has no divisor 0."""

    placeholder: str
    given: str
    use: str

    def at(self, number: Callable[[Any], Any]) -> DivisorBound:
        """The same: no size is part of it."""
        return self

    def check(self, divisors: torch.Tensor) -> None:
        """Raises ``DivisionByZero``, as eager does."""
        if not divisors.all():
            raise DivisionByZero(f"ZeroDivisionError: {self.use} divides integers by zero")


@dataclass(frozen=True)
class UnitBound:
    """The condition that probabilities lie between 0 and 1."""

    placeholder: str
    given: str
    use: str

    def at(self, number: Callable[[Any], Any]) -> UnitBound:
        """The same: no size is part of it."""
        return self

    def check(self, probabilities: torch.Tensor) -> None:
        """Raises ``InputError``, also for what is no number, as eager does."""
        if not probabilities.numel():
            return
        least, most = torch.aminmax(probabilities.detach())
        if not (least >= 0 and most <= 1):
            raise InputError(f"{self.given} of {self.use} must lie between 0 and 1")


def check_numbers(graph: fx.Graph) -> None:
    """Raises ``CaptureError`` for ``x[k]`` with a number ``k`` that is out of range.

    For a symbolic ``k``, the comparison becomes a guard. Before 2.14, PyTorch adds none.
    """
    for node in graph.nodes:
        if node.target is not torch.ops.aten.select.int:
            continue
        operand, dim, at = node.args
        at = at.meta["val"] if isinstance(at, fx.Node) else at
        size = operand.meta["val"].shape[dim]
        if not -size <= at < size:
            raise CaptureError(f"index {at} is out of range for a dimension of size {size}")


def bounds_of(
    nodes: list[FunctionalNode],
    place_of: Callable[[fx.Node], str],
    names: Mapping[str, str],
) -> tuple[list[Bound | DivisorBound | UnitBound], list[tuple[Ref, Bound | DivisorBound]]]:
    """What operators demand of placeholders, and of values that the graph computes; each once.

    ``place_of`` says where a node comes from, ``names`` what messages call placeholders.
    """
    made_by = {node.node: node for node in nodes}
    ranges = ranges_of(nodes)
    fed: dict[Bound | DivisorBound | UnitBound, None] = {}
    computed: dict[tuple[Ref, Bound | DivisorBound], None] = {}
    for node in nodes:
        for ref, make in _checked(node, f"{node.target}{place_of(node.node)}"):
            source = _source_of(ref, made_by)
            if source is not None:
                name = names.get(source.name, source.name)
                fed[make(source.name, f"input `{name}`")] = None
            elif not _is_known(ref, make("", ""), ranges):
                computed[_smallest(ref, made_by), make("", "a computed value")] = None
        if node.target == "aten.binary_cross_entropy.default":
            # A computed one is mostly a sigmoid's result; to check it would take a pass of its own.
            given = node.args["self"]
            if given.node.op == "placeholder":
                name = names.get(given.node.name, given.node.name)
                use = f"{node.target}{place_of(node.node)}"
                fed[UnitBound(given.node.name, f"input `{name}`", use)] = None
    return list(fed), list(computed)


def _checked(node: FunctionalNode, use: str) -> Iterator[tuple]:
    """Each operand that must be checked, and what makes its bound from its name."""
    for ref, low, high, ignored in _demands(node):
        is_whole = getattr(ref.value, "dtype", None) in (torch.int64, torch.int32)
        low, high = expression(low), expression(high)
        if is_whole:
            yield ref, lambda *names, ends=(low, high, ignored): Bound(*names, *ends, use)
    divisor = node.args.get("other")
    divides = node.target.split(".")[1:2] in (["remainder"], ["fmod"], ["floor_divide"], ["div"])
    if divides and isinstance(divisor, Ref) and not node.outputs[0].is_floating_point():
        if isinstance(divisor.value, torch.Tensor):
            yield divisor, lambda *names: DivisorBound(*names, use)
        elif divisor.value == 0:  # A size, which is compared here so that the trace is guarded.
            raise CaptureError(f"{use} divides integers by zero")


def _is_known(ref: Ref, bound: Bound | DivisorBound, ranges: Mapping[Ref, Range]) -> bool:
    """Whether a computed value satisfies its bound whatever the inputs are."""
    if ref not in ranges:
        return False
    least, most = ranges[ref]
    if isinstance(bound, DivisorBound):
        return least > 0 or most < 0
    return type(bound.low) is type(bound.high) is int and bound.low <= least and most < bound.high


def _smallest(ref: Ref, made_by: dict[fx.Node, FunctionalNode]) -> Ref:
    """The value whose elements ``ref`` has, before it was expanded or viewed."""
    while (maker := made_by.get(ref.node)) is not None and maker.target in SAME:
        ref = maker.args["self"]
    return ref


def _demands(node: FunctionalNode) -> Iterator[tuple]:
    """Index, lower end, upper end and exception of every look-up of an operator."""
    name, args = node.target.split(".")[1] if "." in node.target else "", node.args
    if name == "embedding":
        yield args["indices"], 0, args["weight"].value.shape[0], None
    elif name in ("index_select", "gather") and args["self"].value.dim():
        yield args["index"], 0, args["self"].value.shape[args["dim"]], None
    elif name == "index":
        for dim, index in enumerate(args["indices"]):
            if index is not None:
                size = expression(args["self"].value.shape[dim])
                yield index, -size, size, None
    elif name in ("scatter", "scatter_add", "scatter_reduce") and args["self"].value.dim():
        yield args["index"], 0, args["self"].value.shape[args["dim"]], None
    elif name in ("index_add", "index_copy", "index_fill") and args["self"].value.dim():
        yield args["index"], 0, args["self"].value.shape[args["dim"]], None
    elif name == "index_put":
        for dim, index in enumerate(args["indices"]):
            if index is not None:
                size = expression(args["self"].value.shape[dim])
                yield index, -size, size, None
    elif name in _CLASSES and not args["target"].value.is_floating_point():
        scores = args["self"].value
        yield args["target"], 0, scores.shape[min(1, scores.dim() - 1)], args["ignore_index"]


def _source_of(ref: Ref, made_by: dict[fx.Node, FunctionalNode]) -> fx.Node | None:
    """The placeholder whose elements ``ref`` has, if there is one."""
    while ref.node.op != "placeholder":
        maker = made_by.get(ref.node)
        if maker is None or maker.target not in _SAME:
            return None
        ref = maker.args["self"]
    whole = (torch.int64, torch.int32)
    return ref.node if getattr(ref.value, "dtype", None) in whole else None
