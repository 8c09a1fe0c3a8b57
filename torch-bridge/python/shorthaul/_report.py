"""``shorthaul.report``: what a program does, in numbers.

Owns the Python face of the compiler's report; the numbers are the compiler's own. How it looks in a
notebook is ``_tables``'s part.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _tables
from ._call import Call, recorded
from ._errors import BudgetError, ShorthaulError
from ._program import Program, small_sentence
from ._recipe import check_budget
from .module import module, original_of, runner_of

#: How many kernels that are far from the limits ``str()`` names.
_MOST_SLOW = 5

#: Fields of a decision of fusion: its identity as in a recipe, and what came of it.
DECISION = (
    "kind",
    "stage",
    "node",
    "module",
    "container",
    "other",
    "applied",
    "take",
    "reason",
    "may_change",
    "source",
    "bytes",
    "memory_bytes",
    "operations",
)


class Report:
    """The numbers of a step: ``data`` is a dictionary, ``str()`` a text; a table in a notebook.

    ``data`` has these entries:

    - ``kernels``: a list. Each kernel has ``name``, ``origin``, ``operators``, ``stage``, ``path``
      (the code generator that made it), ``launches``, ``bytes_read``, ``bytes_written``,
      ``bytes_least``, ``operations``, ``reads`` and ``writes`` (names of containers), and
      ``program`` (the position of its program in the step). If a table of measured times chose what
      computes it, ``choice`` says so. If PyTorch computes it, ``bytes_copied`` counts its results,
      which are copied. If the CPU has instructions for bf16 products but this kernel multiplies
      in f32, ``no_pairs`` says why. On a CPU there are also ``predicted`` (``us``, its parts,
      and ``level_bytes``: bytes from the core's cache, the shared cache and memory), ``bound``
      (``compulsory_bytes``, ``cache_bytes``, ``roofline_us``) and, for products, ``products``: the
      type of the numbers that are multiplied, ``f32``, ``f64``, or ``bf16`` for pairs.
    - ``roofline_us``: the least time of the whole step on the machine.
    - ``containers``: the arrays that kernels read and write, each with ``program``, ``name``,
      ``title`` (the name of an input in the model), ``dtype``, ``shape``, ``bytes`` and ``role``.
    - ``decisions``: the rewrites that the compiler applied and refused, each with ``program`` and
      the fields of a :class:`shorthaul.Decision`.
    - ``bytes_moved``, ``bytes_least``, ``bytes_saved`` and ``operations`` of the whole step.
    - ``memory``: bytes of the arenas (memory for intermediate results) and bytes that are saved for
      the backward pass.
    - ``refusals``: sentences about rewrites that would save bytes and were refused, as illegal or
      for their cost: the 50 that would save most. ``n_more_refusals`` counts the others.
    - ``undone``: rewrites that were decided and that the code generators could not carry out, each
      with ``rewrite``, ``origin``, ``reason``, ``bytes`` (moved after all) and ``sentence``. In
      ``decisions`` they are not applied.
    - ``one_thread``: the programs that are so small that they run on one thread, each with
      ``program``, ``n_threads`` (PyTorch's), and the predicted microseconds that threads would save
      (``saved_us``) and wait for each other (``waited_us``).
    - ``attentions``: what computes each attention, and why, if there was a choice.
    - ``warnings``: contractions without a fast kernel, with the reason and, on a CPU, predicted
      times.
    - ``slow``: kernels that are predicted to take more than five times their roofline, at least 20
      microseconds and one percent of the program, the slowest first. Each has ``program``,
      ``kernel`` (its name), ``origin``, ``predicted_us``, ``roofline_us``, ``cause`` (what most of
      its time goes into: ``"products"``, ``"loops"``, ``"movement"`` or ``"launches"``) and
      ``sentence``. On a CPU only.
    - ``outside``: sentences about the operators and modules that PyTorch or Python runs between
      the programs, with the reason; those of all inputs that the model has been compiled for.
    - ``memory_curve``, if memory budgets were given: for each budget and for none, ``budget``,
      ``peak_bytes``, ``bytes_moved``, ``operations`` and ``predicted_us``; or ``budget`` and
      ``refused``, the reason why the budget cannot be kept.
    """

    def __init__(self, data: dict[str, Any]):
        self.data = data

    def __str__(self) -> str:
        data, memory = self.data, self.data["memory"]
        lines = [
            f"{'stage':<9}{'made by':<22}{'read':>10}{'written':>11}{'least':>11}{'operations':>14}"
            "  origin",
            *(
                f"{k['stage']:<9}{k['path']:<22}{_bytes(k['bytes_read']):>10}"
                f"{_bytes(k['bytes_written']):>11}{_bytes(k['bytes_least']):>11}"
                f"{_operations(k['operations']):>14}  {k['origin']}"
                for k in data["kernels"]
            ),
            f"{len(data['kernels'])} kernels move {_bytes(data['bytes_moved'])}; "
            f"the least possible is {_bytes(data['bytes_least'])}; "
            f"{_operations(data['operations'])} in products",
            f"saved for backward {_bytes(memory['saved_bytes'])}, at most "
            f"{_bytes(memory['forward_arena_bytes'])} more in forward and "
            f"{_bytes(memory['backward_arena_bytes'])} in backward",
            *_predicted_line(data),
            *(f"{k['origin']}: {k['choice']}" for k in data["kernels"] if "choice" in k),
            *data.get("attentions", ()),
            *map(_curve_line, data.get("memory_curve", ())),
            *(undone["sentence"] for undone in data.get("undone", ())),
            *(f"warning: {w['sentence']}" for w in data.get("warnings", ())),
            *slow_sentences(data["slow"]),
            *(f"outside of the kernels: {sentence}" for sentence in data.get("outside", ())),
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        curve = map(_curve_line, self.data.get("memory_curve", ()))
        slow = slow_sentences(self.data["slow"])
        return _tables.report(self.data, [*_predicted_line(self.data), *curve, *slow])


def slow_sentences(slow: list[dict[str, Any]]) -> list[str]:
    """Lines about kernels that are far from the limits; at most :data:`_MOST_SLOW`."""
    lines = [f"slow: {kernel['sentence']}" for kernel in slow[:_MOST_SLOW]]
    if len(slow) > _MOST_SLOW:
        lines.append(f"slow: {len(slow) - _MOST_SLOW} more kernels; `data['slow']` lists all")
    return lines


def _bytes(n_bytes: int) -> str:
    """Writes the number in the unit that leaves at least one digit before the point."""
    if n_bytes < 2**10:
        return f"{n_bytes} B"
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:.1f} KiB"


def _operations(n: int) -> str:
    if n < 1000:
        return f"{n} FLOP"
    for unit, size in (("GFLOP", 1e9), ("MFLOP", 1e6)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n / 1e3:.2f} kFLOP"


def _predicted_line(data: dict[str, Any]) -> list[str]:
    """Predicted time beside the bounds, where kernels are a CPU's."""
    kernels = [k for k in data["kernels"] if "predicted" in k]
    if not kernels or not data.get("roofline_us"):
        return []
    predicted = sum(k["predicted"]["us"] for k in kernels)
    bounds = sum(k["bound"]["roofline_us"] for k in kernels if "bound" in k)
    is_training = any(k["stage"] != "forward" for k in kernels)
    small = small_sentence(predicted, is_training)
    return [
        f"predicted {predicted / 1e3:.2f} ms; these kernels take at least {bounds / 1e3:.2f} ms, "
        f"any schedule of the step at least {data['roofline_us'] / 1e3:.2f} ms",
        *([f"this step is small: {small}"] if small else []),
    ]


def _curve_line(point: dict[str, Any]) -> str:
    budget = "no memory budget" if point["budget"] is None else f"memory_budget={point['budget']}"
    if "refused" in point:
        return f"{budget}: {point['refused']}"
    return (
        f"{budget}: peak {_bytes(point['peak_bytes'])}, moves {_bytes(point['bytes_moved'])}, "
        f"{_operations(point['operations'])}, predicted {point['predicted_us'] / 1e3:.1f} ms"
    )


def report(
    model: nn.Module, *inputs: Any, memory_budgets: Sequence[float] = (), **kwargs: Any
) -> Report:
    """Compiles ``model`` for these inputs, in its present mode, and reports on its kernels.

    The report has the kernels after fusion, the bytes that each moves beside the least possible,
    arithmetic, and memory. ``forward`` runs in Python, and each compiled region returns zeros
    without running its kernels. If code between the regions fails on zeros, the kernels run.
    Buffers and PyTorch's random numbers are restored. With ``memory_budgets``, the step is also
    planned for each of these budgets, and the report has a table of memory against predicted time.

    Raises the same errors as a call of the compiled module, and ``ValueError`` if no part of the
    model is compiled for these inputs.
    """
    compiled = compiled_of(model)
    programs = programs_of(compiled, inputs, kwargs)
    data = data_of(programs) | {"outside": list(runner_of(compiled).compiler.outside)}
    if memory_budgets:
        data["memory_curve"] = [_point(programs, budget) for budget in (None, *memory_budgets)]
    return Report(data)


def _point(programs: list, budget: float | None) -> dict[str, Any]:
    """All programs planned under a budget: sums, and the sum of the peaks."""
    check_budget(budget)
    try:
        plans = [json.loads(program.planned(None, budget)) for program in programs]
    except BudgetError as error:
        return {"budget": budget, "refused": str(error)}
    keys = ("peak_bytes", "bytes_moved", "operations", "predicted_us")
    return {"budget": budget} | {key: sum(plan[key] for plan in plans) for key in keys}


def compiled_of(model: nn.Module) -> nn.Module:
    """The model itself where it is compiled, else a compiled module that shares everything."""
    return model if hasattr(type(model), "_shorthaul_options") else module(model)


@contextlib.contextmanager
def unchanged(model: nn.Module):
    """Puts the model's buffers and PyTorch's random numbers back as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def programs_of(
    model: nn.Module, inputs: tuple, kwargs: dict[str, Any] | None = None
) -> list[Program]:
    """The programs that one call of ``model`` runs, in order.

    Their kernels run only if PyTorch or Python between them refuses zeros as results, such as
    lengths of packed sequences.
    """
    compiled = compiled_of(model)

    def calls_of(runs: bool) -> list[Call]:
        with recorded(runs=runs) as calls, unchanged(compiled):
            compiled(*inputs, **(kwargs or {}))
        return calls

    try:
        calls = calls_of(runs=False)
    except ShorthaulError:
        raise
    except Exception:
        calls = calls_of(runs=True)
    if not calls:
        raise ValueError(
            f"PyTorch runs all of {type(original_of(compiled)).__name__} for these inputs, so it "
            f"has no compiled kernels; see the warnings of the call, or 'Coverage and limits' in "
            f"the guide"
        )
    return [call.program for call in calls]


def data_of(programs: list[Program]) -> dict[str, Any]:
    """Several programs' numbers as those of one step: sums, and the largest of the arenas."""
    first, *others = (_data_of(program, i) for i, program in enumerate(programs))
    for other in others:
        for key, value in other.items():
            if isinstance(value, list):
                first[key] = first.get(key, []) + value
            elif isinstance(value, (int, float)):
                first[key] += value
        memory, more = first["memory"], other["memory"]
        for key, value in more.items():
            memory[key] = memory[key] + value if key == "saved_bytes" else max(memory[key], value)
    first["slow"].sort(key=lambda kernel: -kernel["predicted_us"])
    return first


def _data_of(program: Program, position: int) -> dict[str, Any]:
    data = json.loads(program.native.report())
    rows = json.loads(program.native.decisions())["decisions"]
    data["decisions"] = [
        {key: row.get(key) for key in DECISION} | {"sentence": row["what"]} for row in rows
    ]
    for container in data["containers"]:
        container["title"] = program.input_titles.get(container["name"], container["name"])
    if "one_thread" in data:
        data["one_thread"] = [data["one_thread"]]
    for part in ("kernels", "containers", "decisions", "undone", "one_thread", "slow"):
        data[part] = [{"program": position, **entry} for entry in data.get(part, ())]
    return data
