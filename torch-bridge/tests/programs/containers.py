"""Programs whose modules hold lists and dictionaries of layers that change between calls."""

import collections

import torch
from torch import nn

from .facts import gradients, observe, randn, step, training
from .registry import program


@program
def module_list_grows(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    model = Model()
    m = wrap(model)
    seen = [training(model, m, randn(2, 3))]
    model.layers.append(nn.Linear(3, 3))
    seen.append(training(model, m, randn(2, 3)))
    model.layers[0] = nn.Identity()
    seen.append(training(model, m, randn(2, 3)))
    del model.layers[1]
    return [*seen, training(model, m, randn(2, 3))]


@program
def module_list_reordered(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.layers = nn.ModuleList(reversed(list(model.layers)))
    return [first, training(model, m, randn(2, 3))]


@program
def module_list_index_is_an_argument(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

        def forward(self, x, k):
            return self.heads[k](x)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(2, 3), k) for k in (0, 1, -1)]


@program
def module_dict_by_key(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.acts = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh()})
            self.fc = nn.Linear(3, 3)

        def forward(self, x, key):
            return self.acts[key](self.fc(x))

    model = Model()
    m = wrap(model)
    seen = [training(model, m, randn(2, 3), key) for key in ("relu", "tanh", "relu")]
    model.acts["tanh"] = nn.Sigmoid()
    return [*seen, training(model, m, randn(2, 3), "tanh")]


@program
def module_dict_iterated(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})

        def forward(self, x):
            return {name: part(x) for name, part in self.parts.items()}

    model = Model()
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.parts["c"] = nn.Linear(3, 1)
    second = training(model, m, randn(2, 3))
    model.parts.pop("a")
    return [first, second, training(model, m, randn(2, 3))]


@program
def parameter_list(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.randn(3), torch.randn(3)])

        def forward(self, x):
            for scale in self.scales:
                x = x * scale
            return x

    model = Model()
    m = wrap(model)
    first = training(model, m, randn(3))
    model.scales.append(nn.Parameter(torch.randn(3)))
    return [first, training(model, m, randn(3))]


@program
def parameter_dict(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ParameterDict({"en": torch.randn(3), "de": torch.randn(3)})

        def forward(self, x, language):
            return x * self.tables[language]

    model = Model()
    m = wrap(model)
    seen = [training(model, m, randn(3), key) for key in ("en", "de")]
    model.tables["fr"] = nn.Parameter(torch.randn(3))
    return [*seen, training(model, m, randn(3), "fr")]


@program
def sequential_slice(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

        def forward(self, x, n):
            return self.body[:n](x)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(2, 3), n) for n in (1, 3, 4)]


@program
def sequential_extended(wrap):
    model = nn.Sequential(nn.Linear(3, 3))
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.append(nn.Tanh())
    model.insert(0, nn.Linear(3, 3))
    return [first, training(model, m, randn(2, 3))]


@program
def named_sequential(wrap):
    model = nn.Sequential(collections.OrderedDict(a=nn.Linear(3, 3), b=nn.ReLU()))
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.b = nn.Tanh()
    return [first, training(model, m, randn(2, 3))]


@program
def submodule_replaced(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model[2] = nn.Linear(3, 5)
    return [first, training(model, m, randn(2, 3))]


@program
def submodule_of_same_class_replaced(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    m, old = wrap(model), model[0]
    first = training(model, m, randn(2, 3))
    model[0] = nn.Linear(3, 3)
    return [first, training(model, m, randn(2, 3)), observe(old.weight.grad)]


@program
def submodule_wrapped_by_adapter(wrap):
    class Adapter(nn.Module):
        """As LoRA does: the old layer frozen, a small one beside it."""

        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    m = wrap(model)
    first = training(model, m, randn(2, 4))
    model[2] = Adapter(model[2])
    return [first, training(model, m, randn(2, 4))]


@program
def layers_in_a_plain_list(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(3, 3), nn.Linear(3, 3)]

        def forward(self, x):
            for layer in self.hidden:
                x = layer(x)
            return x

    model = Model()
    m = wrap(model)
    first = step(m, randn(2, 3))
    grads = [gradients(layer) for layer in model.hidden]
    model.hidden[0].requires_grad_(False)
    return [first, grads, step(m, randn(2, 3)), [gradients(layer) for layer in model.hidden]]


@program
def layer_held_by_closure(wrap):
    layer = nn.Linear(3, 3)
    m = wrap(lambda x: layer(x).relu())
    first = step(m, randn(2, 3))
    layer.weight.data.mul_(2)
    return [first, step(m, randn(2, 3)), gradients(layer)]


@program
def two_wraps_of_one_model(wrap):
    model = nn.Linear(3, 3)
    a, b = wrap(model), wrap(model)
    first = training(model, a, randn(2, 3))
    with torch.no_grad():
        model.weight.mul_(3)
    return [first, training(model, b, randn(2, 3)), training(model, a, randn(2, 3))]


@program
def two_models_of_one_class(wrap):
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    a, b = wrap(first), wrap(second)
    return [training(first, a, randn(2, 3)), training(second, b, randn(2, 3))]


@program
def wrapped_submodule_in_eager_model(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    model[0] = wrap(model[0])
    return [training(model, model, randn(2, 3)), len(list(model.parameters()))]


@program
def wrapped_inside_wrapped(wrap):
    inner = wrap(nn.Linear(3, 3))
    model = nn.Sequential(inner, nn.Tanh())
    m = wrap(model)
    return [training(model, m, randn(2, 3)), training(model, m, randn(2, 3))]


@program
def wrapped_twice(wrap):
    model = nn.Linear(3, 3)
    m = wrap(wrap(model))
    return training(model, m, randn(2, 3))


@program
def module_called_twice_in_one_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.norm(x) * 2)

    model = Model()
    return [training(model, wrap(model), randn(4, 3)), list(model.buffers())]


@program
def siamese_calls_before_backward(wrap):
    model = nn.Linear(3, 2)
    m, a, b = wrap(model), randn(4, 3), randn(4, 3)
    loss = (m(a) - m(b)).pow(2).sum()
    loss.backward()
    return [loss, a.grad, b.grad, gradients(model)]


@program
def named_modules_seen_by_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            for name, layer in self.named_children():
                x = layer(x) * len(name)
            return x * sum(p.numel() for p in self.parameters())

    model = Model()
    m = wrap(model)
    first = step(m, randn(2, 3))
    model.third = nn.Linear(3, 3)
    return [first, step(m, randn(2, 3))]


@program
def penalty_on_own_parameters(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x).sum() + sum(p.pow(2).sum() for p in self.parameters())

    model = Model()
    return training(model, wrap(model), randn(2, 3))


@program
def class_decorated(wrap):
    class Model(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.fc = nn.Linear(3, n)

        def forward(self, x):
            return self.fc(x).relu()

    made = wrap(Model)
    seen = []
    for n in (2, 4):
        m = made(n)
        seen.append([step(m, randn(2, 3)), [observe(p.grad) for p in m.parameters()]])
    return seen


@program
def class_decorated_and_derived(wrap):
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(x)

    class Derived(Base):
        def forward(self, x):
            return super().forward(x) * 2

    made = wrap(Derived)
    return [step(made(), randn(2, 3)), step(Base(), randn(2, 3))]


@program
def attributes_of_wrapper(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.kind = nn.Linear(3, 3), "small"

        def forward(self, x):
            return self.fc(x)

        def describe(self):
            return f"{self.kind} {self.fc.in_features}"

    model = Model()
    m = wrap(model)
    out = m(randn(2, 3))
    same = [p is q for p, q in zip(m.parameters(), model.parameters(), strict=True)]
    return [out, m.kind, m.describe(), same, m.fc is model.fc, isinstance(m, nn.Module)]


@program
def other_method_than_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

        def encode(self, x):
            return self.encoder(x)

        def forward(self, x):
            return self.decoder(self.encode(x))

    model = Model()
    m, x = wrap(model), randn(3, 4)
    return [training(model, m, x), m.encode(x), model.encode(x)]
