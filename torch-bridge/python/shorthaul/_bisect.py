"""``shorthaul.bisect``: the first decision that makes a model's numbers differ from eager's.

Owns the search over recipes and the measure of a difference. The judge is the same model in
float64: what is farther from it than eager is, beyond a tolerance, differs. Never changes a
decision by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from ._decisions import recipe as recipe_of
from ._recipe import Decision, Recipe, replaced
from ._report import compiled_of, programs_of, unchanged
from .module import module, original_of

#: How many times as far from float64 as eager's results ours may be, and which part of the largest
#: value they may differ in addition.
_TIMES, _PART = 4.0, 1e-5


@dataclass(frozen=True)
class Bisection:
    """What a search found; ``str()`` says it in words.

    - ``decision``: the first decision with which the numbers differ, or ``None``.
    - ``differs``: whether the compiled step differs from eager's. ``differs_without``: whether it
      still differs after all decisions that may be undone are undone.
    - ``what``: the result or gradient that differs most. ``error``, ``eager_error``: Shorthaul's
      and eager's error against float64, relative to the largest value.
    - ``runs``: how many recipes were compiled. ``recipe``: the model's recipe without ``decision``.
    """

    decision: Decision | None
    differs: bool
    differs_without: bool
    what: str
    error: float
    eager_error: float
    runs: int
    recipe: Recipe | None = None

    def __str__(self) -> str:
        against = (
            f"`{self.what}` is off by {self.error:.1e} of its largest value, eager's by "
            f"{self.eager_error:.1e}"
        )
        if not self.differs:
            return f"nothing differs: at most, {against}"
        if self.decision is not None:
            return (
                f"{against}, because of {self.decision.place}: {self.decision.sentence} "
                f"({self.runs} recipes compiled)"
            )
        return (
            f"{against}, and no decision is the cause: it also differs if all decisions that may "
            "be undone are undone"
        )


def bisect(
    model: nn.Module,
    *inputs: Any,
    recipe: Recipe | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float = _PART,
    **kwargs: Any,
) -> Bisection:
    """Finds the first decision that makes results or gradients differ from eager's.

    A binary search compiles and runs the model's step with a part of its decisions: for n
    decisions, about log₂ n times. A value differs if its error against the same model in float64
    exceeds four times eager's error, and also ``tolerance`` times the largest value.

    - ``recipe``: decisions to start from; by default those with which the model was compiled.
    - ``loss``: as for :func:`shorthaul.profile`.

    Parameters, buffers and PyTorch's random numbers are restored. Raises the same errors as a call
    of the compiled module, and ``ValueError`` for a model whose results are random.
    """
    compiled = compiled_of(model)
    if any(program.uses_seed for program in programs_of(compiled, inputs, kwargs)):
        raise ValueError(
            "the model draws random numbers, as dropout does, and no two runs are equal: "
            "call `eval()` on it, or set its probabilities to 0"
        )
    judge = _Judge(original_of(compiled), inputs, kwargs, loss, tolerance)
    base = recipe_of(compiled, *inputs, recipe=recipe, **kwargs)
    differs, what, error, eager = judge.verdict(base)
    told = Bisection(None, differs, differs, what, error, eager, judge.runs)
    if not differs:
        return told
    # Decisions in the order in which they were taken; the first `n` of them stay.
    taken = [d for d in base.decisions if d.applied and d.may_change and d.kind != "blocking"]
    taken += [d for d in base.decisions if d.kind == "blocking" and d.take]
    kept, without = len(taken), 0
    if judge.verdict(_first(base, taken, 0))[0]:
        return Bisection(None, True, True, what, error, eager, judge.runs)
    while kept - without > 1:
        middle = (kept + without) // 2
        if judge.verdict(_first(base, taken, middle))[0]:
            kept = middle
        else:
            without = middle
    guilty = taken[kept - 1]
    return Bisection(guilty, True, False, what, error, eager, judge.runs, _undone(base, [guilty]))


def _first(base: Recipe, taken: list[Decision], n: int) -> Recipe:
    return _undone(base, taken[n:])


def _undone(base: Recipe, decisions: list[Decision]) -> Recipe:
    undo = [(d, {"take": None if d.kind == "blocking" else False}) for d in decisions]
    return replaced(base, undo) if undo else base


class _Judge:
    """Says whether the step under a recipe differs from eager's."""

    def __init__(self, model: nn.Module, inputs: tuple, kwargs: dict, loss, tolerance: float):
        self.model, self.given, self.loss = model, (inputs, kwargs), loss
        self.tolerance, self.runs = tolerance, 0
        self.exact = self._run(_double(copy.deepcopy(model)), double=True)
        self.eager = self._run(copy.deepcopy(model))

    def verdict(self, recipe: Recipe) -> tuple[bool, str, float, float]:
        """Whether it differs; what differs most, how far it is, and how far eager's is."""
        self.runs += 1
        own = self._run(module(copy.deepcopy(self.model), recipe=recipe))
        worst = (False, "", 0.0, 0.0)
        most = -1.0
        for name, exact in self.exact.items():
            scale = exact.abs().max().item() if exact.numel() else 0.0
            if scale == 0.0:
                scale = 1.0
            error, eager = (_apart(one[name], exact) / scale for one in (own, self.eager))
            allowed = _TIMES * eager + self.tolerance
            # NaN is farther than every number.
            excess = float("inf") if error != error else error / allowed
            if excess > most:
                most, worst = excess, (excess > 1, name, error, eager)
        return worst

    def _run(self, model: nn.Module, double: bool = False) -> dict[str, torch.Tensor]:
        """Results, gradients and buffers of one step by name."""
        inputs, kwargs = _pytree.tree_map(lambda x: _leaf(x, double), self.given)
        with unchanged(model):
            result = model(*inputs, **kwargs)
            values = {f"result {n}": t for n, t in enumerate(_tensors(result))}
            differentiable = [t for t in values.values() if t.requires_grad]
            leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
            given = _tensors((inputs, kwargs))
            leaves |= {f"input {n}": t for n, t in enumerate(given) if t.requires_grad}
            if differentiable and leaves and torch.is_grad_enabled():
                wanted = differentiable if self.loss is None else [self.loss(result)]
                ones = [torch.ones_like(t) for t in wanted]
                found = torch.autograd.grad(wanted, list(leaves.values()), ones, allow_unused=True)
                named = zip(leaves, found, strict=True)
                values |= {f"gradient of {name}": g for name, g in named if g is not None}
            values |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
        return {
            name: value.detach().double()
            for name, value in values.items()
            if value.is_floating_point()
        }


def _double(model: nn.Module) -> nn.Module:
    return model.double()


def _leaf(value: Any, double: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    own = value.detach().clone()
    if double and own.is_floating_point():
        own = own.double()
    return own.requires_grad_(value.requires_grad)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; equal infinities do not differ, nor do two NaN."""
    same = (found == exact) | (found.isnan() & exact.isnan())
    return torch.where(same, 0.0, (found - exact).abs()).max().item() if found.numel() else 0.0


__all__ = ["Bisection", "bisect"]
