"""Recurrent layers as loops over time: results and gradients beside PyTorch's in float64."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import shorthaul
import torch
from against_eager import compiles_recurrent_layers
from torch import nn

CASES = {
    "plain": ((5, 4, 7), {}),
    "one_step": ((1, 3, 7), {}),
    "one_row": ((4, 1, 7), {}),
    "no_rows": ((4, 0, 7), {}),
    "many_rows": ((3, 39, 7), {}),
    "batch_first": ((4, 5, 7), {"batch_first": True}),
    "no_bias": ((3, 4, 7), {"bias": False}),
    "two_layers_both_ways": ((3, 3, 7), {"num_layers": 2, "bidirectional": True}),
}

KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
}


class _Layer(nn.Module):
    """All that a layer gives, from states that are given."""

    def __init__(self, kind: str, width: int, **options):
        super().__init__()
        self.layer = KINDS[kind](7, width, **options)

    def forward(self, x, *states):
        """Results, and the last states."""
        y, last = self.layer(x, states if len(states) > 1 else states[0])
        return y, *(last if isinstance(last, tuple) else (last,))


def _step(model, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    results = model(*inputs)
    loss = sum(
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in results
    )
    loss.backward()
    return [*results, *(x.grad for x in inputs), *(p.grad for p in model.parameters())]


def _compare(kind, case, width, dtype):
    shape, options = CASES[case]
    torch.manual_seed(0)
    exact = _Layer(kind, width, **options).double()
    n_rows = shape[0] if options.get("batch_first") else shape[1]
    n_states = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    states = [
        torch.randn(n_states, n_rows, width, dtype=torch.float64)
        for _ in range(2 if kind == "LSTM" else 1)
    ]
    inputs = [torch.randn(shape, dtype=torch.float64), *states]
    ours = copy.deepcopy(exact).to(dtype)
    expected = _step(exact, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        found = _step(shorthaul.module(ours), [x.to(dtype) for x in inputs])
    # Sums of at most some hundred products of numbers near 1, rounded in 24 or 53 bits.
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@compiles_recurrent_layers
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_equals_pytorch_in_double_precision(kind, case):
    _compare(kind, case, 37, torch.float32)


@compiles_recurrent_layers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 32, 300])
def test_layers_of_any_width(kind, width):
    _compare(kind, "plain", width, torch.float64)


@compiles_recurrent_layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "two_layers_both_ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_16_bits_are_as_close_to_float64_as_eagers(kind, case, dtype):
    shape, options = CASES[case]
    torch.manual_seed(0)
    eager = _Layer(kind, 12, **options).to(dtype)
    n_states = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    states = [torch.randn(n_states, shape[1], 12, dtype=dtype) for _ in range(1 + (kind == "LSTM"))]
    inputs = [torch.randn(shape, dtype=dtype), *states]
    ours = shorthaul.module(copy.deepcopy(eager))
    exact = _step(copy.deepcopy(eager).double(), [x.double() for x in inputs])
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        found = _step(ours, inputs)
    for own, other, right in zip(found, _step(eager, inputs), exact, strict=True):
        assert own.dtype == other.dtype == dtype
        errors = [(y.double() - right).abs().max().item() for y in (own, other)]
        # Where eager happens to be closer than one rounding of the largest number.
        least = torch.finfo(dtype).eps * right.abs().max().item()
        assert errors[0] <= max(2 * errors[1], least)


@compiles_recurrent_layers
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_change_in_time_and_batch(kind):
    torch.manual_seed(0)
    exact = KINDS[kind](7, 12, bidirectional=True).double()
    model = shorthaul.module(copy.deepcopy(exact).float())
    for shape in [(5, 4, 7), (3, 6, 7), (9, 1, 7), (1, 13, 7)]:
        x = torch.randn(shape, dtype=torch.float64)
        expected = _gradients(exact, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", shorthaul.FallbackWarning)
            found = _gradients(model, x.float())
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def _gradients(model, x):
    """Results without given states, and gradients of the inputs and parameters."""
    x = x.clone().requires_grad_()
    for p in model.parameters():
        p.grad = None
    y = model(x)[0]
    (y * y).sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


class _Part(nn.Module):
    """What ``part`` takes of a layer's results."""

    def __init__(self, layer, part):
        super().__init__()
        self.layer, self.part = layer, part

    def forward(self, x):
        """As said."""
        return self.part(self.layer, x)


def _without_gradient(layer, x):
    with torch.no_grad():
        return layer(x)[0]


PARTS = {
    "only_h": lambda layer, x: layer(x)[1][0],
    "only_c": lambda layer, x: layer(x)[1][1],
    "one_tensor_as_both_states": lambda layer, x: layer(x, (x[:1, :, :5],) * 2)[0],
    "no_batch": lambda layer, x: layer(x[:, 0])[0],
    "no_rows": lambda layer, x: layer(x[:, :0])[0].sum() + x.sum(),
    "without_gradient": lambda layer, x: _without_gradient(layer, x) * x[:, :, :5],
}


@compiles_recurrent_layers
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_results(name):
    torch.manual_seed(0)
    exact = _Part(nn.LSTM(7, 5), PARTS[name]).double()
    ours = shorthaul.module(copy.deepcopy(exact).float())
    x = torch.randn(4, 3, 7, dtype=torch.float64)
    runs = []
    for model, given in ((exact, x), (ours, x.float())):
        own = given.clone().requires_grad_()
        y = model(own)
        (y * y).sum().backward()
        runs.append([y, own.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*runs[::-1], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@compiles_recurrent_layers
@pytest.mark.parametrize("kind", KINDS)
def test_each_direction_of_a_layer_is_one_loop_in_each_pass(kind):
    layer = KINDS[kind](7, 5, 2, bidirectional=True)
    report = shorthaul.report(layer, torch.randn(4, 3, 7, requires_grad=True)).data
    loops = [k["stage"] for k in report["kernels"] if k["path"] == "loop over time"]
    assert sorted(loops) == ["backward"] * 4 + ["forward"] * 4
    assert report["outside"] == []


@compiles_recurrent_layers
def test_dropout_lies_between_layers():
    """It drops results of the first layer, which the weights pass on, and never of the last."""
    torch.manual_seed(0)
    layer = nn.RNN(4, 4, 2, dropout=0.5, nonlinearity="relu", bias=False)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(torch.eye(4) if "ih" in name else torch.zeros(4, 4))
    model = shorthaul.module(layer)
    x = torch.full((50, 40, 4), 3.0)
    y = model(x)[0]
    kept = (y != 0).float().mean().item()
    assert set(y.unique().tolist()) == {0.0, 6.0}
    # 8000 draws: the standard deviation of their mean is 0.0056.
    assert abs(kept - 0.5) < 0.03
    assert not torch.equal(model(x)[0], y)
    given = x.clone().requires_grad_()
    y = model(given)[0]
    y.sum().backward()
    torch.testing.assert_close(given.grad, (y != 0) * 2.0)
    model.eval()
    torch.testing.assert_close(model(x)[0], x)


@compiles_recurrent_layers
def test_second_derivatives_of_dropped_results_are_refused():
    model = shorthaul.module(nn.Sequential(nn.Tanh(), nn.RNN(4, 4, 2, dropout=0.5)))
    x = torch.randn(3, 2, 4, requires_grad=True)
    y = model(x)[0]
    with pytest.raises(RuntimeError, match="random numbers"):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        dx.square().sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_runs_packed_sequences(kind):
    torch.manual_seed(0)
    eager = _Packed(KINDS[kind](7, 5))
    ours = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(4, 3, 7)
    torch.testing.assert_close(ours(x), eager(x))
    report = shorthaul.report(eager, x).data
    assert any("pack_padded_sequence" in sentence for sentence in report["outside"])
    assert all(k["path"] != "loop over time" for k in report["kernels"])


def test_pytorch_runs_projections():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(7, 7), nn.LSTM(7, 6, proj_size=2))
    ours = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(4, 3, 7)
    with pytest.warns(shorthaul.FallbackWarning):
        found = ours(x)
    torch.testing.assert_close(found[0], eager(x)[0])


class _Packed(nn.Module):
    """A layer over sequences of 4, 2 and 1 steps."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        """Results, padded with zeros."""
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2, 1]))
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]


def _outcome(run):
    """What ``run`` gives, or its error: PyTorch's LSTM in bf16 needs AVX-512."""
    try:
        return run()
    except RuntimeError as error:
        return error


class _Forward(nn.Module):
    """``forward`` of a layer, called by its name in a region of ``torch.autocast``."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer = KINDS[kind](7, 8)

    def forward(self, x):
        """Results of the layer, in the type that they have in the region."""
        with torch.autocast("cpu"):
            return self.layer.forward(x)[0] * 2


class _Own(nn.LSTM):
    """A layer with a region of its own."""

    def forward(self, x):
        """Results of the layer."""
        with torch.autocast("cpu"):
            return super().forward(x)[0]


@compiles_recurrent_layers
@pytest.mark.parametrize(
    "make", [lambda: _Forward("LSTM"), lambda: _Forward("GRU"), lambda: _Own(7, 8)]
)
def test_results_within_autocast_have_the_type_of_eagers(make):
    torch.manual_seed(0)
    eager = make()
    ours = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(3, 2, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shorthaul.FallbackWarning)
        found = _outcome(lambda: ours(x))
    expected = _outcome(lambda: eager(x))
    assert type(found) is type(expected)
    if isinstance(expected, RuntimeError):
        assert str(found) == str(expected)
        return
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


class _Within(nn.Module):
    """A recurrent layer in a region of ``torch.autocast`` between two linear layers."""

    def __init__(self, kind: str):
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(7, 7), KINDS[kind](7, 8), nn.Linear(8, 3)

    def forward(self, x):
        """Results of the layer and of the linear layer behind it."""
        x = self.before(x)
        with torch.autocast("cpu"):
            y = self.layer(x)[0]
        return y, self.after(y.float())


@compiles_recurrent_layers
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("is_around", [False, True])
def test_pytorch_runs_a_layer_within_autocast(is_around, kind):
    torch.manual_seed(0)
    eager = _Within(kind)
    ours = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(3, 2, 7)
    with torch.autocast("cpu", enabled=is_around):
        expected = _outcome(lambda: eager(x))
        with pytest.warns(shorthaul.FallbackWarning, match="within torch.autocast"):
            found = _outcome(lambda: ours(x))
    assert type(found) is type(expected)
    if isinstance(expected, RuntimeError):
        assert str(found) == str(expected)
        return
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
