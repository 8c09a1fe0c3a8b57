"""Gradients that older versions of PyTorch compute differently from newer ones.

Owns how a program computes them as the version that runs does: an operator of the exported graph is
replaced by others that have this gradient, or PyTorch runs the function. Which of them differ is
found by computing a gradient once, not by the version's number. Operators that decompositions bring
in are left alone: those rules are written for one gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.autograd import set_detect_anomaly

aten = torch.ops.aten

#: Functions with a rule for operands that are numbers.
_BY_NUMBERS = frozenset({"clamp", "clip", "clamp_", "clip_", "clamp_min", "clamp_max"})

#: Makes the node of an operator.
Make = Callable[..., fx.Node]


def _clamp(make: Make, x: fx.Node, low: Any = None, high: Any = None) -> fx.Node:
    """Clamps by numbers; a value on a bound has the gradient 1."""
    value, inside = x, None
    if low is not None:
        value = make(aten.where.ScalarSelf, make(aten.lt.Scalar, value, low), low, value)
        inside = make(aten.ge.Scalar, x, low)
    if high is not None:
        value = make(aten.where.ScalarSelf, make(aten.gt.Scalar, value, high), high, value)
        below = make(aten.le.Scalar, x, high)
        inside = below if inside is None else make(aten.logical_and.default, inside, below)
    return make(aten.where.self, inside, x, make(aten.detach.default, value))


def _clamp_max(make: Make, x: fx.Node, high: Any) -> fx.Node:
    return _clamp(make, x, None, high)


def _hardswish(make: Make, x: fx.Node) -> fx.Node:
    """A knot has the gradient of the parabola; what lies outside does not reach it."""
    is_low, is_high = make(aten.lt.Scalar, x, -3.0), make(aten.gt.Scalar, x, 3.0)
    is_outside = make(aten.logical_or.default, is_low, is_high)
    within = make(aten.where.ScalarSelf, is_outside, 0.0, x)
    factor = make(aten.div.Scalar, make(aten.add.Scalar, within, 3.0), 6.0)
    nothing = make(aten.detach.default, make(aten.mul.Scalar, x, 0.0))
    found = make(aten.where.self, is_high, x, make(aten.mul.Tensor, within, factor))
    found = make(aten.where.self, is_low, nothing, found)
    is_nan = make(aten.ne.Tensor, x, x)
    return make(aten.where.self, is_nan, x, found)


def spell_out(graph: fx.Graph) -> None:
    """Replaces operators of an exported graph by others, with the gradient that eager computes."""
    rules = _rules()
    for node in list(graph.nodes) if rules else ():
        rule = rules.get(node.target)
        if rule is None or node.kwargs or not _is_real(node):
            continue
        with graph.inserting_before(node):
            new = rule(functools.partial(_make, graph, node), *node.args)
            if node.target._schema.is_mutable:
                new = _make(graph, node, aten.copy_.default, node.args[0], new)
        node.replace_all_uses_with(new)
        name = node.name
        graph.erase_node(node)
        new._rename(name)  # the signature knows results by name


def _make(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    # Numbers become tensors on the way, which have to be fake too.
    with torch.no_grad(), like.meta["val"].fake_mode:
        if target._schema.is_mutable:
            node.meta["val"] = like.meta["val"]
        else:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _is_real(node: fx.Node) -> bool:
    """Whether a gradient may flow, and all bounds are numbers."""
    bounds = node.args[1:]
    is_nan = any(isinstance(bound, float) and math.isnan(bound) for bound in bounds)
    is_bounded = not node.name.startswith("clamp") or any(bound is not None for bound in bounds)
    return node.meta["val"].is_floating_point() and not is_nan and is_bounded


def _gradient_at(function: Callable, at: float) -> float | None:
    """The gradient, where PyTorch has one."""
    with torch.enable_grad(), torch.inference_mode(False), set_detect_anomaly(False):
        x = torch.tensor([at], dtype=torch.float32, device="cpu", requires_grad=True)
        try:
            (gradient,) = torch.autograd.grad(function(x).sum(), x)
        except (NotImplementedError, RuntimeError):
            return None
    return float(gradient)


@functools.cache
def _left_to_pytorch() -> frozenset[str]:
    """Functions whose gradient is another one than kernels compute, or that have none."""
    with torch.inference_mode(False):
        zero = torch.zeros(1, device="cpu")
    # For each function: where to ask, and the gradient that kernels compute there.
    asked = {
        "aminmax": (lambda x: x.aminmax()[0], 1.0, 1.0),
        # PyTorch gives the gradient of what was overwritten, and none of the rest.
        "as_strided_scatter": (lambda x: x.as_strided_scatter(zero, (1,), (1,)), 0.0, 0.0),
        "atan2 arctan2": (lambda x: x.atan2(zero), 0.0, 0.0),
        "clamp clip clamp_min clamp_max": (lambda x: x.clamp(zero), 0.0, 0.5),
        # PyTorch clamps in these, and our rules for them do not.
        "cosine_embedding_loss hinge_embedding_loss margin_ranking_loss": (
            lambda x: x.clamp(0.0),
            0.0,
            0.0,
        ),
        "fmax": (lambda x: x.fmax(zero), 0.0, 0.5),
        "fmin": (lambda x: x.fmin(zero), 0.0, 0.5),
        "i1e special_i1e": (torch.special.i1e, math.nan, math.nan),
        "nextafter": (lambda x: x.nextafter(zero), 1.0, 1.0),
    }
    found: set[str] = set()
    for names, (function, at, expected) in asked.items():
        gradient = _gradient_at(function, at)
        if gradient != expected and not (gradient != gradient and expected != expected):
            found |= set(names.split())
    return frozenset(found)


def has_own_gradient(name: str, n_operands: int) -> bool:
    """Whether PyTorch must run a function of ``n_operands`` tensors for the sake of its gradient.

    Clamping by numbers has a rule here.
    """
    return name in _left_to_pytorch() and (n_operands > 1 or name not in _BY_NUMBERS)


@functools.cache
def _rules() -> dict[Any, Callable[..., fx.Node]]:
    """The rules that the version that runs needs, by operator."""
    found: dict[Any, Callable[..., fx.Node]] = {}
    if _gradient_at(lambda x: x.clamp(0.0, 1.0), 0.0) == 1.0:
        found |= {aten.clamp.default: _clamp, aten.clamp_.default: _clamp}
        found |= {aten.clamp_min.default: _clamp, aten.clamp_min_.default: _clamp}
        found |= {aten.clamp_max.default: _clamp_max, aten.clamp_max_.default: _clamp_max}
    if _gradient_at(torch.nn.functional.hardswish, 3.0) == 1.5:
        found |= {aten.hardswish.default: _hardswish, aten.hardswish_.default: _hardswish}
    return found


__all__ = ["has_own_gradient", "spell_out"]
