"""``shorthaul.recipe``: the decisions of the programs that one call of a model runs.

Owns the way from a model to its :class:`Recipe`, whose programs are planned again after each
change.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from . import _native
from ._errors import RecipeError
from ._recipe import Planner, Recipe, program_plan, text_of
from ._report import programs_of
from .module import original_of


def recipe(
    model: nn.Module,
    *inputs: Any,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Recipe:
    """The decisions of the programs that one call of ``model`` runs, as a :class:`Recipe`.

    ``recipe``: changes to begin with, as for :func:`shorthaul.module`; without it, what the model
    was compiled with. Compiles the model if it is not compiled yet, runs ``forward`` once in
    Python, and no kernel. Raises what a call of :func:`shorthaul.module` raises.
    """
    programs = programs_of(model, inputs, kwargs)
    planners = [_planner(program) for program in programs]
    if recipe is None:
        described = [program.native.decisions() for program in programs]
    else:
        text = text_of(recipe)
        described = [planner(text) for planner in planners]
    plans = [program_plan(json.loads(one), n) for n, one in enumerate(described)]
    return Recipe(type(original_of(model)).__name__, plans, planners)


def _planner(program) -> Planner:
    captured, wrt, n_threads = program.captured, program.wrt, program.n_threads

    def plan(text: str) -> str:
        try:
            return _native.plan_program(captured.json, captured.constants, wrt, n_threads, text)
        except _native.RecipeFailure as error:
            raise RecipeError(str(error)) from None

    return plan


__all__ = ["recipe"]
