"""What a notebook's reader changes: recipes as they were applied, with measurements.

Owns the line of states that undo and redo go along, and the comparison with float64. Shows nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from .._decisions import recipe as recipe_of
from .._profile import Profile, profile, together
from .._recipe import Decision, Recipe
from .._report import compiled_of, programs_of
from ..module import _wrap, original_of


@dataclass(frozen=True)
class State:
    """A recipe, what it changed last, and the step as it was measured under it."""

    title: str
    recipe: Recipe
    model: nn.Module
    profile: Profile


class Steering:
    """States of one model on the same inputs; ``at`` is the present one."""

    def __init__(self, model: nn.Module, inputs: tuple, kwargs: dict[str, Any], options: dict):
        self.inputs, self.kwargs, self.options = inputs, kwargs, options
        compiled = compiled_of(model)
        recipe = recipe_of(compiled, *inputs, **kwargs)
        measured = profile(compiled, *inputs, **options, **kwargs)
        self.states = [State("as the compiler decides", recipe, compiled, measured)]
        self.at = 0

    @property
    def now(self) -> State:
        """The present state."""
        return self.states[self.at]

    def changed(self, position: int) -> tuple[Decision, Recipe]:
        """A decision of the present profile, and the recipe in which it is taken otherwise.

        Raises ``ValueError`` where it may not.
        """
        row = self.now.profile.data["decisions"][position]
        decision = self._decision_of(row)
        recipe = self.now.recipe
        if decision.applied:
            return decision, recipe.without(decision)
        return decision, recipe.with_(decision)

    def apply(self, position: int) -> None:
        """Compiles and measures the step with a decision taken otherwise; later states are gone."""
        decision, recipe = self.changed(position)
        title = f"{'without' if decision.applied else 'with'} {decision.place}"
        options = replace(type(self.now.model)._shorthaul_options, recipe=recipe.text)
        model = _wrap(original_of(self.now.model), options)
        # Both in the same rounds, so that a busy machine does not decide which is faster.
        before, after = together([self.now.model, model], self.inputs, self.kwargs, **self.options)
        earlier = [*self.states[: self.at], replace(self.now, profile=before)]
        self.states = [*earlier, State(title, recipe, model, after)]
        self.at += 1

    def move(self, by: int) -> None:
        """Goes back (-1) or forth (1). Raises ``ValueError`` at the ends."""
        if not 0 <= self.at + by < len(self.states):
            raise ValueError(f"there is nothing to {'undo' if by < 0 else 'redo'}")
        self.at += by

    def errors(self) -> dict[str, float]:
        """Relative errors of the results and gradients against eager PyTorch in float64.

        Of ``shorthaul`` under the present recipe, and of ``eager`` in the model's own types. Raises
        ``ValueError`` for a step that draws random numbers, since eager draws others.
        """
        model = self.now.model
        if any(p.uses_seed for p in programs_of(model, self.inputs, self.kwargs)):
            raise ValueError(
                "the step draws random numbers, and eager PyTorch draws different ones; turn "
                "dropout off to compare"
            )
        original = original_of(model)
        exact = _results(
            copy.deepcopy(original).double(), _double(self.inputs), _double(self.kwargs)
        )
        found = {}
        for name, candidate in (("shorthaul", model), ("eager", original)):
            own = _results(copy.deepcopy(candidate), self.inputs, self.kwargs)
            off = sum((a - b).square().sum() for a, b in zip(own, exact, strict=True))
            found[name] = (off / sum(b.square().sum() for b in exact)).sqrt().item()
        return found

    def _decision_of(self, row: dict[str, Any]) -> Decision:
        for decision in self.now.recipe.decisions:
            own = (decision.kind, decision.stage, decision.node, decision.container, decision.other)
            asked = tuple(row[key] for key in ("kind", "stage", "node", "container", "other"))
            if own == asked and self._program_of(decision) == row["program"]:
                return decision
        raise ValueError(f"the recipe has no decision about `{row['container']}`")

    def _program_of(self, decision: Decision) -> int:
        """The position of a decision's program in a profile, which lists each program once."""
        programs = programs_of(self.now.model, self.inputs, self.kwargs)
        return list(dict.fromkeys(programs)).index(programs[decision.program])


def numbers(recipe: Recipe) -> dict[str, float]:
    """What a recipe's programs take together: sums, and the largest peak."""
    programs = recipe.programs
    return {
        "n_kernels": sum(program.n_kernels for program in programs),
        "bytes_moved": sum(program.bytes_moved for program in programs),
        "peak_bytes": max(program.peak_bytes for program in programs),
        "predicted_us": sum(program.predicted_us for program in programs),
    }


def _double(values: Any) -> Any:
    return _pytree.tree_map(
        lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, values
    )


def _results(model: nn.Module, inputs: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Results and gradients of parameters, in float64; each result is weighted at random."""
    generator = torch.Generator().manual_seed(1)
    results = [
        value
        for value in _pytree.tree_leaves(model(*inputs, **kwargs))
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    wanted = [value for value in results if value.requires_grad]
    weights = [torch.randn(value.shape, generator=generator).to(value) for value in wanted]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(wanted, parameters, weights, allow_unused=True) if wanted else ()
    return [value.detach().double() for value in (*results, *grads) if value is not None]
