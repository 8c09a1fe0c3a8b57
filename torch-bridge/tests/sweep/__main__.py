"""``python -m sweep``: compiles tiny networks of transformers or timm, prints how each ended.

Run it in ``torch-bridge/tests``. The networks come in an order that a hash of their names gives, so
that a run which is stopped early has a sample. The exit status is 1 where a network differs, raises
or crashes.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import logging
import sys
import zlib

import conftest  # noqa: F401  (finds Shorthaul where it is not installed)
import torch
import torch._dynamo  # before any fork, so that children share it

from .run import CRASHED, DIFFERS, KINDS, RAISES, Network, Outcome, outcomes, run_here


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sweep", description=__doc__)
    parser.add_argument("package", choices=("transformers", "timm"))
    parser.add_argument("pattern", nargs="*", help="names like llama* or *vit*; default all")
    parser.add_argument("--json", help="write one line for each outcome to this file")
    parser.add_argument("--limit", type=int, default=120, help="seconds a network may take")
    parser.add_argument("--steps", type=int, help="run only the first ones of the three steps")
    parser.add_argument("--most", type=int, help="stop after this many networks")
    parser.add_argument("--skip", help="leave out the networks that this file of --json has")
    parser.add_argument("--here", action="store_true", help="in this process, for a debugger")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser.parse_args()


def _networks(arguments: argparse.Namespace) -> list[Network]:
    if arguments.package == "transformers":
        from .transformers_networks import networks
    else:
        from .timm_networks import networks
    chosen = [
        one
        for one in networks()
        if not arguments.pattern or any(fnmatch.fnmatch(one.name, p) for p in arguments.pattern)
    ]
    if arguments.skip:
        with open(arguments.skip) as file:
            done = {json.loads(line)["network"] for line in file}
        chosen = [one for one in chosen if one.name not in done]
    chosen.sort(key=lambda one: zlib.crc32(one.name.encode()))
    return chosen[: arguments.most]


def _print(outcome: Outcome) -> None:
    numbers = f"{outcome.first_seconds:5.1f} s first, {outcome.warm_ratio:5.2f} of eager"
    print(f"{outcome.kind:<9} {outcome.network:<44} {numbers}  {outcome.made}", flush=True)
    for reason in outcome.reasons[:10] + outcome.outside[:4]:
        print(f"            {reason}", flush=True)


def main() -> int:
    arguments = _arguments()
    chosen = _networks(arguments)
    if arguments.list:
        print("\n".join(one.name for one in chosen))
        return 0
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    ended = []
    if arguments.here:
        running = (run_here(one, arguments.steps) for one in chosen)
    else:
        running = outcomes(chosen, arguments.limit, arguments.steps)
    for outcome in running:
        ended.append(outcome)
        _print(outcome)
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.write(json.dumps(vars(outcome)) + "\n")
    counts = collections.Counter(outcome.kind for outcome in ended)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    print(f"\n{arguments.package}: {len(ended)} networks: {summary}")
    return int(any(outcome.kind in (DIFFERS, RAISES, CRASHED) for outcome in ended))


if __name__ == "__main__":
    sys.exit(main())
