"""Recipes of networks: ``--recipes FOLDER``, and ``--tune SECONDS`` to make them.

Owns the names of the files, and the comparison of steps with and without a recipe. Search and
tuning decide what a recipe changes.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

import shorthaul

from .options import Setting
from .timing import interleaved, ratio, summary
from .variants import inputs_of, model_of

#: Rounds that decide whether a predicted change is kept.
_CHECKED_ROUNDS = 9


def path_of(setting: Setting, folder: Path) -> Path:
    """The file of a setting's recipe."""
    small = "-small" if setting.small else ""
    return folder / f"{setting.name.replace(':', '-')}-{setting.batch}{small}.toml"


def make(setting: Setting, folder: Path, seconds: float) -> dict[str, Any]:
    """Searches by prediction, tunes by measurement, and writes the recipe.

    The changes of the search stay only if they make whole steps measurably faster.
    """
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    example, inputs = setting.example, inputs_of(setting)
    model = model_of(setting)
    shorthaul.machine()
    searched = shorthaul.search(model, *inputs)
    start = None
    if searched.changes and _compared(setting, searched, _CHECKED_ROUNDS)["ratio"]["high"] < 1:
        start = searched
    tuned = shorthaul.tune(model, *inputs, seconds=seconds, loss=example.loss, recipe=start)
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(setting, folder)
    tuned.save(path)
    print(f"\n{setting}: {path}\n{searched}\n{tuned}", flush=True)
    return {
        "setting": str(setting),
        "recipe": str(path),
        "layouts": list(searched.layouts),
        "search_before_us": searched.before_us,
        "search_after_us": searched.after_us,
        "search_is_kept": start is not None,
        "changes": len(tuned.changes),
        "ways_timed": tuned.tried,
    }


def compare(setting: Setting, folder: Path, rounds: int) -> dict[str, Any]:
    """Steps with the recipe and without, in turns. Raises ``FileNotFoundError`` without a file.

    A second module without the recipe runs too. It differs from the first only in the addresses of
    its arrays, so a recipe's gain must exceed the difference between these two.
    """
    path = path_of(setting, folder)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; --tune SECONDS makes it")
    recipe = shorthaul.Recipe.load(path)
    found = _compared(setting, recipe, rounds, again=True)
    by = found["ratio"]
    print(
        f"\n{setting}, {rounds} rounds\n"
        f"without a recipe {found['without']['median_ms']:.1f} ms, with {path} "
        f"({len(recipe.changes)} changes) {found['with']['median_ms']:.1f} ms: "
        f"{by['median']:.3f} of the time (95 % interval {by['low']:.3f} to {by['high']:.3f}); "
        f"another module without a recipe: {found['ratio_again']['median']:.3f}",
        flush=True,
    )
    return {"setting": str(setting), "recipe": str(path), "changes": len(recipe.changes), **found}


def _compared(
    setting: Setting, recipe: shorthaul.Recipe, rounds: int, again: bool = False
) -> dict[str, Any]:
    """With ``again``, a second module without the recipe runs too."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    inputs, loss = inputs_of(setting), setting.example.loss

    def stepper(**options):
        called = shorthaul.module(model_of(setting), **options)

        def step() -> None:
            for parameter in called.parameters():
                parameter.grad = None
            loss(called(*inputs)).backward()

        step()
        step()
        return step

    steps = {"without": stepper(), "with": stepper(recipe=recipe)}
    if again:
        steps["again"] = stepper()
    times = interleaved(steps, rounds)
    found = {name: summary(taken) for name, taken in times.items()}
    found["ratio"] = ratio(times["with"], times["without"])
    if again:
        found["ratio_again"] = ratio(times["again"], times["without"])
    return found


def print_mean(found: list[dict[str, Any]]) -> None:
    """The geometric mean over networks, where there are several."""
    ratios = [one["ratio"]["median"] for one in found if "ratio" in one]
    if len(ratios) > 1:
        mean = statistics.geometric_mean(ratios)
        print(f"\n{len(ratios)} networks with recipes: {mean:.3f} of the time (geometric mean)")
