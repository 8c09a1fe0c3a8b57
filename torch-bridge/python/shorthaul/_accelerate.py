"""Lets ``accelerate``, and with it ``transformers.Trainer``, know the backend ``shorthaul``.

Owns one entry in accelerate's closed list of backends. Never imports accelerate: the entry is made
when somebody else does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

_MODULE = "accelerate.utils.dataclasses"
_NAME = "SHORTHAUL"


def add_backend() -> None:
    """Adds the entry, now or as soon as accelerate's list exists."""
    if _MODULE in sys.modules:
        _extend(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _extend(module) -> None:
    backends = module.DynamoBackend
    known = backends._missing_

    def missing(cls, value):
        if value != _NAME:
            return known(value)
        member = str.__new__(cls, _NAME)
        member._name_ = member._value_ = _NAME
        return member

    backends._missing_ = classmethod(missing)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds accelerate's module as other finders do, and extends its list once it has run."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module by another loader, then extends the list."""

    def __init__(self, inner):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module) -> None:
        self.inner.exec_module(module)
        _extend(module)


__all__ = ["add_backend"]
