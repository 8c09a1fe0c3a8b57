"""Large logits, infinities, NaN, ties and zeros with a sign, where rounding must lose nothing.

Each row of a table has a tensor of its own, so that a large number hides no small one. Signs of
zeros count here, unlike in the other themes.
"""

import functools

import torch
from torch.nn import functional

from .kinks_of_elements import INF, NAN
from .registry import HALF
from .tables import floats_or_integers, table


def signs_of_zeros(seen):
    """−1 where an output is a negative zero, 1 where it is a positive one, else 0."""
    if isinstance(seen, list | tuple):
        return [signs_of_zeros(one) for one in seen]
    if hasattr(seen, "fields"):
        return [signs_of_zeros(one) for one in seen.fields.values()]
    values = seen.values
    if not values.is_floating_point():
        return None
    return torch.where(values == 0, torch.copysign(torch.ones_like(values), values), 0.0).tolist()


special = functools.partial(
    table, "special_values", given=floats_or_integers, seen_too=signs_of_zeros
)

#: Rows of logits whose logarithm of the sum is small beside the maximum, or which have none.
LOGITS = {
    "thousands": (1e3, 1e3, 0.0, -5.0),
    "millions": (1e6, 1e6, 1e6 - 1, 0.0),
    "hundreds_of_millions": (1e8, 1e8, 1e8 - 8, 3.0),
    "huge": (1e30, 1e30, 0.0, -1e30),
    "hugely_negative": (-1e30, -1e30, -1e30, -1e31),
    "infinite": (INF, 1.0, 2.0, 0.0),
    "two_infinite": (INF, 0.0, INF, 1.0),
    "without": (1.0, 2.0, -INF, 0.0),
    "nothing": (-INF, -INF, -INF, -INF),
    "nan": (0.0, NAN, 1.0, 2.0),
}
WEIGHTS = (0.5, 1.0, 2.0, 0.25)


def each_logits(f, target):
    """``f`` of every row of logits, as a batch with an ordinary row beside it."""
    ordinary = (0.5, -1.0, 2.0, 0.0)
    return {key: (f, [[row, ordinary], target]) for key, row in LOGITS.items()}


def cross_entropy(**options):
    return lambda x, t: functional.cross_entropy(
        x,
        t,
        **{k: x.new_tensor(v) if k == "weight" else v for k, v in options.items()},
    )


special("large_logits", each_logits(cross_entropy(reduction="none"), [1, 2]))
special("large_logits_mean", each_logits(cross_entropy(), [0, 3]))
special("large_logits_smoothed", each_logits(cross_entropy(label_smoothing=0.1), [1, 2]))
special(
    "large_logits_weighted",
    each_logits(cross_entropy(weight=WEIGHTS, reduction="none"), [1, 2]),
)
special(
    "large_logits_weighted_and_smoothed",
    each_logits(cross_entropy(weight=WEIGHTS, label_smoothing=0.2), [0, 2]),
)
special("ignored_logits", each_logits(cross_entropy(), [-100, 2]))
special("all_logits_ignored", each_logits(cross_entropy(), [-100, -100]))
special("a_class_ignored", each_logits(cross_entropy(ignore_index=1), [1, 2]))
special(
    "probabilities_of_large_logits",
    each_logits(cross_entropy(reduction="none"), [[0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]]),
)
special(
    "large_logits_of_images",
    {
        key: (cross_entropy(reduction="none"), [[[[v, 1.0, v] for v in row]], [[1, 3, -100]]])
        for key, row in LOGITS.items()
    },
)
special(
    "logarithms_of_large_logits",
    {
        f"{name}_{key}": (f, [[row]])
        for key, row in LOGITS.items()
        for name, f in {
            "softmax": lambda x: x.softmax(1),
            "log_softmax": lambda x: x.log_softmax(1),
            "logsumexp": lambda x: x.logsumexp(1),
            "nll": lambda x: functional.nll_loss(
                x.log_softmax(1), torch.tensor([1]), reduction="none"
            ),
        }.items()
    },
)
special(
    "ignored_log_probabilities",
    {
        key: (
            lambda x: functional.nll_loss(x, torch.tensor([1, -100]), reduction="none"),
            [[row, row]],
        )
        for key, row in LOGITS.items()
    },
)


def _images(kind, *shape):
    """Numbers, some of them NaN or infinite, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator)
    drawn = torch.rand(shape, generator=generator)
    if kind == "nan":
        return torch.where(drawn < 0.2, NAN, x)
    if kind == "only_nan":
        return torch.full(shape, NAN)
    if kind == "nothing":
        return torch.full(shape, -INF)
    if kind == "little":
        return torch.where(drawn < 0.8, -INF, x)
    return torch.where(drawn < 0.1, NAN, torch.where(drawn < 0.7, -INF, x))


_POOLS = {
    "tiles": (lambda x: functional.max_pool2d(x, 2), (1, 2, 4, 6)),
    "tiles_at": (lambda x: functional.max_pool2d(x, 2, return_indices=True), (1, 2, 4, 6)),
    "padded": (lambda x: functional.max_pool2d(x, 3, 2, 1), (2, 8, 7, 5)),
    "padded_at": (
        lambda x: functional.max_pool2d(x, 3, 2, 1, return_indices=True),
        (1, 2, 7, 5),
    ),
    "dilated_at": (
        lambda x: functional.max_pool2d(x, 2, 2, 1, 2, return_indices=True),
        (1, 2, 7, 8),
    ),
    "rounded_up_at": (
        lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True, return_indices=True),
        (1, 2, 8, 8),
    ),
    "large_at": (lambda x: functional.max_pool2d(x, 12, return_indices=True), (1, 1, 12, 24)),
    "one_dimension_at": (
        lambda x: functional.max_pool1d(x, 3, 2, 1, return_indices=True),
        (1, 2, 11),
    ),
    "three_dimensions_at": (
        lambda x: functional.max_pool3d(x, 3, 2, 1, return_indices=True),
        (1, 1, 5, 4, 3),
    ),
    "adaptive_at": (
        lambda x: functional.adaptive_max_pool2d(x, (3, 2), return_indices=True),
        (1, 2, 6, 8),
    ),
    "adaptive_uneven_at": (
        lambda x: functional.adaptive_max_pool2d(x, (3, 4), return_indices=True),
        (1, 2, 7, 9),
    ),
    "channels_last": (
        lambda x: functional.max_pool2d(x.to(memory_format=torch.channels_last), 3, 2, 1),
        (1, 8, 7, 5),
    ),
    "after_relu": (lambda x: functional.max_pool2d(x.relu(), 3, 2, 1), (1, 8, 7, 5)),
}
for _kind in ("nan", "only_nan", "nothing", "little", "all_kinds"):
    special(
        f"pools_of_{_kind}",
        {key: (f, [_images(_kind, *shape)]) for key, (f, shape) in _POOLS.items()},
        dtypes=(torch.float32,),
    )

ZEROS = (0.0, -0.0, 1.0, -1.0)
PAIRS = [[a for a in (*ZEROS, 2.0, INF, -INF, NAN) for _ in (*ZEROS, 2.0, INF, -INF, NAN)]]
PAIRS.append([b for _ in range(8) for b in (*ZEROS, 2.0, INF, -INF, NAN)])
special(
    "signs_of_zeros",
    {
        key: (f, [ZEROS])
        for key, f in {
            "relu": functional.relu,
            "relu6": functional.relu6,
            "hardtanh": functional.hardtanh,
            "at_least_zero": lambda x: x.clamp(min=0.0),
            "at_most_zero": lambda x: x.clamp(max=0.0),
            "abs": torch.abs,
            "round": torch.round,
            "trunc": torch.trunc,
            "sqrt": torch.sqrt,
            "leaky_relu": functional.leaky_relu,
            "hardswish": functional.hardswish,
            "elu": functional.elu,
            "max": lambda x: torch.amax(x[:2], 0),
            "pool": lambda x: functional.max_pool1d(x[None], 2),
            "pool_of_turned": lambda x: functional.max_pool1d(x.flip(0)[None], 2),
        }.items()
    }
    | {
        key: (f, PAIRS)
        for key, f in {
            "fmod": torch.fmod,
            "remainder": lambda x, y: torch.remainder(x, y.detach()),
            "floor_divide": lambda x, y: torch.floor_divide(x.detach(), y.detach()),
            "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
            "copysign": lambda x, y: torch.copysign(x, y.nan_to_num()),
            "fmax": torch.fmax,
            "fmin": torch.fmin,
            "atan2": lambda x, y: torch.atan2(x.detach(), y.detach()),
        }.items()
    }
    | {
        "copysign_of_zero": (lambda x: torch.copysign(x, 0.0), [[*ZEROS, INF, -INF, NAN]]),
        "copysign_of_minus_zero": (lambda x: torch.copysign(x, -0.0), [[*ZEROS, INF, -INF, NAN]]),
    },
)
special(
    "far_out",
    {
        "sinc": (torch.sinc, [[1e-30, -1e-30, 1e-25, 1e30, -1e30, INF, 0.0, -0.0, 0.5]]),
        "hypot": (
            torch.hypot,
            [[3e38, 1e-40, 0.0, 3e38, 1e30, -2e-30], [1.0, 1e-40, 1e-40, 1e38, -1e30, 1e-30]],
        ),
        "addcmul": (
            lambda x, y: torch.addcmul(x, x, y, value=0.25),
            [[2.0, -3.0], [3e38, 3e38]],
        ),
    },
    dtypes=(torch.float32,),
)
special(
    "norms_of_halves",
    {
        "large": (lambda x: x.norm(2, 1), [[[300.0, 300.0, 300.0, 300.0], [1e4, -1e4, 1e4, 1.0]]]),
        "small": (lambda x: x.norm(2, 1), [[[1e-4, 1e-4, 2e-4, 0.0]]]),
    },
    dtypes=(torch.float16,),
    slack=HALF / 100,
)


def _attention(mask, **options):
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, mask, **options)


_VISIBLE = torch.ones(4, 4, dtype=torch.bool)
_VISIBLE[:, 2] = False
_NOTHING_VISIBLE = _VISIBLE.clone()
_NOTHING_VISIBLE[1] = False


def _heads(operand=None, value=0.0):
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(1, 2, 4, 8, generator=generator) for _ in range(3)]
    if operand is not None:
        found[operand][:, :, 2] = value
    return found


special(
    "masked_keys",
    {
        f"{name}_{what}": (_attention(mask), _heads(operand, value))
        for name, mask in (("boolean", _VISIBLE), ("empty_row", _NOTHING_VISIBLE))
        for what, operand, value in (
            ("numbers", None, 0.0),
            ("nan_key", 1, NAN),
            ("infinite_key", 1, INF),
            ("nan_value", 2, NAN),
        )
    },
    dtypes=(torch.float32,),
)
_IMAGE = torch.randn(1, 2, 4, 5, generator=torch.Generator().manual_seed(5))
_PLACES = torch.rand(1, 3, 4, 2, generator=torch.Generator().manual_seed(6)) * 2.4 - 1.2
_FAR = torch.tensor([[[[NAN, 0.0], [0.5, NAN], [50.0, -40.0], [3.0, 0.1]]]])
special(
    "places_in_images",
    {
        f"nearest_{padding}": (
            lambda x, at, padding=padding: functional.grid_sample(
                x, at, "nearest", padding, align_corners=False
            ),
            [_IMAGE, _PLACES],
        )
        for padding in ("zeros", "border", "reflection")
    }
    | {
        f"{mode}_of_nan": (
            lambda x, at, mode=mode: functional.grid_sample(x, at, mode, align_corners=True),
            [_IMAGE, _FAR],
        )
        for mode in ("bilinear", "nearest")
    },
    dtypes=(torch.float32,),
)
