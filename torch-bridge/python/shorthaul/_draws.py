"""Random numbers that do not depend on how a graph is split into regions.

Owns the numbers of a graph's random operators and the seed of a call. A reentrant checkpoint runs a
graph without gradients, then again with them, and its regions may differ: both have to draw the
same numbers. So all regions of a call share one seed, and an operator's numbers come from its
position among the graph's random operators.
"""

from __future__ import annotations

import re

import torch
from torch import fx

from ._nodes import is_number, name_of
from ._place import Place

#: Where a node's metadata has its number; where a traced node's has it, under "custom".
DRAW = "shorthaul_draw"

#: What is in the names of functions and methods that may draw random numbers.
_RANDOM = re.compile(
    r"rand|drop|bernoulli|multinomial|normal|uniform|exponential|cauchy|geometric|poisson|gamma"
    r"|rrelu|attention|fractional|lstm|gru|rnn"
)

#: Numbers from here on are of operators whose names do not say that they draw.
_UNKNOWN = 1 << 20


def number_draws(graph: fx.Graph) -> None:
    """Gives each operator of a graph that has no number yet the one that its numbers come from."""
    n_random = 0
    for position, node in enumerate(graph.nodes):
        if node.op not in ("call_function", "call_method") or is_number(node):
            continue
        number = _UNKNOWN + position
        if may_draw(node):
            number = n_random
            n_random += 1
        node.meta.setdefault(DRAW, number)


def may_draw(node: fx.Node) -> bool:
    """Whether a node may draw random numbers, as far as its name says."""
    return node.op in ("call_function", "call_method") and bool(_RANDOM.search(name_of(node)))


def draw_of(traced: fx.Node, target: str) -> int | None:
    """The number of the operator that a traced node comes from, if ``target`` may draw."""
    return (traced.meta.get("custom") or {}).get(DRAW) if _RANDOM.search(target) else None


class Seed:
    """The seed of one call of a graph, drawn from PyTorch's generator when first asked for."""

    __slots__ = ("drawn",)

    def __init__(self) -> None:
        self.drawn: torch.Tensor | None = None

    def at(self, place: Place) -> torch.Tensor:
        """The seed, where the kernels of a program read it."""
        if self.drawn is None or self.drawn.device != place.device:
            self.drawn = place.seed()
        return self.drawn


__all__ = ["DRAW", "Seed", "draw_of", "may_draw", "number_draws"]
