"""Operators on single elements, reductions, moves and look-ups, compiled, against eager."""

import torch
import torch.nn.functional as F
from families import between, check, constant, ints, normal

#: Kinks and ends of the piecewise functions, and ordinary numbers.
POINTS = torch.tensor([-40.0, -6, -3, -1, -0.5, -0.0, 0.0, 0.25, 0.5, 1, 2, 3, 6, 20, 21, 40])
SPECIAL = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1.0])


def points():
    """A row longer than a vector, with every kink."""
    return torch.cat([POINTS, normal(23)])


def test_elementary_functions():
    wide = ["abs", "atan", "asinh", "ceil", "cos", "erf", "floor", "neg", "round", "sigmoid"]
    wide += ["sign", "sin", "tanh", "trunc", "square"]
    cases = {name: (getattr(torch, name), points()) for name in wide}
    for name in ["exp", "exp2", "expm1", "cosh", "sinh", "tan"]:
        cases[name] = (getattr(torch, name), between(-1.4, 1.4, 37))
    for name in ["log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "log1p"]:
        cases[name] = (getattr(torch, name), between(0.01, 30, 37))
    for name in ["acos", "asin", "atanh"]:
        cases[name] = (getattr(torch, name), between(-0.95, 0.95, 37))
    cases["acosh"] = (torch.acosh, between(1.05, 9, 37))
    check(cases)


def test_elementary_functions_of_special_values():
    names = ["abs", "atan", "ceil", "exp", "erf", "expm1", "floor", "log", "log1p", "neg", "round"]
    names += ["rsqrt", "sigmoid", "sign", "sqrt", "tanh", "trunc", "reciprocal", "isnan", "cosh"]
    names += ["asinh", "sin", "cos", "logical_not", "relu", "isinf", "isfinite"]
    check({name: (getattr(torch, name), constant(SPECIAL.clone())) for name in names})


ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "negative slope": lambda x: F.leaky_relu(x, -0.3),
    "elu": lambda x: F.elu(x, 1.7),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.6),
    "softplus": F.softplus,
    "softplus scaled": lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    "log_sigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": lambda x: F.softshrink(x, 0.5),
    "hardshrink": lambda x: F.hardshrink(x, 0.5),
    "threshold": lambda x: F.threshold(x, 0.25, -3.0),
    "clamp": lambda x: x.clamp(-0.5, 2.0),
    "clamp below": lambda x: x.clamp(min=0.5),
    "clamp above": lambda x: x.clamp(max=0.5),
    "glu": lambda x: F.glu(x.view(-1, 3, 13).transpose(0, 1)[:, :, :12]),
}


def test_activations():
    cases = {name: (function, points()) for name, function in ACTIVATIONS.items()}
    cases["prelu"] = (F.prelu, points().view(1, 3, 13), normal(3))
    cases["prelu of one"] = (F.prelu, points(), normal(1))
    check(cases)


def test_activations_of_special_values():
    cases = {name: (f, constant(SPECIAL.clone())) for name, f in ACTIVATIONS.items()}
    del cases["glu"]
    check(cases)


def test_arithmetic_broadcasts():
    a, b = normal(3, 1, 5), normal(4, 1)
    functions = {
        "add": lambda x, y: x + y,
        "add alpha": lambda x, y: torch.add(x, y, alpha=2.5),
        "sub": lambda x, y: x - y,
        "sub alpha": lambda x, y: torch.sub(x, y, alpha=2),
        "rsub": lambda x, y: 3.0 - x * y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / (y.abs() + 0.5),
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "max": torch.max,
        "atan2": torch.atan2,
        "pow": lambda x, y: (x.abs() + 0.1) ** y,
        "pow of number": lambda x, y: 2.0 ** (x + y),
        "lerp": lambda x, y: torch.lerp(x, y.expand(3, 4, 5), 0.3),
        "lerp tensor": lambda x, y: torch.lerp(x.expand(3, 4, 5), y.expand(3, 4, 5), y),
        "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.7),
        "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.7),
        "where": lambda x, y: torch.where(x > y, x, y * 2),
        "where number": lambda x, y: torch.where(x > y, x, 1.5),
        "masked_fill": lambda x, y: (x + y).masked_fill(y > 0, float("-inf")).exp(),
        "hypot": torch.hypot,
        "fmod": lambda x, y: torch.fmod(x, 0.7) + y,
        "remainder": lambda x, y: torch.remainder(x, 0.7) + y,
        "remainder tensor": lambda x, y: torch.remainder(x, y.abs() + 0.3),
        "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 0.1),
        "logaddexp": torch.logaddexp,
        "floor division": lambda x, y: torch.div(x, y, rounding_mode="floor"),
        "truncated division": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        "scalar tensor": lambda x, y: x * y.sum(),
    }
    check({name: (f, a.clone(), b.clone()) for name, f in functions.items()})


def test_powers_with_a_known_exponent():
    x = torch.cat([torch.tensor([0.0, -0.0, -2.0]), normal(20)])
    whole = {f"to the {e}": (lambda x, e=e: x**e, x.clone()) for e in (0, 1, 2, 3, 4, 2.0, 5)}
    positive = {
        f"to the {e}": (lambda x, e=e: x**e, between(0.1, 4, 21))
        for e in (0.5, -0.5, -1, -2, 1.5, 0.3333)
    }
    check(whole | positive)


def test_ties_share_the_gradient():
    tied = torch.tensor([[1.0, 2, 2, 0], [3, 3, 3, 3], [-1, -1, -2, -1]])
    check(
        {
            "maximum": (torch.maximum, tied.clone(), tied.clone()),
            "minimum": (torch.minimum, tied.clone(), tied.flip(1)),
            "amax": (lambda x: x.amax(1), tied.clone()),
            "amin": (lambda x: x.amin((0, 1)), tied.clone()),
            "max": (lambda x: x.max(), tied.clone()),
            "min": (lambda x: x.min(), tied.clone()),
            "max.dim": (lambda x: x.max(1), tied.clone()),
            "min.dim": (lambda x: x.min(dim=-1, keepdim=True), tied.clone()),
            "max.dim 0": (lambda x: x.max(0), tied.clone()),
            "clamp": (lambda x: x.clamp(-1, 2), tied.clone()),
            "abs": (lambda x: (x - 3).abs(), tied.clone()),
            "norm": (lambda x: (x - 3).norm(dim=1), tied.clone()),
            "max_pool": (lambda x: F.max_pool1d(x, 2), tied.clone()),
        }
    )


def test_type_promotion():
    f, d = normal(3, 4), normal(3, 4, seed="d").double()
    i, small, b = ints(9, 3, 4), ints(9, 3, 4, dtype=torch.int32), ints(2, 3, 4, dtype=torch.bool)
    zero_dim = torch.tensor(3)
    check(
        {
            "int + float": (lambda x, y: x + y, i, f.clone()),
            "bool * float": (lambda x, y: x * y, b, f.clone()),
            "float + double": (lambda x, y: x + y, f.clone(), constant(d.clone())),
            "int / int": (lambda x, y: x / (y + 1), i, i),
            "int + number": (lambda x: x + 1.5, i),
            "int * int32": (lambda x, y: x * y, i, small),
            "int32 + number": (lambda x: x + 2, small),
            "bool + bool": (lambda x, y: x + y, b, b),
            "bool sum": (lambda x: x.sum(1), b),
            "int mean as float": (lambda x: x.float().mean(), i),
            "int sum": (lambda x: x.sum(0), small),
            "floor division of ints": (lambda x: torch.div(x - 4, 3, rounding_mode="floor"), i),
            "remainder of ints": (lambda x: (x - 4) % 3, i),
            "truncated division of ints": (lambda x: torch.div(x - 4, 3, rounding_mode="trunc"), i),
            "compare int and float": (lambda x, y: x > y, i, f.clone()),
            "compare int and number": (lambda x: x >= 2.5, i),
            "scalar tensor keeps float": (lambda x, y: x * y, f.clone(), zero_dim),
            "cast down": (lambda x: x.double().float() * 2, f.clone()),
            "cast to int and back": (lambda x: x.to(torch.int64).float() + x, f.clone()),
            "where": (lambda c, x, y: torch.where(c, x, y), b, f.clone(), i),
            "sqrt of int": (lambda x: torch.sqrt(x), i),
            "pow of ints": (lambda x: x**2, i),
            "sigmoid of bool": (lambda x: torch.sigmoid(x), b),
            "abs of int": (lambda x: (x - 4).abs(), i),
            "neg of int": (lambda x: -x, small),
            "clamp of int": (lambda x: x.clamp(2, 5), i),
            "cumsum of int": (lambda x: x.cumsum(0), small),
            "cat": (lambda x, y: torch.cat([x, y]), i, f.clone()),
            "masked_fill of int": (lambda x, m: x.masked_fill(m, -1), i, b),
        }
    )


def test_comparisons_and_logic():
    x = constant(torch.tensor([1.0, 2, float("nan"), float("inf"), -1, 2]))
    y = constant(torch.tensor([1.0, float("nan"), float("nan"), float("inf"), 1, 3]))
    p, q = ints(2, 6, dtype=torch.bool), ints(2, 2, 6, dtype=torch.bool)
    names = ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"]
    cases = {name: (getattr(torch, name), x.clone(), y.clone()) for name in names}
    for case in cases.values():
        for tensor in case[1:]:
            tensor.detach_().requires_grad_()
    cases |= {
        "and": (lambda a, b: a & b, p, q),
        "or": (lambda a, b: a | b, p, q),
        "xor": (lambda a, b: a ^ b, p, q),
        "not": (lambda a: ~a, p),
        "any": (lambda a: a.any(), q),
        "any.dim": (lambda a: a.any(-1), q),
        "all": (lambda a: a.all(), q),
        "all.dim": (lambda a: a.all(0, keepdim=True), q),
        "and of ints": (lambda a: (a > 2) & (a < 5), ints(9, 7)),
        "maximum with NaN": (torch.maximum, constant(SPECIAL.clone()), constant(SPECIAL.flip(0))),
        "minimum with NaN": (torch.minimum, constant(SPECIAL.clone()), constant(SPECIAL.flip(0))),
    }
    check(cases)


def test_reductions():
    functions = {
        "sum": lambda x: x.sum(),
        "sum.dim": lambda x: x.sum(-1),
        "sum.dims": lambda x: x.sum((0, -1), keepdim=True),
        "sum inner": lambda x: x.sum(1),
        "mean": lambda x: x.mean(),
        "mean.dim": lambda x: x.mean((-2,), keepdim=True),
        "prod": lambda x: x[:, :2, :2].prod(),
        "prod.dim": lambda x: x.prod(1),
        "amax": lambda x: x.amax((0, 2)),
        "amin": lambda x: x.amin(-1, keepdim=True),
        "max": lambda x: x.max(),
        "max.dim": lambda x: x.max(-2),
        "min.dim": lambda x: x.min(dim=0, keepdim=True),
        "argmax": lambda x: x.argmax(),
        "argmax.dim": lambda x: x.argmax(-1),
        "argmin.dim": lambda x: x.argmin(1, keepdim=True),
        "logsumexp": lambda x: x.logsumexp(-1),
        "logsumexp.dims": lambda x: x.logsumexp((0, 1), keepdim=True),
        "var": lambda x: x.var(),
        "var.dim": lambda x: x.var((0, -1)),
        "var biased": lambda x: x.var(1, unbiased=False, keepdim=True),
        "var correction": lambda x: x.var(2, correction=2),
        "std": lambda x: x.std(-1),
        "var_mean": lambda x: torch.var_mean(x, 1),
        "std_mean": lambda x: torch.std_mean(x, (0, 2)),
        "norm": lambda x: x.norm(),
        "norm 1": lambda x: x.norm(1, dim=1),
        "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=(-1, 0), keepdim=True),
        "vector_norm inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
        "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        "normalize": lambda x: F.normalize(x, dim=1),
        "cosine_similarity": lambda x: F.cosine_similarity(x[0], x[1], dim=-1),
        "cumsum": lambda x: x.cumsum(-2),
        "count_nonzero": lambda x: (x > 0).sum((1, 2)),
        "nansum": lambda x: torch.nansum(x, 1),
    }
    check({name: (f, normal(3, 5, 7)) for name, f in functions.items()})


def test_reductions_of_special_values():
    rows = torch.tensor(
        [
            [1.0, float("nan"), 3.0],
            [float("inf"), 1.0, 2.0],
            [float("-inf"), 1.0, float("inf")],
            [float("-inf")] * 3,
        ]
    )
    functions = {
        "sum": lambda x: x.sum(1),
        "amax": lambda x: x.amax(1),
        "amin": lambda x: x.amin(1),
        "max.dim": lambda x: x.max(1),
        "min.dim": lambda x: x.min(1),
        "argmax": lambda x: x.argmax(1),
        "argmin": lambda x: x.argmin(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "mean": lambda x: x.mean(0),
        "norm": lambda x: x.norm(dim=1),
    }
    check({name: (f, constant(rows.clone())) for name, f in functions.items()})


def test_views_and_moves():
    functions = {
        "view": lambda x: x.view(-1, 6),
        "reshape of transposed": lambda x: x.transpose(0, 2).reshape(12, -1),
        "flatten": lambda x: x.flatten(-2),
        "unflatten": lambda x: x.unflatten(-1, (2, -1)),
        "squeeze": lambda x: x[:1].squeeze(),
        "squeeze.dim": lambda x: x[:, :1].squeeze(-2),
        "unsqueeze": lambda x: x.unsqueeze(-1),
        "transpose": lambda x: x.transpose(-1, 0),
        "permute": lambda x: x.permute(2, 0, -2),
        "t": lambda x: x[0].t(),
        "mT": lambda x: x.mT,
        "movedim": lambda x: x.movedim(0, -1),
        "expand": lambda x: x[:, :1].expand(-1, 4, -1),
        "expand_as": lambda x: x[:1].expand_as(x),
        "broadcast_to": lambda x: torch.broadcast_to(x, (2, 4, 3, 6)),
        "repeat": lambda x: x.repeat(2, 1, 3),
        "tile": lambda x: x.tile(2),
        "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
        "flip": lambda x: x.flip(-1, 0),
        "roll": lambda x: x.roll(2, -1),
        "rot90": lambda x: x.rot90(1, (1, 2)),
        "slice": lambda x: x[1:, ::2, -4:-1],
        "slice beyond": lambda x: x[:, 1:99],
        "select": lambda x: x[-1, :, 2],
        "narrow": lambda x: x.narrow(-1, -4, 3),
        "chunk": lambda x: x.chunk(4, -1),
        "split": lambda x: x.split(4, dim=-1),
        "split sizes": lambda x: x.split([1, 2], dim=1),
        "tensor_split": lambda x: x.tensor_split(3, -1),
        "unbind": lambda x: x.unbind(-2),
        "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], dim=-2),
        "cat of one": lambda x: torch.cat([x], 0),
        "cat with empty": lambda x: torch.cat([x[:, :0], x], 1),
        "stack": lambda x: torch.stack([x, -x], dim=-1),
        "hstack": lambda x: torch.hstack([x, x]),
        "constant_pad": lambda x: F.pad(x, (1, 2, 0, 1), value=-1.5),
        "negative pad": lambda x: F.pad(x, (-1, 2)),
        "reflect": lambda x: F.pad(x, (2, 1), mode="reflect"),
        "reflect 2d": lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"),
        "replicate": lambda x: F.pad(x, (2, 3), mode="replicate"),
        "replicate 2d": lambda x: F.pad(x, (2, 3, 1, 0), mode="replicate"),
        "circular": lambda x: F.pad(x, (2, 3), mode="circular"),
        "circular 2d": lambda x: F.pad(x, (6, 3, 1, 2), mode="circular"),
        "tril": lambda x: x.tril(-1),
        "triu": lambda x: x.triu(1),
        "diagonal": lambda x: torch.diagonal(x, 0, -2, -1),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(4, 3, 6), 2),
        "ones_like": lambda x: torch.ones_like(x) * x,
        "arange": lambda x: x * torch.arange(6),
        "linspace": lambda x: x * torch.linspace(0, 1, 6),
        "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, 1], indexing="ij"),
        "eye": lambda x: x @ torch.eye(6, dtype=x.dtype),
        "upsample nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    }
    check({name: (f, normal(4, 3, 6)) for name, f in functions.items()})


def test_look_ups():
    idx = torch.tensor([[2, 0, 2], [1, -1, -5]])
    flat = torch.tensor([3, -1, 0, -2])
    plain = torch.tensor([[4, 0, 4], [1, 2, 0]])
    mask = ints(2, 5, 3, dtype=torch.bool)
    check(
        {
            "x[idx]": (lambda x, i: x[i], normal(5, 3), idx),
            "x[:, idx]": (lambda x, i: x[:, i], normal(2, 4, 3), flat),
            "x[..., idx]": (lambda x, i: x[..., i], normal(2, 3, 4), flat),
            "x[list]": (lambda x: x[:, [0, -1]], normal(2, 4, 3)),
            "x[i, j]": (lambda x, i, j: x[i, j], normal(5, 5), flat, flat.flip(0)),
            "x[i, :, j]": (lambda x, i, j: x[i, :, j], normal(5, 2, 5), flat, flat.flip(0)),
            "x[:, i, j]": (lambda x, i, j: x[:, i, j], normal(2, 5, 5), idx, plain),
            "x[i, j] broadcast": (lambda x, i, j: x[i[:, None], j], normal(5, 5), flat, flat),
            "x[range, target]": (lambda x, i: x[torch.arange(4), i], normal(4, 5), flat),
            "index_select": (lambda x, i: x.index_select(-2, i), normal(2, 5, 3), plain[0]),
            "gather": (lambda x, i: x.gather(-1, i), normal(2, 5), plain),
            "gather 0": (lambda x, i: x.gather(0, i), normal(5, 3), plain),
            "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), normal(2, 5), plain),
            "embedding": (lambda i, w: F.embedding(i, w), plain, normal(5, 4)),
            "embedding padded": (
                lambda i, w: F.embedding(i, w, padding_idx=4),
                plain,
                normal(5, 4),
            ),
            "embedding padded from the end": (
                lambda i, w: F.embedding(i, w, padding_idx=-1),
                plain,
                normal(5, 4),
            ),
            "scatter_add": (
                lambda x, i, y: x.scatter_add(0, i, y),
                normal(5, 3),
                plain,
                normal(2, 3),
            ),
            "scatter_add smaller index": (
                lambda x, i, y: x.scatter_add(1, i, y),
                normal(2, 5),
                plain,
                constant(normal(3, 4)),
            ),
            "scatter of a number": (
                lambda x, i: x.scatter(1, i, 2.5) * x,
                normal(3, 5),
                torch.tensor([[4, 0, 4], [1, 1, 1], [2, 0, 0]]),
            ),
            "scatter of one": (
                lambda i: torch.zeros(2, 5).scatter(1, i, 1),
                plain,
            ),
            "index_add": (
                lambda x, i, y: x.index_add(0, i, y),
                normal(5, 3),
                flat % 4,
                normal(4, 3),
            ),
            "topk": (lambda x: x.topk(3, dim=-1), normal(4, 9)),
            "topk smallest": (lambda x: x.topk(2, dim=0, largest=False), normal(4, 9)),
            "sort": (lambda x: x.sort(-1, descending=True), normal(4, 9)),
            "one_hot": (lambda i: F.one_hot(i, 6).float(), plain),
            "masked": (lambda x, m: (x * m).sum(0), normal(5, 3), mask),
        }
    )


def test_slice_writes():
    def assigned(x, y):
        z = x * 2
        z[:, 1:3] = y
        return z * x

    def selected(x, y):
        z = torch.zeros_like(x)
        z[:, 0] = y[:, 0]
        z[1, -1] = x[0, 0]
        return z

    def added(x, y):
        z = x.clone()
        z[:, 1:3] += y
        z[::2].mul_(3.0)
        return z

    def filled(x, y):
        z = x + 1
        z[:, -1].zero_()
        z[0] = 7.0
        return z * 2

    def masked(x, y):
        z = x * 1
        z[z < 0] = 0.5
        return z

    check(
        {
            "slice_scatter": (
                lambda x, y: torch.slice_scatter(x, y, 1, 0, 4, 2),
                normal(3, 5),
                normal(3, 2),
            ),
            "slice_scatter from the end": (
                lambda x, y: torch.slice_scatter(x, y, -1, -2),
                normal(3, 5),
                normal(3, 2),
            ),
            "select_scatter": (
                lambda x, y: torch.select_scatter(x, y, 0, -1),
                normal(3, 5),
                normal(5),
            ),
            "z[:, 1:3] = y": (assigned, normal(3, 5), normal(3, 2)),
            "z[:, 0] = y": (selected, normal(3, 5), normal(3, 2)),
            "z[:, 1:3] += y": (added, normal(3, 5), normal(3, 2)),
            "z[0] = 7": (filled, normal(3, 5), normal(1)),
            "z[z < 0] = 0.5": (masked, normal(3, 5), normal(1)),
        }
    )
