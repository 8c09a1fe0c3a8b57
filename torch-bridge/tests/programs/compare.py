"""Judges what two runs of a program observed: the same, refused, or where they differ.

Owns the tolerances: rounding in another order of summation is no difference; anything else is.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from .facts import Fields, Raised, TensorFacts

# Relative to the largest magnitude in the tensor: about 100 roundings of the type.
TOLERANCES = {
    torch.float64: 2e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
    torch.complex64: 2e-5,
    torch.complex128: 2e-12,
}
# The magnitude below which a tensor's numbers count as what is left of larger ones that cancelled.
SMALLEST_SCALE = 0.5


class Refused(Exception):
    """The wrap raised an error of its own where eager computes."""


def is_own(error: BaseException) -> bool:
    """Whether Shorthaul raised this error on purpose, at whatever depth."""
    names = {cls.__name__ for cls in type(error).__mro__}
    # Dynamo wraps what a backend raises.
    inner = getattr(error, "inner_exception", None)
    return "ShorthaulError" in names or (inner is not None and is_own(inner))


def differences(expected: Any, found: Any, slack: float = 1.0, place: str = "result") -> list[str]:
    """What differs, one line each; raises ``Refused`` where the wrap said that it cannot."""
    if isinstance(found, Raised) and not isinstance(expected, Raised):
        if is_own(found.error):
            raise Refused(_first_line(found.error))
        return [f"{place}: raised {_name(found.error)}: {_first_line(found.error)}"]
    if type(expected) is not type(found):
        return [f"{place}: {_short(expected)} became {_short(found)}"]
    if isinstance(expected, TensorFacts):
        return _tensor_differences(expected, found, slack, place)
    if isinstance(expected, Raised):
        return _error_differences(expected, found, place)
    if isinstance(expected, Fields):
        if expected.kind != found.kind or list(expected.fields) != list(found.fields):
            return [f"{place}: {_short(expected)} became {_short(found)}"]
        pairs = [(k, v, found.fields[k]) for k, v in expected.fields.items()]
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return [f"{place}: {len(expected)} items became {len(found)}"]
        pairs = [(k, v, w) for k, (v, w) in enumerate(zip(expected, found, strict=True))]
    elif isinstance(expected, float):
        slack_here = 2e-5 * slack * max(abs(expected), SMALLEST_SCALE)
        same = expected == found or abs(expected - found) <= slack_here or expected != expected
        return [] if same else [f"{place}: {expected} became {found}"]
    else:
        return [] if expected == found else [f"{place}: {expected!r} became {found!r}"]
    return [line for key, v, w in pairs for line in differences(v, w, slack, f"{place}[{key}]")]


def _error_differences(expected: Raised, found: Any, place: str) -> list[str]:
    if not isinstance(found.error, type(expected.error)):
        if is_own(found.error):
            raise Refused(_first_line(found.error))
        return [f"{place}: {_name(expected.error)} became {_name(found.error)}"]
    if expected.message != found.message:
        return [f"{place}: the error's text {expected.message!r} became {found.message!r}"]
    return []


def _tensor_differences(
    expected: TensorFacts, found: TensorFacts, slack: float, place: str
) -> list[str]:
    lines = []
    for field in fields(TensorFacts):
        a, b = getattr(expected, field.name), getattr(found, field.name)
        if field.name != "values" and a != b:
            lines.append(f"{place}.{field.name}: {a} became {b}")
    if expected.dtype == found.dtype and expected.shape == found.shape:
        lines.extend(_number_differences(expected.values, found.values, slack, place))
    return lines


def _number_differences(
    expected: torch.Tensor, found: torch.Tensor, slack: float, place: str
) -> list[str]:
    if expected.numel() == 0:
        return []
    tolerance = TOLERANCES.get(expected.dtype)
    if tolerance is None:
        if torch.equal(expected, found):
            return []
        return [f"{place}: {_short_numbers(expected)} became {_short_numbers(found)}"]
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), found.to(wide)
    finite = torch.isfinite(a)
    scale = max(a[finite].abs().max().item() if finite.any() else 0.0, SMALLEST_SCALE)
    # No slack is more than what bfloat16 numbers have.
    allowed = min(tolerance * slack, max(tolerance, TOLERANCES[torch.bfloat16]))
    same = torch.isclose(a, b, rtol=0, atol=allowed * scale, equal_nan=True)
    if same.all():
        return []
    return [f"{place}: {_short_numbers(expected)} became {_short_numbers(found)}"]


def _name(error: BaseException) -> str:
    return type(error).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def _short_numbers(tensor: torch.Tensor) -> str:
    numbers = tensor.flatten()
    shown = ", ".join(
        str(n) if not isinstance(n, float) else f"{n:.5g}" for n in numbers[:4].tolist()
    )
    return f"({shown}{', …' if numbers.numel() > 4 else ''})"


def _short(value: Any) -> str:
    if isinstance(value, Raised):
        return f"{_name(value.error)} ({_first_line(value.error)})"
    if isinstance(value, TensorFacts):
        return f"{value.kind}{list(value.shape)}"
    if isinstance(value, Fields):
        return f"{value.kind} with {list(value.fields)}"
    return repr(value)[:80]
