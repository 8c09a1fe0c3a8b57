"""What tuning has learned on this machine: how long one way to compute takes beside another.

Owns the file in the cache folder, which the program ``shorthaul tune`` reads and writes too. An
entry names two lists of kernels by their keys, so it holds for every network that has such kernels.
Never times anything.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Iterable
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
        self.before = _read(self.path)
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
        """Adds an entry; :meth:`save` keeps it."""
        self.ratios[_name(old, new)] = round(ratio, 4)

    def save(self) -> None:
        """Writes the file, with what other processes have added meanwhile."""
        self.ratios = _read(self.path) | self.ratios
        text = json.dumps({"format": _FORMAT, "ratios": self.ratios}, indent=0, sort_keys=True)
        try:
            write_whole(self.path, text)
        except OSError as error:
            warnings.warn(f"{self.path}: what was tuned is not kept: {error}", stacklevel=2)


def _name(old: Iterable[str], new: Iterable[str]) -> str:
    lists = [",".join(sorted(keys)) for keys in (old, new)]
    return ">".join(_short(text) for text in lists)


def _short(text: str) -> str:
    return text if len(text) <= 24 else hashlib.sha256(text.encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, float]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}, not {_FORMAT}")
        return {str(name): float(ratio) for name, ratio in data["ratios"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        aside = path.with_suffix(".damaged")
        try:
            path.replace(aside)
            where = f"; it now lies at {aside}"
        except OSError:
            where = ""
        warnings.warn(
            f"{path} is not a tuning database ({error}){where}; tuning starts from nothing",
            stacklevel=3,
        )
        return {}


__all__ = ["Database"]
