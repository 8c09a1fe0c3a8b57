"""Reductions, scans, norms and windows at ties, zeros, infinities, NaN, and of constants."""

import torch
from torch.nn import functional

from .kinks_of_elements import INF, NAN, kinks

CONSTANTS = ((1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (3.0, 3.0, 3.0, 3.0), (1.0, 2.0, 3.0, 4.0))
TIES = ((2.0, 1.0, 2.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, -0.0, 0.0, -1.0), (3.0, 0.0, 0.0, 3.0))
ZEROS = ((0.0, 2.0, 0.0, 3.0), (0.0, 1.0, 2.0, 3.0), (2.0, 3.0, 1.0, 0.0), (0.0, 0.0, 0.0, 0.0))
INFINITIES = (
    (INF, 1.0, 2.0, 0.0),
    (-INF, 1.0, 2.0, 0.0),
    (-INF, -INF, -INF, -INF),
    (INF, INF, 1.0, 0.0),
    (INF, -INF, 1.0, 0.0),
    (1.0, 2.0, 3.0, -INF),
)
NANS = ((NAN, 1.0, 2.0, 0.0), (1.0, NAN, INF, NAN), (1.0, 3.0, 2.0, 0.0), (NAN, NAN, NAN, NAN))
FINITE = CONSTANTS + TIES + ZEROS
#: Without equal elements in a row: which of them gets the gradient is then anyone's choice.
DISTINCT = ((1.0, 2.0, 3.0, 4.0), (2.0, -1.0, 0.5, 0.0), (0.0, 5.0, -3.0, 1.0))
ALL = CONSTANTS + TIES + ZEROS + INFINITIES + NANS


def each(values, **named):
    """Rows of a table: each function at the same rows."""
    return {name: (f, [values]) for name, f in named.items()}


def first(f):
    """The values that ``f`` finds, without their positions."""
    return lambda x: f(x)[0]


def each_row(values, **named):
    """Each function of all elements of a row, for each of the rows."""
    return {f"{name}_{i}": (f, [row]) for name, f in named.items() for i, row in enumerate(values)}


kinks(
    "sums",
    each(
        ALL,
        sum=lambda x: x.sum(1),
        mean=lambda x: x.mean(1),
        nansum=lambda x: x.nansum(1),
        logsumexp=lambda x: x.logsumexp(1),
        softmax=lambda x: x.softmax(1),
        log_softmax=lambda x: x.log_softmax(1),
        softmin=lambda x: functional.softmin(x, 1),
        cumsum=lambda x: x.cumsum(1),
        any=lambda x: x.any(1),
        all=lambda x: x.all(1),
        count_nonzero=lambda x: x.count_nonzero(1),
    )
    | each(
        FINITE + NANS[:3],
        nanmean=lambda x: x.nanmean(1),
    )
    | each(FINITE, logcumsumexp=lambda x: x.logcumsumexp(1)),
)
kinks(
    "products",
    each(
        FINITE,
        prod=lambda x: x.prod(1),
        cumprod=lambda x: x.cumprod(1),
    )
    | each_row(ZEROS, prod_of_all=torch.prod),
)
kinks(
    "spreads",
    each(
        ALL,
        var=lambda x: x.var(1),
        std=lambda x: x.std(1),
        var_biased=lambda x: x.var(1, unbiased=False),
        std_biased=lambda x: x.std(1, unbiased=False),
        std_of_one=lambda x: x[:, :1].std(1),
        var_of_one=lambda x: x[:, :1].var(1),
        std_of_one_biased=lambda x: x[:, :1].std(1, unbiased=False),
    )
    | each(
        FINITE + NANS,
        var_mean=lambda x: torch.var_mean(x, 1),
        std_mean=lambda x: torch.std_mean(x, 1),
    )
    | each_row(CONSTANTS, std_of_all=torch.std, var_of_all=torch.var),
)
kinks(
    "extremes",
    each(
        ALL,
        max=first(lambda x: x.max(1)),
        min=first(lambda x: x.min(1)),
        max_at=lambda x: x.max(1)[1],
        min_at=lambda x: x.min(1)[1],
        amax=lambda x: x.amax(1),
        amin=lambda x: x.amin(1),
        argmax=lambda x: x.argmax(1),
        argmin=lambda x: x.argmin(1),
        cummax=lambda x: x.cummax(1),
        cummin=lambda x: x.cummin(1),
    )
    | each_row(TIES + NANS, max_of_all=torch.max, min_of_all=torch.min),
)
kinks("both_extremes", each(ALL, aminmax=lambda x: torch.aminmax(x, dim=1)), since=(2, 14))
kinks(
    "orders",
    each(
        ALL,
        median=first(lambda x: x.median(1)),
        sort=lambda x: x.sort(dim=1, stable=True),
        sort_down=lambda x: x.sort(dim=1, descending=True, stable=True),
        kthvalue=first(lambda x: x.detach().kthvalue(2, 1)),
        topk=first(lambda x: x.detach().topk(2, 1)),
        topk_least=first(lambda x: x.detach().topk(3, 1, largest=False)),
    )
    | each(
        DISTINCT,
        kthvalue_of_distinct=lambda x: x.kthvalue(2, 1),
        topk_of_distinct=lambda x: x.topk(2, 1),
        quantile=lambda x: x.quantile(0.5, 1),
        nanquantile=lambda x: x.nanquantile(0.25, 1),
    )
    | each(NANS[:3] + TIES, nanmedian=first(lambda x: x.nanmedian(1)))
    | each(CONSTANTS + TIES + ZEROS + INFINITIES, mode=first(lambda x: x.mode(1)))
    | each_row(TIES + NANS, median_of_all=torch.median),
)
kinks(
    "norms",
    each(
        ALL,
        one=lambda x: x.norm(1, 1),
        two=lambda x: x.norm(2, 1),
        zero=lambda x: x.norm(0, 1),
        largest=lambda x: x.norm(INF, 1),
        vector_norm=lambda x: torch.linalg.vector_norm(x, 2, 1),
        vector_norm_largest=lambda x: torch.linalg.vector_norm(x, INF, 1),
    )
    | each(
        FINITE,
        three=lambda x: x.norm(3, 1),
        half=lambda x: x.norm(0.5, 1),
        least=lambda x: x.norm(-INF, 1),
        minus_one=lambda x: x.norm(-1, 1),
        normalize=lambda x: functional.normalize(x, dim=1),
        normalize_by_sum=lambda x: functional.normalize(x, 1.0, 1),
        normalize_by_largest=lambda x: functional.normalize(x, INF, 1),
        renorm=lambda x: x.renorm(2, 0, 1.0),
        renorm_by_sum=lambda x: x.renorm(1, 0, 2.0),
    )
    | each_row(
        CONSTANTS,
        norm_of_all=torch.norm,
        frobenius=torch.linalg.norm,
        one_of_all=lambda x: x.norm(1),
        largest_of_all=lambda x: x.norm(INF),
    ),
)
OTHERS = tuple(reversed(ALL))
kinks(
    "distances",
    {
        name: (f, [ALL, OTHERS])
        for name, f in {
            "cosine": lambda x, y: functional.cosine_similarity(x, y, 1),
            "pairwise": functional.pairwise_distance,
            "pairwise_one": lambda x, y: functional.pairwise_distance(x, y, 1.0),
            "pairwise_largest": lambda x, y: functional.pairwise_distance(x, y, INF),
            "pairwise_exact": lambda x, y: functional.pairwise_distance(x, y, eps=0.0),
        }.items()
    }
    | {
        f"{name}_{kind}": (f, [rows, TIES])
        for name, f in {
            "cdist": torch.cdist,
            "cdist_of_products": lambda x, y: torch.cdist(
                x, y, compute_mode="use_mm_for_euclid_dist"
            ),
            "cdist_one": lambda x, y: torch.cdist(x, y, 1.0),
            "cdist_largest": lambda x, y: torch.cdist(x, y, INF),
            "cdist_half": lambda x, y: torch.cdist(x, y, 0.5),
            "cdist_three": lambda x, y: torch.cdist(x, y, 3.0),
            "cdist_zero": lambda x, y: torch.cdist(x, y, 0.0),
            "dist": lambda x, y: torch.dist(x, y),
            "dist_one": lambda x, y: torch.dist(x, y, 1),
            "dist_largest": lambda x, y: torch.dist(x, y, INF),
            "cosine_embedding": lambda x, y: functional.cosine_embedding_loss(
                x, y, torch.tensor([1, -1, 1, -1])
            ),
            "triplet": lambda x, y: functional.triplet_margin_loss(x, x, y, margin=1.0),
        }.items()
        for kind, rows in (("same", TIES), ("zeros", ZEROS))
    }
    | each(CONSTANTS, pdist=functional.pdist, pdist_one=lambda x: functional.pdist(x, 1.0)),
)
kinks(
    "normalizations",
    each(
        CONSTANTS + TIES + ZEROS,
        layer_norm=lambda x: functional.layer_norm(x, (4,)),
        layer_norm_exact=lambda x: functional.layer_norm(x, (4,), eps=0.0),
        rms_norm=lambda x: functional.rms_norm(x, (4,)),
        batch_norm=lambda x: functional.batch_norm(x.T.contiguous(), None, None, training=True),
        group_norm=lambda x: functional.group_norm(x, 2),
        instance_norm=lambda x: functional.instance_norm(x[None]),
        local_response=lambda x: functional.local_response_norm(x[None], 2),
    )
    | each(
        NANS + INFINITIES,
        layer_norm_of_nan=lambda x: functional.layer_norm(x, (4,)),
        batch_norm_of_nan=lambda x: functional.batch_norm(
            x.T.contiguous(), None, None, training=True
        ),
    ),
)
kinks(
    "classes",
    {
        name: (f, [FINITE])
        for name, f in {
            "cross_entropy": lambda x: functional.cross_entropy(
                x, torch.arange(len(FINITE)) % 4, reduction="none"
            ),
            "cross_entropy_smoothed": lambda x: functional.cross_entropy(
                x, torch.arange(len(FINITE)) % 4, reduction="none", label_smoothing=0.1
            ),
            "cross_entropy_of_probabilities": lambda x: functional.cross_entropy(
                x, torch.full_like(x, 0.25), reduction="none"
            ),
            "nll": lambda x: functional.nll_loss(
                x, torch.arange(len(FINITE)) % 4, reduction="none"
            ),
            "multi_margin": lambda x: functional.multi_margin_loss(
                x, torch.arange(len(FINITE)) % 4, reduction="none"
            ),
            "multilabel": lambda x: functional.multilabel_soft_margin_loss(
                x, torch.ones_like(x), reduction="none"
            ),
            "glu": lambda x: functional.glu(x, 1),
        }.items()
    },
)
#: Images of one channel, [1, 1, 6, 4].
TIED_IMAGE = (((*TIES, *ZEROS[:2]),),)
NAN_IMAGE = (((*NANS, *INFINITIES[:2]),),)
kinks(
    "windows",
    {
        name: (f, [TIED_IMAGE])
        for name, f in {
            "max_pool": lambda x: functional.max_pool2d(x, 2),
            "max_pool_overlapping": lambda x: functional.max_pool2d(x, 3, 1, 1),
            "max_pool_in_one": lambda x: functional.max_pool1d(x[0], 2),
            "max_pool_at": lambda x: functional.max_pool2d(x, 2, return_indices=True),
            "adaptive_max": lambda x: functional.adaptive_max_pool2d(x, (3, 2)),
            "lp_pool": lambda x: functional.lp_pool2d(x, 2.0, 2),
        }.items()
    }
    | {
        f"{name}_of_nan": (f, [NAN_IMAGE])
        for name, f in {
            "max_pool": lambda x: functional.max_pool2d(x.detach(), 2),
            "average": lambda x: functional.avg_pool2d(x, 2),
            "adaptive_average": lambda x: functional.adaptive_avg_pool2d(x, (3, 2)),
        }.items()
    },
)
#: Places of an image, [1, 6, 4, 2]: its corners, centres of its borders, and what lies beyond.
PLACES = (
    tuple(
        tuple((x, y) for x in (-1.0, 1.0, -0.75, 0.0)) for y in (-1.0, 1.0, -1.2, 0.0, 5 / 6, 2.5)
    ),
)
kinks(
    "sampled_images",
    {
        f"{mode}_{padding}_{'corners' if corners else 'pixels'}": (
            lambda x, at, mode=mode, padding=padding, corners=corners: functional.grid_sample(
                x, at, mode, padding, corners
            ),
            [TIED_IMAGE, PLACES],
        )
        for mode in ("bilinear",)
        for padding in ("zeros", "border", "reflection")
        for corners in (False, True)
    },
    dtypes=(torch.float32,),
)
kinks(
    "resized_images",
    {
        f"{mode}_{kind}": (f, [TIED_IMAGE])
        for mode in ("nearest", "bilinear", "bicubic")
        for kind, f in {
            "larger": lambda x, mode=mode: functional.interpolate(x, scale_factor=2, mode=mode),
            "smaller": lambda x, mode=mode: functional.interpolate(x, size=(3, 3), mode=mode),
        }.items()
    }
    | {
        "bilinear_corners": (
            lambda x: functional.interpolate(x, size=(8, 5), mode="bilinear", align_corners=True),
            [TIED_IMAGE],
        ),
        "bilinear_of_one": (
            lambda x: functional.interpolate(x, size=(1, 1), mode="bilinear", align_corners=True),
            [TIED_IMAGE],
        ),
    },
    dtypes=(torch.float32,),
)
