"""What a captured graph took from Python for constant.

Owns the record of attributes that ``forward`` reads while it is captured (numbers, strings, tuples
of them, tensors that are neither parameters nor buffers) and the check that they still have those
values. Lists, dicts and other objects are not watched.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from ._errors import RecompileWarning

_SCALARS = frozenset((bool, int, float, complex, str, type(None), torch.dtype))

#: Attributes of every module, which hooks and calls read; ``training`` is part of a program's key.
_MACHINERY = frozenset(nn.Module().__dict__)

_patching = threading.RLock()


class Guards:
    """Attributes with the values that a program was made for."""

    def __init__(self) -> None:
        #: By the identity of a module's dictionary and the attribute's name: dictionary, value.
        self._read: dict[tuple[int, str], tuple[dict, Any]] = {}
        self._written: set[tuple[int, str]] = set()

    def note(self, attributes: dict, name: str, value: Any) -> None:
        """Records an attribute as it was first read."""
        self._read.setdefault((id(attributes), name), (attributes, _snapshot(value)))

    def note_written(self, attributes: dict, name: str) -> None:
        """Records an attribute that ``forward`` sets."""
        self._written.add((id(attributes), name))

    def forget_written(self, owner: str) -> None:
        """Stops watching what ``forward`` itself sets; says so, as a program does not do it."""
        for key in self._written:
            self._read.pop(key, None)
        if self._written:
            names = ", ".join(f"`{name}`" for name in sorted({name for _, name in self._written}))
            warnings.warn(
                f"the forward of {owner} sets {names} of its modules, which a compiled module does "
                f"not do. Keep such state in a buffer, or outside of forward.",
                RecompileWarning,
                stacklevel=2,
            )

    def hold(self) -> bool:
        """Whether every attribute still has its value."""
        return all(_same(held, key, value) for key, (held, value) in self._read.items())


class _TensorAsRead:
    """A tensor with its version when it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version


#: Stands for an attribute that the instance does not have: the class's own is read.
_ABSENT = object()


def _snapshot(value: Any) -> Any:
    return _TensorAsRead(value) if isinstance(value, torch.Tensor) else value


def _same(attributes: dict, key: tuple[int, str], value: Any) -> bool:
    now = attributes.get(key[1], _ABSENT)
    if isinstance(value, _TensorAsRead):
        return value.tensor is now and value.version == now._version
    if now is value:
        return True
    if type(now) is not type(value):
        return False
    if isinstance(value, tuple):
        return list(map(type, now)) == list(map(type, value)) and now == value
    return now == value


def _is_watched(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(type(item) in _SCALARS for item in value)
    return kind in _SCALARS or (isinstance(value, torch.Tensor) and not value.is_inference())


@contextlib.contextmanager
def watching(stand_in: nn.Module, owner: nn.Module) -> Iterator[Guards]:
    """Records what this thread reads of the attributes of ``owner`` and its submodules.

    ``stand_in`` is ``owner`` under another class, with a dictionary of its own. Graph modules have
    no Python state that matters. Changes to classes are not seen, but for an instance's own
    attribute in place of its class's.
    """
    guards, thread = Guards(), threading.get_ident()
    of_stand_in = stand_in.__dict__
    modules = [child for child in owner.modules() if not isinstance(child, fx.GraphModule)]
    watched = {id(child.__dict__) for child in modules}
    if id(owner.__dict__) in watched:
        watched.add(id(of_stand_in))

    def read(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if _is_watched(value) and threading.get_ident() == thread and name not in _MACHINERY:
            attributes = object.__getattribute__(module, "__dict__")
            if id(attributes) in watched:
                held = owner.__dict__ if attributes is of_stand_in else attributes
                guards.note(held, name, value if name in attributes else _ABSENT)
        return value

    def write(module: nn.Module, name: str, value: Any) -> None:
        of_module = module.__dict__
        is_state = name in of_module["_parameters"] or name in of_module["_buffers"]
        ours = id(of_module) in watched and threading.get_ident() == thread
        if ours and not is_state and _is_watched(value):
            guards.note_written(owner.__dict__ if of_module is of_stand_in else of_module, name)
        own_write(module, name, value)

    with _patching:
        own_read, own_write = vars(nn.Module).get("__getattribute__"), nn.Module.__setattr__
        try:
            nn.Module.__getattribute__, nn.Module.__setattr__ = read, write
            yield guards
        finally:
            nn.Module.__setattr__ = own_write
            if own_read is not None:
                nn.Module.__getattribute__ = own_read
            elif "__getattribute__" in vars(nn.Module):
                del nn.Module.__getattribute__
