"""The folder in which compiled kernels are kept for later processes.

``SHORTHAUL_CACHE_DIR`` chooses the folder (default ``$XDG_CACHE_HOME/shorthaul`` or
``~/.cache/shorthaul``), ``SHORTHAUL_CACHE_LIMIT`` its largest size (bytes, or with K, M, G).

This module shows and empties the folder. Single entries are written and removed by the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import _native
from ._errors import ToolchainError


@dataclass(frozen=True)
class CacheInfo:
    """What the cache holds.

    If the cache grows beyond ``limit_bytes``, the entries unused for longest are removed.
    ``is_temporary`` says that the chosen folder cannot be used, and ``folder`` is a temporary one.
    """

    folder: str
    n_entries: int
    n_bytes: int
    limit_bytes: int
    is_temporary: bool

    def __str__(self) -> str:
        size, limit = self.n_bytes / 2**20, self.limit_bytes / 2**20
        until = ", until this process ends" if self.is_temporary else ""
        return f"{self.n_entries} entries, {size:.1f} of {limit:.0f} MiB, in {self.folder}{until}"


def info() -> CacheInfo:
    """Returns what the cache holds. Takes time linear in the number of entries."""
    return CacheInfo(*_called(_native.cache_info))


def clear() -> int:
    """Removes all compiled kernels from the folder; returns the number of bytes freed.

    Compiled modules keep running; new ones compile again.
    """
    _, n_bytes = _called(_native.cache_clear)
    return n_bytes


def _called(function):
    try:
        return function()
    except _native.CompileFailure as error:
        raise ToolchainError(str(error)) from None


__all__ = ["CacheInfo", "clear", "info"]
