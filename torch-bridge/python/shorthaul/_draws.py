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

from ._nodes import name_of, tensors_of, value_of
from ._place import Place

#: The key of an operator's number in a node's metadata; a traced node has it under "custom".
DRAW = "shorthaul_draw"

#: What is in the names of functions and methods that may draw random numbers.
_RANDOM = re.compile(
    r"rand|drop|bernoulli|binomial|multinomial|normal|uniform|exponential|cauchy|geometric|poisson"
    r"|standard_gamma|gumbel|rrelu|attention|fractional|lstm|gru|rnn"
)

#: Numbers from here on are of operators whose names do not say that they draw.
_UNKNOWN = 1 << 20


def number_draws(graph: fx.Graph) -> None:
    """Numbers the operators of a graph; those that have a number keep it."""
    n_random = n_others = 0
    for node in graph.nodes:
        if node.op == "placeholder" or not list(tensors_of(value_of(node))):
            continue
        if may_draw(node):
            number, n_random = n_random, n_random + 1
        else:
            number, n_others = _UNKNOWN + n_others, n_others + 1
        node.meta.setdefault(DRAW, number)


def may_draw(node: fx.Node) -> bool:
    """Whether a node may draw random numbers, as far as its name and its arguments say."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    if not _RANDOM.search(name) or is_idle_dropout(node):
        return False
    if name == "scaled_dot_product_attention":
        names = ("query", "key", "value", "attn_mask", "dropout_p")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        return given.get("dropout_p", 0.0) != 0
    return True


def is_idle_dropout(node: fx.Node) -> bool:
    """Whether a node is a dropout that is turned off, or drops nothing."""
    if "dropout" not in name_of(node):
        return False
    given = {"p": 0.5, "training": True}
    given |= dict(zip(("x", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    is_on = given["training"] is not False and given.get("train") is not False
    return not is_on or (type(given["p"]) in (int, float) and given["p"] == 0)


def draw_of(traced: fx.Node, target: str) -> int | None:
    """The number of the operator that a traced node comes from, if ``target`` may draw."""
    return (traced.meta.get("custom") or {}).get(DRAW) if _RANDOM.search(target) else None


class Seed:
    """The seed of one call of a graph, drawn from PyTorch's generator when first asked for."""

    __slots__ = ("drawn",)

    def __init__(self) -> None:
        self.drawn: dict[torch.device, torch.Tensor] = {}

    def on(self, place: Place) -> torch.Tensor:
        """The seed, where the kernels of a program read it."""
        if place.device not in self.drawn:
            # A part without gradients may ask first, for others that save it for a backward pass.
            with torch.inference_mode(False):
                self.drawn[place.device] = place.seed()
        return self.drawn[place.device]


__all__ = ["DRAW", "Seed", "draw_of", "is_idle_dropout", "may_draw", "number_draws"]
