"""Programs about backward passes: again, partial, second order, inside forward, checkpoints."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .facts import gradients, observe, raises, randn, step, training, weighted
from .registry import program


def _mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


@program
def backward_twice_is_refused(wrap):
    m, x = wrap(_mlp()), randn(3, 4)
    loss = weighted(m(x))
    loss.backward()
    return [x.grad.clone(), raises(loss.backward), x.grad]


@program
def backward_twice_with_retain_graph(wrap):
    model = _mlp()
    loss = weighted(wrap(model)(randn(3, 4)))
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    return [first, gradients(model)]


@program
def backward_of_each_output(wrap):
    m, x = wrap(lambda x: (x.sin(), x.exp(), x * 2)), randn(3)
    a, b, c = m(x)
    a.sum().backward(retain_graph=True)
    first = x.grad.clone()
    b.sum().backward(retain_graph=True)
    second = x.grad.clone()
    (c * a).sum().backward()
    return [first, second, x.grad]


@program
def backward_in_reverse_order_of_calls(wrap):
    model = _mlp()
    m = wrap(model)
    losses = [weighted(m(randn(n, 4))) for n in (2, 3, 4)]
    seen = []
    for loss in reversed(losses):
        loss.backward()
        seen.append(gradients(model))
    return seen


@program
def gradient_accumulation(wrap):
    model = _mlp()
    m = wrap(model)
    for _ in range(4):
        (weighted(m(randn(3, 4))) / 4).backward()
    return gradients(model)


@program
def one_output_unused(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = Model()
    a, _ = wrap(model)(randn(2, 3))
    a.sum().backward()
    return gradients(model)


@program
def gradient_of_some(wrap):
    model = _mlp()
    m, x = wrap(model), randn(3, 4)
    loss = weighted(m(x))
    some = torch.autograd.grad(loss, [x, model[2].weight], retain_graph=True)
    rest = torch.autograd.grad(loss, [model[0].bias])
    return [some, rest, gradients(model), x.grad]


@program
def gradient_of_unused_input(wrap):
    m, x, y = wrap(lambda x, y: x * 2), randn(3), randn(3)
    out = m(x, y).sum()
    first = torch.autograd.grad(out, [x, y], allow_unused=True, retain_graph=True)
    second = torch.autograd.grad(
        out, [y], materialize_grads=True, allow_unused=True, retain_graph=True
    )
    return [first, second, raises(torch.autograd.grad, out, [y])]


@program
def backward_into_some_inputs(wrap):
    model = _mlp()
    loss = weighted(wrap(model)(randn(3, 4)))
    loss.backward(inputs=[model[2].bias])
    return gradients(model)


@program
def gradient_given_to_backward(wrap):
    m, x = wrap(lambda x: x * x), randn(2, 3)
    m(x).backward(torch.arange(6.0).reshape(2, 3))
    return x.grad


@program
def expanded_gradient_given_to_backward(wrap):
    m, x = wrap(lambda x: x.sin()), randn(2, 3)
    m(x).backward(torch.ones(1).expand(2, 3))
    return x.grad


@program
def transposed_gradient_given_to_backward(wrap):
    m, x = wrap(lambda x: x.sin()), randn(2, 3)
    m(x).backward(torch.arange(6.0).reshape(3, 2).t())
    return x.grad


@program
def many_gradients_at_once(wrap):
    m, x = wrap(lambda x: x.sin() * 2), randn(3)
    return torch.autograd.grad(m(x), x, torch.eye(3), is_grads_batched=True)


@program
def gradient_with_history(wrap):
    def second_order():
        m, x = wrap(lambda x: (x**3).sum()), randn(3)
        (first,) = torch.autograd.grad(m(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return [first, second]

    return raises(second_order)


@program
def gradient_penalty(wrap):
    def train():
        model = _mlp()
        m, x = wrap(model), randn(3, 4)
        out = m(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.pow(2).mean() + (g.norm(dim=1) - 1).pow(2).mean()).backward()
        return [out, g, gradients(model), x.grad]

    return raises(train)


@program
def gradient_penalty_after_plain_training(wrap):
    model = _mlp()
    m = wrap(model)
    first = training(model, m, randn(3, 4))

    def penalty():
        model.zero_grad()
        x = randn(3, 4)
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        return gradients(model)

    return [first, raises(penalty)]


@program
def hessian_vector_product(wrap):
    def product():
        m, x, v = wrap(lambda x: (x.sin() * x.exp()).sum()), randn(3), torch.randn(3)
        (g,) = torch.autograd.grad(m(x), x, create_graph=True)
        return torch.autograd.grad(g @ v, x)

    return raises(product)


@program
def gradient_inside_forward(wrap):
    """Forces from an energy, as molecular models do."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            energy = self.net(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
            return energy, -force

    def train():
        model = Model()
        m = wrap(model)
        energy, force = m(randn(4, 3))
        (energy + force.pow(2).sum()).backward()
        return [energy, force, gradients(model)]

    return raises(train)


@program
def gradient_inside_forward_of_a_fresh_leaf(wrap):
    def forward(x):
        z = x.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad((z**2).sum(), z)
        return x + g

    return raises(step, wrap(forward), randn(3))


@program
def backward_inside_forward(wrap):
    def forward(x):
        z = x.detach().requires_grad_()
        (z**3).sum().backward()
        return x * z.grad

    return raises(step, wrap(forward), randn(3))


@program
def adversarial_example(wrap):
    model = _mlp()
    m, x, target = wrap(model), torch.randn(3, 4), torch.tensor([0, 1, 1])
    for _ in range(3):
        x = x.detach().requires_grad_()
        loss = nn.functional.cross_entropy(m(x), target)
        (g,) = torch.autograd.grad(loss, x)
        x = x + 0.1 * g.sign()
    return [x, loss, gradients(model)]


@program
def meta_learning_step(wrap):
    def train():
        model = nn.Linear(3, 1)
        m, x = wrap(model), torch.randn(4, 3)
        loss = m(x).pow(2).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        fast = [p - 0.1 * g for p, g in zip(model.parameters(), grads, strict=True)]
        nn.functional.linear(x, *fast).pow(2).mean().backward()
        return gradients(model)

    return raises(train)


@program
def checkpoint_without_reentry(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(checkpoint(lambda z: self.a(z).tanh(), x, use_reentrant=False))

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(3, 4)), training(model, m, randn(2, 4))]


@program
def checkpoint_with_reentry(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(checkpoint(lambda z: self.a(z).tanh(), x, use_reentrant=True))

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(3, 4)), m(torch.randn(3, 4))]


@program(alone=True)
def checkpoint_around_wrapped_module(wrap):
    """Alone: what a process traces first must save nothing for this checkpoint."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    m, seen = wrap(model), []
    for reentrant in (False, True):
        model.zero_grad()
        x = randn(3, 4)
        out = checkpoint(m, x, use_reentrant=reentrant)
        weighted(out).backward()
        seen.append([observe(out), observe(x.grad), gradients(model)])
    return seen


@program
def checkpoint_counts_calls(wrap):
    count = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def part(self, x):
            count.append(1)
            return self.fc(x).tanh()

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    model = Model()
    return [training(model, wrap(model), randn(2, 3)), len(count)]


@program
def checkpoint_sequential_segments(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

        def forward(self, x):
            return checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    model = Model()
    return training(model, wrap(model), randn(2, 3))


@program
def checkpoint_with_dropout(wrap):
    """The mask of the second forward must be the first's: kept elements keep a gradient."""

    class Model(nn.Module):
        def forward(self, x):
            return checkpoint(lambda z: nn.functional.dropout(z * z, 0.5), x, use_reentrant=False)

    m, x = wrap(Model()), (torch.rand(200) + 1).requires_grad_()
    out = m(x)
    out.sum().backward()
    kept = out != 0
    return [torch.equal(kept, x.grad != 0), bool(0.3 < kept.float().mean() < 0.7)]


@program
def checkpoint_with_keywords_and_several_outputs(wrap):
    def part(x, scale=1.0):
        return x * scale, x.exp()

    m = wrap(lambda x: checkpoint(part, x, scale=3.0, use_reentrant=False))
    return step(m, randn(3))


@program
def gradient_of_inplace_chain(wrap):
    def forward(x):
        y = x.clone()
        for k in range(4):
            y[k] = y[k] * (k + 2) + y[(k + 1) % 4]
        return y

    return step(wrap(forward), randn(4))


@program
def gradient_reaches_shared_leaf_twice(wrap):
    m, x = wrap(lambda a, b: a * 2 + b.sin()), randn(3)
    m(x, x).sum().backward()
    first = x.grad.clone()
    m(x, x * 3).sum().backward()
    return [first, x.grad]


@program
def gradient_of_nan_free_where(wrap):
    m = wrap(lambda x: torch.where(x > 0, x.sqrt(), 0.0))
    return step(m, torch.tensor([4.0, 0.0, -1.0]).requires_grad_())


@program
def gradient_at_kinks(wrap):
    def forward(x):
        return (
            x.relu(),
            x.abs(),
            x.clamp(0, 1),
            x.max(),
            torch.maximum(x, x * 0),
            x.norm(),
            x.sign(),
        )

    return step(wrap(forward), torch.tensor([0.0, 1.0, -1.0, 0.0]).requires_grad_())


@program
def gradient_of_ties_in_maximum(wrap):
    m = wrap(lambda x: (x.amax(1), x.max(1).values, x.max(), x.median(1).values))
    return step(m, torch.tensor([[2.0, 2.0, 1.0], [0.0, 0.0, 0.0]]).requires_grad_())


@program
def loss_is_an_output(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x, target):
            logits = self.fc(x)
            return nn.functional.cross_entropy(logits, target), logits.detach()

    model = Model()
    loss, logits = wrap(model)(randn(2, 3), torch.tensor([1, 3]))
    (loss * 2).backward()
    return [loss, logits, gradients(model)]


@program
def output_without_loss_is_freed(wrap):
    model = _mlp()
    m = wrap(model)
    for _ in range(3):
        m(randn(3, 4))
    return training(model, m, randn(3, 4))


@program
def gradient_that_is_lazily_negated(wrap):
    """The imaginary part of a conjugate: of one element, such a view is contiguous."""
    model = nn.Linear(3, 1)
    y = wrap(model)(randn(1, 3))
    conjugate = torch.complex(torch.ones_like(y), y).conj()
    (conjugate * conjugate).real.sum().backward()
    return gradients(model)


@program
def backward_in_another_thread(wrap):
    import threading

    m, x = wrap(lambda x: x.sin() * x), randn(3)
    loss = m(x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss, x.grad]


@program
def gradient_check(wrap):
    m = wrap(lambda x: (x.sin() * x.exp()).cumsum(0))
    return raises(torch.autograd.gradcheck, m, (randn(4, dtype=torch.float64),))


@program
def graph_task_order_with_side_effect(wrap):
    model, order = _mlp(), []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: order.append(name))
    weighted(wrap(model)(randn(3, 4))).backward()
    return sorted(order)


class _Inner(nn.Module):
    """A gradient inside of ``forward``, with something on the way that is more than a value."""

    def __init__(self, between):
        super().__init__()
        self.fc, self.between = nn.Linear(4, 4), between
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        h = self.fc(x).sin()
        y = self.between(self, h, x)
        (g,) = torch.autograd.grad((y * x.cos()).sum(), x, create_graph=True)
        return g, h


def _of_inner(wrap, between, prepare=lambda model, x: None):
    model = _Inner(between)
    m, seen = wrap(model), []
    for _ in range(2):
        model.zero_grad()
        x = randn(3, 4)
        prepare(model, x)
        seen += [raises(step, m, x), x.grad, gradients(model), model.total.clone()]
    return seen


@program
def inner_gradient_past_a_write_without_gradients(wrap):
    def between(self, h, x):
        with torch.no_grad():
            h.mul_(2)
            h[0] = 3.0
        return h

    return _of_inner(wrap, between)


@program
def inner_gradient_past_a_write_through_detach(wrap):
    def between(self, h, x):
        h.detach().mul_(2)
        return h

    return _of_inner(wrap, between)


@program
def inner_gradient_past_written_slices(wrap):
    def between(self, h, x):
        o = h.clone()
        o[0] = h[1] * 2
        o[1:].mul_(3)
        return o

    return _of_inner(wrap, between)


@program
def inner_gradient_past_a_frozen_part(wrap):
    def between(self, h, x):
        with torch.no_grad():
            scale = h.float().exp()
        return h * scale + (h.detach() * h)

    return _of_inner(wrap, between)


@program
def inner_gradient_past_a_written_list(wrap):
    def between(self, h, x):
        torch._foreach_add_([self.total], 1.0)
        return h * self.total

    return _of_inner(wrap, between)


@program
def inner_gradient_past_a_check(wrap):
    def between(self, h, x):
        torch._assert_async((x < 0.5).all(), "a large x")
        return h

    return _of_inner(wrap, between)


@program
def inner_gradient_of_what_has_hooks(wrap):
    def prepare(model, x):
        x.register_hook(lambda v: v * 3)
        if model.total.sum() > 0:
            model.fc.weight.register_hook(lambda v: v * 2)
        model.total.add_(1)

    return _of_inner(wrap, lambda self, h, x: h, prepare)


@program
def conversion_that_does_nothing_without_gradients(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = self.fc(x).sin()
            with torch.no_grad():
                b = h.float().exp() + h.to(h.dtype).contiguous()
            return b, h

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4)) for n in (3, 5, 2)]
