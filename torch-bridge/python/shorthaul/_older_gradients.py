"""Gradients that older versions of PyTorch compute otherwise, as rules that say the same.

Owns guarded decompositions that a program needs so that its gradients are those of the version that
runs. Which of them it needs is found by computing a gradient once, not by the version's number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

#: Functions with a rule for operands that are numbers.
_BY_NUMBERS = frozenset({"clamp", "clip", "clamp_min", "clamp_max"})

Rule = tuple[Callable[[Mapping[str, Any]], bool], Callable]


def _clamp(x, min=None, max=None):  # noqa: A002  (schema)
    """Clamps by numbers; a value on a bound has the gradient 1."""
    inside, value = True, x
    if min is not None:
        inside, value = x >= min, torch.where(value < min, min, value)
    if max is not None:
        inside, value = (x <= max) & inside, torch.where(value > max, max, value)
    return torch.where(inside, x, value.detach())


def _clamp_min(x, min):  # noqa: A002  (schema)
    return _clamp(x, min)


def _clamp_max(x, max):  # noqa: A002  (schema)
    return _clamp(x, None, max)


def _hardswish(x):
    """A knot has the gradient of the parabola; what lies outside does not reach it."""
    within = torch.where((x >= -3) & (x <= 3), x, 0.0)
    rest = torch.where(x < -3, (x * 0.0).detach(), x)
    return torch.where((x >= -3) & (x <= 3), within * (within + 3) / 6, rest)


def _is_real(arguments: Mapping[str, Any]) -> bool:
    """Whether a gradient may flow, and all bounds are numbers."""
    x, *bounds = arguments.values()
    is_nan = any(isinstance(bound, float) and math.isnan(bound) for bound in bounds)
    return x.is_floating_point() and not is_nan


def _gradient_at(function: Callable, at: float) -> float | None:
    """The gradient, where PyTorch has one."""
    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.tensor([at], dtype=torch.float32, device="cpu", requires_grad=True)
        try:
            (gradient,) = torch.autograd.grad(function(x).sum(), x)
        except (NotImplementedError, RuntimeError):
            return None
    return float(gradient)


@functools.cache
def _left_to_pytorch() -> frozenset[str]:
    """Functions whose gradient is another one than kernels compute, or that have none."""
    zero = torch.zeros(1)
    # Of each function, where to ask and what the gradient there is for kernels.
    asked = {
        "aminmax": (lambda x: x.aminmax()[0], 1.0, 1.0),
        "atan2 arctan2": (lambda x: x.atan2(zero), 0.0, 0.0),
        "clamp clip clamp_min clamp_max": (lambda x: x.clamp(zero), 0.0, 0.5),
        "fmax": (lambda x: x.fmax(zero), 0.0, 0.5),
        "fmin": (lambda x: x.fmin(zero), 0.0, 0.5),
        "i1e special_i1e": (torch.special.i1e, 0.0, 0.5),
        "nextafter": (lambda x: x.nextafter(zero), 1.0, 1.0),
    }
    found: set[str] = set()
    for names, (function, at, expected) in asked.items():
        if _gradient_at(function, at) != expected:
            found |= set(names.split())
    return frozenset(found)


def has_own_gradient(name: str, n_operands: int) -> bool:
    """Whether PyTorch must run a function of so many tensors, since its gradient is its own.

    Clamping by numbers has a rule here.
    """
    return name in _left_to_pytorch() and (n_operands > 1 or name not in _BY_NUMBERS)


@functools.cache
def rules() -> dict[Any, Rule]:
    """The rules that the version that runs needs, by operator, each with its guard."""
    found: dict[Any, Rule] = {}
    if _gradient_at(lambda x: x.clamp(0.0, 1.0), 0.0) == 1.0:
        found[aten.clamp.default] = (_is_real, _clamp)
        found[aten.clamp_min.default] = (_is_real, _clamp_min)
        found[aten.clamp_max.default] = (_is_real, _clamp_max)
    if _gradient_at(torch.nn.functional.hardswish, 3.0) == 1.5:
        found[aten.hardswish.default] = (_is_real, _hardswish)
    return found


__all__ = ["has_own_gradient", "rules"]
