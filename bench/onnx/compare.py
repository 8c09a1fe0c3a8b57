"""``python bench/onnx/compare.py``: ONNX optimizers side by side on the same files.

Owns the order of the measurement: makes the files, lets every optimizer work on each in a process
of its own, checks and times what comes out, and writes the raw results as JSON and the page.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import judge
import page
import tools

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Small files in which each optimizer meets something else: what a test has time for.
QUICK = (
    "light_squeezenet",
    "digits_cnn",
    "if_branches",
    "dynamic_heads",
    "overridable_initializer",
)


def main() -> int:
    """Runs the comparison; the exit status is 1 where our own program failed on a file."""
    options = _parse()
    present, missing = tools.available(options.shorthaul)
    if options.tools:
        present = [tool for tool in present if tool.name in options.tools.split(",")]
    for sentence in missing:
        print(f"left out: {sentence}", file=sys.stderr)
    entries = _make_files(options)
    results = []
    document = {
        "command": _command(),
        "machine": _machine(),
        "tools": [
            {"name": tool.name, "version": tool.version, "command": tool.described()}
            for tool in present
        ],
        "missing": missing,
        "files": results,
    }
    for entry in entries:
        results.append(compare_file(entry, present, options))
        print(_line(results[-1]), flush=True)
        _write(document, options.results)
    print(f"wrote onnx-comparison.json and onnx-comparison.md in {options.results}")
    ours = [r["tools"][tool.name] for r in results for tool in present if "short" in tool.name]
    return 1 if any(result["outcome"] != "ok" for result in ours) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shorthaul", type=Path, default=ROOT / "target" / "release" / "shorthaul")
    add(
        "--zoo", type=Path, default=ROOT / "out" / "zoo", help="folder of the files, made if needed"
    )
    add("--groups", default="light,trained,exported,hard", help="also: big, 1.3 GB and 2.8 GB")
    add("--only", default="", help="comma-separated names of files")
    add("--tools", default="", help="comma-separated names of tools (default: all that are here)")
    add("--timeout", type=float, default=300.0, help="seconds for one optimizer on one file")
    add("--quick", action="store_true", help=f"only {', '.join(QUICK)}, and no timing")
    add("--no-timing", action="store_true", help="skip the time in ONNX Runtime")
    add(
        "--decide",
        type=float,
        default=30.0,
        help="seconds of further rounds for a file that may have become slower (default: 30)",
    )
    add("--keep", type=Path, help="keep the optimized files in this folder")
    add("--results", type=Path, default=HERE.parent / "results", help="folder of page and JSON")
    options = parser.parse_args()
    options.shorthaul = options.shorthaul.resolve()
    if options.quick:
        options.no_timing = True
        options.only = options.only or ",".join(QUICK)
    return options


def _make_files(options: argparse.Namespace) -> list[dict]:
    """The entries of the files asked for; makes them in a process of its own."""
    command = [sys.executable, HERE / "zoo.py", options.zoo, "--groups", options.groups]
    made = subprocess.run([*command, "--only", options.only], check=False)
    if made.returncode:
        print("some files could not be made; see above", file=sys.stderr)
    manifest = json.loads((options.zoo / "zoo.json").read_text(encoding="utf-8"))
    groups = options.groups.split(",")
    only = [name for name in options.only.split(",") if name]
    entries = [e for e in manifest["files"] if e["group"] in groups]
    entries = [e for e in entries if not only or e["name"] in only]
    return sorted(entries, key=lambda e: groups.index(e["group"]))


def compare_file(entry: dict, present: list, options: argparse.Namespace) -> dict:
    """Everything about one file: the original, what each tool made of it, and times."""
    work = (options.keep or options.zoo / "optimized").resolve() / entry["name"]
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    original = (options.zoo / entry["file"]).resolve()
    result = {
        **{key: entry[key] for key in ("name", "group", "source", "convolutional")},
        "original": _child("inspect_model.py", original),
        "tools": {},
    }
    reference = work / "original.npz"
    runs = _child("run_model.py", original, original, json.dumps(entry), reference)
    if "failed" in runs:
        result["original"]["failed"] = runs["failed"]
    elif runs:
        result["original"]["errors"] = runs
    good = {"original": original}
    for tool in present:
        target = work / tool.name.replace(" ", "-") / entry["file"]
        target.parent.mkdir()
        outcome = _optimize(tool, original, target, options.timeout)
        if outcome["outcome"] == "ok":
            _examine(outcome, entry, original, target, reference, result["original"])
            if outcome.get("verified") is not None and "failed" not in outcome:
                good[tool.name] = target
        result["tools"][tool.name] = outcome
    if not options.no_timing and "failed" not in result["original"]:
        models = [f"{name}={path}" for name, path in good.items()]
        if entry["runtime"] == "onnxruntime":
            seconds = options.decide
            result["timing"] = _child("time_models.py", json.dumps(entry), seconds, *models)
    if not options.keep:
        shutil.rmtree(work)
    return result


def _optimize(tool, original: Path, target: Path, timeout: float) -> dict:
    """Runs a tool on a file: ``outcome`` is ok, refused, crashed, timed out or wrote nothing."""
    command = tool.command_for(original, target)
    launcher = [sys.executable, "-I", "-S", HERE / "measure.py", str(timeout), target.parent]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    if facts["timed_out"]:
        outcome = "timed out"
    elif facts["signal"] is not None:
        outcome = "crashed"
    elif facts["exit"]:
        outcome = "refused"
    else:
        outcome = "ok" if target.is_file() else "wrote nothing"
    facts["outcome"] = outcome
    messages = _without_paths(facts.pop("messages")).strip()
    if outcome != "ok":
        facts["messages"] = messages[-1500:]
    return facts


def _examine(outcome: dict, entry: dict, original: Path, target: Path, reference: Path, facts):
    """Adds counts, interface and numbers of an optimized file to ``outcome``."""
    inspected = _child("inspect_model.py", target)
    if "failed" in inspected:
        outcome.update(outcome="unreadable", messages=inspected["failed"])
        return
    outcome.update(inspected)
    changes = judge.compare_interfaces(facts["interface"], inspected.pop("interface"))
    del outcome["interface"]
    outcome["changes"] = changes
    if "failed" in facts:
        outcome["verified"] = None
        return
    saved = target.parent / "outputs.npz"
    errors = _child("run_model.py", target, original, json.dumps(entry), saved)
    if "failed" in errors:
        outcome.update(verified=False, failed=errors["failed"], reasons=[errors["failed"]])
        return
    found = judge.compare_outputs(reference, saved, errors)
    outcome.update(verified=found.pop("same"), **found)
    saved.unlink()


def _child(script: str, *arguments: object) -> dict:
    """The JSON that one of our scripts prints; ``failed`` with its last words where it dies."""
    command = [sys.executable, HERE / script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=900, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"failed": "no result after 900 s"}
    if done.returncode < 0:
        return {"failed": f"killed by signal {-done.returncode}"}
    if done.returncode:
        words = _without_paths(done.stderr).strip().splitlines()
        return {"failed": words[-1][:500] if words else f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def _without_paths(text: str) -> str:
    """``text`` without the folders of this machine."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text)


def _command() -> str:
    """The command of this run without the folders of this machine."""
    words = ["python", "bench/onnx/compare.py", *sys.argv[1:]]
    return _without_paths(" ".join(words))


def _machine() -> dict:
    names = ("onnx", "onnxruntime", "torch", "torchvision", "transformers")
    versions = {name: importlib.metadata.version(name) for name in names if tools.installed(name)}
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8"))
        processor = match.group(1) if match else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _line(result: dict) -> str:
    """One line of progress."""
    parts = [f"{result['name']}: {result['original']['nodes']} nodes"]
    for name, tool in result["tools"].items():
        if tool["outcome"] != "ok":
            parts.append(f"{name} {tool['outcome']}")
            continue
        mark = {True: "same", False: "DIFFERS", None: "not run"}[tool.get("verified")]
        parts.append(f"{name} {tool['nodes']} {mark}")
    return ", ".join(parts)


def _write(document: dict, folder: Path) -> None:
    """Writes page and raw results; called after every file, as a run takes long."""
    folder.mkdir(parents=True, exist_ok=True)
    text = as_text(document)
    (folder / "onnx-comparison.json").write_text(text, encoding="utf-8")
    (folder / "onnx-comparison.md").write_text(page.render(document), encoding="utf-8")


def as_text(document: dict) -> str:
    """JSON with a line for each file; numbers with five significant digits, as no time has more."""
    files = [json.dumps(_rounded(result)) for result in document["files"]]
    rest = {key: value for key, value in document.items() if key != "files"}
    head = json.dumps(_rounded(rest), indent=1).removesuffix("\n}")
    return f'{head},\n "files": [\n' + ",\n".join(files) + "\n]\n}\n"


def _rounded(value: object) -> object:
    """The same with floats of five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
