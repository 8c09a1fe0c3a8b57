"""Custom autograd functions with a linear backward pass run in kernels, others in Python."""

import pytest
import shorthaul
import torch
from shorthaul._linear import Kind, NotLinear, kinds_of
from torch import nn
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="older tracers write custom functions otherwise"
)


def function_of(forward, backward):
    """A function of one operand, which is saved."""

    class Unary(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Unary.apply


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.function(self.first(x)).tanh()).square().mean()


def masked(grad, x):
    grad = grad.clone()
    grad[x.abs() > 0.5] = 0
    return grad


LINEAR = {
    "straight through": (torch.round, lambda g, x: g),
    "masked": (torch.sign, masked),
    "reversed": (lambda x: x.view_as(x), lambda g, x: -0.3 * g),
    "surrogate": (lambda x: (x > 0).float(), lambda g, x: g / (1 + (torch.pi * x) ** 2)),
    "averaged": (torch.tanh, lambda g, x: g.mean(-1, keepdim=True).expand_as(g)),
    "product": (torch.clone, lambda g, x: g @ torch.outer(x[0], x[0])),
}


@pytest.mark.parametrize("name", LINEAR)
def test_kernels_run_it(name):
    torch.manual_seed(0)
    model = Net(function_of(*LINEAR[name]))
    # An error, if PyTorch or Python ran any part.
    compiled = shorthaul.module(model, fallback="error", fullgraph=True)
    for n in (4, 6, 4):
        x = torch.randn(n, 5)
        parameters = list(model.parameters())
        expected = torch.autograd.grad(model(x), parameters)
        found = torch.autograd.grad(compiled(x), parameters)
        torch.testing.assert_close(found, expected)


NONLINEAR = {
    "clipped": (lambda g, x: g.clamp(-1, 1), "`clamp`"),
    "sign": (lambda g, x: g.sign(), "`sign`"),
    "squared": (lambda g, x: g * g, "`mul`"),
    "penalty": (lambda g, x: g + x, "`add`"),
    "constant": (lambda g, x: torch.ones_like(g), "a result of its backward pass"),
    "other elements": (lambda g, x: torch.where(x > 0, g, 1.0), "`where`"),
}


@pytest.mark.parametrize("name", NONLINEAR)
def test_python_runs_what_is_not_linear(name):
    backward, why = NONLINEAR[name]
    torch.manual_seed(0)
    model = Net(function_of(torch.tanh, backward))
    compiled = shorthaul.module(model)
    x = torch.randn(4, 5)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with pytest.warns(shorthaul.FallbackWarning, match=why):
        found = torch.autograd.grad(compiled(x), list(model.parameters()))
    torch.testing.assert_close(found, expected)


KINDS = {
    "sum of parts": (lambda g, c: torch.cat([g[:1], 2 * g[1:]]).sum(0) - g.mean(0), Kind.LINEAR),
    "chosen": (lambda g, c: torch.where(c > 0, g.T @ c, torch.zeros_like(c)), Kind.LINEAR),
    "divided": (lambda g, c: g / c, Kind.LINEAR),
    "filled": (lambda g, c: g.masked_fill(c > 0, 0.0), Kind.LINEAR),
    "padded with zeros": (lambda g, c: torch.nn.functional.pad(g, (1, 1)), Kind.LINEAR),
    "of zeros": (lambda g, c: torch.zeros_like(g) + g.new_zeros(3, 3), Kind.ZERO),
    "of its size": (lambda g, c: c * g.shape[0], Kind.CONSTANT),
    "padded with ones": (lambda g, c: torch.nn.functional.pad(g, (1, 1), value=1.0), None),
    "filled with ones": (lambda g, c: g.masked_fill(c > 0, 1.0), None),
    "divided by it": (lambda g, c: c / g, None),
    "rounded": (lambda g, c: (3 * g).round(), None),
    "floor of a quotient": (lambda g, c: torch.div(g, c, rounding_mode="floor"), None),
    "as integers": (lambda g, c: g.long().float(), None),
    "condition": (lambda g, c: torch.where(g > 0, c, 0.0), None),
    "product with itself": (lambda g, c: g @ g, None),
    "shifted": (lambda g, c: c + 2 * g, None),
}


@pytest.mark.parametrize("name", KINDS)
def test_how_a_function_depends_on_its_operand(name):
    function, expected = KINDS[name]
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 3, 3)
    traced = make_fx(lambda g, c: [function(g, c)])(a, c)
    if expected is None:
        with pytest.raises(NotLinear):
            kinds_of(traced, [0])
    else:
        assert kinds_of(traced, [0]) == [expected]
    zero = function(torch.zeros(3, 3), c)
    adds = torch.allclose(function(a + b, c), function(a, c) + function(b, c), atol=1e-5)
    is_linear = adds and not zero.any()
    # What is called linear is; zeros are too.
    assert is_linear == (expected in (Kind.LINEAR, Kind.ZERO))


class Cube(Function):
    """Its gradient is not its derivative, so that both are told apart."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 5 * x**2


def test_second_derivatives_are_of_the_user_s_own_passes():
    torch.manual_seed(0)
    model = Net(Cube.apply)
    x = torch.randn(4, 5, requires_grad=True)
    seen = []
    for run in (model, shorthaul.module(model, fallback="error", fullgraph=True)):
        (first,) = torch.autograd.grad(run(x), x, create_graph=True)
        wanted = [x, *model.parameters()]
        seen.append([first, *torch.autograd.grad(first.square().sum(), wanted, allow_unused=True)])
    torch.testing.assert_close(seen[1], seen[0])


class InnerGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(Cube.apply)

    def forward(self, x):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x), x, create_graph=True)
        return slope.square().sum()


def test_gradients_inside_forward_are_of_the_user_s_own_passes():
    torch.manual_seed(0)
    model = InnerGradient()
    compiled = shorthaul.module(model, fallback="error", fullgraph=True)
    for n in (4, 6):
        x = torch.randn(n, 5)
        wanted = list(model.parameters())
        expected = torch.autograd.grad(model(x), wanted, allow_unused=True)
        found = torch.autograd.grad(compiled(x), wanted, allow_unused=True)
        torch.testing.assert_close(found, expected)


def test_third_derivatives_are_refused():
    torch.manual_seed(0)
    compiled = shorthaul.module(Net(Cube.apply))
    x = torch.randn(4, 5, requires_grad=True)
    (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    with pytest.raises(shorthaul.ShorthaulError, match="custom autograd.Function"):
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        torch.autograd.grad(second.square().sum(), x)
