"""Writes the files of the bench, so that none is ever half written."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Replaces a file in one step; raises ``OSError`` where it cannot be written."""
    if not is_replaceable(path):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def is_replaceable(path: Path) -> bool:
    """Whether a path is that of a file, or of none yet: not of a pipe such as ``/dev/stdout``."""
    return path.is_file() or not path.exists()


def check_writable(path: Path) -> None:
    """Raises ``OSError`` with a sentence where no file can be written to this path."""
    folder = path.resolve().parent
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file")
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder if is_replaceable(path) else path, os.W_OK):
        raise PermissionError(f"{path} cannot be written: permission denied")
