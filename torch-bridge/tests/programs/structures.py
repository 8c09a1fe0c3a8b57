"""Programs whose arguments or results are nested: lists, dictionaries, classes, keywords."""

import collections
import dataclasses
import typing

import torch
from torch import nn

from .facts import observe, raises, randn, step, training
from .registry import program

Pair = collections.namedtuple("Pair", "first second")


class Typed(typing.NamedTuple):
    loss: torch.Tensor
    note: str = "none"


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0
    mask: torch.Tensor | None = None


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: keys are attributes, integers index the values that are not None."""

    def __init__(self, **fields):
        super().__init__((key, value) for key, value in fields.items() if value is not None)
        for key, value in fields.items():
            object.__setattr__(self, key, value)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@program
def dictionary_output(wrap):
    m = wrap(lambda x: {"b": x * 2, "a": x + 1, "n": 3, "none": None})
    return step(m, randn(3))


@program
def nested_output(wrap):
    m = wrap(lambda x: {"a": [x, (x * 2, {"b": x + 1})], "c": ()})
    return step(m, randn(3))


@program
def named_tuple_output(wrap):
    m = wrap(lambda x: Pair(x * 2, Pair(x + 1, 5)))
    return [step(m, randn(3)), type(m(randn(3))) is Pair]


@program
def typed_named_tuple_output(wrap):
    m = wrap(lambda x: Typed(x.sum(), "fine"))
    return [step(m, randn(3)), m(randn(3)).note]


@program
def dataclass_output(wrap):
    m = wrap(lambda x: Batch(x * 2, 0.5))
    out = m(randn(3))
    return [step(m, randn(3)), type(out) is Batch, out.mask is None, out.scale]


@program
def model_output(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x, labels=None, return_hidden=False):
            logits = self.fc(x)
            loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
            return ModelOutput(loss=loss, logits=logits, hidden=x if return_hidden else None)

    model = Model()
    m, seen = wrap(model), []
    for kwargs in ({}, {"labels": torch.tensor([0, 1])}, {"return_hidden": True}):
        out = m(randn(2, 3), **kwargs)
        first = out[0]
        seen.append([list(out), out.loss is None, observe(out.logits), observe(first)])
        first.sum().backward()
        seen.append(observe(model.fc.weight.grad))
    return seen


@program
def ordered_dictionary_output(wrap):
    m = wrap(lambda x: collections.OrderedDict(z=x, a=x * 2))
    return step(m, randn(3))


@program
def default_dictionary_output(wrap):
    def forward(x):
        out = collections.defaultdict(list)
        for k in range(3):
            out[k % 2].append(x * k)
        return out

    return step(wrap(forward), randn(3))


@program
def none_output(wrap):
    m = wrap(lambda x: None)
    return [m(torch.ones(3)), m(torch.ones(2))]


@program
def constant_output(wrap):
    m = wrap(lambda x: (3, "text", 2.5, True, None, x.shape, x.dtype, x.shape[0], x.dim()))
    return [m(torch.ones(2, 3)), m(torch.ones(4, 3)), m(torch.ones(5, 3))]


@program
def string_built_from_sizes(wrap):
    m = wrap(lambda x: (f"{x.shape[0]} rows, {tuple(x.shape)}", x * 2))
    return [m(torch.ones(n, 2)) for n in (2, 3, 4)]


@program
def tensors_made_in_forward(wrap):
    m = wrap(lambda x: (torch.zeros(2), torch.arange(3), torch.tensor([1.0, 2.0]), torch.eye(2)))
    a, b = m(torch.ones(1)), m(torch.ones(1))
    a[0].add_(5)
    return [a, b, m(torch.ones(1))]


@program
def constant_tensor_written_by_caller(wrap):
    m = wrap(lambda x: x * torch.tensor([1.0, 2.0]) + torch.ones(2))
    out = m(torch.ones(2))
    out.add_(100)
    return [out, m(torch.ones(2))]


@program
def dictionary_input(wrap):
    m = wrap(lambda batch: batch["x"] * batch["scale"] + len(batch))
    return [
        step(m, {"x": randn(3), "scale": 2.0}),
        step(m, {"x": randn(3), "scale": 3.0}),
        step(m, {"scale": randn(3), "x": randn(3), "more": None}),
    ]


@program
def order_of_dictionary_input(wrap):
    m = wrap(lambda batch: sum(x * (k + 1) for k, x in enumerate(batch.values())))
    a, b = randn(3), randn(3)
    return [step(m, {"a": a, "b": b}), step(m, {"b": b, "a": a})]


@program
def keys_of_dictionary_change(wrap):
    m = wrap(lambda **batch: {key: x * len(key) for key, x in batch.items()})
    return [step(m, a=randn(2), bcd=randn(2)), step(m, xy=randn(2))]


@program
def list_input_of_changing_length(wrap):
    m = wrap(lambda xs: torch.stack(xs).sum(0) * len(xs))
    return [step(m, [randn(3) for _ in range(n)]) for n in (1, 3, 2)]


@program
def tuple_and_list_inputs(wrap):
    m = wrap(lambda xs: xs[0] * 2 if isinstance(xs, tuple) else xs[0] * 3)
    return [step(m, (randn(2),)), step(m, [randn(2)])]


@program
def dataclass_input(wrap):
    m = wrap(lambda b: b.x * b.scale if b.mask is None else b.x * b.mask)
    return [
        step(m, Batch(randn(3))),
        step(m, Batch(randn(3), 2.0)),
        step(m, Batch(randn(3), 2.0, torch.ones(3))),
    ]


@program
def named_tuple_input(wrap):
    m = wrap(lambda p: p.first @ p.second)
    return [step(m, Pair(randn(3), randn(3))), step(m, Pair(randn(2, 3), randn(3)))]


@program
def plain_object_input(wrap):
    class Graph:
        def __init__(self, nodes, edges):
            self.nodes, self.edges = nodes, edges

    m = wrap(lambda g: torch.zeros_like(g.nodes).index_add(0, g.edges[1], g.nodes[g.edges[0]]))
    seen = []
    for edges in ([[0, 1], [1, 2]], [[0, 0, 2], [1, 2, 2]]):
        nodes = randn(3, 2)
        seen.append([step(m, Graph(nodes, torch.tensor(edges))), observe(nodes.grad)])
    return seen


@program
def nested_optional_inputs(wrap):
    m = wrap(lambda x, past=None: (x + (0 if past is None else past[0] * past[1]), [x, x * 2]))
    out, past = m(randn(3))
    return [out, step(m, randn(3), past=[t.detach() for t in past]), step(m, randn(3))]


@program
def keyword_arguments_in_any_order(wrap):
    m = wrap(lambda a, b, c=1.0: a - b * c)
    x, y = randn(3), randn(3)
    return [step(m, x, y), step(m, b=y, a=x), step(m, x, c=2.0, b=y), step(m, a=x, b=y, c=x)]


@program
def variable_arguments(wrap):
    m = wrap(lambda *xs, **more: sum(xs) * (1 + len(more)))
    return [step(m, randn(2)), step(m, randn(2), randn(2)), step(m, randn(2), more=1, less=2)]


@program
def keyword_only_arguments(wrap):
    class Model(nn.Module):
        def forward(self, x, *, scale, shift=0.0):
            return x * scale + shift

    m = wrap(Model())
    return [
        step(m, randn(3), scale=2.0),
        step(m, randn(3), scale=1.0, shift=1.0),
        raises(m, randn(3)),
    ]


@program
def default_argument_is_a_tensor(wrap):
    def forward(x, offset=torch.ones(3)):  # noqa: B008
        return x + offset

    m = wrap(forward)
    return [step(m, randn(3)), step(m, randn(3), torch.zeros(3)), step(m, randn(3))]


@program
def default_argument_replaced(wrap):
    def forward(x, scale=1.0):
        return x * scale

    m = wrap(forward)
    first = step(m, randn(3))
    forward.__defaults__ = (4.0,)
    return [first, step(m, randn(3))]


@program
def iterator_as_argument(wrap):
    m = wrap(lambda xs: sum(x * 2 for x in xs))
    return [m(x for x in (torch.ones(2), torch.ones(2))), m(iter([torch.ones(2)]))]


@program
def function_as_argument(wrap):
    m = wrap(lambda x, f: f(x) * 2)
    return [step(m, randn(3), f) for f in (torch.sin, lambda x: x * x, nn.Tanh(), torch.sin)]


@program
def module_as_argument(wrap):
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    m = wrap(lambda layer, x: layer(x))
    return [step(m, a, randn(2, 3)), step(m, b, randn(2, 3)), a.weight.grad, b.weight.grad]


@program
def type_and_device_arguments(wrap):
    m = wrap(lambda x, dtype, device: torch.zeros(2, dtype=dtype, device=device) + x.to(dtype))
    types = (torch.float32, torch.float64, torch.int64)
    return [m(torch.ones(2), dtype, torch.device("cpu")) for dtype in types]


@program
def size_as_argument(wrap):
    m = wrap(lambda x, size: x.expand(size) * x.reshape(-1).new_ones(*size))
    return [step(m, randn(1, 3), torch.Size(s)) for s in ((2, 3), (4, 3), (1, 3))]


@program
def tuple_of_sizes_as_argument(wrap):
    m = wrap(lambda x, size: nn.functional.interpolate(x, size=size))
    return [step(m, randn(1, 1, 4, 4), s) for s in ((2, 2), (8, 8), (3, 5))]


@program
def slice_as_argument(wrap):
    m = wrap(lambda x, s: x[s] * 2)
    return [step(m, randn(6), s) for s in (slice(1, 3), slice(None, None, 2), slice(-2, None))]


@program
def input_returned_among_outputs(wrap):
    def forward(batch):
        batch = dict(batch)
        batch["y"] = batch["x"] * 2
        return batch

    m, x = wrap(forward), randn(3)
    out = m({"x": x, "name": "a"})
    return [list(out), out["x"] is x, out["y"], out["name"]]


@program
def key_value_cache_in_and_out(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x, cache=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            if cache is not None:
                k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
            return out, (k, v)

    model = Model()
    m, cache, seen = wrap(model), None, []
    with torch.no_grad():
        for n in (3, 1, 1, 1):
            out, cache = m(torch.randn(2, n, 4), cache)
            seen.append([observe(out), tuple(cache[0].shape)])
    return [seen, training(model, m, randn(2, 3, 4))]


@program
def cache_object_written_by_forward(wrap):
    class Cache:
        def __init__(self):
            self.keys, self.length = [], 0

        def update(self, k):
            self.keys.append(k)
            self.length += k.shape[1]
            return torch.cat(self.keys, 1)

    model = nn.Linear(4, 4)
    m, cache, seen = wrap(lambda x, cache: cache.update(model(x)).sum(1)), Cache(), []
    with torch.no_grad():
        for n in (3, 1, 1):
            seen.append(m(torch.randn(2, n, 4), cache))
    return [seen, cache.length, len(cache.keys)]


@program
def tensor_subclass_input(wrap):
    class Labelled(torch.Tensor):
        pass

    m = wrap(lambda x: x * 2)
    x = torch.randn(3).as_subclass(Labelled)
    return [m(x), type(m(x)).__name__, m(torch.ones(3))]


@program
def tensor_subclass_with_function(wrap):
    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            return out * 10 if func is torch.sin else out

    m = wrap(lambda x: torch.sin(x) + 1)
    x = torch.ones(3)
    return [m(x), m(x.as_subclass(Logged)), m(x)]


@program
def parameter_as_input(wrap):
    m, p = wrap(lambda x, w: x @ w), nn.Parameter(torch.randn(3, 2))
    return [step(m, randn(2, 3), p), p.grad]


@program
def nested_tensor_input(wrap):
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return raises(lambda: (wrap(lambda x: x * 2)(x)).to_padded_tensor(0.0))


@program
def values_of_a_sparse_input(wrap):
    """PyTorch's tracer fails on views of sparse tensors."""
    m, seen = wrap(lambda x: x * 2 + x.sum()), []
    for n in (3, 4):
        x = torch.eye(n).to_sparse().requires_grad_()
        y = m(x.coalesce().values())
        y.sum().backward()
        seen += [y, x.grad.to_dense(), m(torch.eye(n).to_sparse_csr().values()), m(randn(n))]
    return seen


@program
def sparse_input(wrap):
    x = torch.eye(3).to_sparse()
    m = wrap(lambda x, y: torch.sparse.mm(x, y) * 2)
    return [raises(m, x, torch.ones(3, 2)), raises(m, torch.eye(3), torch.ones(3, 2))]


@program
def numpy_array_input(wrap):
    import numpy as np

    m = wrap(lambda x, a: x * torch.as_tensor(a))
    return [step(m, randn(3), np.array(v, dtype=np.float32)) for v in ([1, 2, 3], [4, 5, 6])]


@program
def numpy_array_output(wrap):
    out = wrap(lambda x: (x * 2).detach().numpy().sum())(torch.ones(3))
    return [float(out), type(out).__module__]
