"""Programs that use more of Python: contexts, partials, identity, signatures, classes, logs."""

import contextlib
import contextvars
import copy
import functools
import inspect
import io
import itertools
import logging
import operator
import threading
import weakref

import torch
from torch import nn

from .facts import raises, randn, step, training
from .registry import program

LEVEL = contextvars.ContextVar("LEVEL", default=1.0)
local = threading.local()


@program
def context_manager_of_the_user(wrap):
    box = {"scale": 1.0}

    @contextlib.contextmanager
    def scaled(by):
        before, box["scale"] = box["scale"], by
        try:
            yield
        finally:
            box["scale"] = before

    def forward(x):
        with scaled(3.0):
            y = x * box["scale"]
        return y + box["scale"]

    m = wrap(forward)
    first = step(m, randn(3))
    with scaled(5.0):
        second = step(m, randn(3))
    return [first, second, box["scale"]]


@program
def context_class_that_counts(wrap):
    class Timer:
        entered = 0

        def __enter__(self):
            Timer.entered += 1
            return self

        def __exit__(self, *args):
            self.done = True

    def forward(x):
        with Timer():
            return x * Timer.entered

    m = wrap(forward)
    return [[step(m, randn(3)) for _ in range(3)], Timer.entered]


@program
def context_variable_changes(wrap):
    m, seen = wrap(lambda x: x * LEVEL.get()), []
    for value in (1.0, 2.0, 3.0):
        token = LEVEL.set(value)
        seen.append(step(m, randn(3)))
        LEVEL.reset(token)
    return seen


@program
def thread_local_changes(wrap):
    m, seen = wrap(lambda x: x * local.scale), []
    for value in (1.0, 2.0, 3.0):
        local.scale = value
        seen.append(step(m, randn(3)))
    return seen


@program
def partial_function(wrap):
    def scaled(x, by):
        return x * by

    model = nn.Sequential(nn.Linear(3, 3))
    model.act = functools.partial(scaled, by=2.0)
    m, seen = wrap(lambda x: model.act(model[0](x))), []
    for by in (2.0, 3.0):
        model.act = functools.partial(scaled, by=by)
        seen.append(step(m, randn(2, 3)))
    return seen


@program
def bound_method_kept(wrap):
    class Helper:
        def __init__(self, by):
            self.by = by

        def apply(self, x):
            return x * self.by

    helper = Helper(2.0)
    act = helper.apply
    m = wrap(lambda x: act(x))
    first = step(m, randn(3))
    helper.by = 5.0
    return [first, step(m, randn(3))]


@program
def class_of_object_changes(wrap):
    class A:
        scale = 1.0

    class B:
        scale = 4.0

    thing = A()
    m = wrap(lambda x: x * thing.scale)
    first = step(m, randn(3))
    thing.__class__ = B
    return [first, step(m, randn(3))]


@program
def class_of_module_changes(wrap):
    class Double(nn.Module):
        def forward(self, x):
            return x * 2

    class Triple(nn.Module):
        def forward(self, x):
            return x * 3

    model = nn.Sequential(Double())
    m = wrap(model)
    first = step(m, randn(3))
    model[0].__class__ = Triple
    return [first, step(m, randn(3))]


@program
def forward_of_class_replaced(wrap):
    """As libraries patch models after loading them."""

    class Layer(nn.Module):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(nn.Linear(3, 3), Layer())
    m = wrap(model)
    first = step(m, randn(2, 3))
    Layer.forward = lambda self, x: x * 7
    return [first, step(m, randn(2, 3))]


@program
def function_of_module_replaced(wrap):
    """A function that forward finds in a namespace is another one later."""
    import types

    space = types.ModuleType("space")
    space.act = torch.sin
    m = wrap(lambda x: space.act(x))
    first = step(m, randn(3))
    space.act = torch.cos
    return [first, step(m, randn(3))]


@program
def descriptor_computes(wrap):
    class Scaled:
        def __get__(self, owner, kind=None):
            return owner.level * 2.0

    class Model(nn.Module):
        scale = Scaled()

        def __init__(self):
            super().__init__()
            self.level = 1

        def forward(self, x):
            return x * self.scale

    model = Model()
    m, seen = wrap(model), []
    for level in (1, 4):
        model.level = level
        seen.append(step(m, randn(3)))
    return seen


@program
def slots(wrap):
    class Settings:
        __slots__ = ("scale",)

    settings = Settings()
    m, seen = wrap(lambda x: x * settings.scale), []
    for scale in (1.0, 3.0):
        settings.scale = scale
        seen.append(step(m, randn(3)))
    return seen


@program
def property_with_setter(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self._scale = 1.0

        @property
        def scale(self):
            return self._scale

        @scale.setter
        def scale(self, value):
            self._scale = value * 2

        def forward(self, x):
            self.scale = self.scale + 1
            return x * self.scale

    model = Model()
    m = wrap(model)
    return [[step(m, randn(3)) for _ in range(3)], model.scale]


@program
def dictionary_subclass(wrap):
    class Defaults(dict):
        def __missing__(self, key):
            return len(key)

    table = Defaults(a=10.0)
    m = wrap(lambda x, key: x * table[key])
    first = [step(m, randn(3), key) for key in ("a", "long")]
    table["a"] = 20.0
    return [first, step(m, randn(3), "a")]


@program
def list_subclass(wrap):
    class Doubled(list):
        def __getitem__(self, k):
            return super().__getitem__(k) * 2

    scales = Doubled([1.0, 2.0])
    m = wrap(lambda x: x * scales[1])
    first = step(m, randn(3))
    scales.append(3.0)
    scales[1] = 5.0
    return [first, step(m, randn(3))]


@program
def identity_of_objects(wrap):
    first, second = object(), object()
    m = wrap(lambda x, key: x * 2 if key is first else x * 3)
    return [step(m, randn(3), key) for key in (first, second, first)]


@program
def identity_numbers(wrap):
    seen = set()

    def forward(x):
        seen.add(id(x))
        return x * len(seen)

    m, a, b = wrap(forward), randn(3), randn(3)
    return [step(m, a), step(m, b), step(m, a)]


@program
def tensors_as_keys(wrap):
    a, b = torch.ones(3), torch.ones(3)
    table = {a: 2.0}
    m = wrap(lambda x: x * table.get(x, 5.0))
    return [m(a), m(b), m(a)]


@program
def weak_reference(wrap):
    class Thing:
        scale = 3.0

    thing = Thing()
    ref = weakref.ref(thing)
    m = wrap(lambda x: x * (ref().scale if ref() is not None else 1.0))
    first = step(m, randn(3))
    del thing
    return [first, step(m, randn(3))]


@program
def signature_inspected(wrap):
    def call(f, x, **more):
        names = inspect.signature(f).parameters
        return f(x, **{k: v for k, v in more.items() if k in names})

    m = wrap(lambda x: call(lambda x, scale: x * scale, x, scale=2.0, other=3))
    return step(m, randn(3))


@program
def copies_inside_forward(wrap):
    def forward(batch):
        own, deep = copy.copy(batch), copy.deepcopy(batch["n"])
        own["x"] = own["x"] * 2
        deep.append(3)
        return own["x"] * len(deep), batch["x"], len(batch["n"])

    m = wrap(forward)
    return step(m, {"x": randn(3), "n": [1]})


@program
def itertools_and_operators(wrap):
    def forward(xs):
        pairs = [a * b for a, b in itertools.combinations(xs, 2)]
        total = functools.reduce(operator.add, pairs)
        return total, list(itertools.accumulate(xs)), sorted(map(len, xs)), max(xs, key=len).sum()

    return step(wrap(forward), [randn(3), randn(3), randn(3)])


@program
def sorted_dictionary_of_tensors(wrap):
    def forward(batch):
        items = sorted(batch.items(), key=lambda item: (-len(item[0]), item[0]))
        return torch.stack([x * k for k, (_, x) in enumerate(items)])

    m = wrap(forward)
    return [step(m, {"bb": randn(2), "a": randn(2)}), step(m, {"a": randn(2), "bb": randn(2)})]


@program
def walrus_match_and_star(wrap):
    def forward(xs, kind):
        first, *rest = xs
        if (n := len(rest)) > 1:
            first = first * n
        match kind:
            case {"scale": scale}:
                return first * scale
            case [a, b]:
                return first * a + b
            case _:
                return first

    m, xs = wrap(forward), [randn(2), randn(2), randn(2)]
    return [step(m, xs, kind) for kind in ({"scale": 3.0}, [2.0, 1.0], None)] + [
        step(m, xs[:1], None)
    ]


@program
def comprehension_with_conditions(wrap):
    m = wrap(lambda xs: sum(x * k for k, x in enumerate(xs) if x.shape[0] == 2))
    return [step(m, [randn(n) for n in sizes]) for sizes in ((1, 2, 2), (2, 2, 3))]


@program
def generator_with_state(wrap):
    def numbers():
        k = 0
        while True:
            k += 1
            yield k

    source = numbers()
    m = wrap(lambda x: x * next(source))
    return [step(m, randn(3)) for _ in range(3)]


@program
def generator_sent_to(wrap):
    def average():
        total, n, value = 0.0, 0, None
        while True:
            value = yield value
            total, n = total + value, n + 1
            value = total / n

    def forward(x):
        mean = average()
        next(mean)
        mean.send(x)
        return mean.send(x * 3)

    return step(wrap(forward), randn(3))


@contextlib.contextmanager
def _logged(log):
    """What is written to a logger meanwhile, as text."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        yield text
    finally:
        logging.disable(disabled)
        log.removeHandler(handler)


@program
def log_messages(wrap):
    log = logging.getLogger("small.programs")

    def forward(x):
        log.warning("rows %d", x.shape[0])
        return x * 2

    with _logged(log) as text:
        m = wrap(forward)
        seen = [step(m, randn(n)) for n in (2, 3, 2)]
    return [seen, text.getvalue()]


@program
def log_messages_with_a_cache(wrap):
    """The cache is the wrapper's: a message of this rank appears once, another one once more."""
    log = logging.getLogger("small.programs.once")
    class_of_log = type("Once", (type(log),), {})
    log.__class__ = class_of_log
    class_of_log.warning_once = functools.lru_cache(None)(lambda log, text: log.warning(text))

    def forward(x):
        y = x * 2
        log.warning_once(f"rank {x.ndim}")
        return y + 1

    with _logged(log) as text:
        m = wrap(forward)
        seen = [step(m, randn(*sizes)) for sizes in ((2,), (3,), (2, 2), (2,), (2, 2))]
    return [seen, text.getvalue()]


@program
def global_function_replaced(wrap):
    before = globals()["_activation"]
    m = wrap(lambda x: _activation(x))
    first = step(m, randn(3))
    try:
        globals()["_activation"] = torch.cos
        return [first, step(m, randn(3))]
    finally:
        globals()["_activation"] = before


def _activation(x):
    return x.sin() * 2


@program
def source_of_forward_replaced(wrap):
    def forward(x):
        return x * 2

    def other(x):
        return x * 9

    m = wrap(lambda x: forward(x))
    first = step(m, randn(3))
    forward.__code__ = other.__code__
    return [first, step(m, randn(3))]


@program
def string_methods_choose(wrap):
    m = wrap(lambda x, spec: getattr(x, spec.split(":")[0])(int(spec.split(":")[1])))
    return [step(m, randn(2, 3), spec) for spec in ("sum:0", "mean:1", "sum:1")]


@program
def operators_of_the_user(wrap):
    class Vector:
        def __init__(self, x):
            self.x = x

        def __add__(self, other):
            return Vector(self.x + other.x)

        def __matmul__(self, other):
            return (self.x * other.x).sum()

        def __bool__(self):
            return bool(self.x.sum() > 0)

    m = wrap(lambda a, b: (Vector(a) + Vector(b)) @ Vector(b) if Vector(a) else a.sum() * 5)
    return [step(m, (torch.ones(2) * s).requires_grad_(), randn(2)) for s in (1.0, -1.0)]


@program
def visitor_over_submodules(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Dropout(0.0)

        def forward(self, x):
            counts = {}
            for layer in self.modules():
                name = type(layer).__name__
                counts[name] = counts.get(name, 0) + 1
            return self.b(self.a(x)) * len(counts), sorted(counts)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(2, 3)), training(model, m, randn(2, 3))]


@program
def keyword_named_like_internals(wrap):
    m = wrap(lambda self_, args, kwargs, fn=1.0: self_ * fn + args - kwargs)
    return step(m, randn(2), args=randn(2), kwargs=randn(2), fn=3.0)


@program
def error_in_the_middle_leaves_state_usable(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.log = nn.Linear(3, 3), []

        def forward(self, x, fail):
            y = self.fc(x)
            self.log.append("first")
            if fail:
                raise OSError("disk")
            self.log.append("second")
            return y

    model = Model()
    m = wrap(model)
    seen = [raises(m, torch.ones(2, 3), fail, message=True) for fail in (False, True, False)]
    return [seen, model.log, training(model, m, randn(2, 3), False)]


@program
def functions_from_a_table_of_a_class_of_its_own(wrap):
    class Table:
        def __init__(self):
            self.functions = {"a": torch.relu, "b": torch.tanh}

        def __getitem__(self, key):
            return self.functions[key]

    table = Table()
    m = wrap(lambda x: table["a"](x) * 2 + table["b"](x))
    before = step(m, randn(3))
    table.functions["a"] = torch.sigmoid
    return [before, step(m, randn(3))]
