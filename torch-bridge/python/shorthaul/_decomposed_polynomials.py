"""Orthogonal polynomials whose degree may be a tensor.

Owns Chebyshev's four kinds by their closed forms, with ``x = cos θ`` inside ``[-1, 1]`` and
``|x| = cosh φ`` outside, in float64; and Hermite's two kinds by their recurrence in the operands'
type, up to the degree at which PyTorch's ends (in float64 where the degree is a number up to 128).
They give no gradient, as in PyTorch.
"""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten


def _first(n, angle, sine, cosine):
    return cosine(n * angle)


def _second(n, angle, sine, cosine):
    return sine((n + 1) * angle) / sine(angle)


def _third(n, angle, sine, cosine):
    return cosine((n + 0.5) * angle) / cosine(0.5 * angle)


def _fourth(n, angle, sine, cosine):
    return sine((n + 0.5) * angle) / sine(0.5 * angle)


#: For each kind: the form, the form at −x up to the sign (−1)ⁿ, and the values at 1 and at −1.
_KINDS = {
    "t": (_first, _first, lambda n: n * 0 + 1, lambda n: n * 0 + 1),
    "u": (_second, _second, lambda n: n + 1, lambda n: n + 1),
    "v": (_third, _fourth, lambda n: n * 0 + 1, lambda n: 2 * n + 1),
    "w": (_fourth, _third, lambda n: 2 * n + 1, lambda n: n * 0 + 1),
}


#: Degrees beyond these are NaN in PyTorch (`getHermitianLimit` in ATen's `Math.h`).
_HERMITE_LIMITS = {torch.float32: 128, torch.float64: 512}

#: Steps of the recurrence that a kernel may have; all degrees of float64 would take seconds to
#: compile, and longer to run than PyTorch's loop.
_MOST_STEPS = 128

#: From here on the conversion of a degree to int64 is the least integer, so the value is 0.
_NO_INTEGER = 2.0**63


def _hermite_rule(step: int):
    """``p₀ = 1``, ``p₁ = step·x``, ``pₖ₊₁ = step·(x·pₖ − k·pₖ₋₁)`` with the step 2 or 1."""

    def rule(x, n):
        dtype = torch.result_type(x, n)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        if dtype not in _HERMITE_LIMITS:
            return NotImplemented  # eager raises an error
        limit = _HERMITE_LIMITS[dtype]
        # The order of the operands counts for NaN, which then is the limit.
        most = limit if isinstance(n, torch.Tensor) else int(max(1, min(limit, n)))
        if most > _MOST_STEPS:
            return NotImplemented
        x, n = (
            v.detach().to(dtype) if isinstance(v, torch.Tensor) else torch.full((), v, dtype=dtype)
            for v in (x, n)
        )
        n = n.trunc()
        earlier, later = torch.ones_like(x), step * x
        value = torch.where(n == 0, 1.0, torch.where(n == 1, later, math.nan))
        for k in range(1, most):
            earlier, later = later, (step * x) * later - (step * k) * earlier
            value = torch.where(n == k + 1, later, value)
        return torch.where((n >= 0) & (n < _NO_INTEGER), value, 0.0)

    return rule


def _rule(kind: str, is_shifted: bool):
    above, below, at_one, at_minus_one = _KINDS[kind]

    def rule(x, n):
        dtype = torch.result_type(x, n)
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        x, n = (
            v.detach().to(torch.float64)
            if isinstance(v, torch.Tensor)
            else torch.full((), v, dtype=torch.float64)
            for v in (x, n)
        )
        n = n.trunc()
        x = 2 * x - 1 if is_shifted else x
        sign = torch.where(n.remainder(2) == 1, -1.0, 1.0)
        inside = x.abs() < 1
        within = above(n, torch.where(inside, x, 0.0).acos(), torch.sin, torch.cos)
        hyperbolic = torch.where(x.abs() > 1, x.abs(), 2.0).acosh()
        beyond = above(n, hyperbolic, torch.sinh, torch.cosh)
        before = sign * below(n, hyperbolic, torch.sinh, torch.cosh)
        value = torch.where(inside, within, torch.where(x > 0, beyond, before))
        value = torch.where(x == 1, at_one(n), torch.where(x == -1, sign * at_minus_one(n), value))
        value = torch.where(x.isnan(), x, value)
        value = torch.where(n == 0, 1.0, torch.where(n < 0, 0.0, value))
        return value.to(dtype)

    return rule


_OVERLOADS = ("default", "x_scalar", "n_scalar")

RULES = {
    getattr(getattr(aten, f"special_{shifted}chebyshev_polynomial_{kind}"), overload): _rule(
        kind, bool(shifted)
    )
    for shifted in ("", "shifted_")
    for kind in _KINDS
    for overload in _OVERLOADS
} | {
    getattr(getattr(aten, f"special_hermite_polynomial_{kind}"), overload): _hermite_rule(step)
    for kind, step in (("h", 2), ("he", 1))
    for overload in _OVERLOADS
}

__all__ = ["RULES"]
