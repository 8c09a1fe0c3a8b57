"""Programs with hooks on tensors and on gradients' accumulation."""

import torch
from torch import nn

from .facts import gradients, observe, randn, step, training, weighted
from .registry import program


@program
def hook_on_input(wrap):
    m, x, seen = wrap(lambda x: x * x), randn(3), []
    x.register_hook(lambda g: seen.append(g.sum().item()))
    return [step(m, x), seen]


@program
def hook_on_input_changes_gradient(wrap):
    m, x = wrap(lambda x: x * x), randn(3)
    x.register_hook(lambda g: g * 2)
    return step(m, x)


@program
def hook_on_output(wrap):
    m, x = wrap(lambda x: x * x), randn(3)
    out = m(x)
    out.register_hook(lambda g: g * 3)
    weighted(out).backward()
    return [out, x.grad]


@program
def hook_on_parameter(wrap):
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda g: g * 10)
    return training(model, wrap(model), randn(2, 3))


@program
def hook_on_parameter_added_and_removed(wrap):
    model = nn.Linear(3, 3)
    m = wrap(model)
    seen = [training(model, m, randn(2, 3))]
    handle = model.weight.register_hook(lambda g: g * 10)
    seen.append(training(model, m, randn(2, 3)))
    handle.remove()
    return [*seen, training(model, m, randn(2, 3))]


@program
def hook_inside_forward(wrap):
    def forward(x):
        y = x * 2
        y.register_hook(lambda g: g * 5)
        return y * y

    return step(wrap(forward), randn(3))


@program
def hook_inside_forward_with_side_effect(wrap):
    seen = []

    def forward(x):
        y = x.sin()
        y.register_hook(lambda g: seen.append(g.abs().sum().item()))
        return y * x

    m = wrap(forward)
    return [step(m, randn(3)), step(m, randn(3)), seen]


@program
def hook_inside_forward_only_sometimes(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.watch, self.seen = nn.Linear(3, 3), False, []

        def forward(self, x):
            y = self.fc(x)
            if self.watch:
                y.register_hook(lambda g: self.seen.append(g.sum().item()))
            return y.relu()

    model = Model()
    m, results = wrap(model), []
    for watch in (False, True, False):
        model.watch = watch
        results.append(training(model, m, randn(2, 3)))
    return [results, model.seen]


@program
def retained_gradient_of_intermediate(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            self.inner = self.fc(x)
            self.inner.retain_grad()
            return self.inner.relu()

    model = Model()
    result = training(model, wrap(model), randn(2, 3))
    return [result, model.inner, model.inner.grad]


@program
def retained_gradient_of_output(wrap):
    m, x = wrap(lambda x: x * 2), randn(3)
    out = m(x)
    out.retain_grad()
    (out * out).sum().backward()
    return [out.grad, x.grad]


@program
def gradient_of_saved_activation(wrap):
    """Grad-CAM: an activation kept on the module, its gradient asked for afterwards."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2, 3)

        def forward(self, x):
            self.features = self.conv(x).relu()
            return self.fc(self.features.mean((2, 3)))

    model = Model()
    scores = wrap(model)(torch.randn(2, 1, 6, 6))
    (gradient,) = torch.autograd.grad(scores[:, 1].sum(), model.features)
    return [scores, model.features, gradient]


@program
def post_accumulate_hook(wrap):
    model, seen = nn.Linear(3, 3), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    return [training(model, wrap(model), randn(2, 3)), seen]


@program
def post_accumulate_hook_steps_optimizer(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def update(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(update)
    m = wrap(model)
    return [[step(m, randn(4, 3)) for _ in range(3)], list(model.parameters())]


@program
def prehook_of_output_node(wrap):
    m, x, seen = wrap(lambda x: x * x), randn(3), []
    out = m(x)
    out.grad_fn.register_prehook(lambda gs: seen.append(gs[0].sum().item()))
    weighted(out).backward()
    return [x.grad, seen]


@program
def order_of_hooks(wrap):
    model, seen = nn.Linear(3, 3), []
    m, x = wrap(model), randn(2, 3)
    x.register_hook(lambda g: seen.append("input"))
    model.weight.register_hook(lambda g: seen.append("weight"))
    out = m(x)
    out.register_hook(lambda g: seen.append("output"))
    weighted(out).backward()
    return [seen[0], sorted(seen), gradients(model)]


@program
def two_hooks_on_one_tensor(wrap):
    m, x = wrap(lambda x: x.exp()), randn(3)
    x.register_hook(lambda g: g + 1)
    x.register_hook(lambda g: g * 2)
    return step(m, x)


@program
def hook_that_raises(wrap):
    m, x = wrap(lambda x: x.exp()), randn(3)

    def fail(g):
        raise LookupError("hook")

    x.register_hook(fail)
    try:
        weighted(m(x)).backward()
    except LookupError as error:
        return [str(error), x.grad]
    return "no error"


@program
def multi_gradient_hook(wrap):
    model, seen = nn.Linear(3, 3), []
    torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda gs: seen.append([g.sum().item() for g in gs])
    )
    return [training(model, wrap(model), randn(2, 3)), seen]


@program
def saved_tensors_hooks_around_call(wrap):
    """Saved tensors are doubled on the way back, so their gradients show who saved what."""
    m, x, count = wrap(lambda x: (x * x).sum()), randn(3), []

    def pack(t):
        count.append(1)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = m(x)
    loss.backward()
    return [loss, x.grad, bool(count)]


@program
def save_on_cpu_around_call(wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    m, x = wrap(model), randn(2, 3)
    with torch.autograd.graph.save_on_cpu():
        out = m(x)
    weighted(out).backward()
    return [out, x.grad, gradients(model)]


@program
def saved_tensors_hooks_inside_forward(wrap):
    packed = []

    def pack(t):
        packed.append(tuple(t.shape))
        return t

    def forward(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = x.exp()
        return y * 2

    return [step(wrap(forward), randn(3)), bool(packed)]


@program
def gradient_changed_by_caller_between_steps(wrap):
    model = nn.Linear(3, 3)
    m, x = wrap(model), torch.randn(2, 3)
    weighted(m(x)).backward()
    model.weight.grad.mul_(0.5)
    held = model.weight.grad
    weighted(m(x)).backward()
    return [gradients(model), held is model.weight.grad, observe(held)]


@program
def gradient_set_by_caller(wrap):
    model = nn.Linear(3, 3)
    model.weight.grad = torch.ones(3, 3)
    weighted(wrap(model)(torch.randn(2, 3))).backward()
    return gradients(model)


@program
def history_of_intermediate_is_seen_in_forward(wrap):
    seen = []

    def forward(x):
        y = x * 2
        seen.append((y.grad_fn is None, y.is_leaf, y.requires_grad))
        return y

    m = wrap(forward)
    return [step(m, randn(3)), step(m, randn(3, grad=False)), seen]


@program
def hook_on_leaf_made_in_forward(wrap):
    seen = []

    def forward(x):
        noise = torch.zeros(3, requires_grad=True)
        noise.register_hook(lambda g: seen.append(g.sum().item()))
        return (x + noise) * 2

    return [step(wrap(forward), randn(3)), seen]
