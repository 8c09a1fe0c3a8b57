"""Judges a compiled step: Shorthaul and eager in float32, both against eager in float64.

Owns the rule. The distance of a tensor is the root mean square of its difference from float64.
Shorthaul's may be four times eager's, plus four roundings of the largest element. How far rounding
moves a network is partly luck, so eager's distance is the largest of several runs, in which all
weights differ by one rounding; those runs are made only if the first comparison fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Observed = dict[str, torch.Tensor | None]

FACTOR = 4.0
ROUNDINGS = 4.0
#: A tensor that eager itself misses by this part of its norm says nothing about Shorthaul.
UNSTABLE = 0.05
#: A gradient below this part of the largest one is what is left of terms that cancel.
CANCELLED = 1e-5


@dataclass(frozen=True)
class Difference:
    """A tensor that is farther from float64 than the rule allows, or has another structure."""

    what: str
    found: float | str
    eager: float | str

    def __str__(self) -> str:
        if isinstance(self.found, str):
            return f"{self.what}: {self.found} instead of {self.eager}"
        return f"{self.what}: relative distance {self.found:.2g}, eager's {self.eager:.2g}"


@dataclass(frozen=True)
class Verdict:
    """What differs, and how many of the tensors could be judged."""

    differences: list[Difference]
    n_judged: int
    n_unstable: int


def judge(
    found: Observed, eager: Observed, exact: Observed, again: Callable[[], list[Observed]]
) -> Verdict:
    """Compares one step. ``again`` gives eager's results with weights that are rounded anew."""
    verdict = _verdict(found, [eager], exact)
    if verdict.differences:
        verdict = _verdict(found, [eager, *again()], exact)
    return verdict


def _verdict(found: Observed, eager: list[Observed], exact: Observed) -> Verdict:
    differences = [Difference(key, "missing", "a tensor") for key in exact if key not in found]
    differences += [Difference(key, "a tensor", "nothing") for key in found if key not in exact]
    largest = max((_largest(t) for k, t in exact.items() if k.startswith("gradient")), default=0.0)
    n_judged = n_unstable = 0
    for key in exact:
        if key not in found or any(key not in run for run in eager):
            continue
        floor = largest if key.startswith("gradient") else 0.0
        difference = _difference(key, found[key], [run[key] for run in eager], exact[key], floor)
        if difference == "unstable":
            n_unstable += 1
            continue
        n_judged += 1
        if difference is not None:
            differences.append(difference)
    return Verdict(differences, n_judged, n_unstable)


def _difference(key, found, eager, exact, largest) -> Difference | str | None:
    first = eager[0]
    kinds = [_kind(found), _kind(first)]
    if kinds[0] != kinds[1]:
        return Difference(key, *kinds)
    if first is None or exact is None or first.shape != exact.shape:
        return None if first is exact else "unstable"
    if not first.is_floating_point():
        if first.is_complex():
            pairs = [torch.view_as_real(t.to(torch.complex128)) for t in (found, *eager, exact)]
            return _difference(key, pairs[0], pairs[1:-1], pairs[-1], largest)
        if any(not torch.equal(run.to(exact.dtype), exact) for run in eager):
            return "unstable"
        same = torch.equal(found.to(exact.dtype), exact)
        return None if same else Difference(key, "other whole numbers", "those of float64")
    finite = first.isfinite()
    if any(not torch.equal(run.isfinite(), finite) for run in (*eager, exact)):
        return "unstable"
    if not torch.equal(found.isfinite(), finite):
        return Difference(key, f"{(~found.isfinite()).sum()} not finite", f"{(~finite).sum()}")
    if not torch.equal(found[~finite].nan_to_num(), first[~finite].nan_to_num()):
        return Difference(key, "other infinities", "eager's")
    exact = exact[finite].double()
    own = max(_distance(run[finite], exact) for run in eager)
    error, scale = _distance(found[finite], exact), _rms(exact)
    eps = torch.finfo(first.dtype).eps
    floor = ROUNDINGS * eps * _largest(exact)
    if _largest(exact) < CANCELLED * largest:
        floor = max(floor, eps * largest)
    if error <= FACTOR * own + floor:
        return None
    if own > UNSTABLE * scale:
        return "unstable"
    return Difference(key, error / max(scale, 1e-300), own / max(scale, 1e-300))


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    return _rms(tensor.double() - exact)


def _rms(tensor: torch.Tensor) -> float:
    return tensor.norm().item() / math.sqrt(tensor.numel()) if tensor.numel() else 0.0


def _largest(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    return tensor.abs().nan_to_num(posinf=0.0).max().item()
