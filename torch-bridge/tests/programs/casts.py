"""Programs that change types: casts in forward, mixed types, promotion, special numbers."""

import math

import torch
from torch import nn

from .facts import gradients, observe, raises, randn, step, training
from .registry import HALF, program

NUMBERS = (0.3, 1.7, -2.5, 1e-3, 65519.0, 3e38)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 0.5)
TYPES = {
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "int": torch.int32,
    "long": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def _cast(name):
    dtype = TYPES[name]

    @program(name=f"to_{name}")
    def cast(wrap):
        m = wrap(lambda x: x.to(dtype))
        numbers = NUMBERS[:4] if name in ("int", "long", "uint8") else NUMBERS + SPECIAL
        inside = numbers if name != "uint8" else (0.3, 1.7, 254.9)
        return [m(torch.tensor(inside)), m(torch.tensor(inside, dtype=torch.float64))]


def _compute(name):
    dtype = TYPES[name]

    @program(name=f"computes_in_{name}", slack=HALF)
    def compute(wrap):
        def forward(x, w):
            y = x.to(dtype) @ w.to(dtype)
            return y, y.sum(), (y * 3 + 1).float(), y.relu().mean()

        return [step(wrap(forward), randn(3, 4), randn(4, 2)) for _ in range(2)]


for _name in TYPES:
    _cast(_name)
for _name in ("bfloat16", "half", "double"):
    _compute(_name)


@program
def bfloat16_methods(wrap):
    m = wrap(lambda x: (x.bfloat16(), x.bfloat16().float(), x.half().float(), x.bfloat16() * 2))
    return step(m, torch.tensor([0.3, 1.7, -2.5]).requires_grad_())


@program
def bfloat16_model(wrap):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).bfloat16()
    m = wrap(model)
    return [training(model, m, randn(3, 4, dtype=torch.bfloat16)) for _ in range(2)]


@program
def half_model(wrap):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).half()
    return training(model, wrap(model), randn(3, 4, dtype=torch.float16))


@program
def double_model(wrap):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    return training(model, wrap(model), randn(3, 4, dtype=torch.float64))


@program
def float_model_gets_double(wrap):
    m = wrap(nn.Linear(3, 2))
    return [raises(m, torch.randn(2, 3, dtype=torch.float64)), m(torch.randn(2, 3))]


@program
def mixed_model(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3)

        def forward(self, x):
            return self.b(self.a(x.double()).float())

    # Float64 gradients that passed through float32 can be held to float64's rounding where no
    # float32 sum rounds: numbers of few bits.
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 8).round() / 8)
    m, x = wrap(model), torch.tensor([[0.5, -1.25, 2.0], [0.75, 3.0, -0.25]], requires_grad=True)
    out = m(x)
    (out * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    return [out, x.grad, gradients(model)]


@program
def type_of_input_changes(wrap):
    m = wrap(lambda x: x * 2 + 1)
    types = (torch.float32, torch.int64, torch.float64, torch.bool, torch.bfloat16)
    return [m(torch.ones(3).to(dtype)) for dtype in types]


@program
def promotion(wrap):
    def forward(i, f, d, b, h):
        return (
            i + f,
            i + d,
            b + i,
            b * 2.5,
            h + f,
            h * 2,
            i / 2,
            i * 2.0,
            f + d,
            b + b,
            i // 2,
            i**2,
        )

    return wrap(forward)(
        torch.tensor([1, -2, 3]),
        torch.randn(3),
        torch.randn(3, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.randn(3).bfloat16(),
    )


@program
def promotion_of_zero_dimensional_tensors(wrap):
    def forward(x, i):
        scalar = torch.tensor(2.5, dtype=torch.float64)
        return x * scalar, i * scalar, x.bfloat16() * scalar, i + torch.tensor(2), x.half() + i

    return wrap(forward)(torch.randn(3), torch.arange(3))


@program
def branch_on_type(wrap):
    m = wrap(lambda x: x * 2 if x.dtype == torch.float32 else x.float() * 3)
    return [m(torch.ones(3)), m(torch.ones(3, dtype=torch.float64)), m(torch.ones(3).int())]


@program
def type_of_other(wrap):
    m = wrap(lambda x, y: x.type_as(y) + y.to(x))
    return [raises(m, torch.ones(3), torch.ones(3).double()), m(torch.ones(2).int(), torch.ones(2))]


@program
def new_tensors_like_others(wrap):
    def forward(x):
        return x.new_zeros(2), x.new_full((2,), 3), torch.ones_like(x), x.new_tensor([1, 2])

    m = wrap(forward)
    return [m(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.int64)]


@program
def rounding_half_to_even(wrap):
    m = wrap(lambda x: (x.round(), x.floor(), x.ceil(), x.trunc(), x.frac(), x.round(decimals=1)))
    return m(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.25, 1e10]))


@program
def special_numbers_elementwise(wrap):
    def forward(x):
        return (
            x.relu(), x.sigmoid(), x.tanh(), x.exp(), x.abs(), x.sign(), x.sqrt(), x.clamp(-1, 1),
            x.isnan(), x.isinf(), x.nan_to_num(), x == x, x > 0, x.max(), x.sum(), x.softmax(0),
        )  # fmt: skip

    return wrap(forward)(torch.tensor(SPECIAL))


@program
def maximum_with_nan(wrap):
    def forward(x, y):
        return (
            torch.maximum(x, y),
            torch.fmax(x, y),
            torch.minimum(x, y),
            x.amax(),
            x.argmax(),
            x.sort(),
        )

    nan = float("nan")
    return wrap(forward)(torch.tensor([1.0, nan, 3.0]), torch.tensor([nan, 2.0, -1.0]))


@program
def gradient_through_cast(wrap):
    m = wrap(lambda x: (x.double() * 2).float().bfloat16().float())
    return step(m, randn(5))


@program
def bitcast(wrap):
    m = wrap(lambda x: (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32))
    return m(torch.tensor([-1.5, 2.0, -0.0]))


@program
def complex_arithmetic(wrap):
    m = wrap(lambda x: (x * x.conj(), x.abs(), x.angle(), x.real, (x * 1j).imag))
    return raises(step, m, torch.randn(3, dtype=torch.complex64).requires_grad_())


@program
def complex_from_real(wrap):
    m = wrap(lambda a, b: torch.complex(a, b).exp().abs() + torch.polar(a.abs(), b).real)
    return step(m, randn(3), randn(3))


@program
def rotary_embedding_by_complex_numbers(wrap):
    def forward(x, angles):
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    return step(wrap(forward), randn(2, 5, 8), torch.randn(5, 4))


class _Rotated(nn.Module):
    """Meta's rotary embedding: a table of complex numbers, cut to the positions of a call."""

    def __init__(self, dim: int = 6, length: int = 16):
        super().__init__()
        angles = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(0, dim, 2) / dim))
        self.turns = torch.polar(torch.ones_like(angles), angles)
        self.q, self.k = nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, 2 * dim)

    def forward(self, x, start: int, heads_first: bool = False):
        turns = self.turns[start : start + x.shape[1]].to(x.device)
        turns = turns.view(1, 1, x.shape[1], 3) if heads_first else turns.unsqueeze(1)
        found = []
        for layer in (self.q, self.k):
            y = layer(x).unflatten(-1, (2, 6)).float()
            y = y.transpose(1, 2) if heads_first else y
            z = torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2))
            found.append(torch.view_as_real(z * turns).flatten(-2).type_as(x))
        return found


@program
def rotary_embedding_of_a_complex_table(wrap):
    model = _Rotated()
    m = wrap(model)
    return [training(model, m, randn(2, n, 12), start) for n, start in ((4, 0), (4, 3), (7, 1))]


@program
def rotary_embedding_of_a_table_that_forward_moves(wrap):
    class Model(_Rotated):
        def forward(self, x, start: int):
            self.turns = self.turns.to(device=x.device)
            return super().forward(x, start), self.turns

    model = Model()
    m, table = wrap(model), model.turns
    found = [m(randn(2, n, 12), start) for n, start in ((4, 0), (4, 3), (7, 1))]
    return [[pair[0] for pair in found], [pair[1] is table for pair in found], model.turns is table]


@program
def rotary_embedding_of_permuted_heads(wrap):
    model = _Rotated()
    m = wrap(model)
    return [training(model, m, randn(2, n, 12), 1, heads_first=True) for n in (4, 5)]


@program
def complex_table_that_learns(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

        def forward(self, x):
            z = torch.complex(x, x.square()) * self.filter.unsqueeze(0)
            return torch.view_as_real(z.transpose(-1, -2)), (z * z.conj()).real

    model = Model()
    return training(model, wrap(model), randn(2, 4, 3))


@program
def parts_of_complex_results(wrap):
    def forward(a, b):
        z = torch.view_as_complex(a) * torch.view_as_complex(b)
        pair = torch.view_as_real(z)
        return pair, z.real, z.imag, z[..., 1:].real, torch.view_as_real(z.conj() - z)

    m = wrap(forward)
    return [step(m, randn(3, 4, 2), randn(3, 4, 2)), m(torch.randn(3, 4, 2), torch.randn(4, 2))]


@program
def complex_results_that_are_not_finite(wrap):
    def forward(a, b):
        z, w = torch.view_as_complex(a), torch.view_as_complex(b)
        return torch.view_as_real(z * w), torch.view_as_real(z + w), torch.view_as_real(z * 2.0)

    a = torch.tensor([[math.inf, 1.0], [0.0, math.nan], [-0.0, 2.0]])
    return wrap(forward)(a, torch.tensor([[2.0, 0.0], [1.0, -math.inf], [0.0, -1.0]]))


@program
def complex_results_written_and_returned(wrap):
    def forward(a, b):
        z = torch.view_as_complex(a * 1) * torch.view_as_complex(b)
        w = z * z
        w.mul_(2)
        pair = torch.view_as_real(z)
        pair.add_(1)
        return pair, torch.view_as_real(w), torch.view_as_real(z * z), z

    return step(wrap(forward), torch.randn(3, 2), torch.randn(3, 2))


@program
def pair_written_by_the_caller(wrap):
    m = wrap(lambda x: torch.view_as_real(torch.view_as_complex(x)))
    x = torch.randn(3, 2)
    y = m(x)
    y.add_(1)
    return [x, y is x]


@program
def quantized_by_hand(wrap):
    def forward(x):
        scale = x.abs().max() / 127
        return (x / scale).round().clamp(-128, 127).to(torch.int8), scale

    q, scale = wrap(forward)(torch.randn(20))
    return [q, scale, observe(q.float() * scale)]


@program
def fake_quantization(wrap):
    m = wrap(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127))
    return step(m, (torch.randn(10) * 8).requires_grad_())


@program
def uint8_image_normalized(wrap):
    m = wrap(lambda x: (x.float() / 255 - 0.5) / 0.25)
    return m(torch.arange(0, 250, 50, dtype=torch.uint8))


@program
def float8_storage(wrap):
    m = wrap(lambda x: x.to(torch.float8_e4m3fn).float())
    return raises(m, torch.tensor([0.3, 1.7, 100.0, 0.001]))
