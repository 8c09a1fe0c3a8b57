"""Functions of elements at special points: kinks, ties, ends of domains, zeros, infinities, NaN.

A program runs a table of functions in float32 and float64. Each function has inputs of its own, so
that the NaN of one hides nothing of another.
"""

import math

import torch
from torch.nn import functional

from .facts import observe, step
from .registry import program

INF, NAN = math.inf, math.nan

#: Kinks of the activations, ends of domains, and what is no number.
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 6.0, -6.0, 0.25, INF, -INF, NAN)
#: Without what eager itself computes differently in a vector and alone.
NUMBERS = EDGES[:-1]
FINITE = EDGES[:-3]
#: Where exponentials overflow, or leave nothing.
LARGE = (9.0, -9.0, 15.0, -15.0, 20.0, -20.0, 50.0, -50.0, 90.0, -90.0, 105.0, -105.0, 1e3, -1e3)
#: Pairs of these are the inputs of functions of two values.
ONES = (0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, INF, -INF, NAN)


def at(values, *functions, **named):
    """Rows of a table: each function at the same values."""
    return {name: (f, [values]) for name, f in named.items()}


def at_pairs(**named):
    first = [a for a in ONES for _ in ONES]
    second = [b for _ in ONES for b in ONES]
    return {name: (f, [first, second]) for name, f in named.items()}


def kinks(name, rows):
    """A program of a table: a function and the values of its inputs by name."""

    def forward(inputs):
        return {key: f(*inputs[key]) for key, (f, _) in rows.items()}

    def run(wrap):
        model = wrap(forward)
        seen = []
        for dtype in (torch.float32, torch.float64):
            inputs = {
                key: [torch.tensor(v, dtype=dtype, requires_grad=True) for v in values]
                for key, (_, values) in rows.items()
            }
            out, *_ = step(model, inputs)
            gradients = {key: observe([t.grad for t in given]) for key, given in inputs.items()}
            seen.append([out, gradients])
        return seen

    program(run, name=name, theme="kinks")


kinks(
    "steps",
    at(
        EDGES,
        sign=torch.sign,
        sgn=torch.sgn,
        floor=torch.floor,
        ceil=torch.ceil,
        round=torch.round,
        round_decimals=lambda x: torch.round(x, decimals=1),
        trunc=torch.trunc,
        frac=torch.frac,
        nan_to_num=torch.nan_to_num,
        nan_to_numbers=lambda x: x.nan_to_num(1.0, 2.0, 3.0),
        signbit=torch.signbit,
        heaviside=lambda x: torch.heaviside(x.detach(), torch.full_like(x, 0.5)),
        isnan=torch.isnan,
        isinf=torch.isinf,
        isfinite=torch.isfinite,
        isposinf=torch.isposinf,
        isneginf=torch.isneginf,
        positive=torch.positive,
        negative=torch.negative,
        angle=torch.angle,
    )
    | at(
        FINITE,
        copysign_of_zero=lambda x: torch.copysign(x, 0.0),
        copysign_of_minus_zero=lambda x: torch.copysign(x, -0.0),
    ),
)
kinks(
    "activations",
    at(
        EDGES,
        relu=functional.relu,
        threshold=lambda x: functional.threshold(x, 1.0, 5.0),
        threshold_of_zero=lambda x: functional.threshold(x, 0.0, 0.0),
        leaky_relu=functional.leaky_relu,
        leaky_relu_of_zero=lambda x: functional.leaky_relu(x, 0.0),
        rrelu=functional.rrelu,
    )
    | at(
        NUMBERS,
        relu6=functional.relu6,
        hardtanh=functional.hardtanh,
        hardtanh_of_bounds=lambda x: functional.hardtanh(x, -2.0, 0.5),
        hardshrink=functional.hardshrink,
        hardshrink_of_zero=lambda x: functional.hardshrink(x, 0.0),
        softshrink=functional.softshrink,
        softshrink_of_zero=lambda x: functional.softshrink(x, 0.0),
        elu=functional.elu,
        elu_of_two=lambda x: functional.elu(x, 2.0),
        celu=functional.celu,
        celu_of_two=lambda x: functional.celu(x, 2.0),
        selu=functional.selu,
    ),
)
kinks(
    "smooth_activations",
    at(
        EDGES,
        gelu_tanh=lambda x: functional.gelu(x, approximate="tanh"),
        silu=functional.silu,
        mish=functional.mish,
        softplus=functional.softplus,
        softplus_of_threshold=lambda x: functional.softplus(x, 2.0, 1.0),
        logsigmoid=functional.logsigmoid,
        sigmoid=torch.sigmoid,
        tanh=torch.tanh,
        softsign=functional.softsign,
        tanhshrink=functional.tanhshrink,
    )
    | at(FINITE, gelu=functional.gelu),
)
kinks(
    "activations_far_out",
    at(
        LARGE,
        gelu=functional.gelu,
        gelu_tanh=lambda x: functional.gelu(x, approximate="tanh"),
        silu=functional.silu,
        mish=functional.mish,
        softplus=functional.softplus,
        logsigmoid=functional.logsigmoid,
        sigmoid=torch.sigmoid,
        tanh=torch.tanh,
        softsign=functional.softsign,
        tanhshrink=functional.tanhshrink,
        elu=functional.elu,
        celu=functional.celu,
        selu=functional.selu,
        erf=torch.erf,
        erfc=torch.erfc,
    ),
)
kinks(
    "domains",
    at(
        EDGES,
        sqrt=torch.sqrt,
        rsqrt=torch.rsqrt,
        reciprocal=torch.reciprocal,
        square=torch.square,
        log=torch.log,
        log2=torch.log2,
        log10=torch.log10,
        log1p=torch.log1p,
        exp=torch.exp,
        exp2=torch.exp2,
        expm1=torch.expm1,
        acos=torch.acos,
        asin=torch.asin,
        atan=torch.atan,
        asinh=torch.asinh,
        atanh=torch.atanh,
        sin=torch.sin,
        cos=torch.cos,
        tan=torch.tan,
        sinh=torch.sinh,
        cosh=torch.cosh,
        erf=torch.erf,
        erfc=torch.erfc,
        erfinv=torch.erfinv,
        rad2deg=torch.rad2deg,
    )
    | at(NUMBERS, logit_of_bound=lambda x: torch.logit(x, 0.25)),
)
kinks(
    "special_functions",
    at(EDGES, ndtri=torch.special.ndtri, i1e=torch.special.i1e)
    | at(FINITE, lgamma=torch.lgamma)
    | at((0.0, -0.0, NAN), digamma=torch.digamma),
)
kinks(
    "pairs",
    at_pairs(
        fmax=torch.fmax,
        fmin=torch.fmin,
        maximum=torch.maximum,
        minimum=torch.minimum,
        max=lambda x, y: torch.max(x, y),
        min=lambda x, y: torch.min(x, y),
    ),
)
