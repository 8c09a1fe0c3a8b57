"""Programs with functions whose backward pass is linear: estimators, surrogates, fused layers."""

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .facts import gradients, observe, raises, randn, step, training
from .registry import program


class _Net(nn.Module):
    """``function`` of a linear layer's results, and a second layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.second = function, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def _trained(wrap, function, sizes=(3, 5, 2)):
    model = _Net(function)
    m = wrap(model)
    seen = [training(model, m, randn(n, 4)) for n in sizes]
    model.eval()
    with torch.no_grad():
        return [seen, m(randn(4, 4))]


class _Sign(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad.clone()
        grad[x.abs() > 1] = 0
        return grad


@program
def sign_with_clipped_gradient(wrap):
    return _trained(wrap, _Sign.apply)


class _Spike(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.alpha / 2 / (1 + (torch.pi / 2 * ctx.alpha * x) ** 2), None


@program(slack=10)
def spikes_over_time(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 2)
            self.beta = nn.Parameter(torch.tensor(0.9))

        def forward(self, x):
            voltage = x.new_zeros(x.shape[1], 8)
            count = 0.0
            for now in x:
                voltage = self.beta * voltage + self.inner(now)
                spike = _Spike.apply(voltage - 0.3, 2.0)
                voltage = voltage - 0.3 * spike
                count = count + self.outer(spike)
            return count

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(6, n, 4)) for n in (2, 3, 5)]


@program
def strength_of_a_surrogate_changes(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.alpha = nn.Linear(4, 4), 1.0

        def forward(self, x):
            return _Spike.apply(self.fc(x), self.alpha)

    model = Model()
    m, seen = wrap(model), []
    for alpha in (1.0, 2.0, 4.0):
        model.alpha = alpha
        seen.append(training(model, m, randn(3, 4)))
    return seen


class _Swish(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0]
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


@program(slack=10)
def memory_efficient_swish(wrap):
    return _trained(wrap, _Swish.apply)


@program(slack=10)
def second_derivative_of_swish(wrap):
    return _second_derivatives(wrap, _Swish.apply)


@program(slack=10)
def gradient_inside_of_swish(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = _Net(_Swish.apply)

        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5)]


class _Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        return dx, grad.t() @ x, grad.sum(0)


class _OwnLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(5, 4).detach()), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return _Linear.apply(x, self.weight, self.bias)


@program
def linear_layer_of_its_own(wrap):
    model = nn.Sequential(nn.Linear(4, 4), _OwnLinear(), nn.Tanh())
    m = wrap(model)
    seen = [training(model, m, randn(n, 4)) for n in (3, 5)]
    model[1].bias.requires_grad_(False)
    return [seen, training(model, m, randn(3, 4))]


class _Masked(Function):
    @staticmethod
    def forward(ctx, x, scores):
        mask = (scores > scores.median()).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad * mask, None


class _WithParameter(nn.Module):
    """``function`` of a linear layer's results and of a parameter."""

    def __init__(self, function):
        super().__init__()
        self.function, self.fc = function, nn.Linear(4, 4)
        self.other = nn.Parameter(randn(4).detach())

    def forward(self, x):
        return self.function(self.fc(x), self.other)


def _trained_with_parameter(wrap, function):
    model = _WithParameter(function)
    m = wrap(model)
    seen = [training(model, m, randn(n, 4)) for n in (3, 5)]
    return [seen, model.other.grad is None]


@program
def parameter_without_a_gradient(wrap):
    return _trained_with_parameter(wrap, _Masked.apply)


def _unary(forward, backward):
    """A function of one operand that is saved."""

    class Unary(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Unary.apply


def _registered_unary(name, forward, backward, slack=1.0):
    @program(name=name, slack=slack)
    def run(wrap):
        return _trained(wrap, _unary(forward, backward))


_registered_unary("gradient_is_clipped", torch.clone, lambda g, x: g.clamp(-0.1, 0.1))
_registered_unary("gradient_gets_a_penalty", torch.clone, lambda g, x: g + 0.1 * x.sign())
_registered_unary("gradient_is_its_sign", torch.tanh, lambda g, x: g.sign())
_registered_unary("gradient_is_normed", torch.tanh, lambda g, x: g / (g.norm() + 1))
_registered_unary("gradient_is_zero", torch.tanh, lambda g, x: torch.zeros_like(g))
_registered_unary("gradient_is_constant", torch.tanh, lambda g, x: torch.ones_like(g))
_registered_unary("gradient_is_averaged", torch.tanh, lambda g, x: g.mean(0, True).expand_as(g))
_registered_unary(
    "gradient_of_chosen_elements", torch.relu, lambda g, x: torch.where(x > 0, g, 0.1 * g)
)
_registered_unary("gradient_of_other_elements", torch.relu, lambda g, x: torch.where(x > 0, g, 0.1))
_registered_unary("gradient_moves", torch.clone, lambda g, x: g.roll(1, 1).flip(0) * x.exp())
_registered_unary("gradient_squared", torch.clone, lambda g, x: g * g)
_registered_unary("gradient_in_half", torch.clone, lambda g, x: g.bfloat16().float() * x)
_registered_unary("gradient_in_double", torch.exp, lambda g, x: g.double() * x.double().exp())
_registered_unary("gradient_written_in_place", torch.clone, lambda g, x: g.mul_(2))
_registered_unary("gradient_with_dropout", torch.clone, lambda g, x: functional.dropout(g, 0.0))
_registered_unary("result_rounds", torch.round, lambda g, x: g)
_registered_unary("result_is_a_view", lambda x: x.view(x.shape), lambda g, x: -g)
_registered_unary("result_is_a_part", lambda x: x[:, :6], lambda g, x: 3 * g)
_registered_unary("result_is_the_operand", lambda x: x, lambda g, x: 0.5 * g)


class _Both(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a + b, (a > b).sum()

    @staticmethod
    def backward(ctx, dproduct, dsum, _):
        a, b = ctx.saved_tensors
        return dproduct * b + dsum, dproduct * a + dsum


@program
def several_results(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, both: bool):
            product, total, n = _Both.apply(self.first(x), self.second(x))
            return (product * total.sigmoid() if both else product), n

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4), both) for n, both in ((3, True), (5, True), (3, False))]


@program
def results_returned_and_written(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            y = _unary(lambda x: x.view(4, -1), lambda g, x: -g.view(x.shape))(h)
            z = y.view(2, -1) * 2
            return y, z.add_(2), h + 1

    model = Model()
    m = wrap(model)
    with torch.no_grad():
        first, *others = m(randn(4, 4))
        first.add_(1)
    return [first, others, training(model, m, randn(4, 4))]


@program
def inside_of_a_checkpoint(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = _Net(_Sign.apply)

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5)]


@program(slack=800)
def within_autocast(wrap):
    model = _Net(_Swish.apply)
    m = wrap(model)
    with torch.autocast("cpu", torch.bfloat16):
        return [training(model, m, randn(n, 4)) for n in (3, 5)]


@program
def same_operand_twice(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            return _Both.apply(h, h)[0]

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5)]


@program
def operands_of_eager(wrap):
    def forward(x, scale):
        return _Spike.apply(x * scale, 2.0) + _Sign.apply(x)

    m = wrap(forward)
    scale = torch.ones(3, requires_grad=True)
    x = randn(4, 3).requires_grad_()
    hooked = []
    x.register_hook(lambda gradient: hooked.append(gradient.clone()))
    return [step(m, x, scale), hooked, raises(m, randn(4, 3), randn(2))]


@program
def gradient_of_another_shape(wrap):
    model = _Net(_unary(torch.clone, lambda g, x: g[:1]))
    return raises(training, model, wrap(model), randn(3, 4))


class _Scaled(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


@program
def value_depends_on_a_parameter_without_a_gradient(wrap):
    return _trained_with_parameter(wrap, _Scaled.apply)


def _second_derivatives(wrap, function):
    model = _Net(function)
    m, seen = wrap(model), []
    for n in (3, 5):
        x = randn(n, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
        model.zero_grad()
        gradient.square().sum().backward()
        seen.append([observe(gradient), observe(x.grad), gradients(model)])
    return seen


class _Exp(Function):
    """Its backward pass reads its result, which has a history."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0]


@program(slack=10)
def second_derivative_of_a_saved_result(wrap):
    return _second_derivatives(wrap, _Exp.apply)


class _Square(Function):
    """Its backward pass reads a value of the forward pass, which has no history."""

    @staticmethod
    def forward(ctx, x):
        ctx.twice = x * 2
        ctx.save_for_backward(x, x.cos())
        return x * x

    @staticmethod
    def backward(ctx, grad):
        x, cos = ctx.saved_tensors
        return grad * ctx.twice * cos + grad * x


@program(slack=10)
def second_derivative_of_a_saved_intermediate(wrap):
    return _second_derivatives(wrap, _Square.apply)


class _CubeBackward(Function):
    @staticmethod
    def forward(ctx, grad, x):
        ctx.save_for_backward(grad, x)
        return grad * 3 * x * x

    @staticmethod
    def backward(ctx, gradient):
        grad, x = ctx.saved_tensors
        return gradient * 3 * x * x, gradient * grad * 7 * x


class _Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return _CubeBackward.apply(grad, ctx.saved_tensors[0])


@program(slack=10)
def second_derivative_by_a_function_of_its_own(wrap):
    return _second_derivatives(wrap, _Cube.apply)


class _Counted(Function):
    """Counts the results that have a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        n = (first is not None) + (second is not None)
        return sum(n * one for one in (first, second) if one is not None)


@program
def results_without_a_gradient_are_none(wrap):
    return _trained(wrap, lambda x: _Counted.apply(x)[0])


@program
def checkpoint_around_a_module(wrap):
    model = _Net(_Sign.apply)
    m = wrap(model)

    def run(x):
        return checkpoint(m, x, use_reentrant=False)

    return [training(model, run, randn(n, 4).requires_grad_()) for n in (3, 5, 4, 6, 4)]


class _KeepsOnContext(Function):
    """Keeps an operand without telling autograd, which sees no later write to it."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.x


@program
def operand_on_the_context_is_written_later(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x)
            y = _KeepsOnContext.apply(h)
            h.add_(1)
            return y * h.sin()

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5)]


class _Twice(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx, first, second):
        return first + 3 * second


@program
def one_result_returned_twice(wrap):
    return _trained(wrap, lambda x: _Twice.apply(x)[0].sin() * _Twice.apply(x)[1])


class _Batched(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


@program
def function_mapped_by_vmap(wrap):
    return _trained(wrap, lambda x: torch.func.vmap(_Batched.apply)(x * 2))


class _Through(Function):
    @staticmethod
    def forward(ctx, x, layer):
        return layer(x).round()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@program
def function_of_a_layer(wrap):
    """No operand needs a gradient, so no parameter of the layer gets one."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(_Through.apply(x, self.inner))

    model = Model()
    m = wrap(model)
    return [training(model, m, torch.ones(n, 4)) for n in (3, 5)]
