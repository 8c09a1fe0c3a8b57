"""Operators that decompositions serve, where the operators' database has no sample of the case."""

import math
import warnings

import pytest
import shorthaul
import torch
from families import between, check, constant, ints, normal
from torch import nn


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def compiled(function, *tensors):
    """What a function gives when all of it runs in one region."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return shorthaul.module(Function(function), fallback="error")(*tensors)


@pytest.mark.parametrize("n", [1, 2])
def test_a_lookup_in_what_the_same_kernel_computes(n):
    """With one element the look-up once read before the store."""
    x, at = torch.arange(4.0, 4.0 + n), torch.zeros(1, dtype=torch.int64)
    found = compiled(lambda x, at: (x + 1).index_select(0, at), x, at)
    assert torch.equal(found, torch.tensor([5.0]))


#: Where the special functions have poles, limits and signs of their own.
SPECIAL = [0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 8.0, 30.0, 1e4, -0.5, -1.0, -2.5, -7.0, -11.25]
EXTREMES = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(
    "function",
    [
        torch.lgamma,
        torch.digamma,
        torch.erfc,
        torch.special.erfcx,
        torch.special.i0,
        torch.special.i0e,
        torch.special.i1,
        torch.special.i1e,
        torch.special.spherical_bessel_j0,
        torch.special.bessel_j0,
        torch.special.bessel_y1,
        torch.special.scaled_modified_bessel_k0,
        torch.special.scaled_modified_bessel_k1,
        torch.special.airy_ai,
        torch.signbit,
        torch.angle,
    ],
)
def test_special_functions_at_special_places(function):
    x = torch.tensor(SPECIAL)
    found, expected = compiled(function, x), function(x)
    exact = function(x.double()).to(expected.dtype)
    same = (found == expected) | (found == exact) | (found.isnan() & expected.isnan())
    if expected.is_floating_point():
        # The absolute part is for lgamma at 1 and 2, where terms of size ten cancel in float64.
        same |= (found - exact).abs() <= 4e-7 * exact.abs() + 1e-14
    assert same.all(), (found, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function", [torch.special.hermite_polynomial_h, torch.special.hermite_polynomial_he]
)
def test_hermite_polynomials_of_every_degree(function, dtype):
    x = torch.tensor([0.0, -0.0, 1.5, -7.25, 1e-40, 1e30, *EXTREMES], dtype=dtype).unsqueeze(1)
    degrees = [*range(-2, 40), 127, 128, 129, 511, 512, 513, 2.5, -0.5, 1e19, -1e19, *EXTREMES]
    n = torch.tensor(degrees, dtype=dtype)
    cases = []
    if dtype == torch.float32:  # With float64, tensors of degrees are PyTorch's.
        cases += [(function, x, n), (function, x.int().clamp(-9, 9), n.nan_to_num().int())]
        cases.append((lambda n: function(1.25, n), n))
    for number in (-1, 7, 2.5):
        cases.append((lambda x, number=number: function(x, number), x))
    for call, *operands in cases:
        found, expected = compiled(call, *operands), call(*operands)
        assert found.dtype == expected.dtype
        # Eager rounds a product and a sum once, and kernels each of them. Beyond the largest
        # number, kernels then subtract infinities.
        rtol, largest = 1e3 * torch.finfo(dtype).eps, torch.finfo(dtype).max
        is_near = expected.abs() > largest / 100
        assert (found.isnan() | (found.abs() > largest / 200))[is_near].all()
        found, expected = found.masked_fill(is_near, 0), expected.masked_fill(is_near, 0)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


def test_segments_that_do_not_fill_the_data_are_refused():
    def sums(x, lengths):
        return torch.segment_reduce(x, "sum", lengths=lengths, axis=0)

    x, lengths = torch.randn(6, 2), torch.tensor([2, 0, 4])
    torch.testing.assert_close(compiled(sums, x, lengths), sums(x, lengths))
    with pytest.raises(shorthaul.OutOfRange):
        compiled(sums, x, torch.tensor([2, 0, 3]))


@pytest.mark.parametrize("function", [torch.erfinv, torch.special.ndtri])
def test_inverses_at_the_ends(function):
    x = torch.tensor([0.0, 1e-6, 0.25, 0.5, 0.999999, 1.0, 1.5])
    found, expected = compiled(function, x), function(x)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-12, equal_nan=True)


def test_a_strided_copy_of_a_view_counts_from_the_start_of_its_memory():
    def copy(x, first):
        return torch.as_strided_copy((x * 2)[2:], (2,), (2,), first)

    model, x = shorthaul.module(Function(copy)), torch.arange(8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch runs the copy that begins before the view.
        for first in (None, 0, 2, 3):
            assert torch.equal(model(x, first), copy(x, first))


def test_writes_that_repeat():
    """The last value stays; gradients reach every value, as in eager."""
    at = torch.tensor([2, 0, 2, 1, 2])
    mask = ints(2, 5, 3, dtype=torch.bool)

    def put(x, values):
        return x.index_put((at,), values)

    check(
        {
            "index_put": (put, normal(5, 3), normal(5, 3)),
            "two axes": (
                lambda x, v: x.index_put((at, at.clamp(max=1)), v),
                normal(5, 3),
                normal(5),
            ),
            "broadcast": (lambda x, v: x.index_put((at,), v), normal(5, 3), normal(1, 3)),
            "mask": (
                lambda x, v: x.index_put((mask,), v),
                normal(5, 3),
                normal(int(mask.sum())),
            ),
            "accumulate": (
                lambda x, v: x.index_put((at, at.clamp(max=1)), v, accumulate=True),
                normal(5, 3),
                normal(5),
            ),
            "scatter": (
                lambda x, i, v: x.scatter(1, i, v),
                normal(4, 5),
                constant(ints(5, 4, 3)),
                normal(4, 3),
            ),
            "put": (lambda x, v: x.put(at, v), normal(5, 3), normal(5)),
            "masked_scatter": (
                lambda x, v: x.masked_scatter(mask, v),
                normal(5, 3),
                normal(15),
            ),
        }
    )


def test_order_and_scans():
    check(
        {
            "median": (lambda x: x.median(1).values, normal(4, 6)),
            "nanmedian": (
                lambda x: torch.where(x > 1, math.nan, x).nanmedian(1).values,
                normal(4, 6),
            ),
            "kthvalue": (lambda x: x.kthvalue(3, 0).values, normal(5, 3)),
            "mode": (lambda x: x.mode(1).values, ints(3, 4, 6).float()),
            "cumprod": (lambda x: x.cumprod(1), between(-1.5, 1.5, 3, 9)),
            "cummax": (lambda x: x.cummax(1).values, normal(3, 9)),
            "logcumsumexp": (lambda x: x.logcumsumexp(0), normal(7, 3)),
            "pdist": (torch.pdist, normal(5, 3)),
            "cdist": (lambda a, b: torch.cdist(a, b, p=1.5), normal(4, 3), normal(5, 3)),
        }
    )


def test_images_with_antialiasing():
    def smaller(mode):
        return lambda x: nn.functional.interpolate(x, size=(5, 4), mode=mode, antialias=True)

    check(
        {
            "bilinear": (smaller("bilinear"), normal(2, 3, 11, 9)),
            "bicubic": (smaller("bicubic"), normal(2, 3, 11, 9)),
        }
    )


def test_a_cache_that_begins_empty_stays_in_the_region():
    def step(x):
        cache = torch.tensor([], dtype=x.dtype)
        return torch.cat([cache, x.exp()], dim=-2) * 2, cache

    x = torch.randn(2, 3)
    result, cache = compiled(step, x)
    torch.testing.assert_close(result, x.exp() * 2)
    assert cache.shape == (0,)


def test_a_result_that_is_written_nowhere_stays_in_the_region():
    def step(x, y):
        product = torch.functional.tensordot(x, y, dims=([1], [1]), out=None)
        return torch.add(product, product.exp(), out=None)

    x, y = torch.randn(3, 4), torch.randn(5, 4)
    product = x.double() @ y.double().T
    torch.testing.assert_close(compiled(step, x, y), (product + product.exp()).float())


@pytest.mark.parametrize("function", [lambda x: torch.fill(x, 2.0), lambda x: (x * 2).zero_() + 1])
def test_inputs_that_no_slope_reaches_get_zeros(function):
    x = torch.randn(3, requires_grad=True)
    compiled(function, x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3))


@pytest.mark.parametrize("n_dims", [2, 3])
def test_fractional_pooling(n_dims):
    """With samples that are given, so that both draw the same windows."""
    pool = nn.functional.fractional_max_pool2d_with_indices
    if n_dims == 3:
        pool = nn.functional.fractional_max_pool3d_with_indices
    sizes, wanted = (9, 11, 8)[:n_dims], (4, 5, 3)[:n_dims]
    samples = between(0.0, 1.0, 2, 3, n_dims)
    x = normal(2, 3, *sizes)

    def run(x, samples):
        return pool(x, 3 if n_dims == 2 else 2, output_size=wanted, _random_samples=samples)

    values, indices = compiled(run, x, samples)
    expected = run(x, samples)
    assert torch.equal(values, expected[0]) and torch.equal(indices, expected[1])


def test_shifts_and_masks_of_bits():
    x = torch.tensor([-9, -1, 0, 1, 6, 1 << 40])
    for function in (lambda x: x << 3, lambda x: x >> 2, lambda x: x & 7):
        assert torch.equal(compiled(lambda x, f=function: f(x), x), function(x))
    for own in (x, torch.arange(256, dtype=torch.uint8), torch.tensor([-(2**31), -5, 2**31 - 1])):
        for function in (lambda x: x ^ 1, lambda x: x | 7, lambda x: x ^ 127, lambda x: x & 255):
            found, expected = compiled(lambda x, f=function: f(x), own), function(own)
            assert torch.equal(found, expected) and found.dtype == expected.dtype


BITS = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "left": lambda x, y: x << y,
    "right": lambda x, y: x >> y,
    "both shifts": lambda x, y: (x << y) >> y,
    "a number first": lambda x, y: (77 & y, 77 | y, 77 ^ y, 5 << y, 77 >> y),
    "not": lambda x, y: (~x, ~(x & y)),
}


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str
)
@pytest.mark.parametrize("name", BITS)
def test_bits_of_two_tensors(name, dtype):
    kind = torch.iinfo(dtype)
    x = torch.tensor([kind.min, kind.max, 0, 1, 2, 77, -kind.max % kind.max, kind.max // 3])
    # From no bits to more than there are, and for signed types a negative number.
    amounts = [0, 1, 3, kind.bits - 1, kind.bits, kind.bits + 1, 100]
    y = torch.tensor([*amounts, -1 if kind.min else 200])
    x, y = x.to(dtype)[:, None], y.to(dtype)
    function = BITS[name]
    found, expected = compiled(function, x, y), function(x, y)
    pairs = (
        zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    )
    for ours, eager in pairs:
        assert torch.equal(ours, eager) and ours.dtype == eager.dtype


def test_bits_of_truth_values_and_integers():
    x, y = torch.tensor([True, False, True]), torch.tensor([6, 7, -1])

    def function(x, y):
        return x & y, x | y, y ^ x, x & True, x ^ True

    for found, expected in zip(compiled(function, x, y), function(x, y), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype


OUT_OF_RANGE = {
    "scatter": lambda x, at: x.scatter(1, at, torch.ones(2, 2)),
    "scatter_reduce": lambda x, at: x.scatter_reduce(1, at, torch.ones(2, 2), "amax"),
    "index_copy": lambda x, at: x.index_copy(1, at[0], torch.ones(2, 2)),
    "index_fill": lambda x, at: x.index_fill(1, at[0], 2.0),
    "index_put": lambda x, at: x.index_put((at[0] * 0, at[0]), torch.ones(2)),
    "put": lambda x, at: x.put(at[0] + 3, torch.ones(2)),
    "masked_scatter": lambda x, at: x.masked_scatter(at.sum() > x, torch.ones(5)),
    "mask with too few": lambda x, at: x.index_put((at.sum() > x,), torch.ones(5)),
    "mask with too many": lambda x, at: x.index_put((at.sum() > x,), torch.ones(7)),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_what_eager_refuses_is_refused(name):
    """The index 3 lies within the memory of a tensor of two rows, but in no row."""
    x, at = torch.zeros(2, 3), torch.tensor([[0, 3], [1, 2]])
    with pytest.raises((RuntimeError, IndexError)):
        OUT_OF_RANGE[name](x, at)
    with pytest.raises(shorthaul.OutOfRange):
        compiled(OUT_OF_RANGE[name], x, at)


def test_bags_that_begin_behind_the_end_are_refused():
    weight, at = torch.randn(4, 2), torch.tensor([0, 1, 3])

    def bags(weight, at, starts):
        return nn.functional.embedding_bag(at, weight, starts, mode="sum")

    starts = torch.tensor([0, 2])
    assert torch.equal(compiled(bags, weight, at, starts), bags(weight, at, starts))
    with pytest.raises(shorthaul.OutOfRange):
        compiled(bags, weight, at, torch.tensor([0, 4]))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_one_length_are_one_kernel_in_each_pass(mode):
    model = nn.EmbeddingBag(10, 4, mode=mode)
    report = shorthaul.report(shorthaul.module(model), torch.tensor([[1, 2, 2], [9, 0, 1]]))
    assert [kernel["stage"] for kernel in report.data["kernels"]] == ["forward", "backward"]


def test_random_numbers_are_those_of_their_distribution():
    torch.manual_seed(0)
    weights = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]])

    def draw(weights, mean):
        drawn = torch.multinomial(weights, 4000, replacement=True)
        dice = torch.randint(1, 7, (6000,))
        near = torch.normal(mean.expand(5000), 2.0)
        order = torch.multinomial(weights[0] + 1e-3, 3)
        return drawn, dice, near, order

    drawn, dice, near, order = compiled(draw, weights, torch.tensor(3.0))
    assert drawn.dtype == torch.int64 and set(drawn[0].tolist()) == {1, 2}
    assert 0.7 < (drawn[0] == 2).float().mean() < 0.8 and not drawn[1].any()
    counts = dice.bincount(minlength=7)
    assert counts[0] == 0 and len(counts) == 7 and counts[1:].min() > 850
    assert abs(near.mean() - 3) < 0.15 and abs(near.std() - 2) < 0.15
    assert sorted(order.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, math.inf]])
def test_weights_that_eager_refuses_are_refused(weights):
    given = torch.tensor(weights)
    with pytest.raises(RuntimeError):
        torch.multinomial(given, 1)
    with pytest.raises(shorthaul.OutOfRange):
        compiled(lambda w: torch.multinomial(w, 1), given)


def test_neighbours_and_parts_of_numbers():
    least, largest = 2.0**-149, torch.finfo(torch.float32).max
    ends = [0.0, -0.0, 1.0, -1.0, 2.0, 3.7, least, -least, 2.0**-126, largest, math.inf, -math.inf]
    x = torch.tensor([*ends, math.nan, 2.0**-140, 1e20, -1e-20, 0.99999994])
    for end in (0.0, 5.0, -math.inf, math.inf):
        to = torch.full_like(x, end)
        found, expected = compiled(torch.nextafter, x, to), torch.nextafter(x, to)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), expected.signbit())
    mantissa, exponent = compiled(torch.frexp, x)
    expected = torch.frexp(x)
    torch.testing.assert_close(mantissa, expected.mantissa, rtol=0, atol=0, equal_nan=True)
    usual = x.isfinite()
    assert torch.equal(exponent[usual], expected.exponent[usual])


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_samples_of_a_volume(mode, padding):
    def sample(x, grid, align_corners):
        return nn.functional.grid_sample(x, grid, mode, padding, align_corners)

    check(
        {
            "corners": (
                lambda x, g: sample(x, g, True),
                normal(2, 3, 4, 5, 3),
                between(-1.4, 1.4, 2, 3, 2, 4, 3),
            ),
            "edges": (
                lambda x, g: sample(x, g, False),
                normal(2, 3, 4, 5, 3),
                between(-1.3, 1.3, 2, 3, 2, 4, 3),
            ),
        }
    )


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_slopes_of_samples_that_lie_on_elements(padding, n_dims):
    """A sum of distances would have the slope 0 there."""
    along = torch.linspace(-1, 1, 5, dtype=torch.float64)
    places = torch.meshgrid(*[along] * n_dims, indexing="ij")
    x, grid = torch.randn(1, 2, *[5] * n_dims, dtype=torch.float64), torch.stack(places[::-1], -1)

    def slope(function):
        own = grid[None].clone().requires_grad_()
        y = function(x, own, padding_mode=padding, align_corners=True)
        return torch.autograd.grad(y, own, torch.arange(y.numel()).view_as(y).to(y.dtype))[0]

    torch.testing.assert_close(
        slope(torch.compile(nn.functional.grid_sample, backend="shorthaul", fullgraph=True)),
        slope(nn.functional.grid_sample),
    )


def loss_in_chunks(reduction):
    options = getattr(nn, "LinearCrossEntropyOptions", None)
    if options is None:
        pytest.skip("this version of PyTorch has no linear_cross_entropy in chunks")

    def loss(x, weight, labels, bias=None):
        return nn.functional.linear_cross_entropy(
            x,
            weight,
            labels,
            linear_bias=bias,
            reduction=reduction,
            ignore_index=3,
            options=options(batch_chunk_size=2, allow_retain_graph=True),
        )

    return loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_in_chunks_is_one_loss(reduction):
    loss, labels = loss_in_chunks(reduction), torch.tensor([0, 3, 1, 4, 2, 3])
    given = (normal(6, 4), normal(5, 4), constant(labels))
    check({"loss": (loss, *given), "with bias": (loss, *given, normal(5))})
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    torch.testing.assert_close(compiled(loss, x, weight, labels), loss(x, weight, labels))
    with torch.no_grad():
        torch.testing.assert_close(compiled(loss, x, weight, labels), loss(x, weight, labels))


def test_a_large_loss_in_chunks_stays_so(monkeypatch):
    monkeypatch.setattr("shorthaul._rewrites._MOST_SCORES", 29)
    loss = loss_in_chunks("mean")
    model = shorthaul.module(Function(loss))
    x, labels = torch.randn(6, 4), torch.tensor([0, 3, 1, 4, 2, 3])
    weight = torch.randn(5, 4, requires_grad=True)
    with pytest.warns(shorthaul.FallbackWarning, match="backward pass of its own"):
        torch.testing.assert_close(model(x, weight, labels), loss(x, weight, labels))


@pytest.mark.parametrize("fallback", ["error", "eager"])
def test_empty_slices_beside_what_is_made_from_the_same(fallback):
    """Rotary embeddings of whole heads: nothing stands left and right of what they turn."""

    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.ones(4) * 2), nn.Linear(4, 4)

        def forward(self, x):
            turned = torch.cat((x[..., :0], x * self.scale, x[..., 4:] * self.scale[:0]), -1)
            return turned + torch.cat([self.linear(x[:0]), self.linear(x)])

    model, x = Turn(), torch.randn(3, 4, requires_grad=True)

    def gradients(run):
        return torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        compiled = shorthaul.module(model, fallback=fallback)
        for found, expected in zip(gradients(compiled), gradients(model), strict=True):
            torch.testing.assert_close(found, expected)
    assert shorthaul.report(compiled, x).data["kernels"]


def test_a_parameter_that_only_an_empty_slice_uses_has_zeros_for_its_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return torch.cat((x * self.used, x[..., 4:] * self.idle[:0]), -1)

    model = Model()
    shorthaul.module(model)(torch.randn(3, 4)).sum().backward()
    assert torch.equal(model.idle.grad, torch.zeros(4)) and model.used.grad.abs().sum() > 0


def test_a_write_behind_an_empty_slice_is_kept():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x):
            return torch.cat((x, self.count.add_(1)[:0]))

    model = shorthaul.module(Model())
    for n in (1, 2):
        torch.testing.assert_close(model(torch.ones(3)), torch.ones(3))
        assert torch.equal(model.count, torch.full((4,), float(n)))
