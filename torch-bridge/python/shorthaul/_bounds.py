"""Indices that a program takes from its caller, and the range that eager would hold them to.

Owns the check that embeddings, look-ups and class labels stay within their tables. It costs one
pass over those inputs, which are small beside what they look up. Indices that the graph computes
are not checked; there, what lies outside reads NaN and writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ._errors import OutOfRange
from ._functionalize import FunctionalNode, Ref

#: Operators after which the elements are the same ones.
_SAME = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy.default",
        "alias.default",
        "clone.default",
        "contiguous.default",
        "expand.default",
        "flatten.using_ints",
        "permute.default",
        "reshape.default",
        "squeeze.dim",
        "to.dtype",
        "transpose.int",
        "unsqueeze.default",
        "view.default",
    )
)
_CLASSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward"})


@dataclass(frozen=True)
class Bound:
    """What one operator demands of one input: elements in ``[low, high)``, or ``ignored``."""

    placeholder: str
    low: int
    high: int
    ignored: int | None
    #: The operator with its place, for the message.
    use: str

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
                f"input `{self.placeholder}` holds {indices[outside][0].item()}, but {self.use} "
                f"takes {self.low} to {self.high - 1}{allowed}"
            )


def bounds_of(nodes: list[FunctionalNode]) -> list[Bound]:
    """The bounds on placeholders, each once, in the order of their operators."""
    found: dict[tuple, Bound] = {}
    made_by = {node.node: node for node in nodes}
    for node in nodes:
        for index, low, high, ignored in _demands(node):
            source = _source_of(index, made_by)
            if source is None or not isinstance(high, int):
                continue
            module = list((node.node.meta.get("nn_module_stack") or {}).values())
            where = f" in `{module[-1][0]}`" if module and module[-1][0] else ""
            bound = Bound(source.name, low, high, ignored, f"{node.target}{where}")
            found.setdefault((source.name, low, high, ignored), bound)
    return list(found.values())


def _demands(node: FunctionalNode) -> Iterator[tuple]:
    """Index, lower end, upper end and exception of every look-up of an operator."""
    name, args = node.target.split(".")[1] if "." in node.target else "", node.args
    if name == "embedding":
        yield args["indices"], 0, args["weight"].value.shape[0], None
    elif name in ("index_select", "gather") and args["self"].value.dim():
        yield args["index"], 0, args["self"].value.shape[args["dim"]], None
    elif name == "index":
        for dim, index in enumerate(args["indices"]):
            size = args["self"].value.shape[dim]
            if index is not None and isinstance(size, int):
                yield index, -size, size, None
    elif name in _CLASSES and not args["target"].value.is_floating_point():
        scores = args["self"].value
        yield args["target"], 0, scores.shape[min(1, scores.dim() - 1)], args["ignore_index"]


def _source_of(ref: Ref, made_by: dict[fx.Node, FunctionalNode]) -> fx.Node | None:
    """The placeholder whose elements ``ref`` has, if it has one's."""
    while ref.node.op != "placeholder":
        maker = made_by.get(ref.node)
        if maker is None or maker.target not in _SAME:
            return None
        ref = maker.args["self"]
    whole = (torch.int64, torch.int32)
    return ref.node if getattr(ref.value, "dtype", None) in whole else None
