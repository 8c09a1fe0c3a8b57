"""Bessel functions of orders 0 and 1, in float64, by sums over a circle or along a line.

Owns the formulas (NIST Handbook of Mathematical Functions, chapter 10). The trapezoidal rule is
exact to rounding for their integrals: for periodic ones (10.9.1) with enough points, and for those
that fall doubly exponentially (10.32.9).
"""

from __future__ import annotations

import math

import torch

from ._decomposed_elements import with_slope

aten = torch.ops.aten

_EULER = 0.57721566490153286061

#: Up to this x, the sum over the circle is used; beyond it, Hankel's expansion (10.17).
_FAR = 25.0

#: Points in a quarter of the circle.
_N_POINTS = 40

#: Terms of Neumann's series (10.8.2), whose functions have orders up to twice that.
_N_NEUMANN = 32

#: Steps along the line, and their number.
_STEP, _N_STEPS = 0.2, 100


def _circle():
    """Sines of the points of a quarter, their shares, and the weights of Neumann's series there."""
    for j in range(_N_POINTS + 1):
        angle = math.pi / 2 * j / _N_POINTS
        share = (1 if 0 < j < _N_POINTS else 0.5) / _N_POINTS
        signs = ((-1) ** k * math.cos(2 * k * angle) / k for k in range(1, _N_NEUMANN + 1))
        yield math.sin(angle), share, sum(signs)


def _near(x):
    """J0, J1, Y0 and Y1 for 0 < x ≤ 25."""
    j0, j1, sum0, sum1 = (torch.zeros_like(x) for _ in range(4))
    for sine, share, weight in _circle():
        even, odd = (x * sine).cos() * share, (x * sine).sin() * (share * sine)
        j0, j1 = j0 + even, j1 + odd
        sum0, sum1 = sum0 + even * weight, sum1 + odd * weight
    log = (x / 2).log() + _EULER
    y0 = 2 / math.pi * (log * j0 - 2 * sum0)
    y1 = 2 / math.pi * (log * j1 - j0 / x - 2 * sum1)
    return j0, j1, y0, y1


def _beyond(order: int, x):
    """The functions of the first and second kind for x > 25."""
    p, q, term = torch.ones_like(x), torch.zeros_like(x), torch.ones_like(x)
    for k in range(1, 14):
        term = term * (4 * order * order - (2 * k - 1) ** 2) / (8 * k * x)
        sign = -1 if k % 4 in (2, 3) else 1
        p, q = (p + sign * term, q) if k % 2 == 0 else (p, q + sign * term)
    phase = x - (2 * order + 1) * math.pi / 4
    scale = (2 / (math.pi * x)).sqrt()
    sine, cosine = phase.sin(), phase.cos()
    return scale * (p * cosine - q * sine), scale * (p * sine + q * cosine)


def _wide(x):
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return x.to(torch.float64), dtype


def _both_orders(x, is_second: bool):
    """The functions of orders 0 and 1."""
    size = x.abs()
    inside = (size > 0) & (size <= _FAR)
    near = _near(torch.where(inside, size, 1.0))
    far = torch.where((size > _FAR) & ~size.isinf(), size, _FAR)
    values = []
    for order in range(2):
        value = torch.where(inside, near[order + 2 * is_second], _beyond(order, far)[is_second])
        value = torch.where(size.isinf(), math.nan, value)
        if is_second:
            value = torch.where(x < 0, math.nan, torch.where(x == 0, -math.inf, value))
        else:
            value = torch.where(x == 0, 1.0 - order, value)
            value = torch.where(x < 0, -value, value) if order else value
        values.append(torch.where(x.isnan(), x, value))
    return values


def _rule(order: int, is_second: bool):
    def rule(x):
        wide, dtype = _wide(x)
        zeroth, first = _both_orders(wide.detach(), is_second)
        if order == 0:
            return with_slope(zeroth, wide, -first).to(dtype)
        ratio = first / torch.where(wide == 0, 1.0, wide)
        ratio = torch.where(wide == 0, first if is_second else torch.full_like(first, 0.5), ratio)
        return with_slope(first, wide, zeroth - ratio).to(dtype)

    return rule


def _modified(order: int, x, is_scaled: bool):
    """K0 or K1, or the same times exp(x)."""
    tiny = x < 1e-5
    is_far = x > _FAR
    given = torch.where(tiny | is_far, 1.0, x)
    value = torch.full_like(given, 0.5)
    for k in range(1, _N_STEPS + 1):
        t = k * _STEP
        factor = math.cosh(t) if order else 1.0
        value = value + factor * (-(math.cosh(t) - 1) * given).exp()
    far = torch.where(is_far & ~x.isinf(), x, _FAR)
    term = expansion = torch.ones_like(far)
    for k in range(1, 14):
        term = term * (4 * order * order - (2 * k - 1) ** 2) / (8 * k * far)
        expansion = expansion + term
    expansion = expansion * (math.pi / (2 * far)).sqrt()
    value = torch.where(is_far, expansion, value * _STEP)
    least = torch.where(x > 0, torch.where(tiny, x, 1.0), 1.0)
    limit = least.reciprocal() if order else -((least / 2).log() + _EULER)
    value = torch.where(tiny, limit * least.exp(), value)
    value = value if is_scaled else value * (-torch.where(x > 0, x, 0.0)).exp()
    value = torch.where(x == math.inf, 0.0, value)
    value = torch.where(x < 0, math.nan, torch.where(x == 0, math.inf, value))
    return torch.where(x.isnan(), x, value)


def _modified_rule(order: int, is_scaled: bool):
    def rule(x):
        wide, dtype = _wide(x)
        given = wide.detach()
        zeroth, first = (_modified(n, given, is_scaled) for n in range(2))
        value = first if order else zeroth
        slope = -zeroth - first / given if order else -first
        return with_slope(value, wide, slope + value if is_scaled else slope).to(dtype)

    return rule


RULES = {
    aten.special_bessel_j0.default: _rule(0, False),
    aten.special_bessel_j1.default: _rule(1, False),
    aten.special_bessel_y0.default: _rule(0, True),
    aten.special_bessel_y1.default: _rule(1, True),
    aten.special_modified_bessel_k0.default: _modified_rule(0, False),
    aten.special_modified_bessel_k1.default: _modified_rule(1, False),
    aten.special_scaled_modified_bessel_k0.default: _modified_rule(0, True),
    aten.special_scaled_modified_bessel_k1.default: _modified_rule(1, True),
}

__all__ = ["RULES"]
