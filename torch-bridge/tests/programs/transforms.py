"""Programs with ``torch.func``: functional calls, vmap, jvp, Jacobians, per-sample gradients."""

import copy

import torch
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from .facts import gradients, raises, randn, step
from .registry import program


@program
def functional_call_of_wrapped(wrap):
    model = nn.Linear(3, 3)
    m = wrap(model)
    params = {name: randn(*p.shape) for name, p in model.named_parameters()}
    out = functional_call(m, params, (torch.ones(2, 3),))
    out.sum().backward()
    return [out, {k: p.grad for k, p in params.items()}, gradients(model), m(torch.ones(2, 3))]


@program
def functional_call_inside_forward(wrap):
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.make = nn.Linear(2, 2), nn.Linear(1, 6)

        def forward(self, x, z):
            flat = self.make(z)
            weights = {"weight": flat[:4].view(2, 2), "bias": flat[4:]}
            return functional_call(self.inner, weights, (x,))

    model = Hyper()
    return [step(wrap(model), randn(3, 2), randn(1)), gradients(model)]


@program
def functional_call_with_tied_weights(wrap):
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    m, w = wrap(model), randn(3, 3)
    out = functional_call(m, {"0.weight": w}, (torch.ones(2, 3),))
    out.sum().backward()
    return [out, w.grad]


@program
def gradient_transform_around_wrapped(wrap):
    m = wrap(lambda x: (x**3).sum())
    return raises(grad(m), torch.randn(3))


@program
def gradient_transform_inside(wrap):
    m = wrap(lambda x: grad(lambda z: (z**3).sum())(x) * 2)
    return raises(step, m, randn(3))


@program
def gradient_and_value_inside(wrap):
    def forward(x):
        g, value = grad_and_value(lambda z: z.sin().sum())(x)
        return g * value

    return raises(step, wrap(forward), randn(3))


@program
def vmap_around_wrapped(wrap):
    model = nn.Linear(3, 2)
    m = wrap(model)
    return raises(vmap(m), torch.randn(4, 3))


@program
def vmap_inside(wrap):
    m = wrap(lambda x, y: vmap(torch.dot)(x, y))
    return raises(step, m, randn(4, 3), randn(4, 3))


class _Scan(nn.Module):
    """Two steps of a scan and a nested map, as state-space models and masks have them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        rows = self.linear(x)
        steps = vmap(lambda a, b: (a * b).softmax(0) + torch.dot(a, b), in_dims=(0, 1))
        found = steps(rows, x.t().contiguous())
        pairs = vmap(vmap(lambda a, b: torch.where(a > b, a, b), (None, 0)), (0, None))
        return pairs(found[0], found[1]) + found.sum()


@program
def maps_inside_of_a_model(wrap):
    m = wrap(_Scan())
    return [step(m, randn(3, 4)), step(m, randn(5, 4)), step(m, randn(3, 4))]


@program
def map_that_writes_and_views(wrap):
    def forward(x):
        y = x * 2
        view = vmap(lambda r: r.view(2, 2))(y)
        view += 1
        written = vmap(lambda r: r.add_(1))(y)
        return y, view, written, vmap(torch.Tensor.sum)(x)

    m = wrap(forward)
    return [m(torch.arange(12.0).reshape(3, 4)), m(torch.ones(5, 4))]


class _Detached(nn.Module):
    """Values inside of maps through which no gradient flows."""

    def forward(self, x):
        rounded = vmap(lambda r: r + (r.round() - r).detach())(x)

        def without(r):
            with torch.no_grad():
                sine = r.sin()
            return sine * r

        return rounded * vmap(lambda r: r.detach().sin())(x) + vmap(without)(x)


@program
def map_that_detaches(wrap):
    m = wrap(_Detached())
    return step(m, randn(3, 4))


@program
def map_in_autocast_of_the_model(wrap):
    def forward(x):
        with torch.autocast("cpu", torch.bfloat16):
            return vmap(lambda r: torch.dot(r, r).float())(x)

    return wrap(forward)(randn(3, 4))


class _Combined(nn.Module):
    """A scan that combines steps in maps of products and sums, beside a layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        factor = self.linear(x).sigmoid()
        while factor.shape[0] > 1:
            left, right = (factor[0::2], y[0::2]), (factor[1::2], y[1::2])
            factor, y = vmap(lambda a, b: (a[0] * b[0], b[0].mul(a[1]) + b[1]))(left, right)
        return y


@program
def scan_with_maps_of_elements(wrap):
    m = wrap(_Combined())
    return [step(m, randn(n, 3, 4), randn(n, 3, 4)) for n in (8, 4, 8)]


@program
def maps_of_elements_over_other_dimensions(wrap):
    def forward(x, y):
        columns = vmap(lambda a, b: a * b - 2, in_dims=(1, 0))(x, y)
        return columns, vmap(lambda a, b: a / (b + 3), out_dims=1)(x, y)

    return step(wrap(forward), randn(4, 4), randn(4, 4))


@program
def maps_of_elements_of_several_ranks_and_types(wrap):
    scale = torch.tensor([2.0, 3.0, 5.0])

    def forward(x, y):
        ranks = vmap(lambda a, b: a * b)(x, y)
        types = vmap(lambda a, b: a.double() * b + a.half())(x, x)
        return ranks, types, vmap(lambda a: a * scale)(x), vmap(lambda a: a * 2 + 1)(y)

    return step(wrap(forward), randn(3, 3), randn(3))


@program
def map_of_elements_that_gives_a_value_twice(wrap):
    def forward(x, y):
        def both(a, b):
            product = a * b
            return product, product, a

        first, second, own = vmap(both)(x, y)
        first.add_(1)
        return first, second, own

    x = torch.arange(12.0).reshape(3, 4)
    results = wrap(forward)(x, torch.ones(3, 4))
    results[2].mul_(2)
    return results, x


@program
def map_of_elements_between_writes(wrap):
    def forward(x, y):
        z = x * 2
        found = vmap(lambda a, b: a + b)(z, y)
        z += 1
        again = vmap(lambda a, b: a - b)(z, y)
        found[0] = 7
        return found, again, z

    return step(wrap(forward), randn(3, 4), randn(3, 4))


@program
def map_of_two_views_written_by_the_caller(wrap):
    def forward(x):
        def two(r):
            twice = r * 2
            return twice[1:], twice[2:]

        return vmap(two)(x)

    first, second = wrap(forward)(randn(3, 4))
    second.add_(100)
    return first, second


@program
def vmap_with_randomness(wrap):
    m = wrap(lambda x: vmap(lambda r: r + torch.rand(3), randomness="different")(x))

    def run():
        out = m(torch.zeros(4, 3))
        return [out.unique().numel(), bool((out < 1).all())]

    return raises(run)


@program
def vmap_over_dimensions(wrap):
    m = wrap(lambda x: vmap(lambda c: c.softmax(0), in_dims=1, out_dims=1)(x))
    return raises(step, m, randn(3, 4))


@program
def jvp_around_wrapped(wrap):
    m = wrap(lambda x: x.sin() * x)
    x, t = torch.randn(3), torch.randn(3)
    return raises(jvp, m, (x,), (t,))


@program
def jvp_inside(wrap):
    def forward(x, t):
        return jvp(lambda z: z.sin() * z, (x,), (t,))

    return raises(step, wrap(forward), randn(3), randn(3))


@program
def forward_mode_gradients(wrap):
    import torch.autograd.forward_ad as forward_ad

    def run():
        m = wrap(lambda x: x.exp() * 2)
        with forward_ad.dual_level():
            out = m(forward_ad.make_dual(torch.ones(3), torch.arange(3.0)))
            primal, tangent = forward_ad.unpack_dual(out)
            return [primal, tangent is None, tangent]

    return raises(run)


@program
def vjp_around_wrapped(wrap):
    def run():
        out, pull = vjp(wrap(lambda x: x.sin() * 3), torch.arange(3.0))
        return [out, pull(torch.ones(3))]

    return raises(run)


@program
def reverse_jacobian_around_wrapped(wrap):
    m = wrap(lambda x: x.sin().cumsum(0))
    return raises(jacrev(m), torch.randn(3))


@program
def forward_jacobian_around_wrapped(wrap):
    m = wrap(lambda x: x.sin().cumsum(0))
    return raises(jacfwd(m), torch.randn(3))


@program
def reverse_jacobian_inside(wrap):
    m = wrap(lambda x: jacrev(lambda z: z**2 * z.sum())(x))
    return raises(step, m, randn(3))


@program
def hessian_around_wrapped(wrap):
    m = wrap(lambda x: (x**3).sum())
    return raises(hessian(m), torch.randn(3))


@program
def jacobian_of_autograd(wrap):
    m = wrap(lambda x: x.sin() * x.sum())
    return raises(torch.autograd.functional.jacobian, m, torch.randn(3))


@program
def hessian_of_autograd(wrap):
    m = wrap(lambda x: (x.sin() * x).sum())
    return raises(torch.autograd.functional.hessian, m, torch.randn(3))


@program
def per_sample_gradients(wrap):
    model = nn.Linear(3, 1)
    m = wrap(model)
    params = {k: p.detach() for k, p in model.named_parameters()}

    def loss(params, x):
        return functional_call(m, params, (x[None],)).pow(2).sum()

    return raises(vmap(grad(loss), in_dims=(None, 0)), params, torch.randn(4, 3))


@program
def ensemble_of_models(wrap):
    models = [nn.Linear(3, 2) for _ in range(3)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def one(params, buffers, x):
        return functional_call(base, (params, buffers), (x,))

    m = wrap(lambda x: vmap(one, in_dims=(0, 0, None))(params, buffers, x))
    return raises(lambda: m(torch.randn(4, 3)))


@program
def linearized(wrap):
    def run():
        out, push = linearize(wrap(lambda x: x.sin() * 2), torch.arange(3.0))
        return [out, push(torch.ones(3))]

    return raises(run)


@program
def functionalized(wrap):
    def forward(x):
        y = x.clone()
        y.add_(1)
        return y.view(-1)

    return raises(functionalize(wrap(forward)), torch.ones(2, 2))


@program
def wrapped_then_transformed_then_plain(wrap):
    m = wrap(lambda x: (x.sin() * x).sum())
    x = torch.randn(3)
    return [step(m, randn(3)), raises(grad(m), x), step(m, randn(3))]


@program
def transform_first_then_plain(wrap):
    m = wrap(lambda x: (x.sin() * x).sum())
    return [raises(grad(m), torch.randn(3)), step(m, randn(3)), raises(vmap(m), torch.randn(2, 3))]


@program
def make_fx_of_wrapped(wrap):
    from torch.fx.experimental.proxy_tensor import make_fx

    m = wrap(lambda x: x.sin() * 2)

    def run():
        return make_fx(m)(torch.ones(3))(torch.arange(3.0))

    return raises(run)


@program
def exported_after_wrapping(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    m = wrap(model)
    first = m(torch.ones(2, 3))

    def run():
        return torch.export.export(model, (torch.ones(2, 3),)).module()(torch.ones(2, 3))

    return [first, raises(run)]


@program
def scripted_submodule(wrap):
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.ReLU())
    return raises(lambda: step(wrap(model), randn(2, 3)))


@program
def traced_module_of_wrapped_model(wrap):
    model = nn.Linear(3, 3)
    m = wrap(model)
    out = m(torch.ones(2, 3))
    traced = torch.jit.trace(model, torch.ones(2, 3))
    return [out, traced(torch.ones(2, 3) * 2)]
