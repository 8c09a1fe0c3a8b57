"""The random numbers of a compiled forward pass, for PyTorch's operators that run it again.

Owns the numbers of kernels in PyTorch's operators: Philox 4x32-10 (Salmon et al., SC'11) of the
program's seed, the place in the model, and the element's position. Each operator of PyTorch's that
draws gets the numbers of the next place; one that the compiler writes with simpler operators is
written so here, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from . import _decompositions, _recurrent
from ._draws import DRAW
from ._errors import ShorthaulError
from ._functionalize import out_of_place

aten = torch.ops.aten

#: Operators of a program that may drop elements, with the type that kernels compare in.
_DROPOUTS = {
    "aten.dropout.default": torch.float64,
    "aten.native_dropout.default": torch.float64,
    "aten.feature_dropout.default": torch.float32,
}

#: Operators of a program that draw numbers, and the distributions of these.
_DRAWS = {
    "aten.bernoulli.p": "bernoulli",
    "aten.rand.default": "uniform",
    "aten.rand_like.default": "uniform",
    "aten.randn.default": "normal",
    "aten.randn_like.default": "normal",
}

#: Those of PyTorch's that draw the same, and what makes a tensor of their shape and type.
_CALLS = {
    aten.rand.default: ("uniform", aten.empty.memory_format),
    aten.rand_like.default: ("uniform", aten.empty_like.default),
    aten.randn.default: ("normal", aten.empty.memory_format),
    aten.randn_like.default: ("normal", aten.empty_like.default),
}

#: How many streams of uniform numbers a place takes.
_STREAMS = {"normal": 2}

#: Attention, in a program and in PyTorch: with dropout, PyTorch's consists of other operators.
_ATTENTION = "aten.scaled_dot_product_attention.default"
_WITHOUT_DROPOUT = ("_scaled_dot_product", "_fused_sdp_choice")

#: Layers that may drop results between them.
_RECURRENT = {f"aten.{name}.input" for name in _recurrent.NAMES}

#: The same numbers as in the operator ``dropout`` of the compiler.
_PLACE_STRIDE = 1 << 32
#: How many places an operator of PyTorch's may have, as the importer counts them.
_PLACES = 1 << 8
_RESOLUTION = 2.0**-24

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Place:
    """Where a program draws one number for each element of a tensor."""

    number: int
    #: ``dropout``, ``bernoulli``, ``uniform`` or ``normal``.
    kind: str
    #: The probability of the first two, and the least number that keeps an element.
    p: float = 0.0
    least: float = 0.0


def places(document: dict) -> list[Place] | None:
    """Each place of a captured graph that draws, in order.

    ``None`` if the numbers of one of them cannot be drawn again.
    """
    found = []
    n_drawn: Counter[int | None] = Counter()

    def place(draw: int | None, kind: str, p: float = 0.0, least: float = 0.0) -> None:
        number = n_drawn[draw] if draw is None else draw * _PLACES + n_drawn[draw]
        n_drawn[draw] += _STREAMS.get(kind, 1)
        found.append(Place(number, kind, p, least))

    for node in document["nodes"]:
        target, args = node["target"], node["args"]
        if target in _DROPOUTS:
            p = float(args["p"])
            if args["train"] is not False and p != 0.0:
                least = float(torch.tensor(p, dtype=_DROPOUTS[target]))
                place(node["draw"], "dropout", p, least)
        elif target in _DRAWS:
            p = float(args.get("p", 0.0))
            place(node["draw"], _DRAWS[target], p, float(torch.tensor(p, dtype=torch.float32)))
        elif target in _RECURRENT and args["train"] and args["dropout"] and args["num_layers"] > 1:
            return None
        elif target == _ATTENTION:
            if p := float(args["dropout_p"]):
                place(node["draw"], "dropout", p, p)
    return found


def draws(document: dict) -> bool:
    """Whether a captured graph draws random numbers."""
    return places(document) != []


def uniform(key: int, n: int) -> torch.Tensor:
    """The first ``n`` uniform numbers in [0, 1) under a key, in float32."""
    # Products of 64 bits wrap around, which leaves their bits as they are.
    zero = torch.zeros(-(-n // 4), dtype=torch.int64, device="cpu")
    c0 = torch.arange(zero.numel(), dtype=torch.int64, device="cpu")
    c1, c2, c3 = c0 >> 32, zero, zero
    c0 = c0 & _WORD
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    words = torch.stack([c0, c1, c2, c3], dim=1).flatten()[:n]
    return (words >> 8).to(torch.float32) * _RESOLUTION


class DrawnAgain(TorchDispatchMode):
    """Gives PyTorch's operators the numbers of a program's places, in order.

    Leaving it raises an error if PyTorch drew other numbers than the program.
    """

    def __init__(self, seed: int, places: Sequence[Place]):
        super().__init__()
        self.seed = seed
        #: The number of the operator that runs, where it is known, and all that the program has.
        self.draw: int | None = None
        self.drawn = {one.number // _PLACES for one in places}
        # PyTorch draws no mask where everything is dropped.
        self.waiting = [one for one in places if (one.kind, one.p) != ("dropout", 1.0)]
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.draw is not None and self.draw not in self.drawn:
            return func(*args, **kwargs)  # the program has no use for what it draws
        if func is aten.bernoulli_.float:
            # The default, 0.5, is left out of the arguments.
            return self._masked(args[0], args[1] if len(args) > 1 else 0.5)
        if func is aten.bernoulli.p:
            return self._masked(torch.empty_like(args[0]), args[1])
        if func in _CALLS:
            kind, empty = _CALLS[func]
            return self._numbers(kind, empty(*args, **kwargs))
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn and not func.__name__.startswith(_WITHOUT_DROPOUT):
            return self._by_rule(func, args, kwargs)
        return func(*args, **kwargs)

    def _next(self, *kinds: str) -> Place:
        place = self.waiting.pop(0) if self.waiting else None
        if place is None or place.kind not in kinds:
            raise ShorthaulError(_DIFFERS)
        if self.draw is not None and place.number // _PLACES != self.draw:
            raise ShorthaulError(_DIFFERS)
        return place

    def _uniform(self, number: int, into: torch.Tensor) -> torch.Tensor:
        return uniform(self.seed + number * _PLACE_STRIDE, into.numel()).view(into.shape)

    def _masked(self, into: torch.Tensor, kept: float) -> torch.Tensor:
        """Ones where elements are kept, with this probability."""
        place = self._next("dropout", "bernoulli")
        drawn = self._uniform(place.number, into)
        if place.kind == "bernoulli":
            is_kept, expected = drawn < place.least, place.p
        else:
            is_kept, expected = drawn.to(torch.float64) >= place.least, 1.0 - place.p
        if kept != expected:
            raise ShorthaulError(_DIFFERS)
        return into.copy_(is_kept)

    def _numbers(self, kind: str, into: torch.Tensor) -> torch.Tensor:
        place = self._next(kind)
        drawn = self._uniform(place.number, into)
        if kind == "normal":
            # As the importer writes it (Box and Muller, 1958).
            dtype = torch.promote_types(into.dtype, torch.float32)
            angle = self._uniform(place.number + 1, into).to(dtype) * math.tau
            drawn = (torch.log(1.0 - drawn.to(dtype)) * -2.0).sqrt() * angle.cos()
        return into.copy_(drawn)

    def _by_rule(self, func, args, kwargs):
        """Another operator that draws, by the operators that the compiler writes it with."""
        schema = func._schema
        in_place = schema.is_mutable and schema.name.endswith("_")
        if in_place:
            func = out_of_place(func)
        rule = _decompositions.rule_for(func)
        with self:
            found = NotImplemented if rule is None else rule(*args, **kwargs)
        if found is NotImplemented:
            raise ShorthaulError(_DIFFERS)
        return args[0].copy_(found) if in_place else found

    def __enter__(self):
        self.depth += 1
        super().__enter__()
        return self

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        self.depth -= 1
        if kind is None and self.waiting and not self.depth:
            raise ShorthaulError(_DIFFERS)


class _Numbered(fx.Interpreter):
    """Runs a graph, and tells ``drawn_again`` the numbers of the operators that run."""

    def __init__(self, body: fx.GraphModule, drawn_again: DrawnAgain):
        super().__init__(body)
        self.drawn_again = drawn_again

    def run_node(self, n: fx.Node):
        self.drawn_again.draw = n.meta.get(DRAW)
        return super().run_node(n)


def run_again(body: fx.GraphModule, seed: int, places: Sequence[Place], inputs: Sequence):
    """The results of a graph by PyTorch's operators, with the random numbers of its program."""
    # Where a batch of gradients is asked for, PyTorch refuses to draw; these numbers are known.
    draws = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet("VmapMode"))
    with draws, DrawnAgain(seed, places) as drawn_again:
        return _Numbered(body, drawn_again).run(*inputs)


_DIFFERS = (
    "PyTorch drew other random numbers than the compiled forward pass, so that a second derivative "
    "would be wrong; call the original module for it"
)

__all__ = ["DrawnAgain", "Place", "draws", "places", "run_again", "uniform"]
