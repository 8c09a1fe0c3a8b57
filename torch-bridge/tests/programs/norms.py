"""Programs with parametrizations of weights: weight norms, spectral norms, writes to ``out=``."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .facts import raises, randn, training
from .registry import program


@program
def weight_norm(wrap):
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)))
    m = wrap(model)
    return [training(model, m, randn(2, 3)), training(model, m, randn(2, 3))]


@program
def weight_norm_of_old(wrap):
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)))
    m, seen = wrap(model), []
    for _ in range(2):
        seen.append(training(model, m, randn(2, 3)))
        with torch.no_grad():
            model[0].weight_g.mul_(2)
    return seen


@program(slack=10)
def spectral_norm(wrap):
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)))
    m = wrap(model)
    seen = [training(model, m, randn(2, 3)) for _ in range(3)]
    model.eval()
    return [seen, training(model, m, randn(2, 3)), list(model.buffers())]


@program(slack=10)
def spectral_norm_of_old(wrap):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)))
    m = wrap(model)
    seen = [training(model, m, randn(2, 3)) for _ in range(3)]
    return [seen, list(model.buffers())]


@program(slack=10)
def spectral_norms_of_several_layers(wrap):
    old, new = nn.utils.spectral_norm, parametrizations.spectral_norm
    model = nn.Sequential(
        old(nn.Conv2d(2, 4, 3, 2, 1)),
        nn.LeakyReLU(0.1, inplace=True),
        new(nn.Conv2d(4, 4, 3, 2, 1)),
        nn.Flatten(),
        old(nn.Linear(4, 3)),
        new(nn.Linear(3, 2)),
    )
    m = wrap(model)
    seen = [training(model, m, randn(n, 2, 4, 4)) for n in (3, 5, 2)]
    return [seen, list(model.buffers())]


@program
def view_made_before_gradients_are_off(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.weight = nn.Linear(4, 4), nn.Parameter(randn(2, 2, 4).detach())

        def forward(self, x):
            h = self.fc(x).tanh()
            flat = self.weight.reshape(4, -1)
            with torch.no_grad():
                inner = flat.t()
                size = torch.linalg.det(inner @ flat)
            return h @ flat / (1 + size), (h.detach() @ inner).sum() + flat.sum()

    model = Model()
    return training(model, wrap(model), randn(3, 4))


@program(slack=10)
def results_written_to_out(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("total", torch.zeros(4))
            self.register_buffer("wide", torch.zeros(2, 4))
            self.register_buffer("kept", torch.ones(4))

        def forward(self, x):
            y = self.fc(x)
            with torch.no_grad():
                total = torch.add(self.total, y.sum(0), out=self.total)
                torch.mul(y[:2], 2.0, out=self.wide[:, :4])
                torch.empty(4, out=self.kept)
            return y * total.sigmoid(), self.wide.sum() + self.kept.sum()

    model = Model()
    m = wrap(model)
    seen = [training(model, m, randn(n, 4)) for n in (3, 5, 2)]
    return [seen, list(model.buffers()), raises(m, randn(4, 5))]


@program
def results_written_over_operands(wrap):
    def forward(x):
        b = x.detach().clone()
        torch.add(b, 1.0, out=b)
        torch.index_select(b, 0, torch.tensor([1, 0, 2]), out=b)
        return b

    def shifted(x):
        b = x.detach().clone()
        torch.add(b[1:], 1.0, out=b[:-1])
        return b

    return [raises(wrap(forward), randn(3)), raises(wrap(shifted), randn(3))]


@program(slack=10)
def orthogonal(wrap):
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)))
    return training(model, wrap(model), randn(2, 3))


class _Symmetric(nn.Module):
    """A parametrization that a user writes: the upper triangle of a square matrix, mirrored."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT

    def right_inverse(self, weight):
        return weight.triu()


@program
def symmetric_weights(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    nn.utils.parametrize.register_parametrization(model[0], "weight", _Symmetric())
    m = wrap(model)
    seen = [training(model, m, randn(n, 3)) for n in (2, 4)]
    model[0].weight = torch.eye(3)
    return [seen, training(model, m, randn(2, 3))]


@program
def weight_norm_taken_off(wrap):
    model = nn.Sequential(
        parametrizations.weight_norm(nn.ConvTranspose2d(2, 3, 2, stride=2), dim=1)
    )
    m = wrap(model)
    seen = training(model, m, randn(2, 2, 3, 3))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    return [seen, training(model, m, randn(2, 2, 3, 3))]


class _Normalized(nn.Module):
    """A textbook's batch norm: its statistics keep their history."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        mean, var = self.mean, self.var
        if self.training:
            mean = x.mean(0)
            var = (x * x).mean(0) - mean**2
            self.mean = 0.9 * self.mean + 0.1 * mean
            self.var = 0.9 * self.var + 0.1 * var
        return (x - mean) / torch.sqrt(var + 1e-5) * self.scale


@program(slack=10)
def statistics_that_keep_their_history(wrap):
    layers = (nn.Linear(3, 4), _Normalized(4), nn.Tanh(), nn.Linear(4, 4), _Normalized(4))
    model = nn.Sequential(*layers)
    m = wrap(model)
    seen = [training(model, m, randn(8, 3)) for _ in range(4)]
    model.eval()
    return [seen, m(torch.randn(8, 3)), [b.requires_grad for b in model.buffers()]]


@program
def statistics_whose_history_is_used_again(wrap):
    """The second backward pass reaches what the first one has freed."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("state", torch.zeros(3))

        def forward(self, x):
            self.state = torch.tanh(self.state + x * self.w)
            return self.state * 2

    m = wrap(Model())
    m(torch.randn(3)).sum().backward()
    return raises(m(torch.randn(3)).sum().backward)
