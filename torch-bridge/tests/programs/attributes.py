"""Programs in which attributes of a module change: tensors, numbers, flags, lists, modes."""

import torch
from torch import nn

from .facts import aliases, gradients, observe, raises, randn, step, training
from .registry import program


class Scaled(nn.Module):
    """A linear layer times an attribute."""

    def __init__(self, scale):
        super().__init__()
        self.fc, self.scale = nn.Linear(3, 3), scale

    def forward(self, x):
        return self.fc(x) * self.scale


def _with_each(wrap, values):
    model = Scaled(values[0])
    m, seen = wrap(model), []
    for value in values:
        model.scale = value
        seen.append(training(model, m, randn(2, 3)))
    return seen


@program
def number_changes(wrap):
    return _with_each(wrap, [1.0, 2.0, -0.5, 0.25])


@program
def whole_number_changes(wrap):
    return _with_each(wrap, [1, 2, 3, 0])


class Counting(nn.Module):
    """A layer that counts its calls, as functions of differential equations do."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.gain = nn.Linear(3, 3), 0, 1.0

    def forward(self, x):
        self.calls += 2
        self.gain *= 0.5
        y = self.fc(x) * self.calls
        if self.calls > 12:
            y = y + 1
        return y.tanh() + self.calls // 3


@program
def counter_of_calls(wrap):
    model = Counting()
    m, seen = wrap(model), []
    for _ in range(9):
        seen += [training(model, m, randn(2, 3)), model.calls, model.gain]
    return seen


@program
def flag_changes(wrap):
    return _with_each(wrap, [True, False, True])


@program
def number_changes_type(wrap):
    return _with_each(wrap, [1, 1.0, True, 2.5])


@program
def tensor_replaced(wrap):
    return _with_each(wrap, [torch.ones(3), torch.arange(3.0), torch.zeros(1)])


@program
def tensor_becomes_number(wrap):
    return _with_each(wrap, [torch.ones(3), 2.0, torch.full((3,), 3.0)])


@program
def numpy_number_changes(wrap):
    import numpy as np

    return _with_each(wrap, [np.float32(1), np.float32(2), np.float64(3)])


@program
def attribute_changes_through_wrapper(wrap):
    model = Scaled(1.0)
    m, seen = wrap(model), []
    for value in (1.0, 3.0):
        m.scale = value
        seen.append([training(model, m, randn(2, 3)), model.scale, m.scale])
    return seen


@program
def plain_tensor_changes_in_place(wrap):
    model = Scaled(torch.ones(3))
    m, seen = wrap(model), []
    for _ in range(3):
        seen.append(training(model, m, randn(2, 3)))
        model.scale.add_(1)
    return seen


@program
def plain_tensor_learns(wrap):
    model = Scaled(randn(3))
    m, seen = wrap(model), []
    for _ in range(3):
        model.scale.grad = None
        seen.append([training(model, m, randn(2, 3)), observe(model.scale.grad)])
        with torch.no_grad():
            model.scale -= 0.1 * model.scale.grad
    return seen


@program
def plain_tensor_starts_to_learn(wrap):
    model = Scaled(torch.ones(3))
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.scale.requires_grad_()
    return [first, training(model, m, randn(2, 3)), model.scale.grad]


@program
def plain_tensor_with_history(wrap):
    base = randn(3)
    model = Scaled(base * 2)
    return [training(model, wrap(model), randn(2, 3)), base.grad]


@program
def list_of_plain_tensors_learns(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = [randn(3), randn(3)]

        def forward(self, x):
            for weight in self.weights:
                x = x * weight
            return x

    model = Model()
    m = wrap(model)
    first = [step(m, randn(2, 3)), [w.grad.clone() for w in model.weights]]
    model.weights.append(randn(3))
    return [first, step(m, randn(2, 3)), [w.grad for w in model.weights]]


@program
def dictionary_of_tensors_changes(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = {"a": torch.ones(3)}

        def forward(self, x, key):
            return x * self.table[key]

    model = Model()
    m = wrap(model)
    first = step(m, randn(3), "a")
    model.table["b"] = torch.full((3,), 2.0)
    second = step(m, randn(3), "b")
    model.table["a"] = torch.full((3,), 5.0)
    return [first, second, step(m, randn(3), "a")]


@program
def list_attribute_grows(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = [1.0]

        def forward(self, x):
            for scale in self.scales:
                x = x * scale + 1
            return x

    model = Model()
    m, seen = wrap(model), []
    for scale in (2.0, 3.0, 4.0):
        seen.append(step(m, randn(3)))
        model.scales.append(scale)
    model.scales[0] = 9.0
    return [seen, step(m, randn(3))]


@program
def counter_in_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_calls = 0

        def forward(self, x):
            self.n_calls += 1
            return x * self.n_calls

    model = Model()
    m = wrap(model)
    return [[step(m, randn(3)) for _ in range(4)], model.n_calls]


@program
def warmup_schedule_by_counter(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_calls, self.fc = 0, nn.Linear(3, 3)

        def forward(self, x):
            self.n_calls += 1
            return self.fc(x) * min(1.0, self.n_calls / 3) if self.training else self.fc(x)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(2, 3)) for _ in range(5)]


@program
def tensor_attribute_set_in_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            self.inner = self.fc(x)
            return self.inner.relu()

    model = Model()
    m = wrap(model)
    seen = []
    for _ in range(2):
        result = step(m, randn(2, 3))
        seen.append([result, observe(model.inner)])
    return seen


@program
def hidden_state_detached(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.h = nn.Linear(3, 3), torch.zeros(2, 3)

        def forward(self, x):
            h = torch.tanh(self.fc(x) + self.h)
            self.h = h.detach()
            return h

    model = Model()
    m = wrap(model)
    return [[training(model, m, randn(2, 3)) for _ in range(3)], model.h]


@program
def hidden_state_with_history(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.h = nn.Linear(3, 3), None

        def forward(self, x):
            self.h = torch.tanh(self.fc(x) + (0 if self.h is None else self.h))
            return self.h

    model = Model()
    m = wrap(model)
    m(randn(2, 3))
    m(randn(2, 3))
    return [training(model, m, randn(2, 3)), model.h]


@program
def loss_kept_on_module(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            y = self.fc(x)
            self.penalty = y.pow(2).mean()
            return y

    model = Model()
    m = wrap(model)
    out = m(randn(2, 3))
    (out.sum() + 10 * model.penalty).backward()
    return [out, model.penalty, gradients(model)]


@program
def submodule_keeps_attention_map(wrap):
    class Attention(nn.Module):
        def forward(self, x):
            self.map = (x @ x.mT).softmax(-1)
            return self.map @ x

    model = nn.Sequential(nn.Linear(4, 4), Attention())
    m, x = wrap(model), randn(1, 3, 4)
    result = step(m, x)
    return [result, model[1].map]


@program
def train_and_eval(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    m, seen = wrap(model), []
    for mode in (True, False, True, False):
        model.train(mode)
        seen.append([training(model, m, randn(5, 4)), observe(list(model.buffers()))])
    return seen


@program
def train_and_eval_through_wrapper(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    m, seen = wrap(model), []
    for mode in (True, False):
        m.train(mode)
        seen.append([training(model, m, randn(5, 4)), model.training, model[1].training])
    return seen


@program
def one_submodule_in_eval(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    m = wrap(model)
    seen = [training(model, m, randn(5, 4))]
    model[1].eval()
    seen.append(training(model, m, randn(5, 4)))
    model[1].train()
    model[3].eval()
    return [seen, training(model, m, randn(5, 4)), list(model.buffers())]


@program
def branch_on_training(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return (self.fc(x), x.mean()) if self.training else self.fc(x)

    model = Model()
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model.eval()
    return [first, training(model, m, randn(2, 3))]


@program
def training_flag_set_by_hand(wrap):
    model = nn.Sequential(nn.BatchNorm1d(3))
    m = wrap(model)
    first = step(m, randn(4, 3))
    model[0].training = False
    return [first, step(m, randn(4, 3)), list(model.buffers())]


@program
def dropout_probability_changes(wrap):
    model = nn.Sequential(nn.Dropout(0.0))
    m, x = wrap(model), torch.ones(2000)
    seen = []
    for p in (0.0, 0.5, 1.0, 0.1):
        model[0].p = p
        share = (m(x) == 0).float().mean().item()
        seen.append(abs(share - p) < 0.05)
    return [seen, m(x).max() > 1]


@program
def epsilon_of_norm_changes(wrap):
    model = nn.Sequential(nn.LayerNorm(4))
    m, seen = wrap(model), []
    for eps in (1e-5, 1.0, 10.0):
        model[0].eps = eps
        seen.append(training(model, m, randn(3, 4)))
    return seen


@program
def momentum_of_norm_changes(wrap):
    model = nn.Sequential(nn.BatchNorm1d(3))
    m, seen = wrap(model), []
    for momentum in (0.1, 0.9, None):
        model[0].momentum = momentum
        seen.append([step(m, randn(4, 3)), observe(list(model.buffers()))])
    return seen


@program
def stride_of_convolution_changes(wrap):
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))
    m, seen = wrap(model), []
    for stride in ((1, 1), (2, 2), (1, 2)):
        model[0].stride = stride
        seen.append(training(model, m, randn(1, 1, 5, 5)))
    return seen


@program
def attribute_deleted(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.extra = 1.0

        def forward(self, x):
            return x + self.extra if hasattr(self, "extra") else x * 5

    model = Model()
    m = wrap(model)
    first = step(m, randn(3))
    del model.extra
    return [first, step(m, randn(3))]


@program
def flag_of_grandchild_changes(wrap):
    class Leaf(nn.Module):
        double = False

        def forward(self, x):
            return x * 2 if self.double else x

    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), Leaf()), Leaf())
    m = wrap(model)
    first = training(model, m, randn(2, 3))
    model[0][1].double = True
    return [first, training(model, m, randn(2, 3))]


@program
def attribute_of_plain_object_changes(wrap):
    class Schedule:
        def __init__(self):
            self.temperature = 1.0

        def __call__(self, x):
            return x / self.temperature

    model = Scaled(1.0)
    model.schedule = Schedule()
    m, seen = wrap(lambda x: model.schedule(model(x)).softmax(-1)), []
    for temperature in (1.0, 0.5, 4.0):
        model.schedule.temperature = temperature
        seen.append(training(model, m, randn(2, 3)))
    return seen


@program
def same_output_kept_by_module(wrap):
    class Model(nn.Module):
        def forward(self, x):
            self.last = x * 2
            return self.last

    model = Model()
    out = wrap(model)(randn(3))
    shared = aliases(out=out, last=model.last)
    with torch.no_grad():
        out.add_(1)
    return [shared, out, model.last]


class _Doubled:
    """A descriptor that gives twice what was written, plus one."""

    def __get__(self, owner, kind=None):
        return owner.__dict__["written"] * 2 + 1

    def __set__(self, owner, value):
        owner.__dict__["written"] = value * 3


class _Settings:
    doubled = _Doubled()

    def __init__(self, factor):
        self.factor, self.doubled = factor, 1.0

    @property
    def half(self):
        return self.factor / 2

    @classmethod
    def shift(cls, x):
        return x + 1

    def scaled(self, x):
        return x * self.factor


@program
def properties_descriptors_and_class_methods(wrap):
    settings = _Settings(3.0)

    def forward(x):
        settings.doubled = settings.half
        return type(settings).shift(x) * settings.doubled + settings.__class__.shift(x)

    m = wrap(forward)
    return [step(m, randn(3)), step(m, randn(3)), settings.doubled]


@program
def method_of_another_object_replaced(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.run = _Settings(2.0).scaled

        def forward(self, x):
            return self.run(x)

    model = Model()
    m, seen = wrap(model), []
    for run in (model.run, _Settings(5.0).scaled, _Settings.shift, lambda x: x - 1):
        model.run = run
        seen.append(step(m, randn(3)))
    return seen


@program
def property_without_a_setter_written(wrap):
    class Model(nn.Module):
        @property
        def factor(self):
            return 2.0

        def forward(self, x):
            self.factor = 3.0
            return x * self.factor

    return raises(step, wrap(Model()), randn(3))
