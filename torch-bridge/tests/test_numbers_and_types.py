"""Numbers that meet tensors of a type: rounded, wrapped and converted as in eager, bit by bit."""

import math

import pytest
import torch
import torch.nn.functional as F

NAN, INF = math.nan, math.inf
LARGE = 2**24 + 1  # float32 does not hold it
HALF = (torch.bfloat16, torch.float16)


def of(values, dtype=None):
    return torch.tensor(values, dtype=dtype)


def literals(x):
    """Tensors that are written in the function are computed before it is compiled."""
    t, small = of([0.7, 1.001, 16777216.0]), of([200, 3, 90], torch.uint8)
    return (
        (t >= 0.7) & (x > 0),
        t.bfloat16().float() + x,
        (t + 1.0) - t + x,
        t % 0.1 + x,
        t % INF + x,
        small + small + x.to(torch.uint8),
        of([2**31 - 1], torch.int32) + 1 + x.int(),
        of([NAN, INF, -INF]).long() + x.long(),
        of([NAN, 3e9, -3e9]).int() + x.int(),
        of([NAN, 300.0, -1.0]).to(torch.uint8) + x.to(torch.uint8),
        of([3000000005.0] * 3, torch.float64).to(torch.uint8) + x.to(torch.uint8),
        torch.full((3,), NAN).int() + x.int(),
    )


def comparisons(x):
    whole = 100 * x
    fractions = x >= 0.7, x < 0.7, x == 0.1, x != 0.1, x > 0.3, x <= 0.3
    return *fractions, whole >= 257, whole == 257, whole < 2049, x * 100 != 16777217


def powers_of_integers(x, n):
    return x**n


def searched(x, ordered):
    right = torch.bucketize(x, ordered, right=True)
    return torch.bucketize(x, ordered), right, torch.searchsorted(ordered, x)


def filled(x, floats):
    at = of([-1, 1])
    return x.index_fill(0, at, 2.7), x.index_fill(0, at, -3), floats.index_fill(0, at, 2.7)


def logarithms(x):
    return torch.log2(x), torch.log2(x).floor(), torch.log10(10.0 ** torch.arange(8.0))


def rests(x):
    return x % 0.1, torch.fmod(x, 0.1), x**3.3, 0.1 % x, (x * 200) % 301, torch.fmod(x * 200, 301)


def scaled(x, at, y):
    square = torch.stack([y, y])
    return (
        x.index_add(0, at, y, alpha=3),
        torch.addcmul(x[:2], y, y, value=3),
        torch.addmm(square, square, square, alpha=3, beta=5),
    )


def spread(x):
    return [torch.var(x, 1, correction=n) for n in (3, 5)] + [torch.std(x, 1, correction=3)]


CASES = {
    "scaled_integers": (scaled, of([0, 0, 0]), of([0, 2]), of([LARGE, LARGE + 2])),
    "spread_of_too_few": (spread, of([[1.0, 2.0, 3.0], [1.0, 5.0, 6.5], [2.0, 2.0, 2.0]])),
    **{f"rests_{dtype}": (rests, of([0.5, 1.5, 2.5], dtype)) for dtype in HALF},
    "literals": (literals, of([1.0, 2.0, 3.0])),
    **{
        f"comparisons_{dtype}": (comparisons, of([0.1, 0.3, 0.7, 1.0, 2.56, 20.48, NAN], dtype))
        for dtype in (*HALF, torch.float32, torch.float64)
    },
    "powers_of_integers": (powers_of_integers, of([-1, -1, -1, 1, 2]), of([-1, -2, -3, -5, -1])),
    "searched_nan": (searched, of([0.5, NAN, 3.0, INF]), of([0.0, 1.0, 2.0])),
    "searched_among_nan": (searched, of([0.5, 2.0, NAN]), of([0.0, 1.0, NAN])),
    "searched_among_none": (searched, of([0.5, NAN]), of([])),
    "searched_number": (lambda b: torch.bucketize(2.5, b), of([1, 2, 3])),
    "searched_fractions": (searched, of([0.5, 2.5, 2.0]), of([1, 2, 3])),
    "filled_truth": (lambda x: x.index_fill(0, of([-1]), True), of([False, False])),
    "filled": (filled, of([1, LARGE, 3]), of([1.0, 2.0, 3.0])),
    "most_frequent": (lambda x: torch.mode(x, 0), of([LARGE, LARGE, LARGE - 1])),
    "most_frequent_truth": (lambda x: torch.mode(x, 0), of([True, False, True])),
    "searched_scalar": (
        lambda x, ordered: torch.bucketize(x, ordered),
        of(0.7, torch.float64),
        of([0.7]),
    ),
    "bytes_of_doubles": (lambda x: x.to(torch.uint8), of([3000000005.0, -1.0], torch.float64)),
    "logarithms_of_integers": (
        lambda x: (torch.log2(x), torch.log10(x)),
        of([8, 64, 1000, 8192, 2**29, 3]),
    ),
    "logarithms": (logarithms, 2.0 ** torch.arange(-140.0, 127.0)),
    "powers_of_two": (torch.exp2, torch.arange(-149.0, 129.0)),
    "logarithms_of_others": (torch.log2, of([0.0, INF, NAN, -1.0])),
    "stretched_by_a_factor": (
        lambda x: F.interpolate(x, scale_factor=3.3, mode="nearest"),
        torch.arange(6.0).reshape(1, 2, 3),
    ),
    "stretched_almost_twice": (
        lambda x: F.interpolate(x, scale_factor=2.3, mode="nearest"),
        torch.arange(30.0).reshape(1, 2, 5, 3),
    ),
    "stretched_a_little": (
        lambda x: F.interpolate(x, scale_factor=(1.1, 2.1), mode="nearest"),
        torch.arange(30.0).reshape(1, 2, 5, 3),
    ),
    "stretched_almost_twice_along_a_line": (
        lambda x: F.interpolate(x, scale_factor=2.1, mode="nearest"),
        torch.arange(10.0).reshape(1, 2, 5),
    ),
    "stretched_twice": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
        torch.arange(6.0).reshape(1, 2, 3),
    ),
    "counted_by_a_fraction": (
        lambda x: torch.arange(0, 5, 1.5, dtype=torch.int32) + x,
        of([1], torch.int32),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name):
    function, *inputs = CASES[name]
    # Functions of PyTorch's own share one code object, for which Dynamo counts compilations.
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="shorthaul", fullgraph=True)
    expected, found = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_softmax_of_many_elements_in_half_precision():
    """Their sum is beyond the largest number of float16."""
    x = torch.zeros(70_000, dtype=torch.float16)
    found = torch.compile(lambda x: x.softmax(0), backend="shorthaul")(x)
    torch.testing.assert_close(found, x.softmax(0))


@pytest.mark.parametrize("size", [(4, 4), (5, 12)])
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.filterwarnings("ignore::shorthaul.FallbackWarning")
def test_interpolated_bytes(size, antialias):
    x = ((torch.arange(3 * 8 * 8) * 37) % 256).to(torch.uint8).reshape(1, 3, 8, 8)

    def stretched(x):
        return F.interpolate(x, size=size, mode="bilinear", antialias=antialias)

    assert torch.equal(torch.compile(stretched, backend="shorthaul")(x), stretched(x))


@pytest.mark.parametrize("dtype", HALF)
def test_variance_far_from_zero(dtype):
    """A mean in 16 bits would be off by more than what the elements differ by."""
    torch.manual_seed(0)
    x = (100 + torch.randn(8, 64)).to(dtype)
    exact = x.double().requires_grad_()
    exact.var(-1).sum().backward()
    own = x.clone().requires_grad_()
    torch.compile(lambda x: x.var(-1), backend="shorthaul")(own).sum().backward()
    torch.testing.assert_close(
        torch.compile(lambda x: x.std(-1), backend="shorthaul")(x).double(),
        x.double().std(-1),
        rtol=2e-2 if dtype is torch.bfloat16 else 2e-3,
        atol=0,
    )
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=2e-2, atol=2e-4)


def test_the_gradient_of_a_logarithm_is_everywhere():
    x = of([1.0, 8.0, 3.0]).requires_grad_()
    torch.compile(torch.log2, backend="shorthaul")(x).sum().backward()
    torch.testing.assert_close(x.grad, 1 / (x.detach() * math.log(2)))
