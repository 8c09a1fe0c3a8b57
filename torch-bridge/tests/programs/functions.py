"""Programs with a ``torch.autograd.Function`` of the user's own."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .facts import aliases, observe, raises, randn, step, training, weighted
from .registry import program


class Reverse(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Round(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Scale(Function):
    """A number as an argument, and a gradient that is not the forward's."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * 10 + x, None


class Split(Function):
    """Two outputs, one of which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(positive)
        return x * 2, positive

    @staticmethod
    def backward(ctx, gradient, _):
        (positive,) = ctx.saved_tensors
        return gradient * positive * 3


class AddOneInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Apply(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function, *args):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function, self.args = function, args

    def forward(self, x):
        return self.function.apply(self.fc(x), *self.args)


def _applied(wrap, function, *args):
    model = Apply(function, *args)
    m = wrap(model)
    return [training(model, m, randn(3, 4)) for _ in range(2)]


@program
def reversed_gradient(wrap):
    return _applied(wrap, Reverse)


@program
def straight_through(wrap):
    return _applied(wrap, Round)


@program
def number_argument(wrap):
    return _applied(wrap, Scale, 0.5)


@program
def number_argument_changes(wrap):
    model = Apply(Scale, 0.5)
    m, seen = wrap(model), []
    for factor in (0.5, 2.0, -1.0):
        model.args = (factor,)
        seen.append(training(model, m, randn(3, 4)))
    return seen


@program
def output_without_gradient(wrap):
    return _applied(wrap, Split)


@program
def in_place_on_intermediate(wrap):
    return _applied(wrap, AddOneInPlace)


@program
def in_place_on_argument(wrap):
    m = wrap(lambda x: AddOneInPlace.apply(x) * 2)
    x = randn(3)
    y = x * 3
    out = m(y)
    weighted(out).backward()
    return [out, y, x.grad]


@program
def several_outputs_one_unused(wrap):
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp(), x.sin()

        @staticmethod
        def backward(ctx, a, b):
            return a * 2 + b * 5

    m, x = wrap(lambda x: Two.apply(x)[0]), randn(4)
    return step(m, x)


@program
def unmaterialized_gradients(wrap):
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x.exp(), x.sin()

        @staticmethod
        def backward(ctx, a, b):
            return a * 2 if b is None else b * 100

    m, x = wrap(lambda x: Two.apply(x)[0]), randn(4)
    return step(m, x)


@program
def setup_context(wrap):
    class Cube(Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x

    return _applied(wrap, Cube)


@program
def double_backward_through_function(wrap):
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * 3 * x

    def penalty(x):
        m = wrap(lambda x: Square.apply(x).sum())
        (first,) = torch.autograd.grad(m(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        return [first, second]

    return raises(penalty, randn(4))


@program
def once_differentiable_function(wrap):
    class Once(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @once_differentiable
        def backward(ctx, gradient):
            return gradient * 4

    return _applied(wrap, Once)


@program
def side_effect_in_backward(wrap):
    seen = []

    class Watch(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient.sum().item())
            return gradient

    return [_applied(wrap, Watch), seen]


@program
def backward_returns_none(wrap):
    class Stop(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return None

    m, x = wrap(lambda x: Stop.apply(x) + 1), randn(3)
    out = m(x)
    weighted(out).backward()
    return [out, x.grad]


@program
def backward_with_wrong_number_of_gradients(wrap):
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    m = wrap(lambda x, y: Wrong.apply(x, y))
    return raises(step, m, randn(3), randn(3))


@program
def error_in_backward(wrap):
    class Fail(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("no gradient here")

    return raises(step, wrap(lambda x: Fail.apply(x)), randn(3), message=True)


@program
def output_is_input(wrap):
    class Same(Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    m, x = wrap(lambda x: Same.apply(x)), randn(3)
    out = m(x)
    shared = aliases(out=out, x=x)
    return [step(m, x), shared]


@program
def output_is_view_of_input(wrap):
    class Head(Function):
        @staticmethod
        def forward(ctx, x):
            return x[:2]

        @staticmethod
        def backward(ctx, gradient):
            return torch.cat([gradient * 2, gradient * 0])

    m, x = wrap(lambda x: Head.apply(x)), randn(4)
    return [step(m, x), aliases(out=m(x), x=x)]


@program
def nested_functions(wrap):
    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            return x.abs()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    m = wrap(lambda x: Round.apply(Inner.apply(x * 3)) + Reverse.apply(x))
    return step(m, randn(5))


@program
def function_with_branch_on_saved_flag(wrap):
    class Clip(Function):
        @staticmethod
        def forward(ctx, x, limit):
            ctx.clipped = bool(x.abs().max() > limit)
            return x.clamp(-limit, limit)

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * 0.5 if ctx.clipped else gradient * 2), None

    m = wrap(lambda x: Clip.apply(x, 1.0))
    return [step(m, (randn(4).detach() * scale).requires_grad_()) for scale in (0.1, 10.0)]


@program
def needs_input_grad(wrap):
    class Watch(Function):
        @staticmethod
        def forward(ctx, x, w):
            return x * w

        @staticmethod
        def backward(ctx, gradient):
            return tuple(
                gradient * (k + 2) if n else None for k, n in enumerate(ctx.needs_input_grad)
            )

    m = wrap(lambda x, w: Watch.apply(x, w))
    return [step(m, randn(3, grad=a), randn(3, grad=b)) for a, b in ((1, 1), (0, 1), (1, 0))]


@program
def function_under_no_grad(wrap):
    m = wrap(lambda x: Scale.apply(x, 3.0))
    with torch.no_grad():
        first = observe(m(randn(3)))
    return [first, step(m, randn(3))]


@program
def quantizer_with_learned_step(wrap):
    class Quantize(Function):
        @staticmethod
        def forward(ctx, x, size):
            ctx.save_for_backward(x, size)
            return (x / size).round() * size

        @staticmethod
        def backward(ctx, gradient):
            x, size = ctx.saved_tensors
            return gradient, (gradient * ((x / size).round() - x / size)).sum()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.size = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.1))

        def forward(self, x):
            return nn.functional.linear(x, Quantize.apply(self.fc.weight, self.size), self.fc.bias)

    model = Layer()
    return training(model, wrap(model), randn(3, 4))


#: An operator whose kernel for autograd applies a function, as those of spiking neurons do.
_LIBRARY = torch.library.Library("shorthaul_programs", "DEF")
_LIBRARY.define("round(Tensor x) -> Tensor")
_LIBRARY.impl("round", torch.round, "CPU")
_LIBRARY.impl("round", Round.apply, "AutogradCPU")
torch.library.register_fake("shorthaul_programs::round", torch.empty_like, lib=_LIBRARY)


@program
def operator_of_a_library(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = torch.ops.shorthaul_programs.round(self.first(x).tanh() * 3)
            return self.second(h.relu())

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5)]


@torch.compiler.allow_in_graph
def _reversed_in_graph(x):
    return Reverse.apply(x.tanh())


@program
def function_that_the_tracer_does_not_enter(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.second(_reversed_in_graph(self.first(x)).relu())

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5)]


@torch.compiler.allow_in_graph
def _hooked_in_graph(x):
    y = x.sin()
    y.register_hook(lambda grad: grad * 100)
    return y


@program
def hook_in_what_the_tracer_does_not_enter(wrap):
    m = wrap(lambda x: _hooked_in_graph(x) * 2)
    return [step(m, randn(n)) for n in (2, 3)]
