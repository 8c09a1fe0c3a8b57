"""Programs in which parameters and buffers are tied, replaced, frozen, moved or reparametrized."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from .facts import aliases, gradients, observe, raises, randn, step, training
from .registry import program


class ThreeLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        return self.a(x) + 10 * self.b(x) + 100 * self.c(x)


@program
def tied_weights(wrap):
    model = ThreeLayers()
    model.b.weight = model.a.weight
    return training(model, wrap(model), randn(3, 4))


@program
def tied_pair_changes(wrap):
    model = ThreeLayers()
    model.b.weight = model.a.weight
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    model.a.weight = nn.Parameter(torch.randn(4, 4))
    model.c.weight = model.b.weight
    return [first, training(model, m, randn(3, 4))]


@program
def weights_tied_after_first_call(wrap):
    model = ThreeLayers()
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    model.c.weight = model.a.weight
    return [first, training(model, m, randn(3, 4))]


@program
def weights_untied_after_first_call(wrap):
    model = ThreeLayers()
    model.c.weight = model.a.weight
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    model.c.weight = nn.Parameter(torch.randn(4, 4))
    return [first, training(model, m, randn(3, 4))]


@program
def weights_that_share_memory(wrap):
    model = ThreeLayers()
    model.b.weight = nn.Parameter(model.a.weight.detach().t())
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    with torch.no_grad():
        model.a.weight.add_(1)
    return [first, training(model, m, randn(3, 4)), aliases(a=model.a.weight, b=model.b.weight)]


@program
def embedding_tied_to_head(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model = Model()
    return training(model, wrap(model), torch.tensor([[1, 2, 2], [0, 6, 1]]))


@program
def module_shared_twice(wrap):
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    model[2] = nn.Linear(4, 4)
    return [first, training(model, m, randn(3, 4))]


@program
def parameter_replaced(wrap):
    model = nn.Linear(4, 4)
    m = wrap(model)
    seen = [training(model, m, randn(3, 4))]
    model.weight = nn.Parameter(torch.randn(4, 4))
    seen.append(training(model, m, randn(3, 4)))
    model.weight = nn.Parameter(torch.randn(6, 4))
    model.bias = None
    return [*seen, training(model, m, randn(3, 4))]


@program
def parameter_data_replaced(wrap):
    model = nn.Linear(4, 4)
    m = wrap(model)
    first = training(model, m, randn(3, 4))
    model.weight.data = torch.randn(4, 4)
    second = training(model, m, randn(3, 4))
    model.weight.data = torch.randn(4, 4).t()
    return [first, second, training(model, m, randn(3, 4))]


@program
def parameter_written_by_caller(wrap):
    model = nn.Linear(4, 4)
    m, seen = wrap(model), []
    for _ in range(3):
        seen.append(training(model, m, randn(3, 4)))
        with torch.no_grad():
            model.weight.copy_(torch.randn(4, 4))
            model.bias.zero_()
    return seen


@program
def parameter_frozen_and_thawed(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    m, seen = wrap(model), []
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        seen.append(training(model, m, randn(3, 4, grad=False)))
    return seen


@program
def all_parameters_frozen(wrap):
    model = nn.Linear(4, 4).requires_grad_(False)
    m = wrap(model)
    return [training(model, m, randn(3, 4, grad=False)), training(model, m, randn(3, 4))]


@program
def gradual_unfreezing(wrap):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    m, seen = wrap(model.requires_grad_(False)), []
    for layer in reversed(model):
        layer.requires_grad_()
        seen.append(training(model, m, torch.randn(2, 3)))
    return seen


@program
def input_starts_to_need_a_gradient(wrap):
    model = nn.Linear(4, 4)
    m = wrap(model)
    return [training(model, m, randn(3, 4, grad=g)) for g in (False, True, False)]


@program
def parameter_becomes_none(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x if self.scale is None else x * self.scale

    model = Model()
    m = wrap(model)
    first = training(model, m, randn(3))
    model.scale = None
    return [first, training(model, m, randn(3))]


@program
def unused_parameter(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    model = Model()
    return training(model, wrap(model), randn(2, 3))


@program
def parameter_used_by_turns(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, first):
            return self.a(x) if first else self.b(x)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(2, 3), first) for first in (True, False, True)]


@program
def parameter_detached_in_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * self.w.detach() + self.w.data

    model = Model()
    return training(model, wrap(model), randn(3))


@program
def parameter_returned(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * self.w, self.w

    model = Model()
    out, w = wrap(model)(randn(3))
    return [out, w, w is model.w, aliases(w=w, own=model.w)]


@program
def input_that_once_was_a_parameter(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return self.w * 2 - x * x

    model = Model()
    m = wrap(model)
    first = training(model, m, model.w)
    return [first, training(model, m, randn(3))]


@program
def buffer_replaced(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            return x - self.mean

    model = Model()
    m, seen = wrap(model), []
    for k in range(3):
        model.mean = torch.full((3,), float(k))
        seen.append(step(m, randn(3)))
    return seen


@program
def buffer_written_in_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(3), persistent=False)

        def forward(self, x):
            self.count += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    model = Model()
    m, held = wrap(model), model.mean
    seen = [step(m, randn(4, 3)) for _ in range(3)]
    return [seen, model.count, model.mean, held is model.mean, list(model.state_dict())]


@program
def buffer_replaced_by_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            return x - self.mean

    model = Model()
    m = wrap(model)
    seen = [step(m, randn(4, 3)) for _ in range(3)]
    return [seen, model.mean, list(model.state_dict())]


@program
def buffer_that_requires_gradient(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", randn(3))

        def forward(self, x):
            return x * self.scale

    model = Model()
    return [step(wrap(model), randn(3)), model.scale.grad]


@program
def buffer_returned(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(6.0))

        def forward(self, n):
            return self.table[:n]

    model = Model()
    m = wrap(model)
    out = m(3)
    shared = aliases(out=out, table=model.table)
    out.add_(10)
    return [shared, out, model.table, m(4)]


@program
def buffer_registered_in_forward(wrap):
    class Model(nn.Module):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.register_buffer("scale", x.detach().abs().max())
            return x / self.scale

    model = Model()
    m = wrap(model)
    return [step(m, randn(3)), step(m, randn(3)), model.scale, list(model.state_dict())]


@program
def state_dict_loaded(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    m = wrap(model)
    held = copy.deepcopy(model.state_dict())
    seen = [training(model, m, randn(4, 3)), training(model, m, randn(4, 3))]
    model.load_state_dict(held)
    return [*seen, training(model, m, randn(4, 3)), dict(model.state_dict())]


@program
def state_dict_assigned(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    m = wrap(model)
    first = training(model, m, randn(4, 3))
    model.load_state_dict(other.state_dict(), assign=True)
    second = training(model, m, randn(4, 3))
    shared = aliases(a=model[0].weight, b=other[0].weight)
    return [first, second, shared, list(model.buffers())]


@program
def moved_to_double(wrap):
    model = nn.Linear(3, 3)
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.double()
    return [first, training(model, m, randn(2, 3, dtype=torch.float64))]


@program
def flattened_parameter_vector(wrap):
    model = nn.Linear(3, 3)
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    vector = torch.arange(12.0)
    nn.utils.vector_to_parameters(vector, model.parameters())
    second = training(model, m, randn(2, 3))
    vector.add_(1)
    return [first, second, training(model, m, randn(2, 3))]


@program
def parametrization(wrap):
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).mT

    model = nn.Sequential(nn.Linear(3, 3))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    m = wrap(model)
    return [training(model, m, randn(2, 3)), training(model, m, randn(2, 3)), model[0].weight]


@program
def parametrization_added_and_removed(wrap):
    class Doubled(nn.Module):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(nn.Linear(3, 3))
    m = wrap(model)
    seen = [training(model, m, randn(2, 3))]
    parametrize.register_parametrization(model[0], "weight", Doubled())
    seen.append(training(model, m, randn(2, 3)))
    parametrize.remove_parametrizations(model[0], "weight")
    return [*seen, training(model, m, randn(2, 3))]


@program
def parametrization_cached(wrap):
    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return x * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x))

    model = Model()
    parametrize.register_parametrization(model.fc, "weight", Counted())
    m = wrap(model)
    seen = []
    for _ in range(2):
        Counted.calls = 0
        with parametrize.cached():
            seen.append([training(model, m, randn(2, 3)), Counted.calls])
    return seen


@program
def pruned_by_mask(wrap):
    model = nn.Sequential(nn.Linear(4, 4))
    m = wrap(model)
    seen = [training(model, m, randn(2, 4))]
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    seen.append(training(model, m, randn(2, 4)))
    prune.remove(model[0], "weight")
    return [*seen, training(model, m, randn(2, 4))]


@program
def mask_of_pruning_changes(wrap):
    model = nn.Sequential(nn.Linear(4, 4))
    prune.random_unstructured(model[0], "weight", amount=0.5)
    m = wrap(model)
    first = training(model, m, randn(2, 4))
    model[0].weight_mask.fill_(1)
    return [first, training(model, m, randn(2, 4))]


@program
def lazy_linear(wrap):
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    m = wrap(model)
    first = step(m, randn(3, 5))
    return [first, training(model, m, randn(3, 5)), [tuple(p.shape) for p in model.parameters()]]


@program
def lazy_convolution_with_norm(wrap):
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    m = wrap(model)
    return [step(m, randn(2, 1, 5, 5)), training(model, m, randn(2, 1, 5, 5)), repr(model)]


@program
def lazy_layer_meets_wrong_size(wrap):
    model = nn.LazyLinear(2)
    m = wrap(model)
    first = step(m, randn(3, 5))
    return [first, raises(m, randn(3, 4))]


@program
def uninitialized_weight_is_copied(wrap):
    model = nn.LazyLinear(2)
    twin = copy.deepcopy(model)
    first = step(wrap(twin), randn(3, 5))
    return [first, type(model).__name__, type(twin).__name__]


@program
def gradient_of_zero_sized_parameter(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty, self.w = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.randn(2, 3))

        def forward(self, x):
            return torch.cat([self.empty, self.w]) @ x

    model = Model()
    return training(model, wrap(model), randn(3))


@program
def zero_rows_of_tokens_that_learn(wrap):
    """As vision transformers have without a class token or registers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.layer = nn.Parameter(torch.randn(0, 4)), nn.Linear(4, 4)

        def forward(self, x):
            tokens = self.tokens.expand(len(x), -1, -1)
            return self.layer(torch.cat((tokens, x), 1)).relu()

    model = Model()
    return training(model, wrap(model), randn(2, 3, 4))


@program
def storage_of_weight_freed_and_given_back(wrap):
    """As sharded training does between uses."""
    model = nn.Linear(3, 3)
    m, held = wrap(model), model.weight.detach().clone()
    first = training(model, m, randn(2, 3))
    storage = model.weight.untyped_storage()
    storage.resize_(0)
    freed = raises(m, torch.ones(2, 3))
    storage.resize_(36)
    with torch.no_grad():
        model.weight.copy_(held)
    return [first, freed, training(model, m, randn(2, 3))]


@program
def storage_of_weight_freed_before_the_backward_pass(wrap):
    model = nn.Linear(3, 3)
    y = wrap(model)(randn(2, 3))
    model.weight.untyped_storage().resize_(0)
    return raises(y.sum().backward)


@program
def zero_gradients_in_place_or_none(wrap):
    model = nn.Linear(3, 3)
    m, seen = wrap(model), []
    for to_none in (True, False, True):
        model.zero_grad(set_to_none=to_none)
        seen.append([step(m, randn(2, 3)), gradients(model)])
    return [seen, observe(model.weight.grad)]
