"""README and guide as the tests see them: their fenced blocks, and the program they call.

Owns reading the pages and finding or building the program `shorthaul`; runs no block by itself.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "src").glob("*.md")))

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line its text begins in."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def commands(page: Path, program: str) -> list[list[str]]:
    """The arguments of each line of a shell block that calls ``program``."""
    lines = [
        line
        for block in blocks(page)
        if block.language == "sh"
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    found = (shlex.split(line, comments=True) for line in lines)
    return [words[1:] for words in found if words[:1] == [program]]


@functools.cache
def program() -> Path:
    """The program `shorthaul` of this checkout, or the one that SHORTHAUL_PROGRAM names."""
    if named := os.environ.get("SHORTHAUL_PROGRAM"):
        return Path(named)
    subprocess.run(
        ["cargo", "build", "--quiet", "--package", "shorthaul-cli"], cwd=ROOT, check=True
    )
    target = Path(os.environ.get("CARGO_TARGET_DIR") or "target")
    return ROOT / target / "debug" / "shorthaul"
