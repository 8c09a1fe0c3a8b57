"""``shorthaul.tune``: chooses decisions by measurement.

Owns the order in which decisions are tried, and what counts as faster. A decision is tried by
timing the kernels that it changes, cut out of the step, in turns with those that they replace. What
was learned is ``_tuning_database``'s to keep; what a recipe is, ``_recipe``'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _machine, _native, _profile
from ._decisions import recipe as recipe_of
from ._errors import ShorthaulError
from ._program import Program, own_errors
from ._recipe import Decision, Recipe, planned_again, replaced
from ._report import compiled_of, programs_of
from ._tuning_database import Database
from .module import module, original_of

log = logging.getLogger("shorthaul")

#: A replacement must take at most this part of the time of what it replaces.
_FASTER = 0.97
#: Ways to cut a contraction that are tried beside the chosen one.
_OTHERS = 4
#: The part of the time that goes to contractions first.
_FOR_BLOCKING = 0.6
#: Seconds of one comparison, at least and at most.
_LEAST_S, _MOST_S = 0.15, 1.5
#: Kernels below this part of the step's time are not tried.
_SMALL = 0.003
#: Rounds of whole steps that confirm the result.
_CHECKED_ROUNDS = 12


class Tuned(Recipe):
    """A recipe that measurement chose.

    - ``kept``: a sentence for each change. ``tried``: how many ways to compute kernels were timed.
      ``known``: how many results came from earlier runs. ``failed``: how many ways could not be
      planned, compiled or run; the log names them.
    - ``ratio``: the time of a whole step with the recipe, divided by that of a step without it;
      ``None`` if it was not measured. A recipe that is not faster is dropped.
    - ``interrupted``: whether Ctrl-C ended the search.
    """

    kept: tuple[str, ...] = ()
    tried: int = 0
    known: int = 0
    failed: int = 0
    ratio: float | None = None
    interrupted: bool = False

    def __str__(self) -> str:
        lines = [
            super().__str__(),
            f"tuning: timed {self.tried} ways to compute kernels, {self.known} known from earlier "
            f"runs, {self.failed} failed, {len(self.kept)} decisions changed",
            *(f"  {line}" for line in self.kept),
        ]
        if self.ratio is not None:
            lines.append(f"a step with the recipe takes {self.ratio:.3f} times as long as without")
        if self.interrupted:
            lines.append("interrupted: what was found so far is kept")
        return "\n".join(lines)

    __repr__ = __str__


def tune(
    model: nn.Module,
    *inputs: Any,
    seconds: float = 60.0,
    loss: Callable[[Any], torch.Tensor] | None = None,
    recipe: Recipe | None = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Tuned:
    """Times other ways to compute the kernels of a step; returns the faster ones as a recipe.

    - ``seconds``: how long kernels are timed; compiling the step and ``check`` take more time.
    - ``recipe``: decisions to start from. ``loss``: as for :func:`shorthaul.profile`.
    - ``check``: whether to measure whole steps with and without the result, in turns, and to drop
      the result if it is not faster.
    - ``progress``: a function that is called with a line about the state of the search. Without
      it, a terminal shows this line.

    The measured ratios are kept in the cache folder under the text and the compiler of the kernels,
    so other networks with the same kernels use them. Ctrl-C ends the search; the recipe then has
    what was found so far. Raises the same errors as :func:`shorthaul.profile`.
    """
    search = _Search(model, inputs, kwargs, seconds, loss, recipe, progress)
    interrupted = False
    try:
        with own_errors():
            search.run()
    except KeyboardInterrupt:
        interrupted = True
    search.database.save()
    found = search.result()
    found.interrupted = interrupted
    if check and search.changes and not interrupted:
        try:
            found = search.checked(found)
        except KeyboardInterrupt:
            found.interrupted = True
    search.say("")
    log.info(
        "tuned %s: %d ways timed, %d entries of the database used",
        type(original_of(search.compiled)).__name__,
        search.tried,
        search.database.n_used,
    )
    return found


@dataclass
class _Group:
    """Equal kernels, at all their places."""

    key: str
    row: dict[str, Any]
    kernels: object
    position: int
    places: list[tuple[int, tuple[str, str, str]]] = field(default_factory=list)
    seconds: float = 0.0


class _Search:
    """One run of tuning."""

    def __init__(self, model, inputs, kwargs, seconds, loss, recipe, progress):
        self.compiled = compiled_of(model)
        self.inputs, self.kwargs, self.loss = inputs, kwargs, loss
        self.progress = progress
        self.programs: list[Program] = programs_of(self.compiled, inputs, kwargs)
        if any(program.place.runs_cuda_text for program in self.programs):
            raise ValueError("tuning times kernels of the CPU; these are for a GPU")
        self.base = recipe_of(self.compiled, *inputs, recipe=recipe, **kwargs)
        self.recipe = self.base
        self.database = Database()
        self.seconds, self.end = seconds, time.perf_counter() + seconds
        self.tried = 0
        self.failed = 0
        self.changes: list[str] = []

    def run(self) -> None:
        """Contractions first, then other decisions, each until its part of the time is over."""
        start = self.compiled
        if self.base.changes:
            # Its kernels are not those of the compiled model.
            start = module(original_of(self.compiled), recipe=self.base)
        with torch.no_grad() if not torch.is_grad_enabled() else contextlib.nullcontext():
            measured = _profile.profile(
                start,
                *self.inputs,
                rounds=2,
                warmup=1,
                loss=self.loss,
                limits={"copy_gb_s": 1.0, "product_gflop_s": 1.0},
                **self.kwargs,
            ).data["kernels"]
        self.end = time.perf_counter() + self.seconds
        self._blockings(measured, self.end - (1 - _FOR_BLOCKING) * self.seconds)
        self._decisions(measured)

    def say(self, line: str) -> None:
        """Shows where the search is."""
        if self.progress is not None:
            if line:
                self.progress(line)
        elif sys.stderr.isatty():
            print(f"\r{line:<79.79}" + ("" if line else "\r"), end="", file=sys.stderr, flush=True)

    def result(self) -> Tuned:
        """The recipe so far."""
        found = Tuned(self.recipe.model, self.recipe.programs, self.recipe._planners)
        found.kept, found.tried = tuple(self.changes), self.tried
        found.failed = self.failed
        found.known = self.database.n_used
        return found

    def checked(self, found: Tuned) -> Tuned:
        """Times whole steps with and without the recipe, alternating; drops it if not faster."""
        self.say("tuning: measuring whole steps")
        original = original_of(self.compiled)
        both = [module(original, recipe=recipe) for recipe in (self.base, found)]
        before, after = _profile.steps(both, self.inputs, self.kwargs, _CHECKED_ROUNDS, self.loss)
        ratio = statistics.median(b / a for a, b in zip(before, after, strict=True))
        if ratio >= 1:
            unchanged = Tuned(self.base.model, self.base.programs, self.base._planners)
            unchanged.tried, unchanged.known = found.tried, found.known
            unchanged.failed = found.failed
            unchanged.ratio = 1.0
            log.info("a step with the tuned recipe takes %.3f of its time: it is dropped", ratio)
            return unchanged
        found.ratio = ratio
        return found

    # ---- contractions ----

    def _blockings(self, measured: list[dict[str, Any]], end: float) -> None:
        groups, whole = self._groups(measured)
        for n, group in enumerate(groups):
            if group.seconds < _SMALL * whole:
                break
            best = self._best_blocking(group, time.perf_counter() < end)
            self._say_where(f"contraction {n + 1} of {len(groups)}")
            if best is not None:
                blocking, ratio = best
                self._cut(group, blocking)
                at = group.row["origin"]
                self.changes.append(
                    f"{len(group.places)} × {at}: blocking {blocking}, {ratio:.2f} of the time"
                )

    def _groups(self, measured: list[dict[str, Any]]) -> tuple[list[_Group], float]:
        """Contractions that can be cut otherwise, those first that take longest in sum."""
        groups: dict[str, _Group] = {}
        for n, program in enumerate(self.programs):
            kernels = self._kernels(program, self.recipe.text, _OTHERS)
            own = [kernel for kernel in measured if kernel["program"] == n]
            rows = json.loads(kernels.rows())
            for position, (row, kernel) in enumerate(zip(rows, own, strict=True)):
                if not row["others"]:
                    continue
                key = kernels.key(position)
                if key is None:
                    continue
                group = groups.setdefault(key, _Group(key, row, kernels, position))
                group.places.append((n, tuple(row["place"])))
                group.seconds += kernel["seconds"]
        whole = sum(kernel["seconds"] for kernel in measured)
        return sorted(groups.values(), key=lambda group: -group.seconds), whole

    def _best_blocking(self, group: _Group, may_time: bool) -> tuple[str, float] | None:
        candidates = {}
        for blocking, _ in group.row["others"]:
            key = group.kernels.key(group.position, blocking)
            if key is not None and key != group.key:
                candidates.setdefault(key, blocking)
        known = {key: self.database.ratio([group.key], [key]) for key in candidates}
        unknown = [key for key, ratio in known.items() if ratio is None]
        if unknown and may_time:
            items = [(group.kernels, group.position, None)]
            items += [(group.kernels, group.position, candidates[key]) for key in unknown]
            each_s = group.seconds / len(group.places)
            measured = self._times(items, each_s, len(unknown))
            if measured is not None:
                first, *others = measured
                for key, times in zip(unknown, others, strict=True):
                    known[key] = _ratio(first, times)
                    self.database.learn([group.key], [key], known[key])
                self.database.save()
        ratios = [(ratio, key) for key, ratio in known.items() if ratio is not None]
        ratio, key = min(ratios, default=(1.0, ""))
        return (candidates[key], ratio) if ratio <= _FASTER else None

    def _cut(self, group: _Group, blocking: str) -> None:
        places = set(group.places)
        chosen = [
            (decision, {"take": True, "blocking": blocking})
            for decision in self.recipe.decisions
            if decision.kind == "blocking"
            and (decision.program, (decision.node, decision.module, decision.container)) in places
        ]
        self.recipe = replaced(self.recipe, chosen)

    # ---- other decisions ----

    def _decisions(self, measured: list[dict[str, Any]]) -> None:
        tried: set[tuple] = set()
        plans = [self._kernels(program, self.recipe.text, 0) for program in self.programs]
        keys = [_keys(kernels, json.loads(kernels.rows())) for kernels in plans]
        while time.perf_counter() < self.end:
            decision = next((d for d in self._worth() if d.key not in tried), None)
            if decision is None:
                break
            tried.add(decision.key)
            self._say_where(decision.place)
            n = decision.program
            change = self.recipe.without if decision.applied else self.recipe.with_
            try:
                changed = change(decision)
            except (ValueError, ShorthaulError) as error:
                self._failed(str(decision.place), error)
                continue
            kernels = self._kernels(self.programs[n], changed.text, 0)
            new = _keys(kernels, json.loads(kernels.rows()))
            ratio = self._replacement((plans[n], keys[n]), (kernels, new))
            if ratio is not None and ratio <= _FASTER:
                # The blockings of contractions that are no longer there are dropped.
                self.recipe = planned_again(changed) if changed.notes else changed
                plans[n], keys[n] = kernels, new
                verb = "left out" if decision.applied else "taken"
                self.changes.append(f"{decision.place}: {verb}, {ratio:.2f} of its kernels' time")

    def _worth(self) -> list[Decision]:
        """Decisions to change, those first that move most bytes."""
        wanted = [
            decision
            for decision in self.recipe.decisions
            if decision.kind in ("inline", "fuse", "epilogue", "prologue", "layout")
            and decision.may_change
            and decision.exists
            and decision.take is None
        ]
        return sorted(wanted, key=lambda d: -max(abs(d.bytes or 0), d.operations or 0))

    def _replacement(self, old: tuple, new: tuple) -> float | None:
        """The time of the kernels that only ``new`` has, divided by the time of those that only
        ``old`` has; ``None`` if there is no answer."""
        gone = _without(old[1], new[1])
        added = _without(new[1], old[1])
        if not gone or not added or None in (key for key, _ in [*gone, *added]):
            return None
        names = [[key for key, _ in gone], [key for key, _ in added]]
        known = self.database.ratio(*names)
        if known is None:
            items = [(old[0], position, None) for _, position in gone]
            items += [(new[0], position, None) for _, position in added]
            times = self._times(items, 0.0, 1)
            if times is None:
                return None
            before = [sum(one) for one in zip(*times[: len(gone)], strict=True)]
            after = [sum(one) for one in zip(*times[len(gone) :], strict=True)]
            known = _ratio(before, after)
            self.database.learn(*names, known)
            self.database.save()
        return known

    # ---- both ----

    def _failed(self, what: str, error: Exception) -> None:
        self.failed += 1
        log.warning("tuning: %s: %s", what, error)

    def _kernels(self, program: Program, recipe: str, n_others: int) -> object:
        captured = program.captured
        return _native.Kernels(
            captured.json,
            captured.constants,
            program.wrt,
            program.native.threads,
            recipe,
            None,
            _machine.kept_text(),
            n_others,
        )

    def _times(self, items: list[tuple], kernel_s: float, ways: int) -> list[list[float]] | None:
        """Times of the given ways to compute, alternating; ``None`` if one of them fails."""
        seconds = min(max(8 * kernel_s * len(items), _LEAST_S), _MOST_S)
        try:
            with own_errors():
                times = _native.time_kernels(items, seconds)
        except ShorthaulError as error:
            self._failed("kernels cut out", error)
            return None
        self.tried += ways
        return times

    def _say_where(self, what: str) -> None:
        left = max(self.end - time.perf_counter(), 0.0)
        self.say(
            f"tuning: {left:.0f} s left, {self.tried} ways timed, "
            f"{len(self.changes)} faster; {what}"
        )


def _keys(kernels: object, rows: list[dict[str, Any]]) -> list[str | None]:
    return [kernels.key(position) for position in range(len(rows))]


def _without(own: list[str | None], other: list[str | None]) -> list[tuple[str | None, int]]:
    """Keys and positions of what only the first list has."""
    left, found = Counter(other), []
    for position, key in enumerate(own):
        if left[key] > 0:
            left[key] -= 1
        else:
            found.append((key, position))
    return found


def _ratio(before: list[float], after: list[float]) -> float:
    """The ratio of times measured in turns.

    It is the median of the rounds' ratios, or the ratio of the least times if that is larger.
    """
    rounds = statistics.median(b / a for a, b in zip(before, after, strict=True))
    return max(rounds, min(after) / min(before))


__all__ = ["Tuned", "tune"]
