"""Models whose ``forward`` calls ``torch.autograd.grad``, beside eager in float32 and float64.

Physics-informed networks, forces of energies, gradient penalties, inner loops of meta-learning:
the gradients inside are operators of the compiled graph, and the step differentiates them again.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from shorthaul import _span
from torch import nn
from torch._C._functorch import _grad_increment_nesting, _vmap_increment_nesting
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, hessian, vmap
from torch.func import grad as func_grad

grad = torch.autograd.grad

traces_gradients = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="this PyTorch's tracer breaks the graph at torch.autograd.grad",
)


class Burgers(nn.Module):
    """Residual of an equation with a second derivative by a coordinate."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU())
        self.head = nn.Sequential(nn.Softmax(-1), nn.Linear(16, 1))

    def forward(self, x, t):
        """u_t + u·u_x − u_xx / 100"""
        x, t = x.requires_grad_(), t.requires_grad_()
        u = self.head(self.net(torch.cat([x, t], 1)))
        u_t = grad(u, t, torch.ones_like(u), create_graph=True)[0]
        u_x = grad(u, x, torch.ones_like(u), create_graph=True)[0]
        u_xx = grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        return u_t + u * u_x - 0.01 * u_xx


class Forces(nn.Module):
    """An energy of pairs of atoms, and its negative gradient by positions."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(5, 8)
        self.pair = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8))
        self.out = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
        self.register_buffer("centres", torch.linspace(0, 3, 8))

    def forward(self, kinds, positions, first, second):
        """Both depend on the parameters."""
        features = self.kinds(kinds)
        distances = (positions[first] - positions[second]).norm(dim=-1)
        radial = torch.exp(-((distances[:, None] - self.centres) ** 2))
        messages = self.pair(torch.cat([features[first], radial], -1))
        features = features.index_add(0, second, messages)
        energy = self.out(features).sum()
        forces = -grad(energy, positions, create_graph=self.training)[0]
        return energy, forces


class Penalty(nn.Module):
    """A critic with a penalty of its gradient's norm, as in WGAN-GP."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 3, 1, 1, groups=4),
            nn.InstanceNorm2d(16, affine=True),
            nn.Softplus(),
            nn.Conv2d(16, 8, 3, 2, padding=2, dilation=2),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(8, 4, 3, 2, 1, output_padding=1, groups=2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * 4 * 4, 1),
        )

    def forward(self, x):
        """Scores and the penalty."""
        y = self.net(x)
        (g,) = grad(y.sum(), x, create_graph=True)
        return y, ((g.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


class Visible(nn.Module):
    """Values on the way to later results are results themselves, also without history."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        """u, a product of gradients, a Laplacian, a product with a value without history."""
        u = self.second(torch.sin(self.first(x)))
        first, second = (
            grad(u[:, k].sum(), x, create_graph=True, retain_graph=True)[0] for k in range(2)
        )
        rows = [grad(first[:, d].sum(), x, create_graph=True)[0][:, d] for d in range(4)]
        return u, first * second, sum(rows), u.detach() * first.sum()


class Frozen(nn.Module):
    """Parts without gradients inside of what is differentiated, and gradients once only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        """The step's gradient flows around what is frozen."""
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            scale = torch.exp(self.second(h))
        y = (self.second(h) * scale).sum() + (h.detach() * h).sum()
        (g,) = grad(y, x, create_graph=True)
        (once,) = grad(g.sum(), x, retain_graph=True)
        return g * h.sum() + once * self.second(h)


class Meta(nn.Module):
    """Three inner steps of gradient descent (MAML)."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(1, 8) * 0.3)

    def forward(self, x, y, query):
        """Predictions for the query with adapted weights."""
        w1, w2 = self.w1, self.w2
        for _ in range(3):
            loss = F.mse_loss(torch.relu(x @ w1.T) @ w2.T, y)
            g1, g2 = grad(loss, (w1, w2), create_graph=True)
            w1, w2 = w1 - 0.1 * g1, w2 - 0.1 * g2
        return torch.relu(query @ w1.T) @ w2.T


class Unused(nn.Module):
    """A gradient that is ``None``, weights of outputs, and a parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, w):
        """The last bias has no gradient in eager, and none here."""
        y = self.net(x)
        g, none = grad(y, [x, w], torch.full_like(y, 2.0), create_graph=True, allow_unused=True)
        return g if none is None else g * w.sum()


class Curved(nn.Module):
    """A Laplacian of each row, by ``torch.func``, and gradients of single samples."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        """Second derivatives of the network by its input, and by its parameters."""
        curvature = vmap(hessian(lambda row: self.net(row).squeeze(-1)))(x)
        parameters = dict(self.net.named_parameters())

        def size(given, row):
            return functional_call(self.net, given, (row,)).sum()

        rows = vmap(func_grad(size), in_dims=(None, 0))(parameters, x)
        return curvature.diagonal(dim1=-2, dim2=-1).sum(-1), rows["0.weight"]


class Written(nn.Module):
    """Constants from lists, circular padding, and slices of a fresh tensor that are written."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        """A gradient of each way to write."""
        y = torch.tanh(self.net(x)) * torch.tensor([[1.0], [-2.0]], dtype=x.dtype)
        filled = torch.zeros_like(x)
        filled[:, 0] = y[:, 1] ** 2
        filled[:, 1].copy_(y[:, 0].exp())
        by_x = grad(filled.sum(), x, create_graph=True)[0]
        return by_x, grad(F.pad(y, (2, 1), mode="circular").pow(3).sum(), x, create_graph=True)[0]


def _atoms(n):
    first, second = torch.triu_indices(n, n, 1)
    return torch.randint(0, 5, (n,)), torch.randn(n, 3).requires_grad_(), first, second


CASES = {
    "burgers": (Burgers, lambda n: (torch.rand(n, 1), torch.rand(n, 1)), (6, 9, 7)),
    "forces": (Forces, _atoms, (5, 5)),
    "penalty": (Penalty, lambda n: (torch.randn(n, 3, 16, 16).requires_grad_(),), (4, 4)),
    "visible": (Visible, lambda n: (torch.randn(n, 4).requires_grad_(),), (4, 6, 3)),
    "frozen": (Frozen, lambda n: (torch.randn(n, 4).requires_grad_(),), (4, 4)),
    "meta": (Meta, lambda n: (torch.randn(n, 4), torch.randn(n, 1), torch.randn(n, 4)), (6, 9)),
    "curved": (Curved, lambda n: (torch.randn(n, 3),), (4, 6, 3)),
    "unused": (
        Unused,
        lambda n: (torch.randn(n, 4).requires_grad_(), torch.randn(3).requires_grad_()),
        (4, 4),
    ),
    "written": (Written, lambda n: (torch.randn(n, 2, 5).requires_grad_(),), (3, 3)),
}


def _run(model, inputs, dtype=torch.float32):
    """Results, gradients of inputs and of parameters, after a loss with different weights."""
    given = [x.detach().clone().to(dtype if x.is_floating_point() else x.dtype) for x in inputs]
    for x, original in zip(given, inputs, strict=True):
        x.requires_grad_(original.requires_grad)
    model.zero_grad()
    results = model(*given)
    results = list(results) if isinstance(results, tuple) else [results]
    losses = [
        (y * torch.cos(torch.arange(y.numel()).to(y.dtype)).view(y.shape)).sum()
        for y in results
        if y.requires_grad
    ]
    sum(losses).backward()
    return [*results, *(x.grad for x in given), *(p.grad for p in model.parameters())]


def _compare(found, eager, exact):
    scale = max(x.abs().max().item() for x in exact if x is not None)
    for mine, theirs, true in zip(found, eager, exact, strict=True):
        assert (mine is None) == (theirs is None) == (true is None)
        if mine is None:
            continue
        assert mine.requires_grad == theirs.requires_grad
        # A tensor that is zero but for rounding has the rounding of what it is a difference of.
        size = max(true.abs().max().item(), 1e-2 * scale)
        own, limit = (x.double().sub(true).abs().max().item() / size for x in (mine, theirs))
        assert own <= 4 * limit + 2e-6


@traces_gradients
@pytest.mark.parametrize("name", CASES)
def test_gradients_inside_are_compiled(name):
    torch.manual_seed(0)
    kind, make, sizes = CASES[name]
    eager = kind()
    exact, compiled = copy.deepcopy(eager).double(), shorthaul.module(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("error", shorthaul.FallbackWarning)
        for n in sizes:
            inputs = make(n)
            _compare(
                _run(compiled, inputs), _run(eager, inputs), _run(exact, inputs, torch.float64)
            )
    report = shorthaul.report(compiled, *make(sizes[0])).data
    assert report["kernels"]
    assert not [s for s in report["outside"] if "PyTorch runs" in s]


@traces_gradients
def test_a_caller_may_ask_for_the_gradient_of_a_value_on_the_way():
    torch.manual_seed(0)
    eager = Visible()
    compiled = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(4, 4)
    found = []
    for model in (eager, compiled):
        u, product, _, last = model(x.clone().requires_grad_())
        assert grad(product.sum(), u, allow_unused=True, retain_graph=True)[0] is None
        seen = []
        u.register_hook(seen.append)
        (u.sin().sum() + product.sum() + last.sum()).backward()
        found.append(seen[0])
    torch.testing.assert_close(found[1], found[0])


@traces_gradients
def test_forces_in_evaluation():
    torch.manual_seed(0)
    eager = Forces().eval()
    compiled = shorthaul.module(copy.deepcopy(eager))
    inputs = _atoms(5)
    for found, expected in zip(compiled(*inputs), eager(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    assert not compiled(*inputs)[1].requires_grad


@traces_gradients
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_transforms_in_evaluation_are_compiled(mode):
    torch.manual_seed(0)
    eager = Curved().eval()
    compiled = shorthaul.module(copy.deepcopy(eager), fallback="error")
    for n in (4, 6):
        x = torch.randn(n, 3)
        with mode():
            for found, expected in zip(compiled(x), eager(x), strict=True):
                assert not found.requires_grad
                torch.testing.assert_close(found, expected)


class _Curvature(nn.Module):
    """A second derivative through a LayerNorm, whose own gradient is a third."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=torch.float64)

    def forward(self, x):
        """The second derivative of a sum by x."""
        y = torch.tanh(self.norm(torch.tanh(x))).sum()
        (g,) = grad(y, x, create_graph=True)
        return grad(g.sum(), x, create_graph=True)[0]


@traces_gradients
def test_third_derivatives_of_layer_norm_are_finite_differences():
    """Not so in eager of PyTorch 2.15, which takes the statistics for constants there."""
    torch.manual_seed(0)
    model = shorthaul.module(_Curvature())
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        model.norm.weight.copy_(torch.randn(4))
    h = 1e-5
    direction = torch.randn(5, 4, dtype=torch.float64)
    (found,) = grad((model(x) * direction).sum(), x)
    for place in ((0, 0), (1, 2), (4, 3)):
        step = torch.zeros_like(x)
        step[place] = h
        moved = [
            (model((x + s).detach().requires_grad_()) * direction).sum() for s in (step, -step)
        ]
        expected = (moved[0] - moved[1]) / (2 * h)
        torch.testing.assert_close(found[place], expected, rtol=1e-6, atol=1e-8)


class _Random(nn.Module):
    """Dropout in front of a linear layer: the gradient shows the mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        """A score of each row, and its gradient."""
        y = (F.dropout(x, 0.5) * self.weight).sum(1) + torch.rand(x.shape[0])
        return y, grad(y.sum(), x, create_graph=True)[0]


@traces_gradients
def test_random_numbers_are_the_same_in_both():
    torch.manual_seed(0)
    model = shorthaul.module(_Random())
    x = torch.randn(16, 8, requires_grad=True)
    y, g = model(x)
    dropped = (g == 0).double().mean()
    assert 0.3 < dropped < 0.7
    noise = y - (g * x).sum(1)
    assert 0 <= noise.min() and noise.max() < 1
    torch.testing.assert_close(g[g != 0], (2 * model.weight).expand(16, 8)[g != 0])


class _Solved(nn.Module):
    """A Gaussian process whose likelihood is differentiated by its places."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, y):
        """The gradient of the likelihood, in two ways."""
        z = self.net(x)
        covariance = torch.exp(-(z[:, None] - z[None]).pow(2).sum(-1)) + torch.eye(len(x)).to(x)
        factor = torch.linalg.cholesky(covariance)
        likelihood = (y * torch.cholesky_solve(y, factor)).sum() + factor.diagonal().log().sum()
        other = (y * torch.linalg.solve(covariance, y)).sum() + torch.linalg.slogdet(covariance)[1]
        return tuple(grad(one, x, create_graph=True)[0] for one in (likelihood, other))


@traces_gradients
def test_linear_algebra_is_pytorchs_and_the_rest_is_compiled():
    torch.manual_seed(0)
    eager = _Solved()
    exact, compiled = copy.deepcopy(eager).double(), shorthaul.module(copy.deepcopy(eager))
    inputs = [torch.randn(5, 2, requires_grad=True), torch.randn(5, 1)]
    with pytest.warns(shorthaul.FallbackWarning, match="linalg_cholesky_ex"):
        found = _run(compiled, inputs)
    expected = [
        _run(model, inputs, dtype)
        for model, dtype in ((eager, torch.float32), (exact, torch.float64))
    ]
    _compare(found, *expected)
    assert shorthaul.report(compiled, *inputs).data["kernels"]


class _Singular(nn.Module):
    def forward(self, x):
        return grad(torch.linalg.inv(x).sum(), x, create_graph=True)[0]


@traces_gradients
def test_a_singular_matrix_raises_eagers_error():
    x = torch.zeros(3, 3, requires_grad=True)
    said = []
    for model in (_Singular(), shorthaul.module(_Singular())):
        with pytest.raises(torch.linalg.LinAlgError) as error:
            model(x)
        said.append(str(error.value).splitlines()[0])
    assert said[0] == said[1]


class _Normalized(nn.Module):
    """A BatchNorm in training writes its statistics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        """A gradient."""
        return grad(self.net(x).sum(), x, create_graph=True)[0]


@traces_gradients
def test_what_cannot_be_written_so_is_pytorchs_and_is_said_once():
    torch.manual_seed(0)
    eager = _Normalized()
    compiled = shorthaul.module(copy.deepcopy(eager))
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.warns(shorthaul.FallbackWarning, match="autograd.grad.* writes a value"):
        found = _run(compiled, [x])
    for mine, theirs in zip(found, _run(eager, [x]), strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(compiled.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    traced = torch._dynamo.utils.counters["frames"]["total"]
    compiled(x)
    assert torch._dynamo.utils.counters["frames"]["total"] == traced


@pytest.mark.parametrize(
    "enter", [lambda: _vmap_increment_nesting(3, "error"), _grad_increment_nesting]
)
def test_a_trace_that_fails_inside_of_a_transform_leaves_it(enter):
    def fails(x):
        enter()
        raise ValueError("no such row")

    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    with pytest.raises(ValueError, match="no such row"):
        _span.trace(fails, [torch.ones(3, 2)], FakeTensorMode())
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == depth
