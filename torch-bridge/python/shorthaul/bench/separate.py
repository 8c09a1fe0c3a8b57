"""One network of several in a process of its own: ``--separate``.

Owns the arguments of such a process and the report of how it ended. If a process crashes or takes
too long, only its own network is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import alone, environment
from .options import Setting

#: Seconds for one network; the slowest of the bench takes a tenth of them.
_TIME_LIMIT = 1800


def run(
    setting: Setting, options: argparse.Namespace, processes: alone.Processes
) -> tuple[list[dict], bool]:
    """The results that the process wrote, and whether Shorthaul did well there.

    If the process crashes, each peer runs alone. Those that crash alone too are left out of a
    second process; their entries say so.
    """
    peers = [peer for peer in options.against.split(",") if peer]
    with tempfile.TemporaryDirectory(prefix="shorthaul-bench-") as folder:
        written = Path(folder) / "results.json"
        code = _ended(setting, options, peers, written, processes)
        crashing: dict[str, str] = {}
        if code is not None and code < 0 and code != -signal.SIGKILL:
            found = {peer: alone.crash(setting, peer) for peer in peers}
            crashing = {peer: ending for peer, ending in found.items() if ending}
        if crashing:
            names = " and ".join(crashing)
            verb = "crashes" if len(crashing) == 1 else "crash"
            print(
                f"{names} also {verb} without Shorthaul; measuring again without {names}",
                flush=True,
            )
            others = [peer for peer in peers if peer not in crashing]
            code = _ended(setting, options, others, written, processes)
        results = json.loads(written.read_text())["results"] if written.exists() else []
    for result in results:
        for peer, ending in crashing.items():
            result.get("variants", {})[peer] = {"error": f"its process ends with {ending}"}
    return results, code == 0


def _ended(
    setting: Setting,
    options: argparse.Namespace,
    peers: list[str],
    written: Path,
    processes: alone.Processes,
) -> int | None:
    """The code with which a process of some variants ended; ``None`` if it took too long."""
    command = [sys.executable, "-m", "shorthaul.bench", *setting.arguments()]
    command += [*_passed_on(options), "--against", ",".join(peers), "--json", str(written)]
    # It inherits this process's environment, which the results record.
    command.append("--plain-environment")
    shared = contextlib.nullcontext({}) if options.no_first_step else processes.shared()
    try:
        with environment.unbound(), shared as more:
            code = subprocess.run(command, check=False, timeout=_TIME_LIMIT, **more).returncode
    except subprocess.TimeoutExpired:
        processes.end()  # it may be answering the process that was ended
        print(f"\n{setting}: ended after {_TIME_LIMIT} seconds", flush=True)
        return None
    if code not in (0, 1):
        processes.end()
    if code == -signal.SIGKILL:
        print(f"\n{setting}: skipped, {alone.KILLED}", flush=True)
    elif code not in (0, 1):
        print(f"\n{setting}: the process ended with {alone.ending(code)}", flush=True)
    return code


def _passed_on(options: argparse.Namespace) -> list[str]:
    given = ["--rounds", str(options.rounds), "--warmup", str(options.warmup)]
    given += ["--seed", str(options.seed)]
    if options.seconds is not None:
        given += ["--seconds", str(options.seconds)]
    for flag in ("no_first_step", "limits", "errors", "check", "smooth", "report", "profile"):
        if getattr(options, flag):
            given.append("--" + flag.replace("_", "-"))
    return given
