"""Between which numbers a computed index lies, whatever the inputs are.

An index whose range fits needs no check at a call. Owns the rules by operator, for integers only: a
float may be no number, and what it is as an integer is then undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ._functionalize import FunctionalNode, Ref

#: Lowest and highest number.
Range = tuple[int, int]
#: Operators whose results have the elements of their operand, some of them perhaps several times.
SAME = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default",
        "clone.default",
        "contiguous.default",
        "detach.default",
        "expand.default",
        "expand_as.default",
        "flatten.using_ints",
        "permute.default",
        "reshape.default",
        "reshape_as.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "t.default",
        "transpose.int",
        "unflatten.int",
        "unsqueeze.default",
        "view.default",
        "view_as.default",
        "_unsafe_view.default",
    )
)


def ranges_of(nodes: Iterable[FunctionalNode]) -> dict[Ref, Range]:
    """The ranges of the integers that nodes give, where they are known."""
    known: dict[Ref, Range] = {}
    for node in nodes:
        packet = node.target.split(".")[1] if node.target.startswith("aten.") else ""
        rule = _converted if node.target in SAME else _RULES.get(packet)
        for i, value in enumerate(node.outputs if rule is not None else ()):
            if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
                continue
            found = rule(node, i, lambda name, node=node: _of(node.args.get(name), known))
            limits = torch.iinfo(value.dtype)
            # Beyond its type, a sum or product would start again from the other end.
            if found is not None and limits.min <= found[0] <= found[1] <= limits.max:
                known[Ref(node.node, i)] = found
    return known


_INTEGERS = (torch.int64, torch.int32)


def _of(argument: Any, known: Mapping[Ref, Range]) -> Range | None:
    if type(argument) is int:
        return argument, argument
    return known.get(argument) if isinstance(argument, Ref) else None


def _arange(maker: FunctionalNode, _: int, of) -> Range | None:
    start, end, step = (maker.args.get(n, d) for n, d in (("start", 0), ("end", 0), ("step", 1)))
    known = all(type(n) is int for n in (start, end, step))
    return (start, max(start, end - 1)) if known and step > 0 else None


def _constant(maker: FunctionalNode, _: int, of) -> Range | None:
    number = maker.args.get("fill_value", maker.args.get("s"))
    return (number, number) if type(number) is int else None


def _converted(maker: FunctionalNode, _: int, of) -> Range | None:
    return of("self")


def _clamp(maker: FunctionalNode, _: int, of) -> Range | None:
    low, high = maker.args.get("min"), maker.args.get("max")
    inner = of("self")
    if inner is not None:
        low = inner[0] if low is None else low
        high = inner[1] if high is None else high
    return (low, high) if type(low) is int and type(high) is int and low <= high else None


def _remainder(maker: FunctionalNode, _: int, of) -> Range | None:
    divisor = maker.args.get("other")
    return (0, divisor - 1) if type(divisor) is int and divisor > 0 else None


def _masked(maker: FunctionalNode, _: int, of) -> Range | None:
    masks = [r for r in (of("self"), of("other")) if r is not None and r[0] == r[1] >= 0]
    return (0, min(mask[0] for mask in masks)) if masks else None


def _where(maker: FunctionalNode, _: int, of) -> Range | None:
    a, b = of("self"), of("other")
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _ends(function: Callable[[int, int], int]):
    def rule(maker: FunctionalNode, _: int, of) -> Range | None:
        a, b = of("self"), of("other")
        if a is None or b is None or maker.args.get("alpha", 1) != 1:
            return None
        ends = [function(x, y) for x in a for y in b]
        return min(ends), max(ends)

    return rule


def _place(maker: FunctionalNode, idx: int, of) -> Range | None:
    """A position along a dimension, as of a maximum: the whole result, or the second one."""
    dim, sizes = maker.args.get("dim", -1), maker.args["self"].value.shape
    is_place = idx == len(maker.outputs) - 1 and maker.target not in _VALUES
    if dim is None or not sizes or not is_place or type(sizes[dim]) is not int:
        return None
    return 0, sizes[dim] - 1


#: Overloads that give extremes, not their places.
_VALUES = frozenset(f"aten.{f}.{o}" for f in ("max", "min") for o in ("default", "other"))

_RULES: dict[str, Callable] = {
    "_to_copy": _converted,
    "arange": _arange,
    "full": _constant,
    "max": _place,
    "min": _place,
    "scalar_tensor": _constant,
    "to": _converted,
    "clamp": _clamp,
    "remainder": _remainder,
    "bitwise_and": _masked,
    "where": _where,
    "add": _ends(lambda x, y: x + y),
    "sub": _ends(lambda x, y: x - y),
    "rsub": _ends(lambda x, y: y - x),
    "mul": _ends(lambda x, y: x * y),
    "argmax": _place,
    "argmin": _place,
    "argsort": _place,
    "sort": _place,
    "topk": _place,
}

__all__ = ["SAME", "Range", "ranges_of"]
