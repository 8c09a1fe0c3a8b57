"""Programs whose wrapped module is copied, pickled, shared, compiled again or wrapped by others."""

import copy
import gc
import io
import pickle
import weakref

import torch
from torch import nn

from .facts import aliases, gradients, observe, raises, randn, step, training
from .registry import program


class Net(nn.Module):
    """At module level, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.fc(x)).relu()


def _through_bytes(model):
    return pickle.loads(pickle.dumps(model))


@program
def deep_copy_of_model_after_call(wrap):
    model = Net()
    m = wrap(model)
    m(randn(4, 3))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.fc.weight.mul_(2)
    other = wrap(twin)
    return [
        training(model, m, randn(4, 3)),
        training(twin, other, randn(4, 3)),
        list(twin.buffers()),
    ]


@program
def deep_copy_of_wrapped(wrap):
    m = wrap(Net())
    m(randn(4, 3))
    twin = copy.deepcopy(m)
    with torch.no_grad():
        next(iter(twin.parameters())).mul_(2)
    return [step(m, randn(4, 3)), step(twin, randn(4, 3)), [p.grad for p in twin.parameters()]]


@program
def shallow_copy_of_model(wrap):
    model = Net()
    m = wrap(model)
    m(randn(4, 3))
    twin = copy.copy(model)
    return [step(wrap(twin), randn(4, 3)), twin.fc.weight is model.fc.weight, step(m, randn(4, 3))]


@program
def pickled_model_after_call(wrap):
    model = Net()
    m = wrap(model)
    first = training(model, m, randn(4, 3))
    twin = _through_bytes(model)
    return [first, training(twin, wrap(twin), randn(4, 3)), list(twin.state_dict())]


@program
def pickled_wrapped(wrap):
    m = wrap(Net())
    m(randn(4, 3))
    twin = _through_bytes(m)
    return [step(twin, randn(4, 3)), step(m, randn(4, 3))]


@program
def saved_and_loaded_file(wrap):
    model = Net()
    m, file = wrap(model), io.BytesIO()
    m(randn(4, 3))
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Net()
    other.load_state_dict(torch.load(file, weights_only=True))
    return [training(other, wrap(other), randn(4, 3)), list(model.state_dict())]


@program
def state_dict_of_model_is_live(wrap):
    model = Net()
    m, held = wrap(model), model.state_dict()
    m(randn(4, 3))
    return [aliases(held=held["fc.weight"], own=model.fc.weight), held, held["norm.running_mean"]]


@program
def memory_shared_with_other_processes(wrap):
    model = Net()
    model.share_memory()
    m = wrap(model)
    return [training(model, m, randn(4, 3)), model.fc.weight.is_shared()]


@program
def model_moved_to_shared_memory_after_call(wrap):
    model = Net()
    m = wrap(model)
    first = training(model, m, randn(4, 3))
    model.share_memory()
    return [first, training(model, m, randn(4, 3)), model.fc.weight.is_shared()]


@program
def compiled_around_wrapped(wrap):
    model = nn.Linear(3, 3)
    m = torch.compile(wrap(model), backend="eager")
    return [training(model, m, randn(2, 3)), training(model, m, randn(4, 3))]


@program
def wrapped_around_compiled(wrap):
    model = nn.Linear(3, 3)
    m = wrap(torch.compile(model, backend="eager"))
    return [training(model, m, randn(2, 3)), training(model, m, randn(4, 3))]


@program
def wrapped_module_called_in_compiled_function(wrap):
    model = nn.Linear(3, 3)
    m = wrap(model)
    run = torch.compile(lambda x: m(x * 2) + 1, backend="eager")
    return [training(model, run, randn(2, 3)), training(model, run, randn(2, 3))]


@program
def data_parallel_on_one_machine(wrap):
    model = nn.Linear(3, 3)
    m = nn.DataParallel(wrap(model))
    return raises(training, model, m, randn(4, 3))


@program
def fused_by_hand(wrap):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    m, x = wrap(model), torch.randn(1, 1, 5, 5)
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(model[0], model[1])
    return [m(x), wrap(fused)(x)]


@program
def wrapper_and_model_are_freed(wrap):
    model = Net()
    m = wrap(model)
    seen = step(m, randn(4, 3))
    gone = weakref.ref(model.fc.weight)
    del m, model
    torch._dynamo.reset()
    gc.collect()
    return [seen, gone() is None]


@program
def input_is_freed_after_backward(wrap):
    m, x = wrap(nn.Linear(3, 3)), randn(2, 3)
    gone = weakref.ref(x)
    out = m(x)
    out.sum().backward()
    del x
    gc.collect()
    return [out, gone() is None]


@program
def output_keeps_working_after_model_is_gone(wrap):
    model = Net()
    weight = model.fc.weight
    x = randn(4, 3)
    out = wrap(model)(x)
    del model
    gc.collect()
    out.sum().backward()
    return [out, x.grad, weight.grad]


@program
def many_small_models(wrap):
    seen = []
    for k in range(12):
        model = nn.Linear(2, k % 3 + 1)
        seen.append(training(model, wrap(model), randn(3, 2)))
    return seen


@program
def more_shapes_than_any_limit(wrap):
    m = wrap(lambda x, k: x.reshape(k, -1).sum(0) * 2)
    return [step(m, randn(2 * k), k) for k in range(1, 13)]


@program
def model_called_by_its_forward_method(wrap):
    model = Net()
    m = wrap(model)
    return [m.forward(torch.ones(4, 3)), m(torch.ones(4, 3)), list(model.buffers())]


@program
def own_call_method(wrap):
    class Model(nn.Module):
        def __call__(self, x):
            return super().__call__(x * 2)

        def forward(self, x):
            return x + 1

    return step(wrap(Model()), randn(3))


@program
def forward_with_own_wrapper(wrap):
    import functools

    def doubled(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            return function(*args, **kwargs) * 2

        return run

    class Model(nn.Module):
        @doubled
        def forward(self, x):
            return x.sin()

    return step(wrap(Model()), randn(3))


@program
def abstract_base_and_mixins(wrap):
    class Scale:
        def scaled(self, x):
            return x * self.factor

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 2.0

        def forward(self, x):
            return self.body(x) + 1

    class Model(Scale, Base):
        def body(self, x):
            return self.scaled(x)

    return step(wrap(Model()), randn(3))


@program
def gradients_of_shared_backbone(wrap):
    backbone = nn.Linear(3, 3)
    first, second = nn.Sequential(backbone, nn.ReLU()), nn.Sequential(backbone, nn.Tanh())
    a, b = wrap(first), wrap(second)
    (a(randn(2, 3)).sum() + b(randn(2, 3)).sum()).backward()
    return gradients(backbone)


@program
def output_of_one_is_input_of_another(wrap):
    a, b = nn.Linear(3, 4), nn.Linear(4, 2)
    f, g, x = wrap(a), wrap(b), randn(2, 3)
    g(f(x).relu()).sum().backward()
    return [x.grad, gradients(a), gradients(b)]


@program
def printed_form(wrap):
    model = Net()
    out = wrap(model)(randn(4, 3))
    return [out, repr(model), [name for name, _ in model.named_modules()], observe(model.training)]


@program
def class_with_a_call_of_its_own(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def __call__(self, x):
            return self.layer(x).relu()

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 3)) for n in (2, 4)]


@program
def class_with_a_call_around_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.n_calls = nn.Linear(3, 2), 0

        def __call__(self, x):
            self.n_calls += 1
            return super().__call__(x * 2) + 1

        def forward(self, x):
            return self.layer(x).relu()

    model = Model()
    m = wrap(model)
    return [[training(model, m, randn(n, 3)) for n in (2, 4)], m.n_calls]
