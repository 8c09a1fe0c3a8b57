"""``shorthaul.search``: chooses decisions by predicted time.

Owns the Python interface of the compiler's search. The compiler decides what to try, and the order.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from . import _machine, _native
from ._decisions import recipe as recipe_of
from ._program import own_errors
from ._recipe import Recipe, check_budget, with_entries
from ._report import compiled_of, programs_of


class Searched(Recipe):
    """A recipe that prediction chose, for ``shorthaul.module(model, recipe=...)``.

    - ``before_us``, ``after_us``: predicted microseconds of the step's kernels with the compiler's
      own decisions, and with the recipe. The second is never larger.
    - ``bound_us``: the least microseconds that the step can take on the machine. ``gap``: the part
      of ``after_us`` that exceeds it.
    - ``layouts``: for each program, predicted microseconds of contractions and conversions: with
      every value in row-major order (``row_major_us``), in the orders of the compiler's rule
      (``rule_us``), and in the orders chosen together (``chosen_us``); ``bound_us`` is a lower
      bound for any choice. ``n_containers`` values have a choice; ``n_changed`` would change.
    - ``tried``: each change that was tried, with its predicted time and whether it stayed.
      ``n_untried``: the number of changes for which no plan was left.
    """

    before_us: float = 0.0
    after_us: float = 0.0
    bound_us: float = 0.0
    layouts: tuple[dict[str, float], ...] = ()
    tried: tuple[dict[str, Any], ...] = ()
    n_untried: int = 0

    @property
    def gap(self) -> float:
        """The part of the predicted time above the bound."""
        return 1 - self.bound_us / self.after_us if self.after_us else 0.0

    def __str__(self) -> str:
        kept = sum(move["kept"] for move in self.tried)
        gain = self.before_us - self.after_us
        result = (
            f"{kept} of {len(self.tried)} changes stay: predicted {self.after_us / 1e3:.2f} ms "
            f"instead of {self.before_us / 1e3:.2f} ms"
            if gain > 0
            else f"none of {len(self.tried)} changes is predicted to be faster than "
            f"{self.before_us / 1e3:.2f} ms"
        )
        best = min((move["us"] for move in self.tried), default=None)
        nearest = f"; the best of them would take {best / 1e3:.2f} ms" if best and gain <= 0 else ""
        return "\n".join(
            [
                super().__str__(),
                *map(_layouts_line, self.layouts),
                f"search: {result}{nearest}",
                f"at least {self.bound_us / 1e3:.2f} ms on this machine: a gap of "
                f"{self.gap:.0%}; {self.n_untried} groups of decisions were not tried",
            ]
        )

    __repr__ = __str__


def search(
    model: nn.Module,
    *inputs: Any,
    plans: int | None = None,
    recipe: Recipe | None = None,
    memory_budget: float | None = None,
    **kwargs: Any,
) -> Searched:
    """Looks for decisions that together are predicted to be faster than the compiler's own.

    The search changes decisions about layouts, inlining and fusion in groups of similar ones,
    and plans the step again after each change. It does not change what the backward pass computes
    again. The search compiles and runs nothing. Times are predicted from the limits that
    :func:`shorthaul.machine` keeps.

    - ``plans``: how many plans to try for each program, by default 8. There is no time limit, so
      the same call gives the same recipe.
    - ``recipe``: decisions to start from. ``memory_budget``: as for :func:`shorthaul.module`.

    Raises the same errors as a call of the compiled module.
    """
    check_budget(memory_budget)
    if plans is not None and plans < 0:
        raise ValueError(f"`plans` is at least 0, not {plans}")
    compiled = compiled_of(model)
    base = recipe_of(compiled, *inputs, recipe=recipe, memory_budget=memory_budget, **kwargs)
    found = []
    whole = base
    for n, program in enumerate(programs_of(compiled, inputs, kwargs)):
        if program.place.runs_cuda_text:
            raise ValueError("the search predicts kernels of the CPU; these are for a GPU")
        captured = program.captured
        with own_errors():
            text = _native.search_program(
                captured.json,
                captured.constants,
                program.wrt,
                program.n_threads,
                base.text,
                memory_budget,
                _machine.kept_text(),
                plans,
            )
        found.append(json.loads(text))
        if found[-1]["changes"]:
            whole = with_entries(whole, n, found[-1]["changes"])
    searched = Searched(whole.model, whole.programs, whole._planners)
    searched.before_us = sum(one["start_us"] for one in found)
    searched.after_us = sum(one["found_us"] for one in found)
    searched.bound_us = sum(one["bound_us"] for one in found)
    searched.layouts = tuple(one["layouts"] for one in found)
    searched.tried = tuple(move for one in found for move in one["tried"])
    searched.n_untried = sum(one["n_untried"] for one in found)
    return searched


def _layouts_line(gain: dict[str, float]) -> str:
    """A sentence on what orders of dimensions save in one program."""
    if not gain["n_containers"]:
        return "layouts: no value has a choice"
    rule, chosen = gain["rule_us"], gain["chosen_us"]
    away = chosen - gain["bound_us"]
    best = "the best" if away <= 1e-6 * chosen else f"at most {away / chosen:.1%} from the best"
    result = (
        f"{gain['n_changed']} of {gain['n_containers']} values in another order take "
        f"{chosen / 1e3:.2f} ms ({1 - chosen / rule:.1%} less)"
        if gain["n_changed"]
        else f"no other choice for the {gain['n_containers']} values is faster"
    )
    return (
        f"layouts: contractions and conversions take {rule / 1e3:.2f} ms as the compiler lays "
        f"values out, {gain['row_major_us'] / 1e3:.2f} ms in row-major order; {result}; {best}"
    )


__all__ = ["Searched", "search"]
