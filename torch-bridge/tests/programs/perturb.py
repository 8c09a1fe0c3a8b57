"""Wraps that are wrong on purpose, so that the tests can show that programs see such an error.

Each is a kind of defect that a compiler had: other numbers, no gradient, a lost alias, the first
call's result again, side effects twice, hooks not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree


def _each_tensor(change: Callable, result: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, change, result)


def _shift(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * 1.25 + 0.25
    return ~tensor if tensor.dtype == torch.bool else tensor + 1


def _shifted(call: Callable, memory: dict) -> Callable:
    def shifted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if result is None or isinstance(result, np.ndarray | np.generic):
            return torch.zeros(())
        return _each_tensor(_shift, result)

    return shifted


def _apart(call: Callable, memory: dict) -> Callable:
    """The arguments are copies, so that nothing that is written to them is seen."""

    def copied(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _each_tensor(torch.clone, (args, kwargs))
        return call(*args, **kwargs)

    return copied


def _unshared(model: Any) -> Any:
    """The parameters are copies that still learn, so that later writes to them are not seen."""
    if not isinstance(model, nn.Module):
        return model

    def call(self, *args: Any, **kwargs: Any) -> Any:
        copies = {name: p.clone() for name, p in self.named_parameters()}
        return torch.func.functional_call(model, copies, args, kwargs)

    twin = object.__new__(type(type(model).__name__, (type(model),), {"__call__": call}))
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


def _detached(call: Callable, memory: dict) -> Callable:
    return lambda *args, **kwargs: _each_tensor(torch.Tensor.detach, call(*args, **kwargs))


def _copied(call: Callable, memory: dict) -> Callable:
    return lambda *args, **kwargs: _each_tensor(torch.clone, call(*args, **kwargs))


def _stale(call: Callable, memory: dict) -> Callable:
    def again(*args: Any, **kwargs: Any) -> Any:
        if "result" not in memory:
            memory["result"] = call(*args, **kwargs)
        return memory["result"]

    return again


def _twice(call: Callable, memory: dict) -> Callable:
    def again(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return call(*args, **kwargs)

    return again


def _silent(call: Callable, memory: dict) -> Callable:
    """Errors become a result."""

    def quiet(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception:
            return torch.zeros(())

    return quiet


def _perturbed(change: Callable) -> Callable:
    def wrap(model: Any) -> Any:
        memory: dict = {}
        if isinstance(model, type):
            return _derived(model, change)
        if not isinstance(model, nn.Module):
            return change(model, memory)
        twin = object.__new__(_derived(type(model), change, memory))
        object.__setattr__(twin, "__dict__", model.__dict__)
        return twin

    return wrap


def _derived(base: type, change: Callable, memory: dict | None = None) -> type:
    def call(self, *args: Any, **kwargs: Any) -> Any:
        own = memory if memory is not None else self.__dict__.setdefault("_memory", {})
        return change(lambda *a, **k: base.__call__(self, *a, **k), own)(*args, **kwargs)

    return type(base.__name__, (base,), {"__call__": call})


def _hookless(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        return model
    call = {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)}
    twin = object.__new__(type(type(model).__name__, (type(model),), call))
    object.__setattr__(twin, "__dict__", model.__dict__)
    return twin


PERTURBED: dict[str, Callable] = {
    "shifted": _perturbed(_shifted),
    "detached": _perturbed(_detached),
    "copied": _perturbed(_copied),
    "stale": _perturbed(_stale),
    "twice": _perturbed(_twice),
    "silent": _perturbed(_silent),
    "apart": _perturbed(_apart),
    "unshared": _unshared,
    "hookless": _hookless,
}
