"""Writes docs/src/api.md from the docstrings of the package: ``python docs/api.py``.

Owns the list of what is public. A test holds the page up to date; ``--check`` only compares.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import shorthaul
import shorthaul.notebook
import shorthaul.onnx

PAGE = Path(__file__).parent / "src" / "api.md"

HEAD = """\
# Python API

This page lists the public functions and classes of the Python package. Names that start with an
underscore are not public. `docs/api.py` writes this page from the docstrings.
"""

#: Sections of the page: a title, a module, and the names in it.
SECTIONS: tuple[tuple[str, ModuleType, tuple[str, ...]], ...] = (
    (
        "shorthaul",
        shorthaul,
        (
            "module",
            "report",
            "Report",
            "profile",
            "Profile",
            "recipe",
            "Recipe",
            "Decision",
            "search",
            "Searched",
            "tune",
            "Tuned",
            "bisect",
            "Bisection",
            "machine",
            "Machine",
            "Level",
        ),
    ),
    ("shorthaul.notebook", shorthaul.notebook, ("Explorer",)),
    ("shorthaul.optim", shorthaul.optim, ("AdamW", "Adam", "SGD")),
    ("shorthaul.onnx", shorthaul.onnx, ("optimize", "rewrites", "Optimized", "grad", "OnnxError")),
    ("shorthaul.cache", shorthaul.cache, ("info", "CacheInfo", "clear")),
    ("shorthaul.cuda", shorthaul.cuda, ("available", "info", "Info", "Device")),
    ("shorthaul.products", shorthaul.products, ("every", "timed", "Timed", "launched", "machine")),
    (
        "Errors and warnings",
        shorthaul,
        tuple(
            name
            for name in shorthaul.__all__
            if isinstance(getattr(shorthaul, name), type)
            and issubclass(getattr(shorthaul, name), Exception)
        ),
    ),
)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, module, names in SECTIONS:
        parts.append(f"## {title}\n")
        if title == module.__name__ and module is not shorthaul:
            parts.append(f"{markdown(inspect.getdoc(module))}\n")
        for name in names:
            shown = f"{module.__name__}.{name}"
            parts.extend(described(shown, getattr(module, name)))
    return "\n".join(parts)


def described(shown: str, value: Any) -> Iterator[str]:
    """A heading, the signature and the docstring; of a class its public methods too."""
    kind = "class " if inspect.isclass(value) else ""
    yield f"### `{kind}{shown}`\n"
    if not (inspect.isclass(value) and issubclass(value, Exception)):
        yield f"```text\n{shown}{signature(value)}\n```\n"
    yield f"{markdown(inspect.getdoc(value))}\n"
    if inspect.isclass(value):
        kinds = (FunctionType, classmethod, property)
        members = {
            name: member
            for name, member in vars(value).items()
            if not name.startswith("_") and isinstance(member, kinds)
        }
        if members:
            yield "Methods and properties:\n"
        for name, member in members.items():
            given = "" if isinstance(member, property) else signature(getattr(value, name))
            text = textwrap.indent(markdown(inspect.getdoc(member)), "  ").lstrip()
            yield f"- `{name}{given}`: {text}\n"


def signature(value: Any) -> str:
    """The signature, a parameter on each line where it is long."""
    made = inspect.signature(value)
    parts: list[str] = []
    kinds = [p.kind for p in made.parameters.values()]
    for p in made.parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in parts and p.VAR_POSITIONAL not in kinds:
            parts.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        annotation = f": {annotated(p.annotation)}" if p.annotation is not p.empty else ""
        default = f" = {p.default!r}" if p.default is not p.empty else ""
        parts.append(f"{stars}{p.name}{annotation}{default}")
        is_last_positional = kinds.count(p.POSITIONAL_ONLY) == len(parts)
        if p.kind is p.POSITIONAL_ONLY and is_last_positional:
            parts.append("/")
    returned = made.return_annotation
    end = f" -> {annotated(returned)}" if returned is not made.empty else ""
    line = f"({', '.join(parts)}){end}"
    if len(line) < 70:
        return line
    return "(" + "".join(f"\n    {part}," for part in parts) + f"\n){end}"


def annotated(annotation: Any) -> str:
    """An annotation as it stands in the source."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.replace("typing.", "").strip("'\"")


def markdown(doc: str | None) -> str:
    """A docstring with Markdown's code marks and no references of Sphinx.

    Paragraphs on what a module owns are for its readers, not for its users.
    """
    paragraphs = (doc or "").split("\n\n")
    kept = (one for one in paragraphs if not one.startswith(("Owns ", "This module owns ")))
    text = re.sub(r":(?:func|class|meth|mod|attr):`~?([^`]+)`", r"`\1`", "\n\n".join(kept))
    return text.replace("``", "`")


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if it is out of date"
    )
    if parser.parse_args().check:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
