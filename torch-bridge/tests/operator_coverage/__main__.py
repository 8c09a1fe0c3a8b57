"""``python -m operator_coverage``: runs every operator and writes ``docs/src/coverage.md``.

Run it in ``torch-bridge/tests``. Verdicts go to a file at once, so that a run that was stopped goes
on with ``--resume``. The exit status is 1 where an operator is different.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import sys
import time
from pathlib import Path

from . import page
from .judge import DIFFERENT, NATIVE, VIEW
from .samples import operators
from .workers import append, read, verdicts

_FILE = Path(__file__).parents[3] / "target" / "operator-coverage.jsonl"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m operator_coverage", description=__doc__)
    parser.add_argument("filter", nargs="*", help="names like softmax or nn.*; default all")
    parser.add_argument("--resume", action="store_true", help="keep verdicts of an earlier run")
    parser.add_argument("--limit", type=float, default=90, help="seconds an operator may take")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds")
    parser.add_argument("--verdicts", type=Path, default=_FILE, help="where verdicts are kept")
    parser.add_argument("--again", action="append", default=[], help="run these verdicts again")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    names = [
        name
        for name in operators()
        if not arguments.filter or any(fnmatch.fnmatch(name, p) for p in arguments.filter)
    ]
    known = read(arguments.verdicts)
    again = {name for name, old in known.items() if set(old.samples) & set(arguments.again)}
    if arguments.resume:
        names = [name for name in names if name not in known or name in again]
    elif not arguments.filter:
        known = {}
        arguments.verdicts.unlink(missing_ok=True)
    deadline = time.monotonic() + (arguments.seconds or float("inf"))
    n_done = 0
    for verdict in verdicts(names, arguments.limit, deadline, arguments.jobs):
        n_done += 1
        known[verdict.operator] = verdict
        append(arguments.verdicts, verdict)
        if not set(verdict.samples) <= {NATIVE, VIEW}:
            words = collections.Counter(verdict.samples)
            counted = ", ".join(f"{n} {word}" for word, n in words.items())
            print(f"{verdict.operator}: {counted}: {'; '.join(verdict.reasons)}", flush=True)
    if n_done < len(names):
        print(f"{len(names) - n_done} operators are left; go on with --resume")
        return 2
    if known.keys() >= operators().keys():
        page.PAGE.parent.mkdir(exist_ok=True)
        page.PAGE.write_text(page.text_of(known.values()))
        print(f"wrote {page.PAGE}")
    return int(any(DIFFERENT in verdict.samples for verdict in known.values()))


if __name__ == "__main__":
    sys.exit(main())
