"""What a program can observe: tensors with their numbers, layout and history, errors, aliasing.

Owns the record of each kind, taken at once, so that what happens later does not change it. Never
judges a record (``compare``).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class TensorFacts:
    """A tensor as it was: type, layout, history, and a copy of its numbers."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    requires_grad: bool
    has_history: bool
    is_leaf: bool
    is_inference: bool
    values: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Raised:
    """An error that the program caught; ``message`` only where it is the user's own."""

    error: BaseException
    message: str | None


@dataclasses.dataclass(frozen=True)
class Fields:
    """An object of a user's class: its name and what its fields held."""

    kind: str
    fields: dict[str, Any]


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of the dimensions in which a step is possible."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.numel() == 0:
        return None
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        if plain.layout != torch.strided:
            plain = plain.to_dense()
        plain = plain.resolve_conj().resolve_neg()
        return torch.empty_like(plain, memory_format=torch.contiguous_format).copy_(plain)


def observe_tensor(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        type(tensor).__name__,
        tensor.dtype,
        tuple(tensor.shape),
        _strides(tensor),
        tensor.requires_grad,
        tensor.grad_fn is not None,
        tensor.is_leaf,
        tensor.is_inference(),
        _values(tensor),
    )


def observe(value: Any) -> Any:
    """A copy of ``value`` in which every tensor is replaced by its facts."""
    if isinstance(value, torch.Tensor):
        return observe_tensor(value)
    if isinstance(value, TensorFacts | Raised | Fields):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Fields(type(value).__name__, {k: observe(getattr(value, k)) for k in value._fields})
    if isinstance(value, list | tuple):
        return type(value)(observe(one) for one in value)
    if isinstance(value, Mapping):
        kind = "dict" if type(value) is dict else type(value).__name__
        return Fields(kind, {str(key): observe(one) for key, one in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: observe(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return Fields(type(value).__name__, fields)
    if isinstance(value, torch.dtype | torch.device | torch.Size | enum.Enum | type):
        return str(value)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    raise TypeError(f"a program returned a {type(value).__name__}, which has no record")


def gradients(model: nn.Module) -> dict[str, Any]:
    """The gradient of each parameter, or None, as it is now."""
    return {name: observe(p.grad) for name, p in model.named_parameters()}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def weighted(value: Any) -> torch.Tensor:
    """A loss that gives every element of every float output a gradient of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors_in(value):
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.cos(torch.arange(tensor.numel(), dtype=torch.float64) + 0.5)
            total = total + (tensor.double() * weights.reshape(tensor.shape)).sum()
    return total


def step(model: Any, *args: Any, **kwargs: Any) -> Any:
    """One call and its backward pass: the outputs, then the gradients of the tensor arguments."""
    out = model(*args, **kwargs)
    seen = observe(out)
    loss = weighted(out)
    if loss.requires_grad:
        loss.backward()
    return [seen, *(observe(t.grad) for t in tensors_in([args, kwargs]) if t.is_leaf)]


def training(model: nn.Module, run: Any, *args: Any, **kwargs: Any) -> Any:
    """``step`` of ``run`` from fresh gradients, with the gradients of ``model``'s parameters."""
    model.zero_grad()
    return [step(run, *args, **kwargs), gradients(model)]


def raises(function: Any, *args: Any, message: bool = False, **kwargs: Any) -> Any:
    """The result of a call, or the error that it raised.

    ``message``: the error is raised by the program's own code, so its words must arrive too.
    """
    try:
        return observe(function(*args, **kwargs))
    except Exception as error:
        return Raised(error, str(error) if message else None)


def aliases(**tensors: torch.Tensor) -> list[str]:
    """Pairs of the tensors that share memory, each with whether both start at one place."""
    found = []
    for (name, a), (other, b) in itertools.combinations(tensors.items(), 2):
        if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.nbytes:
            same = a.data_ptr() == b.data_ptr() and a.shape == b.shape
            found.append(f"{name} {'is' if a is b else 'equals' if same else 'shares'} {other}")
    return found


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool | int = True) -> torch.Tensor:
    """A random leaf that requires a gradient."""
    return torch.randn(*shape, dtype=dtype).requires_grad_(bool(grad))
