"""Programs whose forward reads or writes Python state: globals, closures, settings, time."""

import collections
import contextlib
import dataclasses
import enum
import functools
import io
import itertools
import os
import types
import warnings

import torch
from torch import nn

from .facts import observe, raises, randn, step, training
from .registry import program

FACTOR = 1.0
TABLE = {"scale": 1.0, "layers": [1, 2]}
OFFSET = torch.zeros(3)
calls = 0


@contextlib.contextmanager
def _global(**values):
    before = {name: globals()[name] for name in values}
    globals().update(values)
    try:
        yield
    finally:
        globals().update(before)


@program
def global_number_changes(wrap):
    m, seen = wrap(lambda x: x * FACTOR), []
    for value in (1.0, 2.0, -3.0):
        with _global(FACTOR=value):
            seen.append(step(m, randn(3)))
    return seen


@program
def global_dictionary_changes(wrap):
    m, seen = wrap(lambda x: x * TABLE["scale"] + len(TABLE["layers"])), []
    for value in (1.0, 4.0):
        with _global(TABLE={"scale": value, "layers": [0] * int(value)}):
            seen.append(step(m, randn(3)))
    return seen


@program
def global_dictionary_changes_in_place(wrap):
    table = {"scale": 1.0}
    with _global(TABLE=table):
        m, seen = wrap(lambda x: x * TABLE["scale"]), []
        for value in (1.0, 4.0, 2.0):
            table["scale"] = value
            seen.append(step(m, randn(3)))
    return seen


@program
def global_tensor_changes(wrap):
    m, seen = wrap(lambda x: x + OFFSET), []
    for k in range(3):
        with _global(OFFSET=torch.full((3,), float(k))):
            seen.append(step(m, randn(3)))
    return seen


@program
def global_tensor_learns(wrap):
    weight = randn(3)
    with _global(OFFSET=weight):
        m = wrap(lambda x: x * OFFSET)
        first = step(m, randn(3))
        with torch.no_grad():
            weight -= weight.grad
        return [first, step(m, randn(3)), weight, weight.grad]


@program
def global_counter(wrap):
    def forward(x):
        global calls
        calls += 1
        return x * calls

    with _global(calls=0):
        m = wrap(forward)
        return [[step(m, randn(3)) for _ in range(4)], calls]


@program
def closure_number_changes(wrap):
    factor = 1.0

    def forward(x):
        return x * factor

    m, seen = wrap(forward), []
    for factor in (1.0, 2.0, 5.0):  # noqa: B007
        seen.append(step(m, randn(3)))
    return seen


@program
def closure_counter(wrap):
    count = 0

    def forward(x):
        nonlocal count
        count += 1
        return x + count

    m = wrap(forward)
    return [[step(m, randn(3)) for _ in range(3)], count]


@program
def closure_list_grows(wrap):
    seen = []

    def forward(x):
        seen.append(x.shape[0])
        return x * len(seen)

    m = wrap(forward)
    return [[step(m, randn(n)) for n in (2, 3, 4)], seen]


@program
def closure_list_of_outputs(wrap):
    seen = []

    def forward(x):
        y = x * 2
        seen.append(y)
        return y + 1

    m = wrap(forward)
    m(randn(2))
    out = m(randn(2))
    return [out, seen, seen[1].grad_fn is None]


@program
def closure_tensor_changes_in_place(wrap):
    scale = torch.ones(3)
    m, seen = wrap(lambda x: x * scale), []
    for _ in range(3):
        seen.append(step(m, randn(3)))
        scale.mul_(2)
    return seen


@program
def closure_function_changes(wrap):
    box = {"activation": torch.relu}
    m, seen = wrap(lambda x: box["activation"](x)), []
    for activation in (torch.relu, torch.tanh, torch.sin):
        box["activation"] = activation
        seen.append(step(m, randn(3)))
    return seen


@program
def class_attribute_changes(wrap):
    class Model(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    model = Model()
    m, seen = wrap(model), []
    for scale in (1.0, 2.0, 3.0):
        Model.scale = scale
        seen.append(step(m, randn(3)))
    return seen


@program
def class_attribute_hidden_by_instance(wrap):
    class Model(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    model = Model()
    m = wrap(model)
    first = step(m, randn(3))
    model.scale = 7.0
    second = step(m, randn(3))
    del model.scale
    return [first, second, step(m, randn(3))]


@program
def method_replaced_on_class(wrap):
    class Model(nn.Module):
        def inner(self, x):
            return x * 2

        def forward(self, x):
            return self.inner(x)

    model = Model()
    m = wrap(model)
    first = step(m, randn(3))
    Model.inner = lambda self, x: x * 5
    return [first, step(m, randn(3))]


@program
def method_replaced_on_instance(wrap):
    class Model(nn.Module):
        def inner(self, x):
            return x * 2

        def forward(self, x):
            return self.inner(x)

    model = Model()
    m = wrap(model)
    first = step(m, randn(3))
    model.inner = lambda x: x * 5
    return [first, step(m, randn(3))]


@program
def forward_of_submodule_replaced(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    m = wrap(model)
    first = step(m, randn(2, 3))
    model[1].forward = torch.tanh
    return [first, step(m, randn(2, 3))]


@program
def property_computes(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.level = 1

        @property
        def scale(self):
            return 2.0**self.level

        def forward(self, x):
            return x * self.scale

    model = Model()
    m, seen = wrap(model), []
    for level in (1, 2, 5):
        model.level = level
        seen.append(step(m, randn(3)))
    return seen


@program
def computed_attribute(wrap):
    class Model(nn.Module):
        def __getattr__(self, name):
            if name.startswith("times_"):
                return float(name.removeprefix("times_"))
            return super().__getattr__(name)

        def forward(self, x):
            return x * self.times_3

    return step(wrap(Model()), randn(3))


@program
def time_moves_on(wrap):
    """A clock of the program's own, so that both runs see the same times."""
    ticks = itertools.count()
    m = wrap(lambda x: x + next(ticks))
    return [step(m, randn(3)) for _ in range(4)]


@program
def environment_variable_changes(wrap):
    def forward(x):
        return x * float(os.environ.get("PROGRAM_SCALE", "1"))

    m, seen = wrap(forward), []
    try:
        for value in ("1", "2", "8"):
            os.environ["PROGRAM_SCALE"] = value
            seen.append(step(m, randn(3)))
    finally:
        del os.environ["PROGRAM_SCALE"]
    return seen


@program
def print_in_forward(wrap):
    def forward(x):
        print("rows", x.shape[0])
        return x * 2

    m, text = wrap(forward), io.StringIO()
    with contextlib.redirect_stdout(text):
        seen = [step(m, randn(2)) for _ in range(3)]
    return [seen, text.getvalue()]


@program
def print_of_a_number_in_forward(wrap):
    def forward(x):
        print(f"{x.sum().item():.3f}")
        return x * 2

    m, text = wrap(forward), io.StringIO()
    with contextlib.redirect_stdout(text):
        seen = [step(m, randn(2)) for _ in range(3)]
    return [seen, text.getvalue()]


@program
def warning_in_forward(wrap):
    def forward(x):
        warnings.warn("odd rows", DeprecationWarning, stacklevel=1)
        return x * 2

    m, counts = wrap(forward), []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            m(randn(3))
        counts.append(sum(str(w.message) == "odd rows" for w in caught))
    return counts


@program
def dataclass_of_settings_changes(wrap):
    @dataclasses.dataclass
    class Settings:
        scale: float = 1.0
        layers: int = 1

    class Model(nn.Module):
        def __init__(self, settings):
            super().__init__()
            self.settings, self.fc = settings, nn.Linear(3, 3)

        def forward(self, x):
            for _ in range(self.settings.layers):
                x = self.fc(x) * self.settings.scale
            return x

    settings = Settings()
    m, seen = wrap(Model(settings)), []
    for scale, layers in ((1.0, 1), (2.0, 1), (2.0, 3)):
        settings.scale, settings.layers = scale, layers
        seen.append(step(m, randn(2, 3)))
    return seen


@program
def namespace_of_settings_changes(wrap):
    settings = types.SimpleNamespace(scale=1.0, activation="relu")
    m, seen = wrap(lambda x: getattr(torch, settings.activation)(x) * settings.scale), []
    for scale, name in ((1.0, "relu"), (2.0, "relu"), (2.0, "tanh")):
        settings.scale, settings.activation = scale, name
        seen.append(step(m, randn(3)))
    return seen


@program
def enum_chooses(wrap):
    class Mode(enum.Enum):
        SIN, COS = 1, 2

    m = wrap(lambda x, mode: x.sin() if mode is Mode.SIN else x.cos())
    return [step(m, randn(3), mode) for mode in (Mode.SIN, Mode.COS, Mode.SIN)]


@program
def deque_of_history(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = collections.deque(maxlen=2)

        def forward(self, x):
            self.last.append(x.detach())
            return x + sum(self.last)

    m = wrap(Model())
    return [step(m, randn(3)) for _ in range(4)]


@program
def default_dictionary(wrap):
    counts = collections.defaultdict(int)

    def forward(x, key):
        counts[key] += 1
        return x * counts[key]

    m = wrap(forward)
    return [[step(m, randn(3), key) for key in "abab"], dict(counts)]


@program
def cached_function(wrap):
    computed = []

    @functools.lru_cache
    def table(n):
        computed.append(n)
        return torch.arange(n, dtype=torch.float32)

    m = wrap(lambda x: x + table(x.shape[0]))
    return [[step(m, randn(n)) for n in (3, 4, 3)], computed]


@program
def cached_property(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        @functools.cached_property
        def mask(self):
            return torch.tensor([1.0, 0.0, 1.0])

        def forward(self, x):
            return self.fc(x) * self.mask

    model = Model()
    m = wrap(model)
    first = step(m, randn(2, 3))
    model.mask = torch.tensor([0.0, 1.0, 0.0])
    return [first, step(m, randn(2, 3)), "mask" in model.__dict__]


@program
def mutable_default_argument(wrap):
    def forward(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * len(seen)

    m = wrap(forward)
    return [step(m, randn(3)) for _ in range(3)]


@program
def exception_object_kept(wrap):
    kept = []

    def forward(x):
        try:
            raise ValueError("inside")
        except ValueError as error:
            kept.append(str(error))
        return x * 2

    m = wrap(forward)
    return [step(m, randn(3)), step(m, randn(3)), kept]


@program
def set_of_shapes(wrap):
    shapes = set()

    def forward(x):
        shapes.add(tuple(x.shape))
        return x * len(shapes)

    m = wrap(forward)
    return [[step(m, randn(*s)) for s in ((2,), (3,), (2,), (2, 2))], sorted(map(str, shapes))]


@program
def isinstance_of_submodule_decides(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x) if isinstance(self.layer, nn.Linear) else self.layer(x) * 10

    model = Model()
    m = wrap(model)
    first = step(m, randn(2, 3))
    model.layer = nn.Tanh()
    return [first, step(m, randn(2, 3))]


@program
def error_then_success(wrap):
    limit = [2]

    def forward(x):
        if x.shape[0] > limit[0]:
            raise ValueError(f"at most {limit[0]} rows")
        return x * 2

    m = wrap(forward)
    first = raises(m, randn(3), message=True)
    limit[0] = 5
    return [first, step(m, randn(3)), observe(raises(m, randn(6), message=True))]


class _Queue(nn.Module):
    """Negatives of earlier steps (MoCo): read in one graph, written in a later one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("queue", torch.linspace(-1, 1, 24).view(4, 6))
        self.register_buffer("centres", torch.linspace(0, 1, 12).view(3, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys):
        start = int(self.place)
        self.queue[:, start : start + keys.shape[0]] = keys.T
        self.place[0] = (start + keys.shape[0]) % 6

    def forward(self, x, classes):
        q = self.fc(x)
        logits = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        near = (q - self.centres[classes]).pow(2).mean()
        self.enqueue(q.detach())
        with torch.no_grad():
            count = torch.bincount(classes, minlength=3)
            self.centres.index_add_(0, classes, 0.1 * q / (1 + count[classes]).unsqueeze(1))
        return logits.logsumexp(1).mean() + near


@program(slack=10)
def queue_of_negatives(wrap):
    model = _Queue()
    m = wrap(model)
    classes = torch.tensor([0, 2, 0])
    seen = [training(model, m, randn(3, 4), classes) for _ in range(4)]
    return [seen, list(model.buffers())]
