"""``python -m programs``: runs the programs beside eager, prints a table and a summary line.

Run it in ``torch-bridge/tests``. The exit status is 1 where a program differs, crashes or hangs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import fnmatch
import json
import logging
import sys
from collections.abc import Iterator

import conftest  # noqa: F401  (finds Shorthaul where it is not installed)
import torch._dynamo  # before any fork, so that children share it

from .ran import COMPILED, NOT_COMPILED, PARTLY
from .registry import THEMES, Program, programs
from .run import CRASHED, DIFFERS, HUNG, NEWER, REFUSED, SAME, Outcome, run_here, run_in_children
from .wraps import WRAPS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m programs", description=__doc__)
    parser.add_argument("filter", nargs="*", help="names like aliasing.* or *hook*; default all")
    parser.add_argument("--wrap", choices=WRAPS, default="module")
    parser.add_argument("--isolated", action="store_true", help="one process for each program")
    parser.add_argument("--here", action="store_true", help="all in this process, for a debugger")
    parser.add_argument(
        "--dynamo", action="append", default=[], metavar="NAME=VALUE", help="torch._dynamo.config"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=int, default=120, help="seconds a program may take")
    parser.add_argument(
        "--all", action="store_true", help="list the programs that are the same too"
    )
    parser.add_argument("--slowest", type=int, default=0, help="list the N that took longest")
    parser.add_argument("--json", help="write the outcomes to this file")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--loud", action="store_true", help="show what PyTorch logs")
    return parser.parse_args()


def _chosen(patterns: list[str]) -> list[Program]:
    made = programs()
    if not patterns:
        return made
    return [
        one
        for one in made
        if any(p == one.theme or fnmatch.fnmatch(one.full_name, p) for p in patterns)
    ]


def outcomes(chosen: list[Program], arguments: argparse.Namespace) -> Iterator[Outcome]:
    """The outcome of each program, as they end."""
    if arguments.here:
        return (run_here(one, arguments.wrap, arguments.limit) for one in chosen)
    at_most = 1 if arguments.isolated else 25
    return run_in_children(chosen, arguments.wrap, arguments.jobs, arguments.limit, at_most)


def _print_summary(ended: list[Outcome], arguments: argparse.Namespace) -> None:
    by_theme = collections.defaultdict(collections.Counter)
    for outcome in ended:
        by_theme[outcome.program.split(".")[0]].update([outcome.kind, outcome.ran])
    kinds = (SAME, REFUSED, NEWER, DIFFERS, CRASHED, HUNG)
    columns = (*kinds, COMPILED, PARTLY, NOT_COMPILED)
    print(f"\n{'theme':<16}" + " ".join(f"{column:>8}" for column in columns))
    for theme in THEMES:
        if theme in by_theme:
            counts = (f"{by_theme[theme][column]:>{max(8, len(column))}}" for column in columns)
            print(f"{theme:<16}" + " ".join(counts))
    for outcome in sorted(ended, key=lambda o: -o.seconds)[: arguments.slowest]:
        print(f"{outcome.seconds:7.2f} s  {outcome.program}")
    total = sum(by_theme.values(), collections.Counter())
    counts = ", ".join(f"{total[kind]} {kind}" for kind in kinds)
    who = ", ".join(f"{total[ran]} {ran}" for ran in (COMPILED, PARTLY, NOT_COMPILED))
    seconds = sum(outcome.seconds for outcome in ended)
    print(f"\n{arguments.wrap}: {len(ended)} programs: {counts} ({seconds:.0f} s of work)")
    print(f"In the processes of the programs themselves: {who}")


def main() -> int:
    arguments = _arguments()
    chosen = _chosen(arguments.filter)
    if arguments.list:
        print("\n".join(one.full_name for one in chosen))
        return 0
    for setting in arguments.dynamo:
        key, value = setting.split("=")
        setattr(torch._dynamo.config, key, ast.literal_eval(value))
    if not arguments.loud:
        logging.disable(logging.ERROR)
    ended = []
    for outcome in outcomes(chosen, arguments):
        ended.append(outcome)
        if arguments.all or outcome.kind != SAME:
            print(f"{outcome.kind:<8} {outcome.program}", flush=True)
            for reason in outcome.reasons[:6]:
                print(f"           {reason}")
    _print_summary(ended, arguments)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([vars(outcome) for outcome in ended], file, indent=1)
    return int(any(outcome.kind in (DIFFERS, CRASHED, HUNG) for outcome in ended))


if __name__ == "__main__":
    sys.exit(main())
