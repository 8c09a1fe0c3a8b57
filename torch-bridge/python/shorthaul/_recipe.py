"""Recipes: the decisions of a model's programs, to read, change, save and load.

Owns the Python face of decisions and recipes. What a decision is, which may be changed, and the
form of the file are the compiler's. Never looks at a model: that is ``_decisions``' part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import _native, _tables
from ._errors import RecipeError

#: What a file keeps of a decision, in order.
_IDENTITY = ("kind", "stage", "node", "module", "container", "other")


@dataclass(frozen=True)
class Decision:
    """One rewrite at one place, applied or refused.

    ``kind``, ``stage``, ``node``, ``module``, ``container``, ``other`` and ``program`` identify a
    decision. They contain no sizes and are the same in every run.

    - ``kind``: the rewrite. ``inline``: a value is computed where it is read instead of stored.
      ``recompute``: the backward pass computes a value again. ``fuse``: two kernels become one.
      ``epilogue``: element-wise work joins the kernel of a product, at its end. ``prologue``:
      products compute an operand while they read it. ``chain``: on a GPU, two products and the
      work between them share a kernel. ``call``: on a GPU, an operator that PyTorch computes reads
      its operand in place. ``join``: the parts of a concatenation are written to their places in
      it. ``layout``: a value gets another order of dimensions than row-major. ``blocking``: how a
      contraction is cut into blocks, or that it is a Winograd convolution.
    - ``stage``: ``forward`` or ``backward``. ``node``, ``module``: the operator and the path of its
      module. ``container``: the value. ``other``: if two kernels are joined, a value that the first
      one writes. ``source``: the line in the model's code.
    - ``applied``: whether the rewrite was applied. ``reason``: why it was refused. ``sentence``:
      both in words. ``take``: what the recipe demands, or ``None``. ``may_change``: whether a
      recipe may change the decision.
    - ``bytes``: bytes that need not move with the rewrite. ``memory_bytes``: bytes that need not be
      kept for the backward pass. ``operations``: operations that are done twice. All are ``None``
      in a recipe from :meth:`Recipe.load`.
    """

    kind: str
    stage: str
    node: str
    container: str
    applied: bool
    module: str = ""
    other: str | None = None
    take: bool | None = None
    program: int = 0
    sentence: str = ""
    source: str = ""
    reason: str | None = None
    may_change: bool = True
    exists: bool = True
    bytes: int | None = None
    memory_bytes: int | None = None
    operations: int | None = None
    #: How a contraction is cut into blocks, in the generator's numbers, or ``"winograd"``.
    blocking: str | None = None
    #: The order of dimensions that a layout has in memory, slowest first, such as ``"0.2.3.1"``.
    order: str | None = None
    #: The line that stands before it in a file.
    comment: str = ""

    @property
    def key(self) -> tuple[int | str | None, ...]:
        """Equal for the same decision in different recipes."""
        return (self.program, *(getattr(self, name) for name in _IDENTITY))

    @property
    def place(self) -> str:
        """The place in words."""
        pair = f" and `{self.other}`" if self.other else ""
        module = f" in {self.module}" if self.module else ""
        return f"{self.kind} `{self.container}`{pair} at {self.node}{module} ({self.stage})"

    def __str__(self) -> str:
        return f"{'did' if self.applied else 'refused'} {self.place}: {self.sentence}"


@dataclass(frozen=True)
class ProgramPlan:
    """The numbers of one program under a recipe. ``None`` where the recipe was only loaded."""

    structure: str
    training: bool
    decisions: tuple[Decision, ...]
    #: What the recipe says and could not be done.
    notes: tuple[str, ...] = ()
    n_kernels: int | None = None
    bytes_moved: int | None = None
    bytes_least: int | None = None
    operations: int | None = None
    #: Most bytes of intermediate results at one time: what is kept for the backward pass and the
    #: larger arena.
    peak_bytes: int | None = None
    #: Microseconds of all kernels by their bytes and operations, predicted and not measured.
    predicted_us: float | None = None
    #: How a memory budget was kept: ``budget_bytes``, ``default_bytes``, ``peak_bytes``, the time
    #: that computing again is predicted to add (``added_us``), and the least that any choice adds
    #: which keeps as few bytes (``least_us``).
    budget: dict[str, float] | None = field(default=None, compare=False)
    #: Bytes of the arenas and of what is saved, as in :func:`shorthaul.report`.
    memory: dict[str, int] | None = field(default=None, compare=False)


#: Plans a program again: from a recipe's text to the description that the compiler gives.
Planner = Callable[[str], str]


class Recipe:
    """The decisions of a model's programs. ``without`` and ``with_`` return a changed copy.

    ``programs`` has an entry for each program, with its numbers: ``n_kernels``, ``bytes_moved``,
    ``bytes_least``, ``operations``, ``peak_bytes``, ``predicted_us``, ``memory``, and ``budget`` if
    it was planned for a memory budget. A recipe from :func:`shorthaul.recipe` is planned again
    after every change, so its decisions and numbers are up to date; nothing is compiled. A recipe
    from :meth:`load` knows no sizes, so its numbers are ``None``; pass it to
    ``shorthaul.recipe(model, *inputs, recipe=loaded)`` to get them.
    """

    def __init__(
        self, model: str, programs: list[ProgramPlan], planners: list[Planner] | None = None
    ):
        self.model = model
        self.programs = programs
        self._planners = planners

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of all programs, in order."""
        return [decision for program in self.programs for decision in program.decisions]

    @property
    def changes(self) -> list[Decision]:
        """The decisions that the recipe changes."""
        return [decision for decision in self.decisions if decision.take is not None]

    @property
    def notes(self) -> list[str]:
        """A sentence for each change that could not be made."""
        return [note for program in self.programs for note in program.notes]

    def without(self, *decisions: Decision) -> Recipe:
        """Returns the recipe without some applied decisions, planned again once for all of them.

        If a contraction was cut as the recipe demands, the compiler decides about it again. Raises
        ``ValueError`` if a decision is not applied, or not in this recipe.
        """
        changes = []
        for found in map(self._find, decisions):
            if not found.applied:
                raise ValueError(f"{found.place} was not applied, so it cannot be left out")
            if found.kind == "blocking" and found.take is None:
                raise ValueError(
                    f"{found.place} cannot be left out: every contraction has a blocking; `cut` "
                    f"chooses another one"
                )
            is_told = found.take or found.kind == "blocking"
            changes.append((found, {"take": None if is_told else False}))
        return replaced(self, changes)

    def with_(self, *decisions: Decision) -> Recipe:
        """Returns the recipe with some refused decisions applied.

        Raises ``ValueError`` if a decision is already applied, is not legal, or not in this
        recipe.
        """
        changes = []
        for found in map(self._find, decisions):
            if found.applied:
                raise ValueError(f"{found.place} is applied already")
            if not found.may_change:
                raise ValueError(f"{found.place} is not possible: {found.reason}")
            # If the demand is taken back, the compiler decides again.
            changes.append((found, {"take": None if found.take is False else True}))
        return replaced(self, changes)

    def cut(self, decision: Decision, blocking: str | None) -> Recipe:
        """Returns the recipe with a contraction cut into other blocks; ``None`` takes that back.

        ``decision`` is one of the kind ``blocking``. ``"winograd"`` asks for a Winograd
        convolution. If the contraction cannot be computed in this way, ``notes`` says so. Raises
        ``ValueError`` for a decision of another kind.
        """
        found = self._find(decision)
        if found.kind != "blocking":
            raise ValueError(f"{found.place} is not about a contraction's blocking")
        told = True if blocking is not None else None
        fields = {"take": told, "blocking": blocking or found.blocking}
        return replaced(self, [(found, fields)])

    def _find(self, decision: Decision) -> Decision:
        for own in self.decisions:
            if own.key == decision.key:
                return own
        raise ValueError(f"this recipe has no decision {decision.place}; see `recipe.decisions`")

    @property
    def text(self) -> str:
        """The recipe as TOML, with a comment line before each decision."""
        sections = [
            {
                "structure": program.structure,
                "training": program.training,
                "decision": [_entry_of(decision) for decision in program.decisions],
            }
            for program in self.programs
        ]
        return _native.recipe_text(self.model, json.dumps(sections))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :attr:`text` to a file."""
        Path(path).write_text(self.text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Reads a file that :meth:`save` wrote.

        Raises :class:`shorthaul.RecipeError` if the file is damaged or has another format.
        """
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path}: this is not a recipe of Shorthaul: {error}") from None
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Reads the text of a file. Raises as :meth:`load` does."""
        try:
            data = json.loads(_native.recipe_parsed(text))
        except _native.RecipeFailure as error:
            raise RecipeError(str(error)) from None
        sections = enumerate(data["program"])
        return cls(data["model"], [program_plan(section, n) for n, section in sections])

    def diff(self, other: Recipe) -> list[str]:
        """A line for each decision that only one of the two recipes applies.

        ``+``: only this recipe applies it. ``-``: only ``other`` does.
        """
        here = {decision.key: decision for decision in self.decisions}
        there = {decision.key: decision for decision in other.decisions}
        lines = []
        for key in dict.fromkeys([*here, *there]):
            a, b = here.get(key), there.get(key)
            done_here, done_there = bool(a and a.applied), bool(b and b.applied)
            if done_here != done_there:
                shown = a if done_here else b
                lines.append(f"{'+' if done_here else '-'} {shown.place}: {shown.sentence}")
        return lines

    def __str__(self) -> str:
        lines = []
        for n, program in enumerate(self.programs):
            applied = sum(decision.applied for decision in program.decisions)
            told = sum(decision.take is not None for decision in program.decisions)
            numbers = ""
            if program.bytes_moved is not None:
                numbers = (
                    f"; {program.n_kernels} kernels move {program.bytes_moved / 2**20:.1f} MiB, "
                    f"peak {program.peak_bytes / 2**20:.1f} MiB"
                )
            lines.append(
                f"program {n} of {self.model}: {applied} decisions applied, "
                f"{len(program.decisions) - applied} refused, {told} changed by the recipe{numbers}"
            )
        lines += [f"  changed: {decision}" for decision in self.changes]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sentences = [line for line in str(self).splitlines() if not line.startswith("  changed: ")]
        shown = ("applied", "take", "kind", "place", "sentence", "bytes")
        rows = [{key: getattr(decision, key) for key in shown} for decision in self.decisions]
        return _tables.recipe(sentences, rows)


def replaced(recipe: Recipe, changes: list[tuple[Decision, dict[str, Any]]]) -> Recipe:
    """The recipe with fields of some decisions replaced, each program planned again once."""
    wanted = {decision.key: fields for decision, fields in changes}
    programs = list(recipe.programs)
    for n, program in enumerate(programs):
        if not any(decision.key in wanted for decision in program.decisions):
            continue
        changed = [replace(d, **wanted.get(d.key, {})) for d in program.decisions]
        programs[n] = replace(program, decisions=tuple(changed))
        if recipe._planners is not None:
            described = recipe._planners[n](Recipe(recipe.model, programs).text)
            programs[n] = program_plan(json.loads(described), n)
    return Recipe(recipe.model, programs, recipe._planners)


def with_entries(recipe: Recipe, n: int, entries: list[dict[str, Any]]) -> Recipe:
    """The recipe with entries of its ``n``-th program as the compiler wrote them, planned again."""
    known = {decision.key: decision for decision in recipe.programs[n].decisions}
    fields = tuple(Decision.__dataclass_fields__)
    told = [
        Decision(**{name: entry[name] for name in fields if name in entry} | {"program": n})
        for entry in entries
    ]
    # A value that keeps its order has no decision about it yet.
    new = tuple(one for one in told if one.key not in known)
    programs = list(recipe.programs)
    programs[n] = replace(programs[n], decisions=programs[n].decisions + new)
    changes = [(one, {"take": one.take, "order": one.order}) for one in told]
    return replaced(Recipe(recipe.model, programs, recipe._planners), changes)


def planned_again(recipe: Recipe) -> Recipe:
    """The recipe without what it says of decisions that its plan no longer has."""
    return replaced(recipe, [(decision, {}) for decision in recipe.decisions])


def check_budget(budget: float | None) -> None:
    """Raises ``ValueError`` if ``budget`` is not a memory budget."""
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (is_number and budget > 0 and (budget < 1 or budget % 1 == 0)):
        raise ValueError(
            f"memory_budget is a whole number of bytes, or a fraction between 0 and 1 of what a "
            f"program takes without a budget, not {budget!r}"
        )


def text_of(recipe: Recipe | str | os.PathLike[str]) -> str:
    """The text of a recipe, or of the file at a path. Raises as :meth:`Recipe.load` does."""
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe)
    return recipe.text


def _entry_of(decision: Decision) -> dict[str, Any]:
    entry = {name: getattr(decision, name) for name in _IDENTITY}
    told = {
        "applied": decision.applied,
        "blocking": decision.blocking,
        "order": decision.order,
        "take": decision.take,
        "sentence": decision.comment,
    }
    return {name: value for name, value in (entry | told).items() if value is not None}


def program_plan(data: dict[str, Any], n: int) -> ProgramPlan:
    """A program from the compiler's description, or from a section of a file."""
    rows = data["decisions"] if "decisions" in data else data.get("decision", [])
    decisions = []
    for row in rows:
        known = {name: row[name] for name in Decision.__dataclass_fields__ if name in row}
        comment = row.get("sentence", "")
        decisions.append(
            Decision(**known | {"program": n, "comment": comment, "sentence": row.get("what", "")})
        )
    numbers = (
        "n_kernels",
        "bytes_moved",
        "bytes_least",
        "operations",
        "peak_bytes",
        "memory",
        "predicted_us",
        "budget",
    )
    return ProgramPlan(
        data["structure"],
        data["training"],
        tuple(decisions),
        tuple(data.get("notes", ())),
        **{name: data[name] for name in numbers if name in data},
    )


__all__ = ["Decision", "ProgramPlan", "Recipe"]
