"""The dropout masks of a compiled forward pass, for PyTorch's operators that run it again.

Owns the numbers of kernels in PyTorch's operators: Philox 4x32-10 (Salmon et al., SC'11) of the
program's seed, the place in the model, and the element's position. PyTorch on the CPU makes a mask
by ``bernoulli_``; each such call gets the mask of the next place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _recurrent
from ._errors import ShorthaulError

aten = torch.ops.aten

#: Operators whose masks can be made again, with the type that kernels compare probabilities in.
_DROPOUTS = {
    "aten.dropout.default": torch.float64,
    "aten.feature_dropout.default": torch.float32,
}

#: Others that draw random numbers in a program.
_OTHERS = {
    "aten.bernoulli.p",
    "aten.native_dropout.default",
    "aten.rand.default",
    "aten.rand_like.default",
    "aten.randn.default",
    "aten.randn_like.default",
    "aten.scaled_dot_product_attention.default",
}

#: Layers that may drop results between them.
_RECURRENT = {f"aten.{name}.input" for name in _recurrent.NAMES}

#: The same numbers as in the operator ``dropout`` of the compiler.
_PLACE_STRIDE = 1 << 32
#: How many places an operator of PyTorch's may have, as the importer counts them.
_PLACES = 1 << 8
_RESOLUTION = 2.0**-24

_WORD = 0xFFFFFFFF


def places(document: dict) -> list[tuple[int, float, float]] | None:
    """Each place that draws: its number, its probability, the least number that keeps an element.

    ``None`` if not all places are dropout.
    """
    found = []
    n_drawn: Counter[int | None] = Counter()
    for node in document["nodes"]:
        target, args = node["target"], node["args"]
        if target in _DROPOUTS:
            p = float(args["p"])
            if args["train"] and p != 0.0:
                draw = node["draw"]
                place = n_drawn[draw] if draw is None else draw * _PLACES + n_drawn[draw]
                n_drawn[draw] += 1
                found.append((place, p, float(torch.tensor(p, dtype=_DROPOUTS[target]))))
        elif target in _RECURRENT and args["train"] and args["dropout"] and args["num_layers"] > 1:
            return None
        elif target in _OTHERS and args.get("dropout_p") != 0.0:
            return None
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


class Masks(TorchDispatchMode):
    """Gives PyTorch's dropout the masks of a program's places, in order.

    Leaving it raises an error if PyTorch drew other masks than the program.
    """

    def __init__(self, seed: int, places: Sequence[tuple[int, float, float]]):
        super().__init__()
        self.seed = seed
        # PyTorch draws no mask where everything is dropped.
        self.waiting = [one for one in places if one[1] != 1.0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.bernoulli_.float:
            # The default, 0.5, is left out of the arguments.
            return self._fill(args[0], args[1] if len(args) > 1 else 0.5)
        return func(*args, **(kwargs or {}))

    def _fill(self, into: torch.Tensor, kept: float) -> torch.Tensor:
        if not self.waiting or kept != 1.0 - self.waiting[0][1]:
            raise ShorthaulError(_DIFFERS)
        place, _, least = self.waiting.pop(0)
        drawn = uniform(self.seed + place * _PLACE_STRIDE, into.numel()).to(torch.float64)
        return into.copy_((drawn >= least).view(into.shape))

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if kind is None and self.waiting:
            raise ShorthaulError(_DIFFERS)


_DIFFERS = (
    "PyTorch drew other random numbers than the compiled forward pass, so that a second derivative "
    "would be wrong; call the original module for it"
)

__all__ = ["Masks", "draws", "places", "uniform"]
