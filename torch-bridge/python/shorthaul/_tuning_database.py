"""What tuning has learned on this machine: ratios of the times of two ways to compute.

Owns the file in the cache folder, which the program ``shorthaul tune`` reads and writes too. An
entry names two lists of kernels by their keys, so it holds for every network that has such kernels.
Processes that write take turns by a lock on a file beside it. Never times anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from ._machine import file_of_this_machine, write_whole

log = logging.getLogger("shorthaul")

#: The form of the file.
_FORMAT = 1


class Database:
    """Ratios by the keys of what is replaced and of what replaces it.

    ``n_used`` counts the entries that were there before this object was made and were asked for.
    """

    def __init__(self, path: Path | None = None):
        self.path = file_of_this_machine("tuning") if path is None else path
        self.before = _opened(self.path)
        self.ratios = dict(self.before)
        self.used: set[str] = set()

    @property
    def n_used(self) -> int:
        """Entries of earlier runs that served this one."""
        return len(self.used)

    def ratio(self, old: Iterable[str], new: Iterable[str]) -> float | None:
        """How many times as long ``new`` takes as ``old``, if it is known."""
        name = _name(old, new)
        if name in self.before:
            self.used.add(name)
        return self.ratios.get(name)

    def learn(self, old: Iterable[str], new: Iterable[str], ratio: float) -> None:
        """Adds an entry; :meth:`save` keeps it. A ratio that is no number teaches nothing."""
        if math.isfinite(ratio):
            self.ratios[_name(old, new)] = round(ratio, 4)

    def save(self) -> None:
        """Writes the file, with what other processes have added meanwhile."""
        try:
            with _locked(self.path):
                self.ratios = _read_or_set_aside(self.path) | self.ratios
                data = {"format": _FORMAT, "ratios": self.ratios}
                write_whole(self.path, json.dumps(data, indent=0, sort_keys=True))
        except OSError as error:
            warnings.warn(f"{self.path}: what was tuned is not kept: {error}", stacklevel=2)


def _name(old: Iterable[str], new: Iterable[str]) -> str:
    lists = [",".join(sorted(keys)) for keys in (old, new)]
    return ">".join(_short(text) for text in lists)


def _short(text: str) -> str:
    return text if len(text) <= 24 else hashlib.sha256(text.encode()).hexdigest()[:24]


class _DamagedError(Exception):
    """A file is no database."""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process writes the database."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(path: Path) -> dict[str, float]:
    """The entries of a file. A problem gives a warning; a damaged file is set aside."""
    try:
        try:
            return _read(path)
        except _DamagedError:
            # Another process may set it aside at the same time.
            with _locked(path):
                return _read_or_set_aside(path)
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error}); tuning starts from nothing", stacklevel=3)
        return {}


def _read(path: Path) -> dict[str, float]:
    """The entries of a file; a missing file has none. Raises ``OSError`` and ``_DamagedError``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}, not {_FORMAT}")
        return {str(name): float(ratio) for name, ratio in data["ratios"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _DamagedError(str(error)) from error


def _read_or_set_aside(path: Path) -> dict[str, float]:
    try:
        return _read(path)
    except _DamagedError as error:
        aside = path.with_suffix(".damaged")
        try:
            path.replace(aside)
            where = f"; it now lies at {aside}"
        except OSError:
            where = ""
        warnings.warn(
            f"{path} is not a tuning database ({error}){where}; tuning starts from nothing",
            stacklevel=4,
        )
        return {}


__all__ = ["Database"]
