"""Functions of elements at special points: kinks, ties, ends of domains, zeros, infinities, NaN.

A program runs a table of functions, most in float32 and float64. Each has inputs of its own,
so that the NaN of one hides nothing of another.
"""

import functools
import math

import torch
from torch.nn import functional

from .tables import table

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


kinks = functools.partial(table, "kinks")


kinks(
    "steps",
    at(
        EDGES,
        abs=torch.abs,
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
        # In float64, eager's slope is 1/6 rounded to float32.
        hardsigmoid=lambda x: functional.hardsigmoid(x.float()),
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
        hardswish=functional.hardswish,
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
    "bounds",
    at(
        EDGES,
        both=lambda x: x.clamp(-1.0, 2.0),
        low=lambda x: x.clamp(min=0.0),
        high=lambda x: x.clamp(max=0.0),
        crossing=lambda x: x.clamp(2.0, -1.0),
        equal=lambda x: x.clamp(1.0, 1.0),
        clamp_min=lambda x: x.clamp_min(0.5),
        clamp_max=lambda x: x.clamp_max(0.5),
        infinite=lambda x: x.clamp(-INF, INF),
        not_a_number=lambda x: x.clamp(NAN, 1.0),
    ),
)
kinks(
    "bounds_that_are_tensors",
    at_pairs(
        low=lambda x, y: x.clamp(min=y),
        high=lambda x, y: x.clamp(max=y),
        clamp_min=torch.clamp_min,
        clamp_max=torch.clamp_max,
        both=lambda x, y: x.clamp(y, y + 1),
        crossing=lambda x, y: x.clamp(y, y - 1),
        around=lambda x, y: x.clamp(-y, y),
    )
    | {
        "three": (
            torch.clamp,
            [
                [a for a in (0.0, 1.0, 2.0, NAN) for _ in range(9)],
                [b for _ in range(4) for b in (0.0, 1.0, 2.0) for _ in range(3)],
                [c for _ in range(12) for c in (0.0, 1.0, 2.0)],
            ],
        )
    },
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
        acosh=torch.acosh,
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
        sinc=torch.sinc,
        entr=torch.special.entr,
        rad2deg=torch.rad2deg,
    )
    | at(EDGES[:1] + EDGES[2:], logit=torch.logit)
    | at(NUMBERS, logit_of_bound=lambda x: torch.logit(x, 0.25)),
)
kinks(
    "special_functions",
    at(EDGES, ndtri=torch.special.ndtri, i1e=torch.special.i1e)
    | at(FINITE, lgamma=torch.lgamma)
    | at((0.0, -0.0, NAN), digamma=torch.digamma),
)
kinks(
    "powers",
    at(
        EDGES,
        zero=lambda x: x**0,
        one=lambda x: x**1,
        two=lambda x: x**2,
        three=lambda x: x**3,
        four=lambda x: x**4,
        half=lambda x: x**0.5,
        one_and_a_half=lambda x: x**1.5,
        third=lambda x: x ** (1 / 3),
        minus_one=lambda x: x**-1,
        minus_two=lambda x: x**-2,
        infinite=lambda x: x**INF,
        of_zero=lambda x: torch.pow(0.0, x),
        of_one=lambda x: torch.pow(1.0, x),
        of_two=lambda x: torch.pow(2.0, x),
        of_half=lambda x: torch.pow(0.5, x),
        of_minus_two=lambda x: torch.pow(-2.0, x),
    )
    | at((0.0, 1.0, -1.0, 0.5, 2.0, INF, NAN), minus_half=lambda x: x**-0.5)
    | at_pairs(pairs=torch.pow, float_power=torch.float_power),
)
kinks(
    "rests_of_division",
    at(
        EDGES,
        fmod_one=lambda x: x.fmod(1.0),
        fmod_minus_two=lambda x: x.fmod(-2.0),
        fmod_zero=lambda x: x.fmod(0.0),
        fmod_infinite=lambda x: x.fmod(INF),
        remainder_one=lambda x: x.remainder(1.0),
        remainder_minus_two=lambda x: x.remainder(-2.0),
        remainder_zero=lambda x: x.remainder(0.0),
        remainder_infinite=lambda x: x.remainder(INF),
        remainder_of_three=lambda x: torch.remainder(3.0, x.detach()),
    )
    | at_pairs(
        fmod=torch.fmod,
        remainder=torch.remainder,
        floor_divide=lambda x, y: torch.floor_divide(x.detach(), y.detach()),
        div_floor=lambda x, y: torch.div(x, y, rounding_mode="floor"),
        div_trunc=lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        div=torch.div,
    ),
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
        atan2=torch.atan2,
        hypot=torch.hypot,
        xlogy=torch.xlogy,
        xlog1py=torch.special.xlog1py,
        copysign=lambda x, y: torch.copysign(x.nan_to_num(0.0, 1.0, -1.0), y),
        ldexp=torch.ldexp,
        logaddexp=torch.logaddexp,
        logaddexp2=torch.logaddexp2,
        heaviside=lambda x, y: torch.heaviside(x.detach(), y.detach()),
        mul=torch.mul,
        sub=torch.sub,
    )
    | {
        "division": (
            lambda x, y: torch.floor_divide(x.detach(), y.detach()),
            [[1.0, 0.3, -1.0, 6.0, 1e30], [0.1, 0.1, 0.1, -0.2, 3.0]],
        ),
        "logaddexp_far_out": (
            torch.logaddexp,
            [[0.0, 1e3, -1e3, 1e3, 90.0, 90.0, -90.0], [1e3, 0.0, 0.0, 1e3, -90.0, 90.0, -90.0]],
        ),
        "xlogy_of_number": (lambda x: torch.xlogy(2.0, x), [EDGES]),
        "xlogy_by_number": (lambda x: torch.xlogy(x, 2.0), [EDGES]),
    },
)
kinks(
    "combinations",
    at_pairs(
        lerp=lambda x, y: torch.lerp(x, y, 0.5),
        lerp_early=lambda x, y: torch.lerp(x, y, 0.25),
        lerp_late=lambda x, y: torch.lerp(x, y, 0.75),
        lerp_by_tensor=lambda x, y: torch.lerp(x, y, torch.full_like(x, 0.5)),
        lerp_by_weight=lambda x, y: torch.lerp(torch.ones_like(x), y, x),
        addcdiv=lambda x, y: torch.addcdiv(x, x, y, value=0.5),
        addcmul=lambda x, y: torch.addcmul(x, x, y, value=0.5),
        where=lambda x, y: torch.where(x > 0, x.log(), y),
        where_of_roots=lambda x, y: torch.where(x > 0, x.sqrt(), y * 2),
        masked_fill=lambda x, y: (x / y).masked_fill(y == 0, 0.0),
        prelu=lambda x, y: functional.prelu(x.reshape(1, 100), y),
    ),
)
kinks(
    "losses",
    at_pairs(
        l1=lambda x, y: functional.l1_loss(x, y, reduction="none"),
        smooth_l1=lambda x, y: functional.smooth_l1_loss(x, y, reduction="none"),
        smooth_l1_of_two=lambda x, y: functional.smooth_l1_loss(x, y, reduction="none", beta=2.0),
        smooth_l1_of_zero=lambda x, y: functional.smooth_l1_loss(x, y, reduction="none", beta=0.0),
        huber=lambda x, y: functional.huber_loss(x, y, reduction="none"),
        huber_of_two=lambda x, y: functional.huber_loss(x, y, reduction="none", delta=2.0),
        mse=lambda x, y: functional.mse_loss(x, y, reduction="none"),
        binary_of_logits=lambda x, y: functional.binary_cross_entropy_with_logits(
            x, y.detach().nan_to_num().clamp(0, 1), reduction="none"
        ),
        divergence=lambda x, y: functional.kl_div(x, y.detach().abs(), reduction="none"),
        divergence_of_logs=lambda x, y: functional.kl_div(x, y, reduction="none", log_target=True),
        hinge=lambda x, y: functional.hinge_embedding_loss(
            x, torch.where(y > 0, 1.0, -1.0).to(x.dtype), reduction="none"
        ),
        ranking=lambda x, y: functional.margin_ranking_loss(
            x, y, torch.ones_like(x), margin=1.0, reduction="none"
        ),
        soft_margin=lambda x, y: functional.soft_margin_loss(
            x, torch.where(y > 0, 1.0, -1.0).to(x.dtype), reduction="none"
        ),
        poisson=lambda x, y: functional.poisson_nll_loss(x, y.detach(), reduction="none"),
        poisson_of_rate=lambda x, y: functional.poisson_nll_loss(
            x, y.detach(), log_input=False, reduction="none"
        ),
    )
    | {
        # In float64, eager's least divisor of the gradient is 1e-12 rounded to float32.
        "binary": (
            lambda x, y: functional.binary_cross_entropy(
                x.float(), y.detach().float(), reduction="none"
            ),
            [[a for a in (0.0, 1.0, 0.5, 1e-20) for _ in range(3)], [0.0, 0.5, 1.0] * 4],
        ),
        "binary_of_far_logits": (
            lambda x: functional.binary_cross_entropy_with_logits(
                x, torch.full_like(x, 0.25), reduction="none"
            ),
            [LARGE],
        ),
        "soft_margin_far_out": (
            lambda x: functional.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
            [LARGE],
        ),
    },
)
