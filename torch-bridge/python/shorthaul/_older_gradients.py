"""Gradients that older versions of PyTorch compute otherwise, as rules that say the same.

Owns guarded decompositions that a program needs so that its gradients are those of the version that
runs. Which of them it needs is found by computing a gradient once, not by the version's number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

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


def _clamp_by_tensors(x, min=None, max=None):  # noqa: A002  (schema)
    """The same by tensors, to which the gradient goes where ``x`` is outside."""
    inside, value = True, x
    if min is not None:
        inside, value = x >= min, torch.maximum(value, min)
    if max is not None:
        inside, value = (x <= max) & inside, torch.minimum(value, max)
    found = value.detach()
    if min is not None:
        is_low = x < min if max is None else (x < min) & (min < max)
        found = torch.where(is_low, min, found)
    if max is not None:
        is_high = x > max if min is None else (x > max) | (max < min)
        found = torch.where(is_high, max, found)
    return torch.where(inside, x, found)


def _hardswish(x):
    """A knot has the gradient of the parabola."""
    return torch.where(x < -3, 0.0, torch.where(x <= 3, x * (x + 3) / 6, x))


def _is_real(arguments: Mapping[str, Any]) -> bool:
    """Whether a gradient may flow, and all bounds are numbers or tensors of the same type."""
    x, *bounds = arguments.values()
    if not x.is_floating_point():
        return False
    return all(
        bound is None or (bound.dtype == x.dtype if isinstance(bound, torch.Tensor) else bound == bound)
        for bound in bounds
    )


def _gradient_at(function: Callable, at: float) -> float:
    with torch.enable_grad(), torch.inference_mode(False):
        x = torch.tensor([at], dtype=torch.float32, device="cpu", requires_grad=True)
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return float(gradient)


@functools.cache
def rules() -> dict[Any, Rule]:
    """The rules that the version that runs needs, by operator, each with its guard."""
    found: dict[Any, Rule] = {}
    if _gradient_at(lambda x: x.clamp(0.0, 1.0), 0.0) == 1.0:
        found[aten.clamp.default] = (_is_real, _clamp)
        found[aten.clamp_min.default] = (_is_real, _clamp_min)
        found[aten.clamp_max.default] = (_is_real, _clamp_max)
        found[aten.clamp.Tensor] = (_is_real, _clamp_by_tensors)
        found[aten.clamp_min.Tensor] = (_is_real, _clamp_min_by_tensor)
        found[aten.clamp_max.Tensor] = (_is_real, _clamp_max_by_tensor)
    if _gradient_at(torch.nn.functional.hardswish, 3.0) == 1.5:
        found[aten.hardswish.default] = (_is_real, _hardswish)
    return found


def _clamp_min_by_tensor(x, min):  # noqa: A002  (schema)
    return _clamp_by_tensors(x, min)


def _clamp_max_by_tensor(x, max):  # noqa: A002  (schema)
    return _clamp_by_tensors(x, None, max)


__all__ = ["rules"]
