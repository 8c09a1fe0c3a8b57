"""The ways to run a model that are held against eager, by name.

``module`` and ``compile`` are Shorthaul's. ``dynamo-eager`` and ``aot-eager`` are PyTorch's own
capture without a compiler: what differs there is PyTorch's. The others are wrong on purpose
(``perturb``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import perturb


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def eager(model: Any) -> Any:
    return model


def module(model: Any) -> Any:
    import shorthaul

    if isinstance(model, type | nn.Module):
        return shorthaul.module(model)
    return shorthaul.module(Function(model))


def _through_dynamo(backend: str) -> Callable:
    def wrap(model: Any) -> Any:
        if isinstance(model, type):
            return lambda *args, **kwargs: torch.compile(model(*args, **kwargs), backend=backend)
        return torch.compile(model, backend=backend)

    return wrap


WRAPS: dict[str, Callable] = {
    "module": module,
    "compile": _through_dynamo("shorthaul"),
    "dynamo-eager": _through_dynamo("eager"),
    "aot-eager": _through_dynamo("aot_eager"),
    "eager": eager,
    **perturb.PERTURBED,
}
