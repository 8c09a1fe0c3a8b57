"""Programs in which a caller sees a value that is not only a last result: hooks on it, gradients
with respect to it, writes to it, and derivatives that are zero."""

import torch
from torch import nn
from torch.nn import functional

from .facts import gradients, raises, randn, step, training, weighted
from .registry import program


class Features(nn.Module):
    """A head, and the features that it reads, passed through ``seen``."""

    def __init__(self, seen):
        super().__init__()
        self.fc, self.head, self.seen = nn.Linear(8, 8), nn.Linear(8, 3), seen

    def forward(self, x):
        h = self.fc(x) * 2
        features = self.seen(h)
        return self.head(h), features


def _all_ways(wrap, seen):
    """The gradient of the features in three ways: retained, asked for, and changed by a hook."""
    model = Features(seen).eval()
    m, found = wrap(model), []
    y, features = m(randn(4, 8))
    features.retain_grad()
    weighted(y).backward()
    found += [features.grad, gradients(model)]
    y, features = m(randn(4, 8))
    found.append(torch.autograd.grad(weighted(y), features))
    model.zero_grad()
    y, features = m(randn(4, 8))
    features.register_hook(lambda g: g * 0)
    weighted(y).backward()
    return [*found, gradients(model)]


@program
def features_that_dropout_passes_through(wrap):
    return _all_ways(wrap, lambda h: functional.dropout(h, training=False))


@program
def features_that_are_float_already(wrap):
    return _all_ways(wrap, lambda h: h.float())


@program
def features_that_are_contiguous_already(wrap):
    return _all_ways(wrap, lambda h: h.contiguous())


@program
def features_on_their_device_already(wrap):
    return _all_ways(wrap, lambda h: h.to("cpu"))


@program
def features_written_by_an_activation(wrap):
    return _all_ways(wrap, nn.ReLU(inplace=True))


@program
def features_written_by_an_activation_without_a_named_argument(wrap):
    return _all_ways(wrap, nn.LeakyReLU(0.1, inplace=True))


@program
def a_result_written_by_what_is_computed_from_it(wrap):
    class Model(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.fc, self.head, self.start = nn.Linear(8, 8), nn.Linear(8, 3), start

        def forward(self, x):
            h = self.start(self.fc(x))
            q = h.exp()
            h.add_(q)
            return h, q, self.head(h)

    models = [Model(lambda h: h), Model(lambda h: h.contiguous())]
    return [training(model, wrap(model), randn(4, 8)) for model in models]


@program
def a_hook_on_a_result_that_no_loss_uses(wrap):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

        def forward(self, x):
            return x * self.a, (x * self.b).relu()

    model, seen = Two(), []
    first, second = wrap(model)(randn(4, 8))
    first.register_hook(lambda g: seen.append(g) or g * 10)
    weighted(second).backward()
    return [seen, gradients(model)]


@program
def two_results_with_separate_backward_passes(wrap):
    model = nn.Linear(4, 4)
    m = wrap(lambda x: (model(x), model(x).relu()))
    first, second = m(randn(3, 4))
    weighted(first).backward(retain_graph=True)
    weighted(second).backward()
    return gradients(model)


def _written_by(act):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.act = nn.Parameter(torch.randn(8)), act

        def forward(self, x):
            h = x * self.weight
            with torch.no_grad():
                self.act(h)
            return h * h

    return Model()


@program
def activations_that_write_where_gradients_are_off(wrap):
    acts = (
        nn.LeakyReLU(0.1, inplace=True),
        nn.Hardtanh(inplace=True),
        nn.ELU(inplace=True),
        nn.ReLU6(inplace=True),
        lambda h: functional.relu(h, True),
    )
    models = [_written_by(act) for act in acts]
    return [training(model, wrap(model), randn(4, 8)) for model in models]


class WrittenLater(nn.Module):
    """``relu(x * weight + t)``, whose second operand ``write`` changes afterwards."""

    def __init__(self, write):
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.randn(8)), write

    def forward(self, x, t):
        y = torch.relu(x * self.weight + t)
        return self.write(y, t)


def _written_later(wrap, write):
    model = WrittenLater(write)
    t = randn(8, grad=False)
    return [training(model, wrap(model), randn(4, 8, grad=False), t), t]


@program
def an_operand_written_later_by_out(wrap):
    return _written_later(wrap, lambda y, t: (torch.mul(t, 0.5, out=t), y)[1])


@program
def an_operand_written_later_in_a_list(wrap):
    def write(y, t):
        torch._foreach_mul_([torch.zeros(8), t], 0.5)
        return y

    return _written_later(wrap, write)


@program
def an_operand_written_later_as_statistics(wrap):
    def write(y, t):
        part = torch.linalg.det(y[:, :4])
        return functional.batch_norm(y + part, t, torch.ones(8), training=True)

    return _written_later(wrap, write)


@program
def an_operand_written_later_by_an_activation(wrap):
    def write(y, t):
        part = torch.linalg.det(y[:, :4])
        functional.leaky_relu(t, 0.1, True)
        return y * part + t

    return _written_later(wrap, write)


@program
def detaching_a_result_that_is_not_contiguous(wrap):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    h = wrap(model)(randn(2, 3, 6, 6, grad=False).to(memory_format=torch.channels_last))
    weighted(h).backward()
    return [raises(h.detach_), h._is_view(), gradients(model)]


@program
def conjugates_that_are_not_computed_yet(wrap):
    def forward(z, a, b):
        c = z.conj()
        return (c * torch.complex(a, b)).real + c.abs()

    m = wrap(forward)
    z = randn(3, 4, dtype=torch.complex64, grad=False)
    return [step(m, z, randn(4), randn(4)), step(m, z.conj(), randn(4), randn(4))]


def _penalty(wrap, act):
    """The gradients of a penalty: zeros, not nothing, where only a kink depends on a parameter."""
    model = nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 1))
    m, x = wrap(model), randn(6, 8)
    (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    return gradients(model)


@program
def a_penalty_of_a_network_with_kinks(wrap):
    acts = (
        nn.ReLU(),
        nn.LeakyReLU(0.1),
        nn.Hardtanh(),
        nn.Softshrink(),
        nn.MaxPool1d(1),
        nn.Tanh(),
    )
    return [_penalty(wrap, act) for act in acts]


@program
def a_penalty_inside_of_forward(wrap):
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x):
            (g,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return g.square().sum()

    model = Penalty()
    return training(model, wrap(model), randn(6, 8))


def _second(wrap, function, *points):
    """Derivatives of the first and second order of a function of single elements."""
    x = torch.tensor(points).requires_grad_()
    (first,) = torch.autograd.grad(wrap(function)(x).sum(), x, create_graph=True)
    return [first, torch.autograd.grad(first.sum(), x)]


@program
def second_derivatives_where_exponentials_overflow(wrap):
    far = (89.0, 200.0, 1.0, 0.0, -1.0, -200.0)
    return [
        _second(wrap, functional.softplus, *far),
        _second(wrap, lambda x: functional.softplus(x, 100), *far),
        _second(wrap, lambda x: functional.softplus(x, 2.0, 3.0), 1.5, 1.0, 2.0, float("nan")),
        _second(wrap, functional.elu, *far),
        _second(wrap, functional.selu, *far),
        _second(wrap, lambda x: functional.celu(x, 0.5), *far),
        _second(wrap, functional.logsigmoid, *far),
    ]


@program
def second_derivatives_at_the_bounds_of_a_huber_loss(wrap):
    def loss(x):
        return functional.huber_loss(x, torch.zeros_like(x), reduction="none", delta=1.0)

    return _second(wrap, loss, 1.0, -1.0, 0.5, 2.0, 0.0, float("nan"))


@program
def a_large_unit_matrix(wrap):
    model = nn.Linear(8, 300)

    def kernel(x):
        return model(x) @ model.weight @ model.weight.T + torch.eye(300)

    def wide(x):
        return model(x)[:, :4] @ torch.eye(4, 300, dtype=torch.float32)

    return [training(model, wrap(kernel), randn(300, 8)), training(model, wrap(wide), randn(2, 8))]


@program(slack=10)
def an_inner_step_of_a_convolution(wrap):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3, padding=1)

        def forward(self, x):
            w = self.conv.weight
            y = functional.conv2d(x, w, padding=1).relu()
            (g,) = torch.autograd.grad(y.square().mean(), w, create_graph=True)
            return functional.conv2d(x, w - 0.1 * g, padding=1).square().mean()

    model, x = Inner(), randn(2, 3, 7, 7, grad=False)
    m = wrap(model)
    return [training(model, m, x), training(model, m, x.to(memory_format=torch.channels_last))]
