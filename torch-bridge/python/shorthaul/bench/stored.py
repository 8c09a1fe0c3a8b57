"""Results files of earlier runs: reading them, and what changed since.

Owns the checks of a file. A file that cannot be read is an error. If some measurements of a file
are not valid, the others count, and a sentence names each that does not.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .timing import ratios, summary


class BrokenResults(ValueError):
    """A results file that cannot be read, or a file that holds no results."""


class ForeignFile(BrokenResults):
    """A file that can be read but holds no results."""


@dataclass(frozen=True)
class Stored:
    """A results file."""

    machine: dict
    #: Measurements with valid settings and times.
    results: list[dict]
    #: A sentence for each other one.
    odd: list[str]


def read(path: Path) -> Stored:
    """The measurements of a file, without checks of accuracy. Raises :class:`BrokenResults`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenResults(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ForeignFile(f"{path} holds no results of the bench") from None
    entries = found.get("results") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise ForeignFile(f"{path} holds no results of the bench")
    measured = [entry for entry in entries if isinstance(entry, dict) and "variants" in entry]
    if not measured:
        raise ForeignFile(f"{path} holds no measurements of the bench")
    problems = [_problem(entry) for entry in measured]
    machine = found.get("machine")
    return Stored(
        machine if isinstance(machine, dict) else {},
        [
            _repaired(entry)
            for entry, problem in zip(measured, problems, strict=True)
            if problem is None
        ],
        [
            f"{_title(entry)}: left out of {path}, {problem}"
            for entry, problem in zip(measured, problems, strict=True)
            if problem is not None
        ],
    )


#: What makes two measurements comparable beside name, batch and threads. Older files lack these.
_DEFAULTS = {"dtype": "f32", "mode": "train", "optimizer": "adamw", "small": False}


def _problem(result: dict) -> str | None:
    """Why a measurement is not valid, or ``None``."""
    kinds = {"name": str, "batch": int, "threads": int}
    kinds |= {name: type(default) for name, default in _DEFAULTS.items()}
    for name, kind in kinds.items():
        if not isinstance(result.get(name, _DEFAULTS.get(name)), kind):
            return f"its `{name}` is not what the bench writes"
    variants = result["variants"]
    if not isinstance(variants, dict) or "shorthaul" not in variants:
        return "its `variants` are not what the bench writes"
    for variant, entry in variants.items():
        if not isinstance(entry, dict) or not ("error" in entry or _are_times(entry)):
            return f"the times of {variant} are not what the bench writes"
    if len({len(entry["times_ms"]) for entry in variants.values() if "error" not in entry}) > 1:
        return "its variants have different numbers of rounds"
    return None


def _are_times(entry: dict) -> bool:
    times = entry.get("times_ms")
    return isinstance(times, list) and bool(times) and all(is_positive(x) for x in times)


def is_positive(value: Any) -> bool:
    """Whether this is a number that one may divide by."""
    return _is_number(value, 1e-9)


def _is_number(value: Any, least: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= 1e15


def key(result: dict) -> tuple:
    """What makes two measurements comparable."""
    same = [result.get(name, default) for name, default in _DEFAULTS.items()]
    if result.get("mode", "train") != "step":
        same[2] = None
    return (result["name"], result.get("batch"), result.get("threads"), *same)


def _repaired(result: dict) -> dict:
    """A valid measurement: recomputes what follows from its times, leaves out invalid extras."""
    variants = {variant: _entry(entry) for variant, entry in result["variants"].items()}
    times = {v: entry["times_ms"] for v, entry in variants.items() if "error" not in entry}
    kept = {name: x for name, x in result.items() if name not in ("used", "limits")}
    needed = {
        "limits": ("copy_gb_s", "product_gflop_s"),
        "used": ("bytes_moved", "bytes_least", "operations", "of_copy", "of_product"),
    }
    found = {name: _numbers(result.get(name)) for name in needed}
    if all(set(names) <= set(found[name]) for name, names in needed.items()):
        kept |= found
    return kept | {"variants": variants} | ratios(times)


def _entry(entry: dict) -> dict:
    if "error" in entry:
        return {"error": str(entry["error"])}
    found = _numbers(entry) | summary(entry["times_ms"])
    errors = _numbers(entry.get("gradient_error"), least=0.0)
    return found | ({"gradient_error": errors} if errors else {})


def _numbers(found: Any, least: float = 1e-9) -> dict[str, float]:
    """The numbers from ``least`` on among the values of an object."""
    given = found if isinstance(found, dict) else {}
    return {name: x for name, x in given.items() if _is_number(x, least)}


def _title(result: dict) -> str:
    return f"{result.get('name')}, batch {result.get('batch')}"


def together(files: list[Stored]) -> list[dict]:
    """The measurements of several files; one of a later file replaces an earlier one's."""
    return list({key(result): result for file in files for result in file.results}.values())


def changes(old: list[dict], new: list[dict]) -> list[str]:
    """A sentence for each new measurement.

    It compares times relative to eager's in the same rounds, so that the speed of the machine does
    not count. If a file has no eager, it compares Shorthaul's own times. A change is beyond noise
    if the interquartile ranges of the two sets of rounds do not overlap.
    """
    before = {key(result): result for result in old}
    said = []
    for result in new:
        other = before.get(key(result))
        if other is None:
            said.append(f"{_title(result)}: not in the old file")
        else:
            said.append(f"{_title(result)}: {_change(other['variants'], result['variants'])}")
    return said


def _change(old: dict, new: dict) -> str:
    for side, which in ((old, "old"), (new, "new")):
        n_rounds = len(side["shorthaul"].get("times_ms", ()))
        if n_rounds < 2:
            return f"nothing to compare, the {which} results have {n_rounds or 'no'} " + (
                "round" if n_rounds == 1 else "rounds"
            )
    relative = all(len(side.get("eager", {}).get("times_ms", ())) > 1 for side in (old, new))
    before, after = (_samples(side, relative) for side in (old, new))
    was, now = statistics.median(before), statistics.median(after)
    unit = " of eager's time" if relative else " ms"
    numbers = f"{was:.3g}{unit} → {now:.3g}{unit}"
    low, high = _middle_half(before)
    new_low, new_high = _middle_half(after)
    if new_high < low:
        return f"faster, {numbers}"
    if new_low > high:
        return f"slower, {numbers}"
    return f"no change beyond noise, {numbers}"


def _samples(variants: dict, relative: bool) -> list[float]:
    own = variants["shorthaul"]["times_ms"]
    if not relative:
        return own
    return [a / b for a, b in zip(own, variants["eager"]["times_ms"], strict=False)]


def _middle_half(samples: list[float]) -> tuple[float, float]:
    quartiles = statistics.quantiles(samples, n=4)
    return quartiles[0], quartiles[2]
