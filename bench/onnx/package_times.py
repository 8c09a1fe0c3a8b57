"""ONNX Runtime's time on files of packages, before and after ``optimize``.

``python bench/onnx/package_times.py --shorthaul target/release/shorthaul`` takes the files that
``package_files.py`` downloaded, fixes their sizes, optimizes them for every runtime and for ONNX
Runtime on the CPU, and times all three side by side (``time_models.py``). Writes a table, and the
single results beside it. Needs a machine where nothing else runs.

Owns the sizes and the table; the measurement and its test are in ``time_models.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime
from package_files import PACKAGES, networks

#: Sides of images whose sizes are dynamic.
SIDE = 224
#: Stands for a file's entry of the manifest where only the sizes of its inputs count.
ENTRY = {"sizes": [{}], "overrides": [], "ranges": {}}
TARGETS = {"shorthaul": "standard", "shorthaul ort-cpu": "ort-cpu"}


def main() -> None:
    """Times every file and writes the table."""
    args = _arguments()
    rows, seen = [], set()
    for package in args.packages or PACKAGES:
        for name, path in networks(package, args.folder, seen):
            with tempfile.TemporaryDirectory() as folder:
                row = {"package": name, "file": path.name}
                row |= _timed(args, path, Path(folder))
            rows.append(row)
            print(row["file"], row.get("error") or _ratios(row), flush=True)
            args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    args.out.write_text(_table(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shorthaul", type=Path, default=Path("target/release/shorthaul"))
    parser.add_argument("--folder", type=Path, default=Path("out/package-files"))
    parser.add_argument("--decide", type=float, default=20, help="seconds for undecided times")
    parser.add_argument("--out", type=Path, default=Path("bench/results/onnx-package-times.md"))
    parser.add_argument("packages", nargs="*", help="only these packages")
    return parser.parse_args()


def _timed(args: argparse.Namespace, path: Path, folder: Path) -> dict:
    """Times of a file with fixed sizes and of what is made of it, or the reason why not."""
    program = str(args.shorthaul.resolve())
    fixed = folder / "fixed.onnx"
    error = "no sizes"
    for sizes in _sizes(program, path, folder):
        shapes = [f"--set-shape={name}={','.join(map(str, s))}" for name, s in sizes.items()]
        error = _run([program, "optimize", path, "-o", fixed, "-q", "--rules=none", *shapes])[0]
        if not error:
            break
    if error:
        return {"error": error}
    models = {"original": fixed}
    for name, target in TARGETS.items():
        made = folder / f"{target}.onnx"
        error = _run([program, "optimize", fixed, "-o", made, "-q", "--target", target])[0]
        if error:
            return {"error": error}
        models[name] = made
    pairs = [f"{name}={model}" for name, model in models.items()]
    timing = Path(__file__).with_name("time_models.py")
    entry = json.dumps(ENTRY)
    error, said = _run([sys.executable, timing, entry, args.decide, *pairs], 600)
    if error:
        return {"error": error}
    found = json.loads(said)
    for result in found["models"].values():
        result.pop("rounds_ms")
    return {"sizes": sizes, **found}


def _sizes(program: str, path: Path, folder: Path):
    """Sizes of the inputs: with larger images where these are dynamic, then those that verify."""
    error, said = _run([program, "optimize", path, "-o", folder / "any.onnx", "-q", "--json"])
    if error:
        return
    found = json.loads(said)["shapes"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    larger = {}
    for port in session.get_inputs():
        sizes = found.get(port.name, [])
        is_image = len(sizes) == 4
        larger[port.name] = [
            given if isinstance(given, int) else SIDE if is_image and at > 1 else size
            for at, (given, size) in enumerate(zip(port.shape, sizes, strict=False))
        ]
    names = set(larger)
    yield {name: sizes for name, sizes in larger.items() if sizes}
    yield {name: sizes for name, sizes in found.items() if sizes and name in names}


def _run(command: list, seconds: float = 180) -> tuple[str, str]:
    """The error of a command, empty if it did its work, and what it printed."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"no end after {seconds} s", ""
    said = (done.stderr or done.stdout).strip()
    return ("" if done.returncode == 0 else said[:300] or "it failed"), done.stdout


def _ratios(row: dict) -> dict[str, float]:
    models = row.get("models", {})
    return {name: round(models[name]["ratio"], 3) for name in TARGETS if name in models}


def _table(rows: list[dict]) -> str:
    timed = [row for row in rows if "models" in row]
    text = "# Times of ONNX files in packages of the Python package index\n\n"
    text += "Made by `python bench/onnx/package_times.py --shorthaul target/release/shorthaul`.\n"
    text += "Medians of ONNX Runtime's time over the original's, all its optimizations on, two\n"
    text += "threads, sizes fixed; in brackets the 95 % interval.\n\n"
    for name in TARGETS:
        ratios = [_ratios(row)[name] for row in timed if name in _ratios(row)]
        if not ratios:
            continue
        mean = statistics.geometric_mean(ratios)
        slower = [row["file"] for row in timed if _verdict(row, name) == "slower"]
        still_open = sum(_verdict(row, name) == "open" for row in timed)
        text += f"- {name}: geometric mean {mean:.3f} of {len(ratios)} files; slower than 1.02 of "
        text += f"the original: {', '.join(slower) or 'none'}; not decided: {still_open}.\n"
    text += "\n| package | file | original, ms | " + " | ".join(TARGETS) + " |\n"
    text += "|---|---|---:|" + "---:|" * len(TARGETS) + "\n"
    for row in rows:
        if "error" in row:
            text += (
                f"| {row['package']} | {row['file']} | {row['error'][:80]} |" + " – |" * 2 + "\n"
            )
            continue
        cells = [_cell(row["models"].get(name)) for name in TARGETS]
        original = row["models"]["original"]["ms"]
        line = f"| {row['package']} | {row['file']} | {original:.2f} | {' | '.join(cells)} |"
        text += line + "\n"
    return text


def _verdict(row: dict, name: str) -> str:
    return row["models"].get(name, {}).get("verdict", "")


def _cell(result: dict | None) -> str:
    if result is None:
        return "✗"
    low, high = result.get("interval", (result["ratio"], result["ratio"]))
    return f"{result['ratio']:.3f} ({low:.3f}–{high:.3f})"


if __name__ == "__main__":
    main()
