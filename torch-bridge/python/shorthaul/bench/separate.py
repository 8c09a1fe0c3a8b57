"""One network of several in a process of its own: ``--separate``.

Owns the arguments of such a process and the report of how it ended. If a process crashes or takes
too long, only its own network is lost.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .options import Setting

#: Seconds for one network; the slowest of ours takes a tenth of them.
_TIME_LIMIT = 1800


def run(setting: Setting, options: argparse.Namespace) -> tuple[list[dict], bool]:
    """The results that the process wrote, and whether Shorthaul did well there."""
    with tempfile.TemporaryDirectory(prefix="shorthaul-bench-") as folder:
        written = Path(folder) / "results.json"
        command = [sys.executable, "-m", "shorthaul.bench", *setting.arguments()]
        command += [*_passed_on(options), "--json", str(written)]
        try:
            code = subprocess.run(command, check=False, timeout=_TIME_LIMIT).returncode
        except subprocess.TimeoutExpired:
            print(f"\n{setting}: ended after {_TIME_LIMIT} seconds", flush=True)
            return [], False
        if code not in (0, 1):
            print(f"\n{setting}: the process ended with {_ending(code)}", flush=True)
        found = json.loads(written.read_text())["results"] if written.exists() else []
        return found, code == 0


def _passed_on(options: argparse.Namespace) -> list[str]:
    given = ["--rounds", str(options.rounds), "--warmup", str(options.warmup)]
    given += ["--against", options.against, "--seed", str(options.seed)]
    for flag in ("no_first_step", "limits", "check", "smooth", "report", "profile"):
        if getattr(options, flag):
            given.append("--" + flag.replace("_", "-"))
    return given


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
