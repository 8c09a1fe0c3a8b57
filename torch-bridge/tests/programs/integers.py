"""Programs with integers, booleans, bits, out-of-range indices and division by zero."""

import torch
import torch.nn.functional as F
from torch import nn

from .facts import observe, raises, randn, step
from .registry import program

INT_MIN = torch.iinfo(torch.int64).min


@program
def division_by_zero(wrap):
    m = wrap(lambda a, b: a // b)
    return [
        raises(m, torch.tensor([4, 5]), torch.tensor([2, 0])),
        m(torch.tensor(7), torch.tensor(2)),
    ]


@program
def division_by_zero_of_short_integers(wrap):
    m, seen = wrap(lambda a, b: torch.div(a, b, rounding_mode="trunc")), []
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        one, zero = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)
        seen.append([raises(m, one, zero), m(one, one)])
    return seen


@program
def remainder_by_zero(wrap):
    m = wrap(lambda a, b: a % b)
    return [
        raises(m, torch.tensor([4, 5]), torch.tensor([2, 0])),
        m(torch.tensor(-7), torch.tensor(3)),
    ]


@program
def fmod_by_zero(wrap):
    m = wrap(lambda a, b: torch.fmod(a, b))
    return [
        raises(m, torch.tensor([4]), torch.tensor([0])),
        m(torch.tensor([-7]), torch.tensor([3])),
    ]


@program
def true_division_by_zero(wrap):
    m = wrap(lambda a, b: (a / b, a.float() // b, a.float() % b, torch.fmod(a.float(), b)))
    return m(torch.tensor([4, 0, -3, 7]), torch.tensor([0, 0, 0, 2]))


@program(since=(2, 14))
def smallest_integer_divided_by_minus_one(wrap):
    m = wrap(lambda a, b: (a // b, a % b, -a, a.abs(), a * b, a - 1))
    return m(torch.tensor([INT_MIN, INT_MIN + 1, -1]), torch.tensor([-1, -1, -1]))


@program
def smallest_short_integer_divided_by_minus_one(wrap):
    m, seen = wrap(lambda a, b: (a // b, a % b, a * b)), []
    for dtype in (torch.int8, torch.int16):
        low = torch.tensor([torch.iinfo(dtype).min, 7], dtype=dtype)
        seen.append(m(low, torch.tensor([-1, -1], dtype=dtype)))
    return seen


@program
def integers_wrap(wrap):
    m, seen = wrap(lambda a, b: (a + b, a - b, a * b, -a, a**2)), []
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        a = torch.tensor([info.max, info.min, 3], dtype=dtype)
        seen.append(m(a, torch.tensor([info.max, 1, 5], dtype=dtype)))
    return seen


@program
def floor_and_remainder_of_negatives(wrap):
    m = wrap(lambda a, b: (a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")))
    a, b = torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])
    return [m(a, b), m(a.float(), b.float()), m(a.int(), b.int())]


@program
def bits(wrap):
    m = wrap(lambda a, b: (a & b, a | b, a ^ b, ~a, a << 2, a >> 1))
    a, b = torch.tensor([5, -3, 1 << 40]), torch.tensor([3, 6, -1])
    return [m(a, b), raises(m, a > 0, b > 0)]


@program
def shifts_by_tensors(wrap):
    m = wrap(lambda a, n: (a << n, a >> n))
    return m(torch.tensor([1, -8, 5]), torch.tensor([3, 1, 0]))


@program
def booleans(wrap):
    def forward(a, b):
        return (
            a & b,
            a | b,
            ~a,
            a ^ b,
            a.any(),
            a.all(),
            a.sum(),
            a * b,
            a + b,
            a.logical_not(),
            a < b,
        )

    return wrap(forward)(torch.tensor([True, False, True]), torch.tensor([True, True, False]))


@program
def boolean_subtraction_is_refused(wrap):
    return raises(wrap(lambda a, b: a - b), torch.tensor([True]), torch.tensor([False]))


@program
def integer_sums_and_products(wrap):
    m = wrap(
        lambda x: (
            x.sum(),
            x.prod(),
            x.cumsum(0),
            x.max(0),
            x.float().mean(),
            x.sum(dtype=torch.int32),
        )
    )
    return [m(torch.tensor([3, 1, 4, 1])), m(torch.tensor([200, 100], dtype=torch.uint8))]


@program
def mean_of_integers_is_refused(wrap):
    return raises(wrap(lambda x: x.mean()), torch.arange(3))


@program
def large_integers_keep_their_digits(wrap):
    m = wrap(lambda x: (x + 1, x // 3, x % 1000, x.float(), x.double(), (x * 1.0), x == x + 1))
    return m(torch.tensor([2**53 + 1, 2**24 + 1, -(2**60)]))


@program
def powers(wrap):
    m = wrap(lambda x, n: (x**n, x**2, x**-1.0, 2**n, x**0.5))
    return [
        m(torch.tensor([1.0, 2.0, -3.0]), torch.tensor([2, 3, 0])),
        m(torch.rand(2), torch.ones(2)),
    ]


@program
def integer_to_negative_power_is_refused(wrap):
    m = wrap(lambda x: x**-1)
    return [raises(m, torch.tensor([2, 4])), m(torch.tensor([2.0, 4.0]))]


@program
def index_out_of_range(wrap):
    m, x = wrap(lambda x, i: x[i]), torch.randn(4)
    return [raises(m, x, torch.tensor([1, k])) for k in (3, 4, -4, -5, 100)]


@program
def number_index_out_of_range(wrap):
    m, x = wrap(lambda x, k: x[k] * 2), torch.randn(4)
    return [raises(m, x, k) for k in (0, 3, 4, -4, -5)]


@program
def embedding_out_of_range(wrap):
    m = wrap(nn.Embedding(5, 2))
    return [raises(m, torch.tensor([0, k])) for k in (4, 5, -1)]


@program
def gather_out_of_range(wrap):
    m, x = wrap(lambda x, i: x.gather(0, i)), torch.randn(4)
    return [raises(m, x, torch.tensor([0, k])) for k in (3, 4, -1)]


@program
def scatter_out_of_range(wrap):
    m = wrap(lambda i: torch.zeros(4).scatter(0, i, 1.0))
    return [raises(m, torch.tensor([0, k])) for k in (3, 4)]


@program
def index_select_out_of_range(wrap):
    m, x = wrap(lambda x, i: x.index_select(0, i)), torch.randn(4)
    return [raises(m, x, torch.tensor([0, k])) for k in (3, 4, -1)]


@program
def label_out_of_range(wrap):
    m, logits = wrap(lambda x, t: nn.functional.cross_entropy(x, t)), torch.randn(2, 3)
    return [raises(m, logits, torch.tensor([0, k])) for k in (2, 3, -100)]


@program
def one_hot_out_of_range(wrap):
    m = wrap(lambda t: nn.functional.one_hot(t, 3))
    return [raises(m, torch.tensor([0, k])) for k in (2, 3, -1)]


@program
def one_hot_of_unknown_width(wrap):
    m = wrap(lambda t: nn.functional.one_hot(t).float())
    return [m(torch.tensor([0, k])) for k in (2, 4, 2)]


@program
def bucketize(wrap):
    m = wrap(lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0, 2.0])))
    return m(torch.tensor([-1.0, 0.0, 0.5, 2.0, 3.0]))


@program
def searchsorted_right(wrap):
    m = wrap(lambda s, x: torch.searchsorted(s, x, right=True))
    return m(torch.tensor([1, 3, 3, 7]), torch.tensor([0, 3, 8]))


@program
def bincount(wrap):
    m = wrap(lambda x: torch.bincount(x, minlength=3))
    return [m(torch.tensor([0, 1, 1])), m(torch.tensor([5, 1]))]


@program
def unique(wrap):
    m = wrap(lambda x: torch.unique(x, return_counts=True))
    return [m(torch.tensor([3, 1, 1])), m(torch.tensor([2, 2, 2]))]


@program
def nonzero(wrap):
    m = wrap(lambda x: (x.nonzero(), (x > 1).nonzero(as_tuple=True)[0] * 2))
    return [m(torch.tensor([0, 1, 2])), m(torch.tensor([0, 0, 3])), m(torch.zeros(3))]


@program
def masked_select(wrap):
    m = wrap(lambda x: x[x > 0] * 2)
    return [
        step(m, torch.tensor(v).requires_grad_()) for v in ([1.0, -1.0, 2.0], [-1.0, -1.0, -1.0])
    ]


@program
def arange_by_sizes(wrap):
    m = wrap(
        lambda x: torch.arange(0, x.shape[0], 2) + torch.arange(x.shape[0] // 2 + x.shape[0] % 2)
    )
    return [m(torch.zeros(n)) for n in (1, 4, 7)]


@program
def linspace_and_logspace(wrap):
    m = wrap(lambda x: torch.linspace(0, 1, x.shape[0]) + torch.logspace(0, 1, x.shape[0]) * x)
    return [step(m, randn(n)) for n in (1, 2, 5)]


@program
def comparison_of_mixed_types(wrap):
    m = wrap(lambda a, b: (a < b, a == b, a >= 1.5, b != 2, torch.eq(a, b)))
    return m(torch.tensor([1, 2, 3]), torch.tensor([1.5, 2.0, 2.5]))


@program
def integer_input_among_float_inputs(wrap):
    m = wrap(lambda x, n: x * n + n.float().log1p())
    return [step(m, randn(3), torch.tensor([k, 1, 2])) for k in (0, 5)]


@program
def where_with_integers(wrap):
    m = wrap(lambda c, x: (torch.where(c, x, 0), torch.where(c, 1, 2), torch.where(c, x, 0.5)))
    return m(torch.tensor([True, False]), torch.tensor([7, 8]))


@program
def histogram(wrap):
    m = wrap(lambda x: torch.histc(x, bins=4, min=0, max=1))
    return raises(lambda: observe(m(torch.tensor([0.1, 0.3, 0.3, 0.9]))))


@program
def repeat_interleave_by_tensor(wrap):
    m = wrap(lambda x, n: x.repeat_interleave(n, 0))
    return [step(m, randn(3, 2), torch.tensor(n)) for n in ([1, 2, 0], [3, 0, 0])]


@program(since=(2, 14))
def rounded_and_clamped(wrap):
    def forward(x):
        return (
            *(f(x) for f in (torch.floor, torch.ceil, torch.round, torch.trunc, F.relu, F.relu6)),
            F.hardtanh(x, -1.0, 2.0),
            F.threshold(x, 2.5, 1.5),
            x.masked_fill(x > 2, 7.0),
        )

    x = torch.tensor([-3, -1, 0, 1, 2, 5])
    return [step(wrap(forward), x.to(t)) for t in (torch.int64, torch.int32, torch.uint8)]


@program
def truth_values_added(wrap):
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    at, true = torch.zeros(256, dtype=torch.int64), torch.ones(256, dtype=torch.bool)

    def forward(a, b, at, true):
        none = torch.zeros(4, dtype=torch.bool)
        sums = (
            torch.add(a, b, alpha=True).int(),
            torch.add(a, b, alpha=False),
            a.expand(7, 3).sum(0),
        )
        return (
            (a + b).float(),
            (a + b) == a,
            *sums,
            none.scatter_add(0, at, true),
            none.index_add(0, at, true),
            none.index_put((at,), true, accumulate=True),
        )

    return step(wrap(forward), a, b, at, true)


@program(since=(2, 14))
def bounds_beyond_the_type(wrap):
    def forward(x):
        limits = x.clamp(-2, 3), x.clamp(min=-300), x.clamp(max=300), x.clamp(-300, 300)
        return (*limits, x == 300, x < 300, x * 300, torch.fmod(x, -3), x % -3)

    bytes_ = torch.tensor([0, 1, 2, 128, 255], dtype=torch.uint8)
    signed = torch.tensor([-128, -7, 5, 44, 127], dtype=torch.int8)
    return [step(wrap(forward), x) for x in (bytes_, signed)]


@program
def activations_of_integers_are_refused(wrap):
    refused = (F.silu, F.softplus, F.hardsigmoid, F.hardswish, F.hardshrink, F.celu, F.logsigmoid)
    numbers = [torch.arange(4), torch.arange(4, dtype=torch.uint8)]
    return [raises(wrap(lambda x, f=f: f(x)), x) for f in refused for x in numbers]


@program
def losses_of_integers_are_refused(wrap):
    refused = (F.binary_cross_entropy, F.huber_loss, F.smooth_l1_loss)
    return [raises(wrap(lambda x, f=f: f(x, x)), torch.arange(2)) for f in refused]


@program
def resizing_integers_is_refused_but_for_bytes(wrap):
    m = wrap(lambda x: F.interpolate(x, scale_factor=2.0))
    image = torch.arange(4).reshape(1, 1, 4)
    return [raises(m, image), m(image.to(torch.uint8)), m(image.float())]


@program
def rounding_of_truth_values_is_refused(wrap):
    refused = (torch.abs, torch.floor, torch.round, torch.trunc, torch.argmax)
    return [raises(wrap(lambda x, f=f: f(x)), torch.tensor([True, False])) for f in refused]


@program
def products_of_truth_values_are_refused(wrap):
    x = torch.tensor([[True, False], [True, True]])
    refused = (torch.matmul, torch.mm, F.linear)
    return [raises(wrap(lambda x, f=f: f(x, x)), x) for f in refused]


@program
def fake_quantization(wrap):
    """Straight-through rounding, as in training for quantized inference."""

    def forward(x, scales):
        whole = torch.arange(3, dtype=torch.int32)
        y = torch.fake_quantize_per_tensor_affine(1.37 * x, 0.0371, 3, -16, 15)
        z = torch.fake_quantize_per_channel_affine(1.37 * x, scales, whole, 1, -16, 15)
        scale, zero = scales.max().reshape(1), whole[1:2]
        return y, z, torch.fake_quantize_per_tensor_affine(1.37 * x, scale, zero, 0, 15)

    m, scales = wrap(forward), torch.tensor([0.01, 0.1, 0.2])
    return [step(m, randn(4, 3, 5), scales), step(m, randn(4, 3, 5).detach(), scales)]
