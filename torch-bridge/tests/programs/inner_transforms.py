"""Programs that take transforms of ``torch.func`` inside of ``forward``, and train through them."""

import functools

import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from .facts import gradients, randn, step
from .registry import program


class _Net(nn.Module):
    """A network of which transforms are taken inside of ``forward``."""

    def __init__(self, run, n_results=1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_results))
        self.run = run

    def forward(self, *inputs):
        return self.run(self.net, *inputs)

    def of_row(self, row):
        return self.net(row).squeeze(-1)


def _steps(wrap, run, *inputs, n_results=1):
    """Three steps, with another number of rows in the last one."""
    model = _Net(run, n_results)
    m = wrap(model)
    seen = [[step(m, *inputs), gradients(model)] for _ in range(2)]
    model.zero_grad()
    return [seen, step(m, *(x[:3].detach().requires_grad_() for x in inputs)), gradients(model)]


def _scalar(net):
    return lambda row: net(row).squeeze(-1)


@program
def gradient_of_each_row(wrap):
    return _steps(wrap, lambda net, x: vmap(grad(_scalar(net)))(x), randn(5, 3))


@program
def laplacian_of_each_row(wrap):
    def run(net, x):
        curvature = vmap(hessian(_scalar(net)))(x)
        return net(x), curvature.diagonal(dim1=-2, dim2=-1).sum(-1)

    return _steps(wrap, run, randn(5, 3))


@program
def jacobians_of_each_row(wrap):
    def run(net, x):
        return vmap(jacrev(net))(x), vmap(jacfwd(net))(x)

    return _steps(wrap, run, randn(5, 3), n_results=2)


@program
def products_with_jacobians(wrap):
    def run(net, x, v):
        value, along = jvp(net, (x,), (v,))
        same, pull = vjp(net, x)
        return value * 2 + along, pull(torch.ones_like(same))[0] * same

    return _steps(wrap, run, randn(5, 3), randn(5, 3))


@program
def detached_inside_of_a_transform(wrap):
    def run(net, x):
        def energy(row):
            return (net(row) * net[0](row).detach().sum()).squeeze(-1)

        return vmap(grad(energy))(x)

    return _steps(wrap, run, randn(5, 3))


@program
def gradients_of_single_samples(wrap):
    def run(net, x, y):
        def loss(parameters, a, b):
            return ((functional_call(net, parameters, (a,)) - b[:1]) ** 2).mean()

        found = vmap(grad(loss), in_dims=(None, 0, 0))(dict(net.named_parameters()), x, y)
        return sum((g.flatten(1) ** 2).sum(1) for g in found.values())

    return _steps(wrap, run, randn(5, 3), randn(5, 3))


@program
def inner_steps_of_meta_learning(wrap):
    def run(net, x, y, query):
        def loss(parameters):
            return ((functional_call(net, parameters, (x,)) - y[:, :1]) ** 2).mean()

        parameters = dict(net.named_parameters())
        for _ in range(2):
            found = grad(loss)(parameters)
            parameters = {name: p - 0.1 * found[name] for name, p in parameters.items()}
        return functional_call(net, parameters, (query,))

    return _steps(wrap, run, randn(5, 3), randn(5, 3), randn(5, 3))


@program
def masks_by_nested_maps(wrap):
    def allowed(batch, i, j):
        return (i >= j) & (batch >= 0)

    def forward(x):
        batch, n = x.shape[:2]
        mask = vmap(vmap(vmap(allowed, (None, None, 0)), (None, 0, None)), (0, None, None))
        mask = mask(torch.arange(batch), torch.arange(n), torch.arange(n))
        return (x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x

    m = wrap(forward)
    return [step(m, randn(n, 5, 4)) for n in (3, 3, 2, 4)]


@program
def maps_over_weights_with_writes_inside(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.weights = nn.Linear(4, 4), nn.Parameter(randn(5, 4, 4).detach())

        def forward(self, x):
            def one(weight):
                y = self.fc(x) @ weight
                y = y.clone()
                y[0] = 0
                return y.relu_().mean(0)

            return vmap(one)(self.weights)

    model = Model()
    m = wrap(model)
    return [[step(m, randn(n, 4)), gradients(model)] for n in (3, 3, 2)]


@program
def results_of_a_map_that_share_memory(wrap):
    def forward(x):
        y = x.sin()
        pair = vmap(lambda r: (r[:2], r.view(2, 2)))(y)
        return pair

    first, second = wrap(forward)(torch.arange(12.0).reshape(3, 4))
    first.add_(100)
    return [first, second]


@program
def slices_written_inside_of_a_transform(wrap):
    def forward(x):
        def f(v):
            o = v.clone()
            o[0] = v[1] * 2
            return (o**3).sum()

        def g(v):
            o = v.clone()
            o[1:].mul_(2)
            return (o**3).sum()

        return grad(f)(x), grad(g)(x), vmap(grad(f))(x.expand(2, -1))

    return step(wrap(forward), randn(3))


@program
def written_through_detach_inside_of_a_transform(wrap):
    def forward(x):
        def f(v):
            h = v * 2
            h.detach().mul_(3)
            return (h * v.sin()).sum()

        return grad(f)(x)

    return step(wrap(forward), randn(3))


@program
def list_written_beside_a_transform(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            def f(v):
                torch._foreach_add_([self.total], 1.0)
                return (v.sin() * self.total).sum()

            return grad(f)(x)

    model = Model()
    return [step(wrap(model), randn(3)), model.total]


def _penalized(operator):
    """A model whose result has the gradient of an operator, and so its gradients that of this."""

    def forward(x):
        y = operator(x.sin())
        (slope,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return y.sum() + (slope**2).sum()

    return forward


@program
def gradients_of_interpolation(wrap):
    resize = torch.nn.functional.interpolate
    kinds = [("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3), ("area", 2)]
    kinds += [("nearest", 1), ("nearest", 2), ("nearest-exact", 2)]
    seen = []
    for i, (mode, n_dims) in enumerate(kinds):
        operator = functools.partial(resize, scale_factor=(2, 1.3)[i % 2], mode=mode)
        x = randn(1, 2, *[3, 4, 2][:n_dims])
        seen.append(step(wrap(_penalized(operator)), x))
    return seen


@program
def gradients_of_padding_by_copies(wrap):
    pad = torch.nn.functional.pad
    return [
        step(
            wrap(_penalized(functools.partial(pad, pad=[1, 2] * n, mode="replicate"))),
            randn(1, 2, *[3, 4, 2][:n]),
        )
        for n in (1, 2, 3)
    ]


@program
def gradients_of_pools(wrap):
    f = torch.nn.functional
    pools = [
        lambda x: f.avg_pool2d(x, 2, padding=1, count_include_pad=False),
        lambda x: f.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=4),
        lambda x: f.adaptive_avg_pool2d(x, (2, 4)),
        lambda x: f.adaptive_max_pool2d(x, 2),
        lambda x: f.local_response_norm(x, 3),
    ]
    return [step(wrap(_penalized(pool)), randn(1, 3, 5, 6)) for pool in pools]


@program
def gradients_of_chosen_elements(wrap):
    chosen = [
        lambda x: x.max(1)[0],
        lambda x: x.topk(2, 1)[0],
        lambda x: x.median(1)[0],
        lambda x: x.kthvalue(2, 1)[0],
    ]
    return [step(wrap(_penalized(choose)), randn(3, 4)) for choose in chosen]


@program
def gradients_of_shrinks(wrap):
    f = torch.nn.functional
    return [step(wrap(_penalized(one)), randn(5, 3)) for one in (f.hardshrink, f.softshrink)]


@program(since=(2, 14))
def gradients_of_distances(wrap):
    return step(wrap(_penalized(lambda x: torch.cdist(x, 2 * x + 1))), randn(5, 3))
