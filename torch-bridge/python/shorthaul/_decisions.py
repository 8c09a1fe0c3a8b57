"""``shorthaul.recipe``: the decisions of the programs that one call of a model runs.

Owns the way from a model to its :class:`Recipe`, whose programs are planned again after each
change.
"""

from __future__ import annotations

import json
import os
from typing import Any

from torch import nn

from ._recipe import Recipe, check_budget, program_plan, text_of
from ._report import programs_of
from .module import original_of


def recipe(
    model: nn.Module,
    *inputs: Any,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    memory_budget: float | None = None,
    **kwargs: Any,
) -> Recipe:
    """The decisions of the compiler for one call of ``model``, as a :class:`Recipe`.

    Compiles the model if it is not compiled yet. ``forward`` runs once in Python, but no kernel
    runs.

    - ``recipe``: changes to start with, as for :func:`shorthaul.module`. By default, those with
      which the model was compiled.
    - ``memory_budget``: a budget to plan for, as for :func:`shorthaul.module`. The recipe then has
      a decision for each value that the backward pass computes again.

    Raises the same errors as a call of the compiled module, and ``ValueError`` if no part of the
    model is compiled for these inputs.
    """
    programs = programs_of(model, inputs, kwargs)
    planners = [program.planned for program in programs]
    check_budget(memory_budget)
    if recipe is None and memory_budget is None:
        described = [program.native.decisions() for program in programs]
    else:
        text = None if recipe is None else text_of(recipe)
        described = [planner(text, memory_budget) for planner in planners]
    plans = [program_plan(json.loads(one), n) for n, one in enumerate(described)]
    return Recipe(type(original_of(model)).__name__, plans, planners)


__all__ = ["recipe"]
