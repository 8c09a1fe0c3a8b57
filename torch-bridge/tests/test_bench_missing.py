"""The bench without optional packages: imports are refused as if they were not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import shorthaul

#: Runs the bench where Python finds none of these packages.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Found:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {missing}:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Found
from shorthaul.bench import main
sys.exit(main(sys.argv[1:]))
"""


def _without(missing, *arguments):
    package = Path(shorthaul.__file__).parent.parent
    paths = [str(package), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=set(missing)), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def test_networks_of_libraries_that_are_not_installed_are_skipped(tmp_path):
    missing = ("torchvision", "timm", "transformers")
    names = ["resnet50", "digits_cnn", *(f"{library}:some_name" for library in missing)]
    quick = ["--batch", "2", "--rounds", "2", "--warmup", "1", "--against", "", "--no-first-step"]
    path = tmp_path / "results.json"
    done = _without(missing, *names, *quick, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "resnet50, batch 2" in done.stdout
    assert "skipped, it needs the package torchvision: pip install torchvision" in done.stdout
    for library in missing:
        said = f"skipped, {library}:some_name needs the package {library}: pip install {library}"
        assert said in done.stdout
    assert [r["name"] for r in json.loads(path.read_text())["results"]] == ["digits_cnn"]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_network_without_numpy():
    quick = ["--rounds", "2", "--warmup", "1", "--no-first-step", "--against", "eager,onnxruntime"]
    done = _without(["numpy"], "yolo_block", "--small", *quick)
    assert done.returncode == 0, done.stderr
    assert "best peer, eager" in done.stdout
    assert "numpy is not installed: pip install numpy" in done.stdout


def test_peers_that_are_not_installed_are_skipped():
    quick = ["--batch", "2", "--rounds", "2", "--warmup", "1", "--no-first-step"]
    asked = ["digits_cnn", *quick, "--against", "eager,jax,onnxruntime"]
    done = _without(["jax", "onnxruntime"], *asked)
    assert done.returncode == 0, done.stderr
    for said in ("JAX is not installed: pip install jax", "onnxruntime is not installed: pip"):
        assert f"skipped: RuntimeError: {said}" in done.stdout
    assert "best peer, eager" in done.stdout
    done = _without(["onnxscript"], "digits_cnn", *quick, "--against", "onnxruntime")
    assert "skipped: RuntimeError: onnxscript is not installed: pip" in done.stdout
