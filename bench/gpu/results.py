"""The results file of one run: what ran, on what, and one entry per item.

Owns the file's form and its writing: anew after every item, under another name first, so that a
machine that is taken away leaves everything measured so far. Never measures.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shorthaul
import torch


class Results:
    """Items in the order they were measured; ``ok`` is false once one was wrong or failed."""

    def __init__(self, path: str | None, script: str, options: dict[str, Any]):
        self.path = Path(path) if path else None
        self.ok = True
        self.data = {"script": script, "options": options, "machine": machine(), "items": []}
        self._write()

    def item(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measures one item; what it raises becomes its entry, and the run goes on."""
        try:
            found = measure()
        except Exception as error:
            print(traceback.format_exc(), file=sys.stderr)
            found = {"ok": False, "failed": f"{type(error).__name__}: {error}".strip()}
        entry = {"name": name, **found}
        self.ok &= entry.get("ok", True)
        self.data["items"].append(entry)
        self._write()
        print(summary(entry), flush=True)
        return entry

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)


def summary(entry: dict[str, Any]) -> str:
    """One line for a person."""
    if "failed" in entry:
        return f"{entry['name']}: FAILED: {entry['failed'].splitlines()[0]}"
    parts = [] if entry.get("ok", True) else ["WRONG, not timed"]
    for variant, times in entry.get("times", {}).items():
        if "median_us" in times:
            low, high = times["quartiles_us"]
            parts.append(f"{variant} {times['median_us']:.1f} us ({low:.1f} to {high:.1f})")
        else:
            parts.append(f"{variant}: {times['skipped']}")
    parts.extend(f"{key} {value:.4g}" for key, value in entry.items() if isinstance(value, float))
    return f"{entry['name']}: " + ", ".join(parts or ["ok"])


def machine() -> dict[str, Any]:
    """Versions, and the device where there is one."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shorthaul": shorthaul.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "shorthaul_cuda": str(shorthaul.cuda.info()).splitlines(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    return found
