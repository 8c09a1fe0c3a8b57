"""Gives operators to a child process, one after the other, and ends it where one takes too long.

Owns the file of verdicts, one line of JSON for each operator, so that a run can go on where an
earlier one ended.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .judge import REFUSED, Verdict

#: Operators after which a child ends, so that what PyTorch's tracer keeps is given back.
_PER_CHILD = 60


def verdicts(
    names: Iterable[str], limit: float, deadline: float = float("inf"), jobs: int = 1
) -> Iterator[Verdict]:
    """The verdict on each operator by name, as they come.

    No operator is begun when ``time.monotonic()`` has passed the deadline.
    """
    pending = collections.deque(names)
    ended: queue.SimpleQueue[Verdict | None] = queue.SimpleQueue()

    def work():
        while pending and time.monotonic() < deadline:
            n = min(len(pending), _PER_CHILD)
            some = [pending.popleft() for _ in range(n)]
            done = 0
            for verdict in _of_one_child(some, limit, deadline):
                done += 1
                ended.put(verdict)
            pending.extendleft(reversed(some[done:]))
        ended.put(None)

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    n_working = jobs
    while n_working:
        verdict = ended.get()
        if verdict is None:
            n_working -= 1
        else:
            yield verdict


def _of_one_child(names: list[str], limit: float, deadline: float) -> Iterator[Verdict]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_work, args=(theirs, names), daemon=True)
    child.start()
    theirs.close()
    try:
        # The database of operators takes seconds to load.
        first = limit + 60
        for name in names:
            if time.monotonic() > deadline:
                return
            if not ours.poll(first):
                yield Verdict(name, [REFUSED], [f"it takes longer than {limit:.0f} s"])
                return
            first = limit
            try:
                yield Verdict(**ours.recv())
            except EOFError:
                yield Verdict(name, [REFUSED], ["the process ends"])
                return
    finally:
        child.kill()
        child.join()


def _work(pipe, names: list[str]) -> None:
    import logging

    import conftest  # noqa: F401  (finds Shorthaul where it is not installed)
    import torch

    from .judge import judge
    from .samples import operators

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    known = operators()
    for name in names:
        pipe.send(vars(judge(name, known[name])))
    pipe.close()
    sys.exit(0)


def read(path: Path) -> dict[str, Verdict]:
    """Verdicts that an earlier run wrote."""
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    return {found.operator: found for found in (Verdict(**json.loads(line)) for line in lines)}


def append(path: Path, verdict: Verdict) -> None:
    """Adds a verdict to the file of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(vars(verdict)) + "\n")
