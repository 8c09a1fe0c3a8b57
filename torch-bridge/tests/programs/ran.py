"""Who ran a program: compiled kernels, PyTorch, or both.

"Same as eager" alone does not say that anything was compiled. Owns the words for it. Processes that
a program starts are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from shorthaul._call import Call
from shorthaul._dynamo import GraphCompiler

COMPILED, PARTLY, NOT_COMPILED = "compiled", "partly", "not compiled"


class Watch:
    """Counts calls of compiled programs, and collects sentences about what PyTorch ran."""

    def __init__(self):
        self.n_calls = 0
        self.outside: list[str] = []

    @property
    def ran(self) -> str:
        if not self.n_calls:
            return NOT_COMPILED
        return PARTLY if self.outside else COMPILED


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Watches everything that this process runs inside."""
    watch = Watch()
    call, say = Call.__call__, GraphCompiler._say_or_refuse

    def counted(self, *args):
        watch.n_calls += 1
        return call(self, *args)

    def collected(self, message):
        watch.outside.append(message)
        return say(self, message)

    with (
        mock.patch.object(Call, "__call__", counted),
        mock.patch.object(GraphCompiler, "_say_or_refuse", collected),
    ):
        yield watch
