"""README and guide as the tests see them: their fenced blocks and commands, and the program they
call.

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
#: The last one describes the package in a package index, where relative links lead nowhere.
OTHERS = tuple(
    ROOT / name
    for name in (
        *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"),
        "torch-bridge/README.md",
    )
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


@dataclass(frozen=True)
class Command:
    """A command of a shell block: its page, the line it is in, and its words.

    The words are those of a plain call: no environment variables before the program, ``python`` for
    every Python, and ``shorthaul-bench`` for ``python -m shorthaul.bench``.
    """

    page: Path
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def place(self) -> str:
        """Page and line, for messages."""
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """The path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def shell_commands(page: Path) -> list[Command]:
    """The commands of the shell blocks of a page, in order."""
    found = []
    for block in blocks(page):
        if block.language == "sh":
            lines = block.text.replace("\\\n", "  ").splitlines()
            for n, line in enumerate(lines):
                words = shlex.split(line, comments=True)
                while words:
                    end = words.index("&&") if "&&" in words else len(words)
                    if plain := _plain(words[:end]):
                        found.append(Command(page, block.line + n, plain))
                    words = words[end + 1 :]
    return found


def _plain(words: list[str]) -> tuple[str, ...]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words and words[0].rpartition("/")[2] == "python":
        words = ["python", *words[1:]]
    if words[:3] == ["python", "-m", "shorthaul.bench"]:
        words = ["shorthaul-bench", *words[3:]]
    return tuple(words)


@functools.cache
def program() -> Path:
    """The program `shorthaul` of this checkout, or the one that SHORTHAUL_PROGRAM names."""
    return built("shorthaul", "SHORTHAUL_PROGRAM", "--package", "shorthaul-cli")


def built(file: str, variable: str, *what: str) -> Path:
    """A program of this checkout, built unless the environment variable `variable` names it."""
    if named := os.environ.get(variable):
        return Path(named)
    subprocess.run(["cargo", "build", "--quiet", *what], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR") or "target")
    return ROOT / target / "debug" / file
