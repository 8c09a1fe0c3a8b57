"""``peak_memory.py MODEL...``: memory that optimizing files takes, as a factor of their sizes.

Owns one measurement: the largest resident memory of ``shorthaul optimize``, verification included,
beside the bytes of the model and its external data. Prints JSON.

    python bench/onnx/zoo.py FOLDER --groups big
    python bench/onnx/peak_memory.py FOLDER/bert_large.onnx FOLDER/beyond_2_gb.onnx --out FILE
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

HERE = Path(__file__).resolve().parent
PROGRAM = HERE.parents[1] / "target" / "release" / "shorthaul"


def main() -> int:
    """Prints size, peak, their ratio and seconds of each; the exit status is that of the worst."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--shorthaul", type=Path, default=PROGRAM, help="the program")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit")
    options = parser.parse_args()
    results = [measure(model.resolve(), options) for model in options.models]
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return max(1 if result["exit"] is None else result["exit"] for result in results)


def measure(model: Path, options: argparse.Namespace) -> dict:
    """One model."""
    size = model.stat().st_size + _external_bytes(model)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-S", HERE / "measure.py", str(options.seconds), folder]
        command += [options.shorthaul.resolve(), "--quiet", "optimize", model, "-o", "out.onnx"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    result = {
        "model": model.name,
        "bytes": size,
        "peak_bytes": facts["peak_bytes"],
        "factor": round(facts["peak_bytes"] / size, 3),
        "seconds": round(facts["seconds"], 2),
        "exit": facts["exit"],
    }
    print(json.dumps(result))
    if facts["exit"]:
        print(facts["messages"], file=sys.stderr)
    return result


def _external_bytes(path: Path) -> int:
    """Bytes of the files beside the model that its initializers name."""
    model = onnx.load(path, load_external_data=False)
    entries = (entry for t in model.graph.initializer for entry in t.external_data)
    names = {entry.value for entry in entries if entry.key == "location"}
    return sum((path.parent / name).stat().st_size for name in names)


if __name__ == "__main__":
    sys.exit(main())
