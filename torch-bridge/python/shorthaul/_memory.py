"""Blocks of memory that the next step uses again.

Owns the saved block and the arena of every call. Fresh memory from the system costs a page fault
for every 4 KiB, which for a network's saved activations is as much as a quarter of its step; a
block that comes back when its tensor dies costs nothing. All programs of a process share large
blocks, so a model that runs with many sizes takes the memory of the largest. What has not been
needed lately goes back to the system. Never decides sizes.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import threading
import weakref

import torch

#: Below this many bytes PyTorch's own allocator has memory at hand.
_SMALL = 1 << 20

#: Sizes of large blocks are multiples of this, the size of a huge page.
_PAGE = 2 << 20

#: A peak of use is no longer recent after this many loans for each block, and this many more.
_LENDS_PER_BLOCK, _LENDS = 4, 64

#: Always given, since the caller's default device may be another one.
_CPU = torch.device("cpu")


class Pool:
    """Large blocks, lent as tensors, which return when their storage dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Blocks that nobody uses, the one that came back last at the end.
        self._free: list[mmap.mmap] = []
        #: Blocks that came back since the last lend. Appending needs no lock: a tensor may die
        #: anywhere, also where this thread holds it.
        self._returned: collections.deque[mmap.mmap] = collections.deque()
        self._free_bytes = self._lent_bytes = self._n_lent = 0
        #: Most bytes that were lent at once, in this window of lends and in the one before.
        self._peak = self._peak_before = self._n_lends = 0
        #: Whether a program has gone since the last lend.
        self._is_stale = False

    @property
    def n_bytes(self) -> int:
        """The bytes of all blocks."""
        with self._lock:
            self._take_back()
            return self._free_bytes + self._lent_bytes

    def lend(self, n_bytes: int) -> torch.Tensor:
        """A ``uint8`` tensor of ``n_bytes`` with arbitrary contents, aligned to a page."""
        with self._lock:
            block = self._chosen(n_bytes)
        lease = (ctypes.c_uint8 * n_bytes).from_buffer(block)
        tensor = torch.frombuffer(lease, dtype=torch.uint8)
        # The storage holds the only lasting reference to the lease.
        weakref.finalize(lease, self._returned.append, block).atexit = False
        return tensor

    def forget(self) -> None:
        """Gives what was kept for a program that has gone back to the system."""
        self._is_stale = True
        # The garbage collector calls this, perhaps in the middle of `lend`, which then does it.
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _chosen(self, n_bytes: int) -> mmap.mmap:
        self._take_back()
        found = min((b for b in self._free if len(b) >= n_bytes), key=len, default=None)
        size = -(-n_bytes // _PAGE) * _PAGE
        # A block of more than twice the size is left to others, if there is room for a new one.
        if found is not None and len(found) > 2 * size and self._has_room(size):
            found = None
        if found is None:
            found = self._fresh(size)
        else:
            self._free = [block for block in self._free if block is not found]
            self._free_bytes -= len(found)
        self._lent_bytes += len(found)
        self._n_lent += 1
        self._count()
        while self._free and not self._has_room(0):
            self._free_bytes -= len(self._free.pop(0))
        return found

    def _fresh(self, size: int) -> mmap.mmap:
        try:
            return _fresh(size)
        except OSError:  # no memory: what is kept may be enough
            self._free.clear()
            self._free_bytes = 0
            return _fresh(size)

    def _has_room(self, size: int) -> bool:
        most = max(self._peak, self._peak_before)
        return 4 * (self._free_bytes + self._lent_bytes + size) <= 5 * most

    def _count(self) -> None:
        self._peak = max(self._peak, self._lent_bytes)
        self._n_lends += 1
        if self._n_lends > _LENDS + _LENDS_PER_BLOCK * (self._n_lent + len(self._free)):
            self._peak_before, self._peak, self._n_lends = self._peak, self._lent_bytes, 0

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free.append(block)
            self._free_bytes += len(block)
            self._lent_bytes -= len(block)
            self._n_lent -= 1
        if self._is_stale:
            self._is_stale = False
            self._free.clear()
            self._free_bytes = 0
            self._peak = self._peak_before = self._lent_bytes


#: The large blocks of this process.
POOL = Pool()

# A thread that is not in the child may have held the lock; its blocks are the child's own copies.
os.register_at_fork(after_in_child=lambda: setattr(POOL, "_lock", threading.Lock()))


class Blocks:
    """The memory of one program: large blocks of the pool, and small ones of its own."""

    def __init__(self) -> None:
        #: Small blocks that passes are done with, by size.
        self._spare: dict[int, list[torch.Tensor]] = {}
        weakref.finalize(self, POOL.forget).atexit = False

    def lend(self, n_bytes: int) -> torch.Tensor:
        """A ``uint8`` tensor of ``n_bytes`` with arbitrary contents, aligned to 64 bytes."""
        if n_bytes < _SMALL:
            return torch.empty(n_bytes, dtype=torch.uint8, device=_CPU)
        return POOL.lend(n_bytes)

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
