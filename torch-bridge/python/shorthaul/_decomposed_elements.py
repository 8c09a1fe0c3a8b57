"""Functions of single elements, and of pairs of rows, written with operators the importer has.

Owns the formulas. What float32 cannot hold well enough is computed in float64. A function with a
known derivative is given it by :func:`with_slope`, since the derivative of its approximation would
be less exact.
"""

from __future__ import annotations

import functools
import math

import torch

from ._straight_through import straight_through

aten = torch.ops.aten


def with_slope(value: torch.Tensor, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """``value``, whose derivative with respect to ``x`` is ``slope``.

    A slope that is infinite or no number is passed on as it is.
    """
    moving = (slope.detach() * x).to(value.dtype).expand(value.shape)
    return straight_through(value.detach(), moving)


def with_zero_slope(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``value``, in which ``x`` has the gradient zero, as eager gives it, not none."""
    ghost = (x - x.detach()) * 0
    return value.detach() + torch.where(ghost == 0, ghost, 0.0)


def _float64(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64)


def _result_type(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


def signbit(x):
    if not x.is_floating_point():
        return x < 0
    return (x < 0) | ((x == 0) & (x.reciprocal() < 0))


def _of_numbers(extreme):
    """The extreme of two values, ignoring NaN; at a tie, both get half the gradient."""

    def rule(a, b):
        return torch.where(b.isnan(), a, torch.where(a.isnan(), b, extreme(a, b)))

    return rule


fmax, fmin = _of_numbers(torch.maximum), _of_numbers(torch.minimum)


def angle(x):
    if x.is_complex():
        return NotImplemented
    value = torch.where(x < 0, math.pi, torch.where(x.isnan(), x, 0.0))
    value = value.to(_result_type(x))
    return with_zero_slope(value, x) if x.is_floating_point() else value


def bernoulli(x, *, generator=None):
    if generator is not None or not x.is_floating_point():
        return NotImplemented
    return with_zero_slope((torch.rand_like(x) < x).to(x.dtype), x)


def rrelu(x, noise, lower=0.125, upper=1 / 3, training=False, generator=None):
    if generator is not None:
        return NotImplemented
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2), noise
    drawn = torch.where(x <= 0, torch.rand_like(x) * (upper - lower) + lower, 1.0)
    return x * drawn, drawn


def round_decimals(x, *, decimals):
    if decimals == 0:
        return x.round()
    factor = 10.0 ** abs(decimals)
    return (x * factor).round() / factor if decimals > 0 else (x / factor).round() * factor


#: Powers of two that bring the size of a float32 into [1, 2). Together they reach all exponents.
_HALVINGS = (128, 64, 32, 16, 8, 4, 2, 1)


def frexp(x):
    """``x = mantissa · 2**exponent``; each step multiplies by a power of two, which is exact."""
    if x.dtype != torch.float32:
        return NotImplemented
    wide = _float64(x)
    size = wide.detach().abs()
    is_usual = (size > 0) & (size < math.inf)
    size = torch.where(is_usual, size, 0.5)
    part, exponent = size, torch.ones_like(size)
    for step in _HALVINGS:
        is_large, is_small = part >= 2.0**step, part < 2.0 ** (1 - step)
        grown = torch.where(is_small, part * 2.0**step, part)
        part = torch.where(is_large, part * 2.0**-step, grown)
        exponent = exponent + torch.where(is_large, step, torch.where(is_small, -step, 0))
    factor = torch.where(is_usual, part / 2 / size, 1.0)
    exponent = torch.where(is_usual, exponent, 0.0).to(torch.int32)
    return (wide * factor).to(x.dtype), exponent


#: Relative to a float32, a distance between half a step and one and a half to its neighbour.
_TO_NEIGHBOUR = 1.25 * 2.0**-24

#: The least number of float32, the least with a full mantissa, and the largest.
_LEAST, _LEAST_FULL, _LARGEST = 2.0**-149, 2.0**-126, (2 - 2.0**-23) * 2.0**127


def nextafter(x, to):
    """The neighbour of a float32: in float64 a bit more than half a step away, rounded."""
    if x.dtype != torch.float32 or to.dtype != torch.float32:
        return NotImplemented
    wide, end = _float64(x), _float64(to)
    size = wide.abs()
    step = torch.where(size < _LEAST_FULL, _LEAST, size * _TO_NEIGHBOUR)
    value = torch.where(end > wide, wide + step, wide - step)
    value = torch.where((value == 0) & (wide < 0), -0.0, value)
    value = torch.where(size.isinf(), torch.where(wide > 0, _LARGEST, -_LARGEST), value)
    value = torch.where(wide == end, end, value)
    return torch.where(wide.isnan() | end.isnan(), math.nan, value).to(x.dtype)


#: Coefficients of the odd powers of 1/x in Stirling's series.
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def _log_gamma(x):
    """Stirling's series of ``log|gamma(x)|`` for x > 0, shifted up by eight where x is small."""
    is_small = x < 8
    shifted = torch.where(is_small, x + 8, x)
    product = x
    for i in range(1, 8):
        product = product * (x + i)
    inverse = shifted.reciprocal()
    square = inverse * inverse
    series = torch.zeros_like(x)
    for coefficient in reversed(STIRLING):
        series = series * square + coefficient
    half_log = 0.5 * math.log(2 * math.pi)
    value = (shifted - 0.5) * shifted.log() - shifted + half_log + series * inverse
    return value - torch.where(is_small, product, 1.0).log()


def _from_whole(x):
    """The distance d of x from the nearest whole number, which is exact, and ``sin(πd)/(πd)``."""
    distance = x - x.round()
    turned = math.pi * distance
    safe = torch.where(turned == 0, 1.0, turned)
    return distance, torch.where(turned == 0, 1.0, safe.sin() / safe)


def lgamma(x):
    dtype, wide = _result_type(x), _float64(x)
    reflected = wide < 0.5
    upper = torch.where(reflected, 1 - wide, wide)
    value = _log_gamma(upper)
    distance, ratio = _from_whole(wide)
    value = torch.where(reflected, -distance.abs().log() - ratio.log() - value, value)
    is_pole = (wide <= 0) & (distance == 0) | wide.isinf()
    value = torch.where(is_pole, math.inf, value)
    return with_slope(value, wide, _digamma(wide)).to(dtype)


def _digamma(x):
    reflected = x < 0.5
    upper = torch.where(reflected, 1 - x, x)
    total = torch.zeros_like(upper)
    for i in range(8):
        total = total - (upper + i).reciprocal()
    shifted = upper + 8
    square = shifted.square().reciprocal()
    series = square * (
        1 / 12
        - square
        * (
            1 / 120
            - square * (1 / 252 - square * (1 / 240 - square * (1 / 132 - square * 691 / 32760)))
        )
    )
    total = total + shifted.log() - 0.5 / shifted - series
    distance, ratio = _from_whole(x)
    cotangent = (math.pi * distance).cos() / ratio / distance
    total = torch.where(reflected, total - cotangent, total)
    total = torch.where((x < 0) & (distance == 0), math.nan, total)
    infinite = torch.where(signbit(x), math.inf, -math.inf)
    return torch.where(x == 0, infinite, total)


def digamma(x):
    wide = _float64(x)
    return with_slope(_digamma(wide), wide, _polygamma(1, wide)).to(_result_type(x))


#: Bernoulli numbers B2, B4, … divided by (2k)!.
_BERNOULLI = (
    1 / 12,
    -1 / 720,
    1 / 30240,
    -1 / 1209600,
    1 / 47900160,
    -691 / 1307674368000,
    1 / 74724249600,
    -3617 / 10670622842880000,
)


def _zeta(s, q):
    """Hurwitz's zeta function for q > 0, by Euler and Maclaurin from the tenth term on."""
    total = torch.zeros_like(q)
    for i in range(10):
        total = total + (q + i) ** -s
    from_here = q + 10
    power = from_here**-s
    total = total + power * from_here / (s - 1) + 0.5 * power
    factor, step = s, power / from_here
    for k, number in enumerate(_BERNOULLI):
        total = total + number * factor * step
        factor = factor * (s + 2 * k + 1) * (s + 2 * k + 2)
        step = step / (from_here * from_here)
    return total


def zeta(s, q):
    """Hurwitz's zeta function, whose derivative in q is ``-s·zeta(s + 1, q)``."""
    dtype = torch.result_type(s, q)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    s, q = (_float64(v) if isinstance(v, torch.Tensor) else float(v) for v in (s, q))
    q = q if isinstance(q, torch.Tensor) else torch.full_like(s, q)
    s = s if isinstance(s, torch.Tensor) else torch.full_like(q, s)
    return with_slope(_zeta_of_all(s, q), q, -s * _zeta_of_all(s + 1, q)).to(dtype)


def _zeta_of_all(s, q):
    # Below zero, the terms up to the first positive q are a difference of two values above zero.
    is_below = q < 0
    size = torch.where(is_below, -q, 1.0)
    part = size - size.floor()
    at = torch.where(is_below, 1 - part, q)
    sign = torch.where(is_below, torch.where(s.remainder(2) == 1, -1.0, 1.0), 0.0)
    value = _zeta(s, at) + sign * _zeta(s, torch.where(is_below, part, 1.0))
    value = value - sign * _zeta(s, size + 1)
    is_pole = (q <= 0) & (q == q.floor())
    unknown = (s < 1) | (is_below & (s != s.floor())) | q.isnan()
    value = torch.where(is_pole, math.inf, torch.where(unknown, math.nan, value))
    return torch.where(s == 1, math.inf, value)


def _polygamma(n: int, x):
    """The n-th derivative of digamma, n ≥ 1; below zero by reflection of its first derivative."""
    factorial = float(math.factorial(n)) * (1 if n % 2 else -1)
    above = factorial * _zeta(float(n + 1), torch.where(x > 0, x, 1.0))
    if n == 1:
        distance, ratio = _from_whole(x)
        below = (ratio * distance).reciprocal().square() - _zeta(
            2.0, torch.where(x > 0, 1.0, 1 - x)
        )
    else:
        s = torch.full_like(x, float(n + 1))
        below = factorial * _zeta_of_all(s, torch.where(x > 0, 1.0, x))
    found = torch.where(x > 0, above, below)
    return torch.where(x == math.inf, 0.0, found) if n == 1 else found


def polygamma(n, x):
    wide = _float64(x)
    if n == 0:
        return with_slope(_digamma(wide), wide, _polygamma(1, wide)).to(_result_type(x))
    value, slope = _polygamma(n, wide), _polygamma(n + 1, wide)
    return with_slope(value, wide, slope).to(_result_type(x))


def erfc(x):
    wide = _float64(x)
    slope = -2 / math.sqrt(math.pi) * (-wide * wide).exp()
    return with_slope(_erfcx_positive(wide.abs(), wide), wide, slope).to(_result_type(x))


def _erfcx_positive(size, x):
    """``erfc(x)`` from the scaled function of its size, which loses no digits where it is small."""
    scaled = (-size * size).exp() * _scaled_erfc(size)
    return torch.where(x < 0, 2 - scaled, scaled)


def _scaled_erfc(x):
    """``exp(x²)·erfc(x)`` for x ≥ 0: near zero by erf, then by a continued fraction."""
    near = torch.where(x < 2, x, 0.0)
    small = (near * near).exp() * (1 - near.erf())
    far = torch.where(x < 2, 2.0, x)
    fraction = far
    for k in range(60, 0, -1):
        fraction = far + 0.5 * k / fraction
    return torch.where(x < 2, small, 1 / (math.sqrt(math.pi) * fraction))


def erfcx(x):
    wide = _float64(x)
    size = wide.abs()
    above = _scaled_erfc(size)
    value = torch.where(wide < 0, 2 * (wide * wide).exp() - above, above)
    slope = 2 * wide * value - 2 / math.sqrt(math.pi)
    return with_slope(value, wide, slope).to(_result_type(x))


def log_ndtr(x):
    """The logarithm of the normal distribution, from the scaled function where it is small."""
    wide = _float64(x)
    t = wide / math.sqrt(2)
    is_low = t < 0
    low, high = torch.where(is_low, -t, 0.0), torch.where(is_low, 0.0, t)
    scaled = _scaled_erfc(low)
    tail = (-high * high).exp() * _scaled_erfc(high) / 2
    value = torch.where(is_low, (scaled / 2).log() - low * low, torch.log1p(-tail))
    slope = torch.where(
        is_low,
        math.sqrt(2 / math.pi) / scaled,
        (-high * high).exp() / (math.sqrt(2 * math.pi) * (1 - tail)),
    )
    return with_slope(value, wide, slope).to(_result_type(x))


#: Giles' polynomials for the inverse of erf (GPU Computing Gems, 2011), highest power first.
_ERFINV_NEAR = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_ERFINV_FAR = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def _erfinv(x):
    """A polynomial, and two steps of Newton's on ``erf`` in float64."""
    w = -((1 - x) * (1 + x)).log()
    near, far = w - 2.5, w.sqrt() - 3
    value_near, value_far = torch.zeros_like(x), torch.zeros_like(x)
    for a, b in zip(_ERFINV_NEAR, _ERFINV_FAR, strict=True):
        value_near, value_far = value_near * near + a, value_far * far + b
    value = torch.where(w < 5, value_near, value_far) * x
    for _ in range(2):
        error = torch.where(value < 0, _negative_error(value, x), -_negative_error(-value, -x))
        value = value - error * (math.sqrt(math.pi) / 2) * (value * value).exp()
    value = torch.where(x.abs() == 1, x * math.inf, value)
    return torch.where(x.abs() > 1, math.nan, value)


def _negative_error(value, x):
    """``erf(value) − x`` where both are negative, from their distance to −1."""
    return _erfcx_positive(-value, -value) - (1 + x)


def erfinv(x):
    wide = _float64(x)
    value = _erfinv(wide)
    slope = math.sqrt(math.pi) / 2 * (value * value).exp()
    return with_slope(value, wide, slope).to(_result_type(x))


#: Cephes' quotients of polynomials for the inverse of the normal distribution: around the middle,
#: and in the tail by ``1 / sqrt(-2·log(p))`` above and below 1/8; highest powers first.
_NDTRI_MIDDLE = (
    (-59.9633501014107895, 98.0010754185999662, -56.6762857469070293, 13.9312609387279679)
    + (-1.23916583867381258,),
    (1.0, 1.95448858338141760, 4.67627912898881538, 86.3602421390890591, -225.462687854119371)
    + (200.260212380060660, -82.0372256168333340, 15.9056225126211696, -1.18331621121330003),
)
_NDTRI_TAIL = (
    (4.05544892305962420, 31.5251094599893867, 57.1628192246421289, 44.0805073893200835)
    + (14.6849561928858024, 2.18663306850790268, -0.140256079171354496, -0.0350424626827848203)
    + (-8.57456785154685414e-4,),
    (1.0, 15.7799883256466750, 45.3907635128879211, 41.3172038254672030, 15.0425385692907503)
    + (2.50464946208309416, -0.142182922854787789, -0.0380806407691578277)
    + (-9.33259480895457427e-4,),
)
_NDTRI_FAR = (
    (3.23774891776946036, 6.91522889068984212, 3.93881025292474443, 1.33303460815807542)
    + (0.201485389549179082, 0.0123716634817820021, 3.01581553508235416e-4)
    + (2.65806974686737551e-6, 6.23974539184983294e-9),
    (1.0, 6.02427039364742014, 3.67983563856160859, 1.37702099489081330, 0.216236993594496636)
    + (0.0134204006088543189, 3.28014464682127739e-4, 2.89247864745380684e-6)
    + (6.79019408009981274e-9,),
)


def _quotient(x, polynomials):
    above, below = (
        functools.reduce(lambda total, c: total * x + c, one, torch.zeros_like(x))
        for one in polynomials
    )
    return above / below


def _ndtri(p):
    is_high = p > 0.5
    tail = torch.where(is_high, 1 - p, p)
    middle = tail - 0.5
    square = middle * middle
    near = (middle + middle * square * _quotient(square, _NDTRI_MIDDLE)) * math.sqrt(2 * math.pi)
    far = (-2 * torch.where((tail > 0) & (tail < math.exp(-2)), tail, 0.1).log()).sqrt()
    inverse = far.reciprocal()
    quotient = torch.where(far < 8, _quotient(inverse, _NDTRI_TAIL), _quotient(inverse, _NDTRI_FAR))
    far = far.log() * inverse + inverse * quotient - far
    value = torch.where(tail > math.exp(-2), near, torch.where(tail == 0, -math.inf, far))
    value = torch.where(is_high, -value, value)
    return torch.where((tail >= 0) & (tail <= 1), value, math.nan)


def ndtri(x):
    wide = _float64(x)
    value = _ndtri(wide)
    slope = math.sqrt(2 * math.pi) * (0.5 * value * value).exp()
    return with_slope(value, wide, slope).to(_result_type(x))


def _bessel_i(order: int, x, *, is_scaled: bool):
    """Modified Bessel functions of order 0 and 1: the power series up to 12, asymptotic beyond."""
    size = x.abs()
    near = torch.where(size < 16, size, 1.0)
    quarter = near * near / 4
    term = torch.ones_like(size) if order == 0 else near / 2
    series = term
    for k in range(1, 48):
        term = term * quarter / (k * (k + order))
        series = series + term
    far = torch.where(size < 16, 16.0, size)
    term = asymptotic = torch.ones_like(size)
    for k in range(1, 18):
        term = term * -(4 * order * order - (2 * k - 1) ** 2) / (k * 8 * far)
        asymptotic = asymptotic + term
    asymptotic = asymptotic / (2 * math.pi * far).sqrt()
    if is_scaled:
        value = torch.where(size < 16, series * (-near).exp(), asymptotic)
    else:
        value = torch.where(size < 16, series, asymptotic * far.exp())
    return torch.where(x < 0, -value, value) if order else value


def _bessel_rule(order: int, is_scaled: bool):
    def rule(x):
        wide = _float64(x)
        value = _bessel_i(order, wide, is_scaled=is_scaled)
        other = _bessel_i(1 - order, wide, is_scaled=is_scaled)
        slope = other
        if order == 1:
            ratio = torch.where(wide == 0, 0.5, value / torch.where(wide == 0, 1.0, wide))
            if is_scaled:
                ratio = torch.where(wide == 0, 0.5, ratio)
            slope = other - ratio
        if is_scaled:
            slope = slope - wide.sign() * value
        return with_slope(value, wide, slope).to(_result_type(x))

    return rule


def spherical_bessel_j0(x):
    wide = _float64(x)
    safe = torch.where(wide == 0, 1.0, wide)
    value = torch.where(wide.isinf(), 0.0, safe.sin() / safe)
    return torch.where(wide == 0, 1.0, value).to(_result_type(x))


def addbmm(x, a, b, *, beta=1, alpha=1):
    product = torch.bmm(a, b).sum(0)
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return with_zero_slope(product, x.expand(product.shape))
    return (x if beta == 1 else x * beta) + product


def _distance(difference, p: float):
    """The p-norm along the last dimension, with the gradient 0 where it is 0."""
    size = difference.abs()
    if p == 0:
        return with_zero_slope((size != 0).to(size.dtype), difference).sum(-1)
    if p == 1:
        return size.sum(-1)
    if math.isinf(p):
        # Each of several largest differences gets the whole gradient.
        largest = size.detach().amax(-1, keepdim=True)
        moved = torch.where(size == largest, size - size.detach(), 0.0)
        return largest.squeeze(-1) + moved.sum(-1)
    is_zero = size == 0
    powers = difference * difference if p == 2 else torch.where(is_zero, 1.0, size) ** p
    total = torch.where(is_zero, 0.0, powers).sum(-1)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    root = total.sqrt() if p == 2 else total ** (1 / p)
    return torch.where(nothing, 0.0, root)


def cdist_forward(a, b, p, compute_mode=None):
    return _distance(a.unsqueeze(-2) - b.unsqueeze(-3), p)


def pdist_forward(x, p=2.0):
    n = x.shape[0]
    rows = [x[i : i + 1] - x[i + 1 :] for i in range(n - 1)]
    return _distance(torch.cat(rows), p) if rows else NotImplemented


def eye(n, m=None, *, dtype=None, layout=None, device=None, pin_memory=None):
    """PyTorch's own rule counts in a type of 16 bits without sign where that is enough."""
    rows, columns = (torch.arange(size, device=device) for size in (n, n if m is None else m))
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


def dist(a, b, p=2.0):
    return torch.linalg.vector_norm(a - b, p)


RULES = {
    aten.signbit.default: signbit,
    aten.fmax.default: fmax,
    aten.fmin.default: fmin,
    aten.angle.default: angle,
    aten.frexp.Tensor: frexp,
    aten.nextafter.default: nextafter,
    aten.bernoulli.default: bernoulli,
    aten.round.decimals: round_decimals,
    aten.rrelu_with_noise_functional.default: rrelu,
    aten.lgamma.default: lgamma,
    aten.digamma.default: digamma,
    aten.special_zeta.default: zeta,
    aten.polygamma.default: polygamma,
    aten.erfc.default: erfc,
    aten.special_erfcx.default: erfcx,
    aten.erfinv.default: erfinv,
    aten.special_ndtri.default: ndtri,
    aten.special_log_ndtr.default: log_ndtr,
    aten.i0.default: _bessel_rule(0, False),
    aten.special_i0e.default: _bessel_rule(0, True),
    aten.special_i1.default: _bessel_rule(1, False),
    aten.special_i1e.default: _bessel_rule(1, True),
    aten.special_modified_bessel_i0.default: _bessel_rule(0, False),
    aten.special_modified_bessel_i1.default: _bessel_rule(1, False),
    aten.special_spherical_bessel_j0.default: spherical_bessel_j0,
    aten.addbmm.default: addbmm,
    aten._cdist_forward.default: cdist_forward,
    aten._pdist_forward.default: pdist_forward,
    aten.dist.default: dist,
    aten.eye.default: eye,
    aten.eye.m: eye,
}

__all__ = ["RULES", "STIRLING", "with_slope", "with_zero_slope"]
