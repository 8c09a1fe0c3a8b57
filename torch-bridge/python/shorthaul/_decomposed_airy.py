"""Airy's function of the first kind, in float64.

Owns its three formulas: the power series around 0, and quotients of polynomials in the reciprocal
of ``ζ = ⅔·|x|^(3/2)`` on both sides (coefficients of Moshier's Cephes library, as in PyTorch's
``Math.h``). It gives no gradient, as in PyTorch.
"""

from __future__ import annotations

import math

import torch

aten = torch.ops.aten

_AN = (
    3.46538101525629032477e-01,
    1.20075952739645805542e01,
    7.62796053615234516538e01,
    1.68089224934630576269e02,
    1.59756391350164413639e02,
    7.05360906840444183113e01,
    1.40264691163389668864e01,
    9.99999999999999995305e-01,
)
_AD = (
    5.67594532638770212846e-01,
    1.47562562584847203173e01,
    8.45138970141474626562e01,
    1.77318088145400459522e02,
    1.64234692871529701831e02,
    7.14778400825575695274e01,
    1.40959135607834029598e01,
    1.00000000000000000470e00,
)
_AFN = (
    -1.31696323418331795333e-01,
    -6.26456544431912369773e-01,
    -6.93158036036933542233e-01,
    -2.79779981545119124951e-01,
    -4.91900132609500318020e-02,
    -4.06265923594885404393e-03,
    -1.59276496239262096340e-04,
    -2.77649108155232920844e-06,
    -1.67787698489114633780e-08,
)
_AFD = (
    1.33560420706553243746e01,
    3.26825032795224613948e01,
    2.67367040941499554804e01,
    9.18707402907259625840e00,
    1.47529146771666414581e00,
    1.15687173795188044134e-01,
    4.40291641615211203805e-03,
    7.54720348287414296618e-05,
    4.51850092970580378464e-07,
)
_AGN = (
    1.97339932091685679179e-02,
    3.91103029615688277255e-01,
    1.06579897599595591108e00,
    9.39169229816650230044e-01,
    3.51465656105547619242e-01,
    6.33888919628925490927e-02,
    5.85804113048388458567e-03,
    2.82851600836737019778e-04,
    6.98793669997260967291e-06,
    8.11789239554389293311e-08,
    3.41551784765923618484e-10,
)
_AGD = (
    9.30892908077441974853e00,
    1.98352928718312140417e01,
    1.55646628932864612953e01,
    5.47686069422975497931e00,
    9.54293611618961883998e-01,
    8.64580826352392193095e-02,
    4.12656523824222607191e-03,
    1.01259085116509135510e-04,
    1.17166733214413521882e-06,
    4.91834570062930015649e-09,
)

#: Between −x and x the series serves; beyond the last place PyTorch's function is 0.
_NEAR, _LAST = 2.09, 103.892

#: Terms of the series. At ``_NEAR``, the last one is far below rounding.
_N_TERMS = 16

#: ``Ai(0)`` and ``−Ai′(0)``, and ``1/√π``.
_AT_ZERO, _SLOPE_AT_ZERO = 0.355028053887817239260, 0.258819403792806798405
_SCALE = 5.64189583547756286948e-01


def _polynomial(x, coefficients):
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _series(x):
    cube = x * x * x
    even, odd = torch.ones_like(x), x
    first, second = even, odd
    for k in range(1, _N_TERMS):
        first = first * cube / ((3 * k - 1) * (3 * k))
        second = second * cube / ((3 * k) * (3 * k + 1))
        even, odd = even + first, odd + second
    return _AT_ZERO * even - _SLOPE_AT_ZERO * odd


def airy_ai(x):
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    x = x.detach().to(torch.float64)
    size = torch.where((x.abs() > _NEAR) & ~x.isinf(), x.abs(), _NEAR)
    zeta, root = 2 * size * size.sqrt() / 3, size.sqrt().sqrt()
    z = zeta.reciprocal()
    above = _SCALE * _polynomial(z, _AN) / _polynomial(z, _AD) / (2 * root * zeta.exp())
    square, angle = z * z, zeta + 0.25 * math.pi
    even = 1 + square * _polynomial(square, _AFN) / _polynomial(square, _AFD)
    odd = z * _polynomial(square, _AGN) / _polynomial(square, _AGD)
    below = _SCALE / root * (angle.sin() * even - angle.cos() * odd)
    near = _series(torch.where(x.abs() > _NEAR, 0.0, x))
    value = torch.where(x >= _NEAR, above, torch.where(x < -_NEAR, below, near))
    value = torch.where(x > _LAST, 0.0, value)
    return torch.where(x.isinf(), math.nan, value).to(dtype)


RULES = {aten.special_airy_ai.default: airy_ai}

__all__ = ["RULES"]
