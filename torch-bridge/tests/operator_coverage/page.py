"""Writes ``docs/src/coverage.md`` from verdicts. Never runs an operator."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from .judge import COUNTED, DIFFERENT, NATIVE, OUT, REFUSED, THROUGH_TORCH, VIEW, Verdict
from .samples import N_SAMPLES

PAGE = Path(__file__).parents[3] / "docs" / "src" / "coverage.md"

_INTRODUCTION = """# Coverage of PyTorch's operators

Written by `cd torch-bridge/tests && python -m operator_coverage`; do not edit.

This page lists which of PyTorch's operators run in Shorthaul's kernels. The operators are those of
the test database (`op_db`) of PyTorch {version} that take float32. For each one, up to {n_samples}
of the smallest samples of different kinds run in `shorthaul.module`, forward and backward. Results
and gradients are compared with eager PyTorch in float64, by the rule of
`torch-bridge/tests/against_eager.py`: the error may be at most twice that of eager in float32, plus
10⁻⁶ of the largest value. If a sum nearly cancels, eager's own error varies at random. The error
may then be twice as large as the change of the float64 result when every operand and incoming
gradient is rounded once more. Shorthaul draws its own random numbers, so only types and sizes are
compared for them, and for uninitialized memory (`empty`).

- **native**: the whole sample ran in compiled regions.
- **through PyTorch**: PyTorch ran the sample, or a part of it. The last column says why.
- **views**: there is nothing to compute. The results are views, sizes or numbers.
- **refused**: Shorthaul raised an error that names the reason.
- **different**: results or gradients differ from eager's.

These samples are not counted: views; samples with an empty tensor or result, which PyTorch always
runs; and complex numbers, sparse tensors, and factorizations and solvers of `linalg`, which
Shorthaul does not support.

"""


def text_of(verdicts: Iterable[Verdict]) -> str:
    """The whole page."""
    ordered = sorted(verdicts, key=lambda verdict: verdict.operator)
    counts = collections.Counter(word for verdict in ordered for word in verdict.samples)
    n_counted = max(1, sum(counts[word] for word in COUNTED))
    rows = [_row(verdict) for verdict in ordered if not set(verdict.samples) <= {OUT}]
    whole = [v for v in ordered if set(v.samples) & set(COUNTED)]
    n_native = sum(set(v.samples) & set(COUNTED) == {NATIVE} for v in whole)
    lines = [
        _INTRODUCTION.format(version=torch.__version__.partition("+")[0], n_samples=N_SAMPLES),
        "| | samples | |",
        "|---|---|---|",
        *(
            f"| {word} | {counts[word]} | {100 * counts[word] / n_counted:.1f} % |"
            for word in (NATIVE, THROUGH_TORCH, REFUSED, DIFFERENT)
        ),
        f"| counted | {n_counted} | |",
        f"| views, not counted | {counts[VIEW]} | |",
        f"| out of scope, not counted | {counts[OUT]} | |",
        "",
        f"Of {len(whole)} operators with counted samples, {n_native} are native in all samples.",
        "",
        "| operator | native | other samples | reason |",
        "|---|---|---|---|",
        *rows,
        "",
        "Out of scope:",
        "",
        *_out_of_scope(ordered),
    ]
    return "\n".join(lines) + "\n"


def row_of(operator: str, page: str) -> str | None:
    """The row of an operator in a page."""
    start = f"| {_escaped(operator)} |"
    return next((line for line in page.splitlines() if line.startswith(start)), None)


def _row(verdict: Verdict) -> str:
    counts = collections.Counter(verdict.samples)
    others = [f"{n} {_words(word)}" for word, n in sorted(counts.items()) if word != NATIVE]
    notes = ["random", *verdict.reasons] if verdict.is_random else verdict.reasons
    # Where in this package a call stands says nothing.
    notes = [
        re.sub(r"( \(operator_coverage/[^)]*\)|:? \(?operator_coverage/\S+)", "", n) for n in notes
    ]
    reason = _escaped("; ".join(dict.fromkeys(notes)))
    return f"| {_escaped(verdict.operator)} | {counts[NATIVE]} | {', '.join(others)} | {reason} |"


def _words(word: str) -> str:
    return "views" if word == VIEW else word


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("_", "\\_").replace("<", "\\<").replace("*", "\\*")


def _out_of_scope(ordered: list[Verdict]) -> list[str]:
    by_reason = collections.defaultdict(list)
    for verdict in ordered:
        if set(verdict.samples) <= {OUT}:
            reason = verdict.reasons[0] if verdict.reasons else "no usable sample"
            by_reason[reason].append(_escaped(verdict.operator))
    return [f"- {reason}: {', '.join(names)}." for reason, names in sorted(by_reason.items())]
