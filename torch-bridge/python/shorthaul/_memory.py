"""Blocks of memory that the next step uses again.

Owns the saved block and the arena of every call. Fresh memory from the system costs a page fault
for every 4 KiB, which for a network's saved activations is as much as a quarter of its step; a
block that comes back when its tensor dies costs nothing. Never decides sizes.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

#: Below this many bytes PyTorch's own allocator has memory at hand.
_SMALL = 1 << 20

#: Said aloud, since the caller's default device may be another one.
_CPU = torch.device("cpu")


class Blocks:
    """Memory of one program: blocks lent as tensors, which return when their storage dies."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}
        #: Small blocks that passes are done with, by size.
        self._spare: dict[int, list[torch.Tensor]] = {}

    def lend(self, n_bytes: int) -> torch.Tensor:
        """A ``uint8`` tensor of ``n_bytes`` with arbitrary contents, aligned to 64 bytes."""
        if n_bytes < _SMALL:
            return torch.empty(n_bytes, dtype=torch.uint8, device=_CPU)
        free = self._free.setdefault(n_bytes, [])
        block = free.pop() if free else _fresh(n_bytes)
        lease = (ctypes.c_uint8 * n_bytes).from_buffer(block)
        tensor = torch.frombuffer(lease, dtype=torch.uint8)
        # The storage holds the only lasting reference to the lease.
        weakref.finalize(lease, free.append, block).atexit = False
        return tensor

    def lend_briefly(self, n_bytes: int) -> torch.Tensor:
        """Like :meth:`lend`, but prefers a small block that was given back."""
        try:
            return self._spare[n_bytes].pop()
        except (KeyError, IndexError):
            return self.lend(n_bytes)

    def give_back(self, block: torch.Tensor) -> None:
        """Keeps a small block that is no longer used for the next pass."""
        n_bytes = block.numel()
        if n_bytes < _SMALL:
            self._spare.setdefault(n_bytes, []).append(block)


def _fresh(n_bytes: int) -> mmap.mmap:
    # Not shared: a forked child works in a copy of its own, as with any other memory.
    block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
