"""Programs with running statistics under several names, and with their values after an update."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .facts import gradients, observe, randn, step, training, weighted
from .registry import program


class Stacked(nn.Module):
    """A batch norm whose statistics are made from buffers by ``rows``."""

    def __init__(self, mean, var, rows):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("var", var)
        self.rows = rows

    def forward(self, x):
        mean, var = self.rows(self.mean, self.var)
        return functional.batch_norm(x, mean, var, training=True)


def _twice(wrap, model):
    m = wrap(model)
    seen = [training(model, m, randn(6, 4) + 3) for _ in range(2)]
    return [seen, dict(model.named_buffers())]


@program
def statistics_of_one_domain_of_several(wrap):
    return _twice(wrap, Stacked(torch.zeros(3, 4), torch.ones(3, 4), lambda m, v: (m[1], v[1])))


@program
def statistics_that_are_viewed_flat(wrap):
    def flat(mean, var):
        return mean.view(-1), var.view(-1)

    return _twice(wrap, Stacked(torch.zeros(1, 4), torch.ones(1, 4), flat))


@program
def statistics_in_slices_of_a_new_tensor(wrap):
    def forward(x):
        both = torch.zeros(2, 4)
        y = functional.batch_norm(x, both[0], both[1], training=True)
        return y, both

    return step(wrap(forward), randn(6, 4))


class Watched(nn.Module):
    """A batch norm between a layer and a use of its statistics."""

    def __init__(self, use):
        super().__init__()
        self.fc, self.norm, self.use = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5), use

    def forward(self, x):
        h = self.fc(x)
        before = self.norm.running_mean.unsqueeze(0)
        return self.use(self.norm, h, self.norm(h), before)


def _watched(wrap, use):
    model = Watched(use)
    m = wrap(model)
    return [training(model, m, randn(6, 4)), training(model, m, randn(6, 4)), list(model.buffers())]


@program
def statistics_viewed_before_their_update(wrap):
    return _watched(wrap, lambda norm, h, y, before: y * 0 + before)


@program
def statistics_used_after_their_update(wrap):
    return _watched(wrap, lambda norm, h, y, before: y + h - norm.running_mean)


@program
def statistics_used_by_the_same_norm_in_evaluation(wrap):
    def use(norm, h, y, before):
        return y * functional.batch_norm(h, norm.running_mean, norm.running_var)

    return _watched(wrap, use)


@program
def statistics_updated_twice_in_one_call(wrap):
    return _watched(wrap, lambda norm, h, y, before: norm(y * 2) + norm.running_mean)


@program
def statistics_with_a_mean_over_all_calls(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)

        def forward(self, x):
            y = self.norm(self.fc(x))
            return y + self.norm.running_var, self.norm.num_batches_tracked + 0

    model = Model()
    m = wrap(model)
    return [[training(model, m, randn(6, 4)) for _ in range(3)], list(model.buffers())]


@program
def statistics_of_an_instance_norm_used_after_their_update(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.norm = nn.InstanceNorm1d(4, track_running_stats=True, momentum=0.5)

        def forward(self, x):
            y = self.norm(self.fc(x).T[None])
            return y.tanh() * self.norm.running_mean[:, None]

    model = Model()
    return training(model, wrap(model), randn(6, 4))


@program
def statistics_written_by_both_runs_of_a_checkpoint(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    m = wrap(model)
    for _ in range(3):
        weighted(checkpoint(m, randn(6, 4) + 3, use_reentrant=False)).backward()
    return [gradients(model), list(model.buffers())]


@program
def an_item_of_a_buffer_that_was_just_written(wrap):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("n", torch.tensor(3))

        def forward(self, x):
            self.n.add_(1)
            return x * self.weight + self.n.item()

    before = torch._dynamo.config.capture_scalar_outputs
    torch._dynamo.config.capture_scalar_outputs = True
    try:
        model = Counting()
        m = wrap(model)
        return [observe(training(model, m, randn(2, 4))) for _ in range(2)]
    finally:
        torch._dynamo.config.capture_scalar_outputs = before
