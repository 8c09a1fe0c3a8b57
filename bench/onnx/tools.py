"""The optimizers that are compared: how each is called, and which are here.

Owns command lines and versions. Every optimizer runs as a program of its own with its defaults;
onnxoptimizer repeats its passes until nothing changes, which its default does not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tool:
    """An optimizer: name, version, and its command with places for IN and OUT."""

    name: str
    version: str
    command: tuple[str, ...]

    def command_for(self, source: Path, target: Path) -> list[str]:
        """The command that writes ``target`` from ``source``."""
        places = {"IN": str(source), "OUT": str(target)}
        return [places.get(word, word) for word in self.command]

    def described(self) -> str:
        """The command as a reader would type it."""
        words = [Path(word).name if word.startswith("/") else word for word in self.command]
        return " ".join(words)


PEERS = {
    "onnxsim": ("-m", "onnxsim", "IN", "OUT"),
    "onnxslim": ("-m", "onnxslim", "IN", "OUT"),
    "onnxoptimizer": ("-m", "onnxoptimizer", "IN", "OUT", "--fixed_point"),
}


def available(shorthaul: Path) -> tuple[list[Tool], list[str]]:
    """The tools that can run, ours first, and a sentence for each that cannot."""
    tools, missing = [], []
    version = _shorthaul_version(shorthaul)
    if version is None:
        missing.append(f"shorthaul: {shorthaul.name} is not built or has no `optimize`")
    else:
        plain = (str(shorthaul), "optimize", "IN", "-o", "OUT")
        tools.append(Tool("shorthaul", version, plain))
        tools.append(Tool("shorthaul ort-cpu", version, (*plain, "--target", "ort-cpu")))
    for name, words in PEERS.items():
        if not installed(name):
            missing.append(f"{name}: not installed (pip install -r bench/onnx/requirements.txt)")
            continue
        tools.append(Tool(name, importlib.metadata.version(name), (sys.executable, *words)))
    return tools, missing


def installed(name: str) -> bool:
    """Whether Python finds the package."""
    return importlib.util.find_spec(name) is not None


def _shorthaul_version(program: Path) -> str | None:
    """The program's version, where it is there and knows how to optimize."""
    if not program.is_file():
        return None
    help_text = subprocess.run(
        [program, "optimize", "--help"], capture_output=True, text=True, check=False
    )
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if help_text.returncode or version.returncode:
        return None
    return version.stdout.split()[-1]
