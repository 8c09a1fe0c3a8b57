"""``python bench/onnx/zoo.py FOLDER``: the ONNX files that optimizers are compared on.

Owns the list of files and their manifest ``zoo.json``, which says for each file how to feed it. The
files are made once and the same on every run: the light networks of the ``onnx`` package, exports
of networks with random weights, and small hard files. Never downloads anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

# A file is made again when this differs from the manifest's.
VERSION = 1

GROUPS = ("light", "trained", "exported", "hard", "big")


@dataclass
class File:
    """One ONNX file: how it is made and what may be fed to it.

    ``sizes`` are settings of the symbolic dimensions, each a value per name. ``ranges`` bounds the
    integers of an input, ``[low, high)``; an input without a range gets 0 to 3. ``overrides`` names
    initializers that are inputs too and are fed other values. ``runtime`` is what can run it:
    ``onnxruntime``, or ``reference`` for the onnx package's evaluator with operators of our own.
    """

    name: str
    group: str
    make: Callable[[Path], None]
    sizes: list[dict[str, int]] = field(default_factory=lambda: [{}])
    ranges: dict[str, list[int]] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    convolutional: bool = False
    runtime: str = "onnxruntime"
    source: str = ""

    def entry(self) -> dict:
        """What the manifest says of this file."""
        facts = asdict(self)
        del facts["make"]
        return {"file": f"{self.name}.onnx", **facts}


def files(groups: tuple[str, ...]) -> Iterator[File]:
    """The files of these groups, in the order of the page."""
    if "light" in groups:
        yield from _light_networks()
    if {"trained", "exported", "big"} & set(groups):
        import zoo_networks

        yield from (file for file in zoo_networks.files(File) if file.group in groups)
    if "big" in groups:
        import zoo_large

        yield from zoo_large.files(File)
    if "hard" in groups:
        import zoo_hard

        yield from zoo_hard.files(File)


def _light_networks() -> Iterator[File]:
    import onnx.backend.test

    folder = Path(onnx.backend.test.__file__).parent / "data" / "light"
    for path in sorted(folder.glob("*.onnx")):

        def copy(target: Path, path: Path = path) -> None:
            shutil.copyfile(path, target)

        source = f"{path.name} of the onnx package"
        yield File(path.stem, "light", copy, convolutional=True, source=source)


def build(folder: Path, groups: tuple[str, ...], only: list[str]) -> tuple[list[dict], list[str]]:
    """Makes the missing files in ``folder``: the entries of those asked for, and the failures."""
    folder.mkdir(parents=True, exist_ok=True)
    known = _read_manifest(folder)
    entries, failures = [], []
    for file in files(groups):
        if only and file.name not in only:
            continue
        path = folder / f"{file.name}.onnx"
        if not (path.is_file() and file.name in known):
            start = time.perf_counter()
            try:
                file.make(path)
            except Exception as error:
                traceback.print_exc()
                failures.append(f"{file.name}: {type(error).__name__}: {error}")
                continue
            print(f"{file.name}: made in {time.perf_counter() - start:.1f} s", flush=True)
        # Entries keep the order of the page, however the files came about.
        known.pop(file.name, None)
        known[file.name] = file.entry()
        entries.append(known[file.name])
        _write_manifest(folder, known)
    return entries, failures


def _read_manifest(folder: Path) -> dict[str, dict]:
    path = folder / "zoo.json"
    if not path.is_file():
        return {}
    manifest = json.loads(path.read_text(encoding="utf-8"))
    if manifest["version"] != VERSION:
        return {}
    return {entry["name"]: entry for entry in manifest["files"]}


def _write_manifest(folder: Path, known: dict[str, dict]) -> None:
    """Replaces the manifest in one step, so that an interrupted run leaves a whole one."""
    text = json.dumps({"version": VERSION, "files": list(known.values())}, indent=1)
    partial = folder / "zoo.json.partial"
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, folder / "zoo.json")


def main() -> int:
    """Makes the files; the exit status is 1 where one could not be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", default="light,trained,exported,hard", help=", ".join(GROUPS))
    parser.add_argument("--only", default="", help="comma-separated names of files")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    entries, failures = build(options.folder, tuple(options.groups.split(",")), only)
    print(f"{len(entries)} files in {options.folder}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
