"""JAX as a peer: the same training step, traced by PyTorch and compiled by XLA.

Owns the translation of a step's graph of core ATen operators to ``jax.numpy``. It knows the
operators of the networks of the bench, and an error names those that it lacks. JAX is imported
only when it is asked for. It uses as many threads as the process has processors, and draws its own
random numbers.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .options import MOMENTUM, OPTIMIZERS, Setting


class _WithLoss(nn.Module):
    """The loss of ``model``'s output, so that one traced graph holds both."""

    def __init__(self, setting: Setting, model: nn.Module):
        super().__init__()
        self.model, self.loss = model, setting.example.loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        return self.loss(self.model(*inputs))


def stepper(setting: Setting, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable:
    """One step: the loss, and the gradient of each parameter or, with an optimizer, its new value.

    For inference, one step gives the output alone.

    Raises ``RuntimeError`` if JAX is not installed, or cannot do what the setting asks.
    """
    jax = _jax()
    if setting.dtype not in ("f32", "bf16"):
        raise RuntimeError("the JAX peer computes in f32 or bf16")
    if setting.threads != (n_processors := len(os.sched_getaffinity(0))):
        raise RuntimeError(
            f"JAX uses one thread for each of the {n_processors} processors: use --threads "
            f"{n_processors}, or change the processors (taskset)"
        )
    is_training = setting.mode != "forward"
    traced = _WithLoss(setting, model) if is_training else model
    with torch.no_grad():
        program = torch.export.export(traced, tuple(inputs), strict=False).run_decompositions()
    function = Translated(program)
    parameters, others = function.split_state()
    fed = [to_jax(x) for x in inputs]

    def loss(parameters, others, fed, key):
        (found, *_), updated = function(parameters | others, fed, key)
        return found, updated

    if not is_training:
        infer = jax.jit(lambda *given: loss(*given)[0])
        key = jax.random.key(0)
        return lambda: jax.block_until_ready(infer(parameters, others, fed, key))
    differentiated = jax.value_and_grad(loss, has_aux=True)
    keys = iter(range(1 << 30))
    if setting.mode == "step":
        return _updates(differentiated, parameters, others, fed, keys, setting.optimizer)
    compiled = jax.jit(differentiated)

    def step() -> tuple[Any, Any]:
        (found, updated), gradients = compiled(parameters, others, fed, jax.random.key(next(keys)))
        others.update(updated)
        return jax.block_until_ready((found, gradients))

    return step


def _updates(
    differentiated: Callable,
    parameters: dict[str, Any],
    others: dict[str, Any],
    fed: list[Any],
    keys: Iterator[int],
    optimizer: str,
) -> Callable:
    """One step with an optimizer's update, which XLA compiles into it."""
    jax = _jax()
    zeros = jax.tree.map(jax.numpy.zeros_like, parameters)
    state = (zeros,) if optimizer == "sgd" else (zeros, jax.tree.map(jax.numpy.copy, zeros))
    update = {"sgd": _sgd, "adamw": _adamw}[optimizer]

    def step(parameters, state, others, fed, key, at):
        (found, updated), gradients = differentiated(parameters, others, fed, key)
        new = {}
        for n, x in parameters.items():
            results = update(x, gradients[n], [s[n] for s in state], at)
            new[n] = [result.astype(x.dtype) for result in results]
        moments = tuple({n: new[n][1 + i] for n in new} for i in range(len(state)))
        return found, {n: new[n][0] for n in new}, moments, updated

    # New values take the place of the old ones, as in PyTorch.
    compiled = jax.jit(step, donate_argnums=(0, 1))
    held = {"parameters": parameters, "state": state}

    def run() -> tuple[Any, Any]:
        at = next(keys)
        found, new, moments, updated = compiled(
            held["parameters"], held["state"], others, fed, jax.random.key(at), at + 1.0
        )
        held.update(parameters=new, state=moments)
        others.update(updated)
        return jax.block_until_ready((found, new))

    return run


def _wide(*values: Any) -> list[Any]:
    """In f32, in which PyTorch's fused updates compute."""
    return [x.astype("float32") for x in values]


def _sgd(x, gradient, state, _at):
    """A parameter and its momentum after a step of ``torch.optim.SGD``."""
    x, gradient, momentum = _wide(x, gradient, state[0])
    momentum = MOMENTUM * momentum + gradient
    return x - OPTIMIZERS["sgd"] * momentum, momentum


def _adamw(x, gradient, state, at):
    """A parameter and its two moments after ``torch.optim.AdamW``; ``at`` counts steps from 1."""
    rate, decay, first, second, epsilon = OPTIMIZERS["adamw"], 1e-2, 0.9, 0.999, 1e-8
    x, gradient, mean, square = _wide(x, gradient, *state)
    mean = first * mean + (1 - first) * gradient
    square = second * square + (1 - second) * gradient * gradient
    corrected = _jax().numpy.sqrt(square / (1 - second**at)) + epsilon
    return (1 - rate * decay) * x - rate / (1 - first**at) * mean / corrected, mean, square


def to_jax(tensor: torch.Tensor) -> Any:
    """The same numbers in an array of JAX's."""
    return _jax().numpy.asarray(tensor.detach().numpy().copy())


class Translated:
    """An exported program as a function of JAX arrays."""

    def __init__(self, program: torch.export.ExportedProgram):
        self._nodes = list(program.graph.nodes)
        self._signature = program.graph_signature
        state = {**program.state_dict, **program.constants}
        self._state = {name: to_jax(value) for name, value in state.items()}
        self._operators = _operators()
        missing = {str(n.target) for n in self._nodes if n.op == "call_function"}
        missing -= self._operators.keys()
        if missing:
            raise RuntimeError(f"the JAX peer lacks {', '.join(sorted(missing))}")
        # JAX's arrays have no strides: only memory in the order of the elements can be read.
        strided = [n for n in self._nodes if str(n.target) == "aten.as_strided.default"]
        if not all(n.args[0].meta["val"].is_contiguous() for n in strided):
            raise RuntimeError("the JAX peer has no views of transposed memory")

    def split_state(self) -> tuple[dict, dict]:
        """Parameters, and buffers with constants, by name."""
        named = set(self._signature.parameters)
        parameters = {name: x for name, x in self._state.items() if name in named}
        return parameters, {name: x for name, x in self._state.items() if name not in named}

    def __call__(self, state: dict, inputs: Sequence[Any], key: Any) -> tuple[list, dict]:
        """The results, and new values of the buffers that the program writes."""
        values: dict[torch.fx.Node, Any] = {}
        places = self._signature
        held = places.inputs_to_parameters | places.inputs_to_buffers
        held |= places.inputs_to_lifted_tensor_constants
        fed = iter(inputs)
        for at, node in enumerate(self._nodes):
            if node.op == "placeholder":
                name = held.get(node.name)
                values[node] = next(fed) if name is None else state[name]
            elif node.op == "call_function":
                given = torch.fx.map_arg(node.args, values.__getitem__)
                named = torch.fx.map_arg(node.kwargs, values.__getitem__)
                if str(node.target) in _RANDOM:
                    named = {**named, "key": _jax().random.fold_in(key, at)}
                values[node] = self._operators[str(node.target)](*given, **named)
            elif node.op == "output":
                results = torch.fx.map_arg(node.args[0], values.__getitem__)
        updated, found = {}, []
        for value, spec in zip(results, places.output_specs, strict=True):
            if spec.kind is torch.export.graph_signature.OutputKind.BUFFER_MUTATION:
                updated[spec.target] = value
            else:
                found.append(value)
        return found, updated


_RANDOM = ("aten.native_dropout.default", "aten.bernoulli.p")


def _jax() -> Any:
    try:
        import jax
    except ImportError:
        raise RuntimeError("JAX is not installed: pip install jax") from None
    return jax


def _operators() -> dict[str, Callable]:
    """What each core operator is in ``jax.numpy``; arguments are those of ATen's schema."""
    np, nn_, lax = _jax().numpy, _jax().nn, _jax().lax
    table: dict[str, Callable] = {"<built-in function getitem>": operator.getitem}
    same = {
        "abs": np.abs,
        "cos": np.cos,
        "erf": _jax().scipy.special.erf,
        "exp": np.exp,
        "log1p": np.log1p,
        "logical_and": np.logical_and,
        "logical_not": np.logical_not,
        "minimum": np.minimum,
        "mm": np.matmul,
        "bmm": np.matmul,
        "neg": np.negative,
        "relu": nn_.relu,
        "rsqrt": lax.rsqrt,
        "sigmoid": nn_.sigmoid,
        "sin": np.sin,
        "tanh": np.tanh,
        "alias": lambda x: x,
        "clone": lambda x, memory_format=None: x,
        "expand": lambda x, sizes: np.broadcast_to(x, _expanded(x.shape, sizes)),
        "permute": np.transpose,
        "view": np.reshape,
        "cat": lambda xs, dim=0: np.concatenate(xs, dim),
        "repeat": np.tile,
        "embedding": lambda table, rows, *_: table[rows],
        "gather": lambda x, dim, index: np.take_along_axis(x, index, dim),
        "index_select": lambda x, dim, index: np.take(x, index, dim),
        "unsqueeze": np.expand_dims,
        "gelu": lambda x, approximate="none": nn_.gelu(x, approximate=approximate == "tanh"),
        "_softmax": lambda x, dim, _: nn_.softmax(x, dim),
        "_log_softmax": lambda x, dim, _: nn_.log_softmax(x, dim),
        "hardtanh": lambda x, low=-1.0, high=1.0: np.clip(x, low, high),
        "clamp": lambda x, low=None, high=None: np.clip(x, low, high),
        "mean": np.mean,
        "addmm": lambda bias, a, b: a @ b + bias,
        "convolution": _convolution,
        "constant_pad_nd": _pad,
        "_to_copy": _cast,
        "_assert_tensor_metadata": lambda *_, **__: None,
        "_native_batch_norm_legit_functional": _batch_norm,
        "_native_batch_norm_legit_no_training": lambda *given: _batch_norm(
            *given[:5], False, *given[5:]
        ),
        "native_layer_norm": _layer_norm,
        "native_dropout": _dropout,
        "max_pool2d_with_indices": _max_pool,
        "max_pool3d_with_indices": _max_pool,
        "avg_pool2d": _average_pool,
        "split_with_sizes": lambda x, sizes, dim=0: np.split(x, _ends(sizes), dim),
        "full": lambda size, value, dtype=None, **_: np.full(size, value, _dtype(dtype)),
        "full_like": lambda x, value, dtype=None, **_: np.full_like(x, value, _dtype(dtype)),
        "empty_permuted": lambda size, _, dtype=None, **__: np.zeros(size, _dtype(dtype)),
        "slice_scatter": _slice_scatter,
        "as_strided": _as_strided,
        "_embedding_bag": _embedding_bag,
        "scalar_tensor": lambda value, dtype=None, **_: np.asarray(value, _dtype(dtype)),
    }
    table |= {f"aten.{name}.default": function for name, function in same.items()}
    for name, function in {
        "add": lambda a, b, alpha=1: a + (b if alpha == 1 else alpha * b),
        "sub": lambda a, b, alpha=1: a - (b if alpha == 1 else alpha * b),
        "mul": np.multiply,
        "div": np.divide,
        "pow": np.power,
        "eq": np.equal,
        "ne": np.not_equal,
        "gt": np.greater,
        "le": np.less_equal,
        "fmod": np.fmod,
        "remainder": np.remainder,
    }.items():
        for overload in ("Tensor", "Scalar", "Tensor_Scalar"):
            table[f"aten.{name}.{overload}"] = function
    return table | {
        "aten.arange.start_step": lambda start, stop, step=1, dtype=None, **_: np.arange(
            start, stop, step, _dtype(dtype)
        ),
        # The operator that fills it comes next.
        "aten.empty.memory_format": lambda size, dtype=None, **_: np.zeros(size, _dtype(dtype)),
        "aten.any.dim": lambda x, dim, keepdim=False: np.any(x, dim, keepdims=keepdim),
        "aten.mean.dim": lambda x, dim, keepdim=False: np.mean(x, _dims(dim), keepdims=keepdim),
        "aten.sum.dim_IntList": lambda x, dim, keepdim=False: np.sum(
            x, _dims(dim), keepdims=keepdim
        ),
        "aten.select.int": lambda x, dim, at: lax.index_in_dim(x, at, dim, keepdims=False),
        "aten.slice.Tensor": _slice,
        "aten.squeeze.dims": lambda x, dims: np.squeeze(
            x, tuple(d for d in dims if x.shape[d] == 1)
        ),
        "aten.where.self": np.where,
        "aten.index.Tensor": lambda x, indices: x[
            tuple(slice(None) if i is None else i for i in indices)
        ],
        "aten.bernoulli.p": lambda x, p, key: (
            _jax().random.bernoulli(key, p, x.shape).astype(x.dtype)
        ),
    }


def _dtype(dtype: torch.dtype | None) -> str | None:
    # JAX counts in 32 bits unless it is told otherwise.
    narrow = {torch.int64: "int32", None: None}
    return narrow[dtype] if dtype in narrow else str(dtype).removeprefix("torch.")


def _dims(dims: Sequence[int] | None) -> tuple[int, ...] | None:
    return tuple(dims) if dims else None


def _ends(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]


def _expanded(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    n_new = len(sizes) - len(shape)
    return [shape[i - n_new] if size == -1 else size for i, size in enumerate(sizes)]


def _cast(x, dtype=None, **_):
    return x if dtype is None else x.astype(_dtype(dtype))


def _along(x, dim, start, end, step) -> tuple[slice, ...]:
    at = [slice(None)] * x.ndim
    at[dim] = slice(start, end, step)
    return tuple(at)


def _slice(x, dim=0, start=None, end=None, step=1):
    return x[_along(x, dim, start, end, step)]


def _slice_scatter(x, part, dim=0, start=None, end=None, step=1):
    return x.at[_along(x, dim, start, end, step)].set(part)


def _as_strided(x, size, stride, offset=None):
    # Strides of dimensions with one element mean nothing.
    dense, expected = 1, []
    for n in reversed(size):
        expected.insert(0, dense)
        dense *= n
    fits = all(n == 1 or a == b for n, a, b in zip(size, stride, expected, strict=True))
    if offset or dense != x.size or not fits:
        raise RuntimeError("the JAX peer has no views with strides")
    return x.reshape(size)


def _embedding_bag(table, rows, offsets, scaled=False, mode=0, sparse=False, *others, **named):
    if scaled or mode or sparse or others or named:
        raise RuntimeError("the JAX peer supports EmbeddingBag only as a plain sum")
    bag = _jax().numpy.searchsorted(offsets, _jax().numpy.arange(rows.size), side="right") - 1
    sums = _jax().ops.segment_sum(table[rows], bag, offsets.size, indices_are_sorted=True)
    return sums, None, None, None


def _pad(x, widths, value=0.0):
    pairs = [(widths[i], widths[i + 1], 0) for i in range(0, len(widths), 2)]
    pairs = [(0, 0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    return _jax().lax.pad(x, _jax().numpy.asarray(value, x.dtype), pairs)


def _convolution(x, weight, bias, stride, padding, dilation, transposed, _extra, groups):
    n = x.ndim - 2
    if transposed:
        if groups != 1:
            raise RuntimeError("the JAX peer has no grouped transposed convolution")
        weight = weight.swapaxes(0, 1)[(slice(None), slice(None), *[slice(None, None, -1)] * n)]
        reach = [
            d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding, strict=True)
        ]
        pads = [(r, r + e) for r, e in zip(reach, _extra, strict=True)]
        windows = {"window_strides": (1,) * n, "lhs_dilation": tuple(stride)}
    else:
        pads = [(p, p) for p in padding]
        windows = {"window_strides": tuple(stride)}
    found = _jax().lax.conv_general_dilated(
        x,
        weight,
        padding=pads,
        rhs_dilation=tuple(dilation),
        feature_group_count=groups,
        **windows,
    )
    return found if bias is None else found + bias.reshape(-1, *[1] * n)


def _batch_norm(x, weight, bias, mean, var, is_training, momentum, epsilon):
    np = _jax().numpy
    dims = (0, *range(2, x.ndim))
    if is_training:
        own_mean, own_var = np.mean(x, dims), np.var(x, dims)
        n = x.size // x.shape[1]
        mean = (1 - momentum) * mean + momentum * own_mean
        var = (1 - momentum) * var + momentum * own_var * (n / max(n - 1, 1))
    else:
        own_mean, own_var = mean, var
    scale = _jax().lax.rsqrt(own_var + epsilon)
    spread = (-1, *[1] * (x.ndim - 2))
    found = (x - own_mean.reshape(spread)) * (scale * weight).reshape(spread)
    return found + bias.reshape(spread), own_mean, scale, mean, var


def _layer_norm(x, shape, weight, bias, epsilon):
    np = _jax().numpy
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean = np.mean(x, dims, keepdims=True)
    scale = _jax().lax.rsqrt(np.var(x, dims, keepdims=True) + epsilon)
    found = (x - mean) * scale
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias), mean, scale


def _dropout(x, p, is_training, key):
    if not is_training or p == 0.0:
        return x, None
    kept = _jax().random.bernoulli(key, 1 - p, x.shape)
    return _jax().numpy.where(kept, x / (1 - p), 0), kept


def _windows(x, kernel, stride, padding, dilation=1, ceil=False):
    n = x.ndim - 2
    kernel, stride, padding, dilation = (
        list(v) * (n // len(v)) if isinstance(v, Sequence) else [v] * n
        for v in (kernel, stride or kernel, padding, dilation)
    )
    pads = []
    for size, k, s, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        more = -(size + 2 * p - reach) % s if ceil else 0
        pads.append((p, p + (more if more < p + s and more else 0)))
    return {
        "window_dimensions": (1, 1, *kernel),
        "window_strides": (1, 1, *stride),
        "padding": ((0, 0), (0, 0), *pads),
    }, tuple((1, 1, *dilation))


def _max_pool(x, kernel, stride=(), padding=0, dilation=1, ceil=False):
    windows, dilations = _windows(x, kernel, stride, padding, dilation, ceil)
    low = -_jax().numpy.inf
    found = _jax().lax.reduce_window(x, low, _jax().lax.max, window_dilation=dilations, **windows)
    return found, None


def _average_pool(x, kernel, stride=(), padding=0, ceil=False, counts_padding=True, divisor=None):
    if ceil or divisor or not counts_padding:
        raise RuntimeError("the JAX peer supports average pools only without options")
    windows, _ = _windows(x, kernel, stride, padding)
    total = _jax().lax.reduce_window(x, 0.0, _jax().lax.add, **windows)
    n = 1
    for size in windows["window_dimensions"]:
        n *= size
    return total / n
