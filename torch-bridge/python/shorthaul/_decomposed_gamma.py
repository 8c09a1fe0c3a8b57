"""The regularized incomplete gamma functions, by quadrature in float64.

Owns the two integrals and what they are at the ends. Both run over ``(0, ∞)`` and are smooth there
in the logarithm of the variable, for which the trapezoidal rule converges fast (Takahasi and Mori,
"Double exponential formulas for numerical integration", 1974).
"""

from __future__ import annotations

import math

import torch

from ._decomposed_elements import STIRLING, lgamma, with_slope

aten = torch.ops.aten

#: Points of the rule in each unit of the logarithm, and the units it reaches from and to.
_DENSITY, _FROM, _TO = 16, -4.5, 8.0


def _points():
    """Places and weights: ``y = exp(u − exp(−u))`` at evenly spaced ``u``."""
    n = int((_TO - _FROM) * _DENSITY) + 1
    u = torch.arange(n, dtype=torch.float64) / _DENSITY + _FROM
    tail = (-u).exp()
    y = (u - tail).exp()
    return y, y * (1 + tail) / _DENSITY


def _prefix(a, x):
    """``xᵃ·e⁻ˣ/Γ(a)``.

    For large a by Stirling's series, where ``d = (x − a)/a``:
    ``sqrt(a/2π)·exp(a·(log(1 + d) − d) − 1/(12a) + …)``. With ``r = d/(2 + d)``, the difference
    is ``−r·d + 2·(r³/3 + r⁵/5 + …)``, which loses no digits where d is small.
    """
    is_large = a >= 10
    high = torch.where(is_large, a, 10.0)
    away = torch.where(is_large, x - a, 0.0) / high
    ratio = away / (2 + away)
    square = ratio * ratio
    series = torch.zeros_like(a)
    for k in range(35, 1, -2):
        series = series * square + 1 / k
    near = 2 * ratio * square * series - ratio * away
    exponent = high * torch.where(away.abs() < 0.5, near, torch.log1p(away) - away)
    inverse, rest = high.reciprocal(), torch.zeros_like(a)
    for coefficient in reversed(STIRLING):
        rest = rest * inverse * inverse + coefficient
    large = (high / (2 * math.pi)).sqrt() * (exponent - rest * inverse).exp()
    return torch.where(is_large, large, (a * x.log() - x - lgamma(a)).exp())


def _parts(a, x):
    """``P(a, x)``, ``Q(a, x)`` and the slope of the first in ``x``, for ``a, x > 0``.

    With ``p = xᵃ·e⁻ˣ/Γ(a)``, below ``a``: ``P = p/a·(1 + x·∫ exp(−(a+1)·y + x·(1 − e⁻ʸ)) dy)``,
    above: ``Q = p/x·∫ exp((a−1)·log(1 + y/x) − y) dy``. Where a is large, the first integrand is
    narrow and the second wide; ``y`` is stretched by their widths.
    """
    y, weights = _points()
    scale = _prefix(a, x)
    is_low = x < a
    narrow = 1 / (x.sqrt() + torch.where(is_low, a - x, 0.0) + 1)
    wide = 1 / (torch.where(is_low, 0.0, 1 - (a - 1) / x) + a.sqrt() / x)
    width = torch.where(is_low, narrow, wide.clamp(min=1))
    wide_a, wide_x = a.unsqueeze(-1), x.unsqueeze(-1)
    y = y * width.unsqueeze(-1)
    lower = (-(wide_a + 1) * y - wide_x * torch.expm1(-y)).exp()
    upper = ((wide_a - 1) * torch.log1p(y / wide_x) - y).exp()
    integral = (torch.where(is_low.unsqueeze(-1), lower, upper) * weights).sum(-1) * width
    part = torch.where(is_low, scale / a * (1 + x * integral), scale / x * integral)
    return torch.where(is_low, part, 1 - part), torch.where(is_low, 1 - part, part), scale / x


def _rule(is_upper: bool):
    def rule(a, x):
        dtype = torch.result_type(a, x)
        if dtype not in (torch.float32, torch.float64):
            return NotImplemented
        a, given = torch.broadcast_tensors(a.detach().to(torch.float64), x.to(torch.float64))
        x = given.detach()
        usual = (a > 0) & (x > 0) & a.isfinite() & x.isfinite()
        below, above, slope = _parts(torch.where(usual, a, 1.0), torch.where(usual, x, 1.0))
        # At the ends, one function is 1 and the other 0.
        end = torch.where((x.isinf() & a.isfinite()) | ((a == 0) & (x > 0)), 1.0, 0.0)
        unknown = (a < 0) | (x < 0) | a.isnan() | x.isnan() | (a.isinf() & x.isinf())
        end = torch.where(unknown | ((a == 0) & (x == 0)), math.nan, end)
        value = torch.where(usual, above, 1 - end) if is_upper else torch.where(usual, below, end)
        slope = torch.where(usual, slope, 0.0)
        return with_slope(value, given, -slope if is_upper else slope).to(dtype)

    return rule


RULES = {
    aten.igamma.default: _rule(False),
    aten.igammac.default: _rule(True),
}

__all__ = ["RULES"]
