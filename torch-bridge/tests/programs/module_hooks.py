"""Programs with hooks on modules: forward, backward, global, of the state dict."""

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from .facts import observe, raises, randn, step, training, weighted
from .registry import program


def _network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _before_and_after(wrap, register, between=lambda model: None):
    """Trains a network before a hook is registered, with it, and after it is removed."""
    model = _network()
    m = wrap(model)
    seen = [training(model, m, randn(3, 4))]
    handle = register(model)
    seen.append(training(model, m, randn(3, 4)))
    between(model)
    handle.remove()
    return [*seen, training(model, m, randn(3, 4))]


@program
def forward_hook_before_first_call(wrap):
    model = _network()
    model[1].register_forward_hook(lambda module, args, out: out * 10)
    return training(model, wrap(model), randn(3, 4))


@program
def forward_hook_added_and_removed(wrap):
    return _before_and_after(
        wrap, lambda model: model[1].register_forward_hook(lambda module, args, out: out * 10)
    )


@program
def forward_hook_of_whole_model_added(wrap):
    return _before_and_after(
        wrap, lambda model: model.register_forward_hook(lambda module, args, out: out * 10)
    )


@program
def forward_hook_records(wrap):
    seen = []
    result = _before_and_after(
        wrap,
        lambda model: model[0].register_forward_hook(
            lambda module, args, out: seen.append((args[0], out))
        ),
    )
    return [result, seen]


@program
def forward_hook_counts_calls(wrap):
    model, count = _network(), [0]

    def hook(module, args, out):
        count[0] += 1

    model[2].register_forward_hook(hook)
    m = wrap(model)
    for _ in range(5):
        m(torch.randn(3, 4))
    return count[0]


@program
def forward_hook_of_whole_model_counts_calls(wrap):
    model, count = _network(), []
    model.register_forward_hook(lambda module, args, out: count.append(1))
    m = wrap(model)
    for _ in range(5):
        m(torch.randn(3, 4))
    return len(count)


@program
def forward_hook_prepended(wrap):
    model = _network()
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    model[0].register_forward_hook(lambda module, args, out: out * 2, prepend=True)
    return step(wrap(model), randn(3, 4))


@program
def forward_hook_replaced_by_another(wrap):
    model = _network()
    m, seen = wrap(model), []
    for factor in (2, 3):
        handle = model[0].register_forward_hook(lambda module, args, out, f=factor: out * f)
        seen.append(step(m, randn(3, 4)))
        handle.remove()
    return seen


@program
def forward_hook_reads_changing_closure(wrap):
    model, scale = _network(), {"by": 1.0}
    model[0].register_forward_hook(lambda module, args, out: out * scale["by"])
    m, seen = wrap(model), []
    for by in (1.0, 2.0, 0.5):
        scale["by"] = by
        seen.append(step(m, randn(3, 4)))
    return seen


@program
def forward_hook_with_keywords(wrap):
    class Model(nn.Module):
        def forward(self, x, scale=1.0):
            return x * scale

    model, seen = Model(), []
    model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(sorted(kwargs)), with_kwargs=True
    )
    m = wrap(model)
    return [step(m, randn(3), scale=2.0), step(m, randn(3)), seen]


@program
def forward_hook_always_called(wrap):
    class Model(nn.Module):
        def forward(self, x):
            if x.shape[0] == 2:
                raise ValueError("two rows")
            return x * 2

    model, seen = Model(), []
    model.register_forward_hook(
        lambda module, args, out: seen.append(out is None), always_call=True
    )
    m = wrap(model)
    return [raises(m, randn(n, 3), message=True) for n in (1, 2, 3)] + [seen]


@program
def forward_hook_that_raises(wrap):
    model = _network()

    def fail(module, args, out):
        raise LookupError("hook")

    model[1].register_forward_hook(fail)
    return raises(wrap(model), randn(3, 4), message=True)


@program
def forward_hook_makes_another_structure(wrap):
    model = _network()
    model.register_forward_hook(lambda module, args, out: {"logits": out, "sum": out.sum()})
    return step(wrap(model), randn(3, 4))


@program
def feature_extraction_by_hooks(wrap):
    model, features = _network(), {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda mod, args, out, name=name: features.update({name: out}))
    m, seen = wrap(model), []
    for _ in range(2):
        features.clear()
        m(randn(3, 4))
        seen.append([observe(features), sorted(features)])
    weighted(features["1"]).backward()
    return [seen, model[0].weight.grad, model[2].weight.grad]


@program
def pre_hook_changes_input(wrap):
    return _before_and_after(
        wrap, lambda model: model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    )


@program
def pre_hook_of_whole_model(wrap):
    return _before_and_after(
        wrap, lambda model: model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    )


@program
def pre_hook_with_keywords(wrap):
    class Model(nn.Module):
        def forward(self, x, scale=1.0):
            return x * scale

    model = Model()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "scale": 5.0}), with_kwargs=True
    )
    m = wrap(model)
    return [step(m, randn(3)), step(m, randn(3), scale=2.0)]


@program
def pre_hook_writes_weight(wrap):
    """As spectral norm of old and weight standardization do."""
    model = nn.Linear(3, 3)
    raw = model.weight
    del model._parameters["weight"]
    model.register_parameter("raw", raw)
    model.register_forward_pre_hook(
        lambda module, args: setattr(module, "weight", module.raw / module.raw.norm())
    )
    m = wrap(model)
    seen = [training(model, m, randn(2, 3))]
    with torch.no_grad():
        raw.mul_(torch.arange(9.0).reshape(3, 3))
    return [*seen, training(model, m, randn(2, 3))]


@program
def full_backward_hook(wrap):
    return _before_and_after(
        wrap,
        lambda model: model[2].register_full_backward_hook(lambda module, gi, go: (gi[0] * 100,)),
    )


@program
def full_backward_hook_records(wrap):
    seen = []
    result = _before_and_after(
        wrap,
        lambda model: model[2].register_full_backward_hook(
            lambda module, gi, go: seen.append((gi[0], go[0]))
        ),
    )
    return [result, seen]


@program
def full_backward_hook_of_whole_model(wrap):
    return _before_and_after(
        wrap, lambda model: model.register_full_backward_hook(lambda module, gi, go: (gi[0] * 3,))
    )


@program
def full_backward_pre_hook(wrap):
    return _before_and_after(
        wrap,
        lambda model: model[1].register_full_backward_pre_hook(lambda module, go: (go[0] * 2,)),
    )


@program
def backward_hook_of_old_form(wrap):
    model, seen = _network(), []
    model[1].register_backward_hook(lambda module, gi, go: seen.append(go[0].sum().item()))
    return [training(model, wrap(model), randn(3, 4)), seen]


@program
def backward_hook_where_input_needs_no_gradient(wrap):
    model, seen = _network(), []
    model[0].register_full_backward_hook(lambda module, gi, go: seen.append(gi[0] is None))
    return [training(model, wrap(model), torch.randn(3, 4)), seen]


@program
def global_forward_hook(wrap):
    seen = []

    def register(model):
        return nn_module.register_module_forward_hook(
            lambda module, args, out: seen.append(type(module).__name__)
        )

    result = _before_and_after(wrap, register)
    return [result, [name for name in seen if name in ("Linear", "Tanh")]]


@program
def global_forward_hook_changes_output(wrap):
    def register(model):
        return nn_module.register_module_forward_hook(
            lambda module, args, out: out * 2 if isinstance(module, nn.Tanh) else None
        )

    return _before_and_after(wrap, register)


@program
def global_forward_pre_hook(wrap):
    def register(model):
        return nn_module.register_module_forward_pre_hook(
            lambda module, args: (args[0] + 1,) if isinstance(module, nn.Tanh) else None
        )

    return _before_and_after(wrap, register)


@program
def global_full_backward_hook(wrap):
    def register(model):
        return nn_module.register_module_full_backward_hook(
            lambda module, gi, go: (gi[0] * 5,) if isinstance(module, nn.Tanh) else None
        )

    return _before_and_after(wrap, register)


@program
def global_parameter_registration_hook(wrap):
    handle = nn_module.register_module_parameter_registration_hook(
        lambda module, name, p: nn.Parameter(p * 2) if name == "bias" else None
    )
    model = nn.Linear(3, 3)
    handle.remove()
    return training(model, wrap(model), randn(2, 3))


@program
def state_dict_hook(wrap):
    model, seen = _network(), []
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append(len(state)))
    m = wrap(model)
    out = m(randn(3, 4))
    keys = list(model.state_dict())
    return [out, keys, seen]


@program
def state_dict_pre_hook_runs_forward(wrap):
    model = _network()
    m = wrap(model)
    model.register_state_dict_pre_hook(lambda module, prefix, keep: m(torch.zeros(1, 4)))
    return [dict(model.state_dict()), m(randn(3, 4))]


@program
def load_state_dict_hooks(wrap):
    model, seen = _network(), []
    other = _network().state_dict()
    model.register_load_state_dict_pre_hook(lambda *args: seen.append("before"))
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append("after"))
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    model.load_state_dict(other)
    return [first, training(model, m, randn(3, 4)), seen]


@program
def hook_on_submodule_called_twice(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x))

    model, seen = Model(), []
    model.fc.register_forward_hook(lambda module, args, out: seen.append(out))
    return [training(model, wrap(model), randn(2, 3)), seen]


@program
def hook_uses_other_submodule(wrap):
    model, extra = _network(), nn.Linear(4, 4)
    model.extra = extra
    model[0].register_forward_hook(lambda module, args, out: out + extra(args[0]))
    del model._modules["extra"]
    return [training(model, wrap(model), randn(3, 4)), extra.weight.grad]


@program
def hook_holds_gradient_scale_by_depth(wrap):
    model = _network()
    for depth, layer in enumerate(model):
        layer.register_full_backward_hook(lambda module, gi, go, d=depth: (gi[0] * (d + 1),))
    return training(model, wrap(model), randn(3, 4))


@program
def hook_added_by_forward_itself(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.seen = nn.Linear(3, 3), []

        def forward(self, x):
            handle = self.fc.register_forward_hook(lambda mod, args, out: out * 2)
            out = self.fc(x)
            handle.remove()
            return out + self.fc(x)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(2, 3)), training(model, m, randn(2, 3))]


@program
def hook_prints_shapes_of_every_layer(wrap):
    model, lines = _network(), []
    for layer in model:
        layer.register_forward_hook(lambda mod, a, o: lines.append(f"{mod} {tuple(o.shape)}"))
    m = wrap(model)
    m(randn(3, 4))
    m(randn(5, 4))
    return lines
