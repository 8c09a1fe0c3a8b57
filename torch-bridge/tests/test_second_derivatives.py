"""Gradients that are differentiated again, and batches of gradients: PyTorch's numbers.

Kernels compute second derivatives, but for regions with dropout, writes or autocast, which PyTorch
runs again; it also computes batches of gradients.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import warnings
import weakref

import pytest
import shorthaul
import torch
from against_eager import assert_close
from shorthaul import _random_numbers
from shorthaul._call import recorded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::shorthaul.FallbackWarning")


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def penalty(model, network, x):
    """A gradient penalty, as in WGAN-GP; gradients with respect to weights and inputs."""
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    norm = slope.flatten(1).norm(dim=1)
    (out.pow(2).mean() + (norm - 1).pow(2).mean()).backward()
    return [out, slope, x.grad, *(p.grad for p in network.parameters()), *network.buffers()]


def hessian_vector_product(model, network, x):
    """The product of the loss's Hessian and a vector, with respect to all weights."""
    weights = list(network.parameters())
    grads = torch.autograd.grad(model(x).pow(2).mean(), weights, create_graph=True)
    along = sum((g * torch.arange(1.0, 1 + g.numel()).view_as(g)).sum() for g in grads)
    return [*grads, *torch.autograd.grad(along, weights)]


def third_derivative(model, network, x):
    """Slopes of slopes of slopes."""
    found, slope = [], model(x).sin().sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(slope, x, create_graph=True)
        found.append(gradient)
        slope = (gradient * gradient).sum()
    return found


def jacobian(model, network, x):
    """All rows of a Jacobian in one backward pass."""
    out = model(x)
    rows = torch.eye(out.numel(), dtype=out.dtype).view(-1, *out.shape)
    batch = torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
    out.sum().backward()
    return [*batch, x.grad]


class Images(nn.Module):
    """Convolution, statistics of a batch that are written in place, a pool."""

    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(2, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5)
        self.two, self.head = nn.Conv2d(5, 5, 3, stride=2), nn.Linear(20, 3)

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.one(x)))
        return self.head(nn.functional.avg_pool2d(self.two(x), 2).flatten(1))


class Text(nn.Module):
    """Attention written out."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(6, 18), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x):
        q, k, v = self.inner(x).unflatten(-1, (3, 6)).unbind(-2)
        mixed = (q @ k.transpose(-1, -2) / 6**0.5).softmax(-1) @ v
        return self.head(nn.functional.gelu(self.norm(x + mixed))).mean(1)


class TwoRegions(nn.Module):
    """Two compiled parts that read the same weight and the same input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        y = self.inner(x).tanh()
        torch._dynamo.graph_break()
        return self.inner(y + x).tanh() * y


class Checkpointed(nn.Module):
    """A part whose values are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.two(checkpoint(lambda z: self.one(z).tanh(), x, use_reentrant=False))


KINDS = {
    "mlp": (mlp, (3, 6)),
    "images": (Images, (2, 2, 9, 11)),
    "text": (Text, (2, 5, 6)),
    "two regions": (TwoRegions, (3, 6)),
    "checkpoint": (Checkpointed, (3, 6)),
}


def _check(kind: str, measure) -> None:
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    network, x = make(), torch.randn(shape)
    found = {}
    for name in ("compiled", "eager", "float64"):
        own, given = copy.deepcopy(network), x.clone()
        if name == "float64":
            own, given = own.double(), given.double()
        model = shorthaul.module(own) if name == "compiled" else own
        with recorded() as calls:
            found[name] = measure(model, own, given.requires_grad_())
        assert bool(calls) == (name == "compiled")
    runs = zip(found["compiled"], found["eager"], found["float64"], strict=True)
    for i, (ours, near, exact) in enumerate(runs):
        assert_close(f"{kind}, result {i}", ours, near, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measure", [penalty, hessian_vector_product])
def test_second_derivatives_are_pytorchs(kind, measure):
    _check(kind, measure)


def test_third_derivatives():
    _check("mlp", third_derivative)


@pytest.mark.parametrize("kind", ["mlp", "images", "two regions"])
def test_batches_of_gradients(kind):
    _check(kind, jacobian)


def test_kernels_compute_second_derivatives():
    network = mlp()
    model = shorthaul.module(network, fallback="error")
    x = torch.randn(3, 6, requires_grad=True)
    with recorded() as calls:
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    forward, gradients = (call.program for call in calls)
    assert forward is not gradients
    assert [tuple(look.shape) for look in gradients.output_looks] == [(3, 6)]
    with recorded() as calls:
        for _ in range(2):
            penalty(model, network, torch.randn(3, 6, requires_grad=True))
    programs = [call.program for call in calls]
    assert programs == [forward, gradients] * 2, "the second derivative is compiled once"


def test_what_pytorch_runs_is_said_once():
    network = Dropped()
    model = shorthaul.module(network)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            penalty(model, network, torch.randn(2, 2, 9, 7, requires_grad=True))
    (only,) = [str(w.message) for w in said if w.category is shorthaul.FallbackWarning]
    assert "PyTorch runs a part of Dropped" in only and "create_graph=True" in only


def test_where_it_is_an_error():
    model = shorthaul.module(Dropped(), fallback="error")
    x = torch.randn(2, 2, 9, 7, requires_grad=True)
    out = model(x)
    with pytest.raises(shorthaul.CaptureError, match="second derivatives.*an error because of"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


class Dropped(nn.Module):
    """Dropout of elements, of whole channels, of everything and of nothing."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 5, 3), nn.Linear(5, 3)
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.5)
        self.never, self.always = nn.Dropout(0.0), nn.Dropout(1.0)

    def forward(self, x):
        x = self.channels(self.drop(self.one(x).sigmoid()))
        x = self.never(self.two(x).tanh()) + self.always(self.two(x))
        return self.head(self.drop(x.mean((2, 3)).exp()))


class Masked(torch.overrides.TorchFunctionMode):
    """Eager dropout with masks that are given, in order."""

    def __init__(self, masks):
        super().__init__()
        self.masks = iter(masks)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.functional.dropout, nn.functional.dropout2d):
            x, (p, mask) = args[0], next(self.masks)
            return x * mask.to(x.dtype) / (1 - p) if p < 1 else x * 0
        return func(*args, **(kwargs or {}))


def test_dropout_is_the_same_in_a_second_derivative():
    torch.manual_seed(0)
    network, x = Dropped(), torch.randn(2, 2, 9, 7)
    found = {}
    with recorded() as calls:
        own, given = copy.deepcopy(network), x.clone().requires_grad_()
        torch.manual_seed(3)
        found["compiled"] = penalty(shorthaul.module(own), own, given)
    assert calls
    torch.manual_seed(3)
    seed = int(torch.empty((), dtype=torch.int64).random_(2**62))
    shapes = [(0.3, (2, 5, 7, 5)), (0.5, (2, 5, 1, 1)), (1.0, (2, 5, 5, 3)), (0.3, (2, 5))]
    masks = []
    # Each operator that draws has a number, and may have 256 places.
    for number, (p, shape) in enumerate(shapes):
        drawn = _random_numbers.uniform(seed + (number * 256 << 32), math.prod(shape))
        masks.append((p, (drawn >= p).view(shape)))
    masks.insert(2, (0.0, torch.ones(())))
    for name in ("eager", "float64"):
        own, given = copy.deepcopy(network), x.clone()
        if name == "float64":
            own, given = own.double(), given.double()
        with Masked(masks):
            found[name] = penalty(own, own, given.requires_grad_())
    runs = zip(found["compiled"], found["eager"], found["float64"], strict=True)
    for i, (ours, near, exact) in enumerate(runs):
        assert_close(f"dropout, result {i}", ours, near, exact)


def half(number):
    return _random_numbers.Place(number, "dropout", 0.5, 0.5)


def test_masks_that_pytorch_draws_otherwise_are_an_error():
    with pytest.raises(shorthaul.ShorthaulError, match="drew other random numbers"):
        with _random_numbers.DrawnAgain(5, [half(0)]):
            nn.functional.dropout(torch.ones(3), 0.25)
    with pytest.raises(shorthaul.ShorthaulError, match="drew other random numbers"):
        with _random_numbers.DrawnAgain(5, [half(0), half(1)]):
            nn.functional.dropout(torch.ones(3), 0.5)


DRAWS = {
    "bernoulli": lambda x: torch.bernoulli(torch.empty_like(x), 0.3),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=0.7),
    "in place": lambda x: torch.zeros_like(x).bernoulli_(0.4),
    "normal": lambda x: torch.randn_like(x) + torch.randn(x.shape),
    "normal in place": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "normal in f64": lambda x: torch.randn(x.shape, dtype=torch.float64).to(x.dtype),
    "normal, transposed": lambda x: torch.randn_like(x.t()).t(),
    "of a deviation": lambda x: torch.normal(0.0, x.detach().abs()),
    "permutation": lambda x: x[:, torch.randperm(6)],
    "uniform": lambda x: torch.rand_like(x) - torch.rand(6),
    "uniform between": lambda x: torch.empty_like(x).uniform_(-1.0, 2.0),
    "whole": lambda x: torch.randint(-3, 4, x.shape).to(x.dtype),
}


@contextlib.contextmanager
def run_again():
    """Collects the results of regions that PyTorch runs again."""
    seen = []
    run = _random_numbers.run_again

    def spied(body, seed, places, inputs):
        seen.append(run(body, seed, places, inputs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_random_numbers, "run_again", spied)
        yield seen


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_the_same_in_a_second_derivative(name):
    class Noise(nn.Module):
        def forward(self, x):
            torch.rand_like(x)  # without a use
            x = F.dropout(x, 0.2)
            return x.sigmoid() + DRAWS[name](x) * x.tanh()

    network = Noise()
    x = torch.randn(5, 6, requires_grad=True)
    with recorded() as calls, run_again() as seen:
        out = shorthaul.module(network)(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(slope.sum(), x)
    assert calls and seen
    torch.testing.assert_close(seen[0][0], out, rtol=1e-5, atol=1e-6)
    # Without noise, the derivatives of both terms are known. The noise is what remains of `out`.
    if name not in ("gumbel", "permutation"):
        exact = x.detach().double().requires_grad_()
        kept = (out == 0.5).double()  # dropped elements have the value 0
        assert 0 < kept.sum() < 30
        y = torch.where(kept.bool(), 0.0, exact / 0.8)
        noise = ((out.double() - y.sigmoid()) / y.tanh()).nan_to_num().detach()
        value = y.sigmoid() + noise * y.tanh()
        (first,) = torch.autograd.grad(value.sum(), exact, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), exact)
        torch.testing.assert_close(slope.double(), first, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(again.double(), second, rtol=1e-3, atol=1e-3)


def test_random_numbers_are_the_same_in_a_batch_of_gradients():
    network = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 6, requires_grad=True)
    out = shorthaul.module(network)(x)
    rows = torch.eye(6).view(6, 3, 2)
    (batch,) = torch.autograd.grad(out, x, rows, is_grads_batched=True, retain_graph=True)
    for row, found in zip(rows, batch, strict=True):
        (wanted,) = torch.autograd.grad(out, x, row, retain_graph=True)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_with_dropout_is_the_same_in_a_second_derivative(is_causal):
    class Attention(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=is_causal)

    # Longer than a block of keys, so that there are several.
    sizes = [(2, 3, 70, 8), (2, 1, 70, 8), (2, 3, 70, 4)]
    q, k, v = (torch.randn(size, requires_grad=True) for size in sizes)
    with recorded() as calls, run_again() as seen:
        out = shorthaul.module(Attention())(q, k, v)
        own = torch.autograd.grad(out.sin().sum(), (q, k, v), retain_graph=True)
        assert calls and not seen
        again = torch.autograd.grad(out.sin().sum(), (q, k, v), create_graph=True)
    torch.testing.assert_close(seen[0][0], out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, own, rtol=1e-4, atol=1e-5)


def test_recurrent_layers_with_dropout_refuse_a_second_derivative():
    class Last(nn.Module):
        def forward(self, x):
            return x[0][:, 0]

    network = nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.GRU(6, 4, 2, dropout=0.5, batch_first=True), Last()
    )
    model = shorthaul.module(network)
    x = torch.randn(3, 6, requires_grad=True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(shorthaul.ShorthaulError, match="differentiated twice: it draws random"):
        slope.pow(2).sum().backward()
    with pytest.raises(shorthaul.ShorthaulError, match="one gradient at a time.*draws random"):
        torch.autograd.grad(model(x), x, torch.ones(2, 3, 4), is_grads_batched=True)


def test_a_buffer_that_is_read_before_it_is_written():
    class Average(nn.Module):
        """Takes off a moving average, then moves it."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x):
            y = self.fc(x)
            centred = y + self.average
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            return centred

    x = torch.randn(3, 6, requires_grad=True)
    out = shorthaul.module(Average())(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(shorthaul.ShorthaulError, match="reads a tensor that it writes in place"):
        slope.pow(2).sum().backward()


def test_a_weight_that_changed_since_is_refused():
    network = mlp()
    x = torch.randn(3, 6, requires_grad=True)
    out = shorthaul.module(network)(x)
    with torch.no_grad():
        network[2].bias.add_(1)
    with pytest.raises(shorthaul.ShorthaulError, match=r"sizes \[4\], was written in place"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_autocast_is_as_in_the_forward_pass():
    torch.manual_seed(0)
    network = mlp()
    found = []
    for model in (shorthaul.module(network), network):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        (slope,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.pow(2).sum(), x)
        found.append((out.dtype, slope, second))
    (ours, *tensors), (eagers, *expected) = found
    assert ours == eagers == torch.bfloat16
    torch.testing.assert_close(tensors, expected)


def test_inputs_are_given_back_after_a_plain_backward_pass():
    class Added(nn.Module):
        """Its backward pass reads nothing."""

        def forward(self, x, y):
            return x + y

    model = shorthaul.module(Added())
    leaf = torch.randn(4, requires_grad=True)
    x = leaf * 2
    alive = weakref.ref(x)
    loss = model(x, leaf).sum()
    del x
    loss.backward(retain_graph=True)
    gc.collect()
    assert alive() is not None
    loss.backward()
    gc.collect()
    assert alive() is None, "an intermediate result is kept behind the backward pass"
    assert torch.equal(leaf.grad, torch.full((4,), 6.0))
