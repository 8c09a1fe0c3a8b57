"""The casts that ``torch.autocast`` demands, and regions of autocast that change nothing.

Owns the region that capture puts around a function: export ignores a region around the module, but
keeps one inside, and PyTorch's decompositions turn it into casts of the graph. Parameters stay what
they are; their gradients come back through the casts in the parameters' type.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import fx

#: What Dynamo's graphs call where a region begins and ends.
ENTER = torch.amp.autocast_mode._enter_autocast
EXIT = torch.amp.autocast_mode._exit_autocast
AUTOCAST = (ENTER, EXIT)

_KINDS = ("cpu", "cuda")

_is_on_anywhere = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def key() -> tuple:
    """What a program is specific to: the kinds of devices with autocast on, and its type."""
    if not _is_on_anywhere():
        return ()
    on = (kind for kind in _KINDS if torch.is_autocast_enabled(kind))
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


def suspended(device: torch.device) -> torch.autocast:
    """A region without autocast, for tracing."""
    return torch.autocast(device.type, enabled=False)


@contextlib.contextmanager
def as_in(wanted: tuple) -> Iterator[None]:
    """Autocast as it was where :func:`key` gave ``wanted``."""
    dtypes = dict(wanted)
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            if kind in dtypes or torch.is_autocast_enabled(kind):
                dtype = dtypes.get(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        yield


def casting(function, device: torch.device):
    """``function`` within an autocast region of its own, if one is on now."""
    dtype = dict(key()).get(device.type)
    return function if dtype is None else within(function, (device.type, dtype, True, None))


def within(function, arguments: tuple):
    """``function`` within the region that ``torch.autocast(*arguments)`` opens."""
    kind, dtype, enabled, cache = arguments

    @functools.wraps(function)
    def cast(*inputs):
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache):
            return function(*inputs)

    return cast


def drop_idle_regions(graph: fx.Graph) -> None:
    """before  enter(kind, enabled=False), nodes, exit   after  nodes

    Legal where autocast is off already for this kind of device, and no region is left inside, which
    might take its type from this one. Dynamo guards whether it is off where the graph begins.
    """
    opened: list[fx.Node] = []
    needed: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.target is ENTER:
            opened.append(node)
        elif node.target is EXIT and opened and node.args == (opened[-1],):
            enter = opened.pop()
            if enter not in needed and _changes_nothing(enter, opened):
                graph.erase_node(node)
                graph.erase_node(enter)
            else:
                needed.update(opened)


def _changes_nothing(enter: fx.Node, around: list[fx.Node]) -> bool:
    kind, _, enabled, _ = enter.args
    if enabled is not False or torch.is_autocast_enabled(kind):
        return False
    return all(one.args[0] != kind or one.args[2] is False for one in around)
