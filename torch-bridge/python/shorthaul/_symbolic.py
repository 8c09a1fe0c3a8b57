"""Traces whose sizes are symbols, one for many sets of sizes.

Owns the trace of a function with symbolic sizes, its binding to the sizes of a call, and the sizes
that may come later. Whether a trace holds for a size is decided by ``_sizes``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch._guards import tracing
from torch.export import Dim

from . import _native
from ._capture import Captured, capture, user_placeholders
from ._sizes import Conditions, Outside, look_of, with_numbers

#: Sizes that are expected beside those of a call, as parts of them.
_EXPECTED = ((1, 2), (3, 4), (5, 4), (3, 2), (2, 1))


def capture_symbolic(
    module: nn.Module, args: tuple, is_open: Sequence[Any], **options: Any
) -> Symbolic:
    """Like :func:`capture` for a module that takes ``*args``, with symbolic sizes.

    ``is_open`` has for each tensor a flag per size, and for each number a flag. Raises
    ``CaptureError``.
    """
    graphs: list[torch.export.ExportedProgram] = []
    shapes = _dynamic_shapes(args, is_open)
    # Within Dynamo, PyTorch's exporter would make its symbols in Dynamo's graph.
    with tracing(None):
        captured = capture(module, args, dynamic_shapes=shapes, traced=graphs, **options)
    # Writing the document may have decided something, too.
    values = [[node.meta.get("val") for node in user_placeholders(graph)] for graph in graphs]
    return Symbolic(captured, [Conditions.of_graph(inputs) for inputs in values])


def _dynamic_shapes(args: Sequence[Any], is_open: Sequence[Any]) -> tuple:
    """The argument ``dynamic_shapes`` of ``torch.export``: which sizes are symbolic."""
    shapes = []
    for value, flags in zip(args, is_open, strict=True):
        if isinstance(value, torch.Tensor):
            shapes.append({i: Dim.AUTO for i, flag in enumerate(flags) if flag} or None)
        else:
            shapes.append(Dim.AUTO if flags is True and type(value) is int else None)
    # The exporter sees one argument, a tuple of them.
    return (tuple(shapes),)


@dataclass
class Symbolic:
    """A captured graph with symbols, for the calls that its conditions allow."""

    captured: Captured
    conditions: list[Conditions]
    #: Whether a program was made from it.
    is_used: bool = False
    _imported: Any = field(default=None, repr=False)

    @property
    def imported(self) -> Any:
        """The graph as the native half holds it, imported and differentiated once for all sizes."""
        if self._imported is None:
            self._imported = _native.Traced(self.captured.json, self.captured.constants)
        return self._imported

    def at(self, inputs: Sequence[Any]) -> Captured:
        """The graph for the sizes of ``inputs``. Raises ``Outside`` where it does not hold."""
        return self._at([look_of(value) for value in inputs], with_expected=True)

    def _at(self, looks: list[Any], *, with_expected: bool) -> Any:
        numbers: dict[sympy.Symbol, sympy.Integer] = {}
        for conditions in self.conditions:
            numbers |= conditions.numbers_of(looks)
        by_name = {symbol.name: int(number) for symbol, number in numbers.items()}
        symbols = self.captured.document["symbols"]
        missing = [entry["name"] for entry in symbols if entry["name"] not in by_name]
        if missing:
            raise Outside(f"no input has the size {missing[0]}")
        sizes = {entry["name"]: by_name[entry["name"]] for entry in symbols}
        if not with_expected:
            return sizes

        def number(value: Any) -> Any:
            return with_numbers(value, numbers)

        captured = self.captured
        return dataclasses.replace(
            captured,
            document=captured.document
            | {"symbols": [{"name": name, "hint": hint} for name, hint in sizes.items()]},
            outputs=[
                dataclasses.replace(output, bound=output.bound and output.bound.at(number))
                for output in captured.outputs
            ],
            returns=[(kind, number(value)) for kind, value in captured.returns],
            bounds=[bound.at(number) for bound in captured.bounds],
            strides=[stride and tuple(map(number, stride)) for stride in captured.strides],
            symbolic=self,
            expected=functools.partial(self._expected, looks),
        )

    def _expected(self, looks: list[Any]) -> list[dict[str, int]]:
        """Sizes that may come, for which the trace holds too."""
        found = []
        for part, whole in _EXPECTED:
            scaled = _scaled(self.conditions[-1], looks, part, whole)
            try:
                sizes = self._at(scaled, with_expected=False)
            except Outside:
                continue
            if sizes not in found:
                found.append(sizes)
        return found

    @property
    def has_symbolic_sizes(self) -> bool:
        """Whether the trace has any symbolic size."""
        return bool(self.captured.document["symbols"])


def _scaled(conditions: Conditions, looks: list[Any], part: int, whole: int) -> list[Any]:
    """The inputs' sizes if each symbolic one were ``part / whole`` of its present value."""
    numbers = conditions.numbers_of(looks)
    # One is added, since a size with few divisors shows more than one with many.
    scaled = {s: sympy.Integer(max(2, int(n) * part // whole + 1)) for s, n in numbers.items()}

    def other(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(with_numbers(size, scaled) for size in value)
        return with_numbers(value, scaled)

    return [other(value) for value in conditions.inputs]


__all__ = ["Symbolic", "capture_symbolic"]
