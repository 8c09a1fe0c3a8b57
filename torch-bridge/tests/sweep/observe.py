"""One step of a network: what a user could observe of it, in float32 or in float64.

Owns the walk over results, the loss that gives every output a gradient, and float64 as a mode in
which casts to float32 are casts to float64. Random numbers are those of float32 in both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .compare import Observed

_RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal}
_WIDER = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


class _Wide(TorchFunctionMode):
    """Every cast to float32 is one to float64, but random numbers are drawn in float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _RANDOM:
            return self._drawn(function, args, kwargs)
        if function is torch.Tensor.float:
            return args[0].double()
        if function is torch.get_default_dtype:
            return torch.float64
        args = tuple(_WIDER.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = _WIDER.get(kwargs["dtype"], kwargs["dtype"])
        return function(*args, **kwargs)

    @staticmethod
    def _drawn(function, args, kwargs):
        args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        with torch._C.DisableTorchFunction():
            if function in (torch.rand, torch.randn):
                kwargs["dtype"] = torch.float32
            elif kwargs.get("dtype") == torch.float64:
                kwargs["dtype"] = torch.float32
            return function(*args, **kwargs).double()


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Inside, a model that was made double computes in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def wide(value: Any) -> Any:
    """The same inputs in float64."""
    if isinstance(value, torch.Tensor):
        if value.dtype in _WIDER:
            return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)
        return value
    return value


def tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a result with their places: mappings, sequences, dataclasses and caches."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors(item, f"{place}[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{place}.{field.name}")
    elif hasattr(value, "layers") and not isinstance(value, nn.Module):
        for i, layer in enumerate(value.layers):
            for name in ("keys", "values", "conv_states", "recurrent_states"):
                yield from tensors(getattr(layer, name, None), f"{place}.layers[{i}].{name}")


def step(model: nn.Module, inputs: dict[str, Any], training: bool) -> Observed:
    """Outputs, and in training also gradients and buffers, after one step."""
    torch.manual_seed(0)
    # A gradient that a call does not give must be None.
    model.zero_grad(set_to_none=True)
    given = {
        key: value.detach().clone().requires_grad_(training and value.is_floating_point())
        if isinstance(value, torch.Tensor)
        else value
        for key, value in inputs.items()
    }
    with torch.set_grad_enabled(training):
        outputs = dict(tensors(model(**given)))
        found: Observed = {f"output {key}": t.detach().clone() for key, t in outputs.items()}
        if training:
            _loss(outputs).backward()
    if training:
        for name, parameter in model.named_parameters():
            found[f"gradient of {name}"] = _copy(parameter.grad)
        for key, value in given.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                found[f"gradient of input {key}"] = _copy(value.grad)
        for name, buffer in model.named_buffers():
            found[f"buffer {name}"] = buffer.detach().clone()
    return found


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().to_dense().clone()


def _loss(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A number that depends on every output that has a gradient: the loss, and weighted means."""
    total = None
    for key, tensor in outputs.items():
        if not (tensor.requires_grad and tensor.is_floating_point()) or tensor.numel() == 0:
            continue
        if key == ".loss" and tensor.numel() == 1:
            term = tensor.sum()
        else:
            finite = tensor[tensor.detach().isfinite()] if _has_special(tensor) else tensor
            term = (finite * _weights(finite)).mean() if finite.numel() else None
        if term is not None:
            total = term if total is None else total + term
    if total is None:
        raise ValueError("no output has a gradient")
    return total


def _has_special(tensor: torch.Tensor) -> bool:
    return not bool(tensor.detach().isfinite().all())


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    with torch._C.DisableTorchFunction():
        drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float32) - 0.3
        return drawn.to(tensor.dtype)


def rounded_anew(model: nn.Module, seed: int) -> None:
    """Moves every weight by one rounding, up or down."""
    for parameter, sign in _signs(model, seed):
        parameter.mul_(1 + sign * torch.finfo(torch.float32).eps)


def moved(model: nn.Module, seed: int, part: float) -> None:
    """Moves every weight by ``part`` of itself, up or down, and those that are 0 by ``part``.

    A router of experts may begin with zeros, so that all experts are equally good.
    """
    for parameter, sign in _signs(model, seed):
        parameter.add_(torch.where(parameter == 0, 1, parameter) * sign * part)


def _signs(model: nn.Module, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                yield parameter, sign
