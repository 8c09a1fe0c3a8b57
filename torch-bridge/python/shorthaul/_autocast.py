"""What ``torch.autocast`` asks of a program.

Owns the region that capture puts around ``forward``: export ignores a region around the module, but
keeps one inside, and PyTorch's decompositions turn it into casts of the graph. Parameters stay what
they are; their gradients come back through the casts in the parameters' type.
"""

from __future__ import annotations

import functools

import torch

_KINDS = ("cpu", "cuda")


def key() -> tuple:
    """What a program is specific to: the kinds of devices with autocast on, and its type."""
    on = (kind for kind in _KINDS if torch.is_autocast_enabled(kind))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


def requested(device: torch.device) -> torch.dtype | None:
    """The type that autocast is on with for tensors of ``device``."""
    return dict(key()).get(device.type)


def suspended(device: torch.device) -> torch.autocast:
    """A region without autocast, for tracing."""
    return torch.autocast(device.type, enabled=False)


def casting(forward, device: torch.device):
    """``forward`` within an autocast region of its own, if one is on now."""
    dtype = requested(device)
    if dtype is None:
        return forward

    @functools.wraps(forward)
    def cast_forward(self, *args, **kwargs):
        with torch.autocast(device.type, dtype=dtype):
            return forward(self, *args, **kwargs)

    return cast_forward
