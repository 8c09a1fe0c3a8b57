"""Runs an operator's samples through Shorthaul, beside eager in float32 and in float64.

Owns what the page's words mean for one sample. Never chooses samples.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import shorthaul
import torch
from against_eager import assert_close
from shorthaul._call import recorded
from torch import nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from .samples import Sample, Slot, is_complex, out_of_scope, samples_of

#: Every tensor came from a compiled region.
NATIVE = "native"
#: Nothing to compute: eager's results share the memory of its operands, or are no tensors.
VIEW = "view"
#: PyTorch ran a part or all of it.
THROUGH_TORCH = "through PyTorch"
REFUSED = "refused"
DIFFERENT = "different"
#: Not counted: complex numbers, sparse tensors, factorizations.
OUT = "out of scope"
#: Eager itself refuses the sample.
NO_SAMPLE = "no sample"

#: Errors of gradients that are rounding alone, by operator. With two rows the exact gradient of a
#: normalization is zero but for its epsilon, whatever comes in: 7e-8 here, of terms of size one.
_NORMS = ("_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm")
_ROUNDING = dict.fromkeys(_NORMS, 2e-7)

COUNTED = (NATIVE, THROUGH_TORCH, REFUSED, DIFFERENT)


@dataclass
class Verdict:
    """What became of one operator: a word for each sample, and reasons for the rest."""

    operator: str
    samples: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    is_random: bool = False


class Calls(nn.Module):
    """An operator called once for each sample, all of them in one graph."""

    def __init__(self, function, samples: list[Sample]):
        super().__init__()
        self.function = function
        self.operands = [(sample.args, sample.kwargs) for sample in samples]

    def forward(self, tensors: list[list[torch.Tensor]]):
        if len(tensors) == 1:
            # A graph that breaks in a loop is no graph at all.
            (args, kwargs), given = self.operands[0], tensors[0]
            args = [_filled(value, given) for value in args]
            kwargs = {name: _filled(value, given) for name, value in kwargs.items()}
            return [self.function(*args, **kwargs)]
        results = []
        for (args, kwargs), given in zip(self.operands, tensors, strict=True):
            filled = {name: _filled(value, given) for name, value in kwargs.items()}
            results.append(self.function(*[_filled(value, given) for value in args], **filled))
        return results


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Operands with tensors in the places of their slots."""
    if isinstance(value, Slot):
        return tensors[value.position]
    if type(value) in (list, tuple):
        return type(value)([_filled(item, tensors) for item in value])
    return value


def judge(name: str, op) -> Verdict:
    """The verdict on an operator: all samples in one graph, and where that is not native each."""
    reason = out_of_scope(op)
    if reason is not None:
        return Verdict(name, [OUT], [reason])
    verdict = Verdict(name)
    usable = []
    for kind in samples_of(op):
        found = _first_usable(name, op.op, kind)
        if isinstance(found, tuple):
            usable.append(found)
        else:
            verdict.samples.append(OUT if found else NO_SAMPLE)
            verdict.reasons += [found] if found else []
    verdict.is_random = any(expected.is_random for _, expected in usable)
    together = _try(op.op, usable) if len(usable) > 1 else (THROUGH_TORCH, "")
    if together[0] in (NATIVE, VIEW):
        verdict.samples += [VIEW if one.is_view else NATIVE for _, one in usable]
    else:
        for one in usable:
            word, reason = _try(op.op, [one])
            if word == THROUGH_TORCH and one[1].is_view:
                word, reason = VIEW, ""
            verdict.samples.append(word)
            if reason:
                verdict.reasons.append(reason)
    verdict.reasons = list(dict.fromkeys(verdict.reasons))
    return verdict


def _first_usable(name: str, function, kind: list[Sample]) -> tuple[Sample, _Expected] | str:
    """A sample that eager computes, with what it gives; or why there is none."""
    reason = ""
    for sample in kind:
        if is_complex(sample):
            return "complex numbers"
        try:
            expected = _Expected(function, sample)
        except _OutOfScope as refusal:
            reason = str(refusal)
        except Exception:
            continue
        else:
            # What is in memory that nobody has written is no result.
            expected.is_random |= "empty" in name
            expected.rounding = _ROUNDING.get(name, 0.0)
            return sample, expected
    return reason


class _OutOfScope(Exception):
    """A sample that the page does not count."""


class _Expected:
    """What eager gives for a sample: results and gradients, in float32 and in float64."""

    def __init__(self, function, sample: Sample):
        #: An error that is allowed by name.
        self.rounding = 0.0
        self.eager = _run(function, [sample], double=False)[0]
        self.exact = _run(function, [sample], double=True)[0]
        self.noise = self._noise(function, sample)
        again = _run(function, [sample], double=False, seed=1)[0]
        self.is_view = not _computes(function, sample)
        self.is_random = any(not _same(a, again[key]) for key, a in self.eager.items())
        for value in (*self.eager.values(), *self.exact.values()):
            if isinstance(value, torch.Tensor) and value.is_complex():
                raise _OutOfScope("complex numbers")
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise _OutOfScope("sparse tensors")
        results = [value for key, value in self.eager.items() if key.startswith("result")]
        results = [value for value in results if isinstance(value, torch.Tensor)]
        if results and not any(value.numel() for value in results):
            raise _OutOfScope("an empty result")

    def _noise(self, function, sample: Sample) -> dict[str, float]:
        """How far results move when operands and incoming gradients are rounded once more."""
        found = dict.fromkeys(self.exact, 0.0)
        for seed in range(2):
            moved = _run(function, [sample], double=True, shake=seed)[0]
            for key, exact in self.exact.items():
                if _is_number(exact) and exact.shape == moved[key].shape:
                    away = (moved[key] - exact).abs().nan_to_num(0.0, 0.0)
                    found[key] = max(found[key], away.max().item() if away.numel() else 0.0)
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _computes(function, sample: Sample) -> bool:
    """Whether some result of a sample lies in memory of its own."""
    given = [_copy(tensor, False).detach() for tensor in sample.tensors]
    with torch.no_grad():
        results = pytree.tree_leaves(Calls(function, [sample])([given]))
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
    return any(tensor.untyped_storage()._cdata not in storages for tensor in tensors)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b or a == b
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _run(function, samples: list[Sample], **how) -> list[dict[str, Any]]:
    return _step(Calls(function, samples), samples, **how)


def _step(
    model,
    samples: list[Sample],
    *,
    double: bool = False,
    seed: int = 0,
    shake: int | None = None,
):
    """For each sample results and gradients by name, after one forward and backward."""
    given = [[_copy(tensor, double) for tensor in sample.tensors] for sample in samples]
    if shake is not None:
        given = [[_shaken(tensor, shake) for tensor in tensors] for tensors in given]
    torch.manual_seed(seed)
    results = model(given)
    found, losses = [], []
    for result in results:
        leaves = pytree.tree_leaves(result)
        found.append({f"result {i}": _detached(leaf) for i, leaf in enumerate(leaves)})
        losses += [
            (leaf * _weights(leaf, shake)).sum()
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
    losses = [loss for loss in losses if not loss.is_complex()]
    if losses:
        sum(losses).backward()
    for results_of, tensors in zip(found, given, strict=True):
        for i, tensor in enumerate(tensors):
            results_of[f"gradient of tensor {i}"] = tensor.grad
    return found


def _copy(tensor: torch.Tensor, double: bool) -> torch.Tensor:
    if tensor.layout != torch.strided:
        raise _OutOfScope("sparse tensors")
    kind = torch.float64 if double and tensor.dtype == torch.float32 else tensor.dtype
    copied = tensor.detach().clone().to(kind)
    return copied.requires_grad_(tensor.requires_grad)


def _shaken(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor whose elements are wrong by one rounding of float32, up or down."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(seed)
    ways = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    moved = tensor.detach() * (1 + ways * torch.finfo(torch.float32).eps)
    return moved.requires_grad_(tensor.requires_grad)


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _weights(tensor: torch.Tensor, shake: int | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    weights = torch.rand(tensor.shape, generator=generator).to(tensor.dtype) - 0.3
    return weights if shake is None else _shaken(weights, shake)


def _try(function, usable: list[tuple[Sample, _Expected]]) -> tuple[str, str]:
    """A word for samples in one graph, and the reason."""
    samples = [sample for sample, _ in usable]
    torch._dynamo.reset()
    counters.clear()
    model = shorthaul.module(Calls(function, samples))
    with recorded() as calls, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = _step(model, samples)
        except shorthaul.ShorthaulError as error:
            return REFUSED, _first_line(error)
        except Exception as error:
            return DIFFERENT, f"{type(error).__name__}: {_first_line(error)}"
    for (_, expected), results in zip(usable, found, strict=True):
        if (difference := _difference(expected, results)) is not None:
            return DIFFERENT, difference
    reasons = [
        _reason(str(warning.message))
        for warning in said
        if issubclass(warning.category, (shorthaul.FallbackWarning, shorthaul.RecompileWarning))
    ]
    if reasons:
        return THROUGH_TORCH, "; ".join(dict.fromkeys(reasons))
    if all(expected.is_view for _, expected in usable):
        return VIEW, ""
    if calls:
        return NATIVE, ""
    if not counters["stats"]["unique_graphs"]:
        return THROUGH_TORCH, "PyTorch's tracer makes no graph of it"
    return THROUGH_TORCH, "no region is worth its call"


def _difference(expected: _Expected, found: dict[str, Any]) -> str | None:
    """How results differ from eager's, in a sentence."""
    if found.keys() != expected.eager.keys():
        return f"gives {len(found)} results for {len(expected.eager)}"
    for key, eager in expected.eager.items():
        value, exact = found[key], expected.exact[key]
        if not isinstance(eager, torch.Tensor):
            if not (value == eager or value == exact or expected.is_random):
                return f"{key}: {value} for {eager}"
            continue
        if value is None:
            return f"{key} is missing"
        if (value.shape, value.dtype) != (eager.shape, eager.dtype):
            return f"{key}: {value.dtype} {tuple(value.shape)}"
        if expected.is_random or (not eager.is_floating_point() and torch.equal(value, eager)):
            continue
        with contextlib.suppress(AssertionError):
            assert_close(key, value, eager, exact)
            continue
        allowed = max(2 * expected.noise[key], expected.rounding if "gradient" in key else 0.0)
        if _largest(value, exact) <= allowed:
            continue
        return _distance(key, value, eager, exact)
    return None


def _largest(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error; infinite where either is not a number."""
    if value.shape != exact.shape or not value.isfinite().all() or not exact.isfinite().all():
        return float("inf")
    return (value.double() - exact).abs().max().item() if value.numel() else 0.0


def _distance(key: str, value: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    if not value.is_floating_point() or exact.shape != value.shape:
        return f"{key} differs"
    ours = (value.double() - exact).abs().nan_to_num().max().item()
    own = (eager.double() - exact).abs().nan_to_num().max().item()
    return f"{key}: error {ours:.2g}, eager's {own:.2g}"


def _reason(message: str) -> str:
    """A warning without the places in the test's own code."""
    message = message.split(": ", 1)[-1] if message.startswith("PyTorch runs") else message
    return message.split(", at ")[0].split(" (tmp/")[0].strip()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
