"""The comparison of ONNX optimizers sees what an optimizer did wrong.

Stands in for optimizers with small programs that copy, change, break or never end.
"""

import argparse
import json
import sys
from pathlib import Path

import onnx
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "onnx"
EDIT = """
import sys, onnx
from onnx import numpy_helper
model = onnx.load(sys.argv[1])
weight = model.graph.initializer[0]
EDITED
onnx.save(model, sys.argv[2])
"""


@pytest.fixture(scope="module")
def bench():
    """The modules of the comparison, which lie beside each other and in no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        import compare
        import page
        import tools
        import zoo

        yield argparse.Namespace(compare=compare, page=page, tools=tools, zoo=zoo)
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def zoo_folder(bench, tmp_path_factory):
    """A few small files that need no PyTorch."""
    folder = tmp_path_factory.mktemp("zoo")
    names = ["common_work", "nan_traps", "overridable_initializer", "custom_domain"]
    _, failures = bench.zoo.build(folder, ("hard",), names)
    assert not failures
    return folder


def compared(bench, folder, name, *edits, timeout=60.0):
    """What the comparison says of a file that ``edits``, each a tool's Python code, changed."""
    manifest = json.loads((folder / "zoo.json").read_text(encoding="utf-8"))
    entry = next(entry for entry in manifest["files"] if entry["name"] == name)
    tools = []
    for idx, edit in enumerate(edits):
        program = EDIT.replace("EDITED", edit)
        command = (sys.executable, "-c", program, "IN", "OUT")
        tools.append(bench.tools.Tool(f"tool{idx}", "0", command))
    options = argparse.Namespace(zoo=folder, keep=None, timeout=timeout, no_timing=True)
    result = bench.compare.compare_file(entry, tools, options)
    return result, [result["tools"][tool.name] for tool in tools]


def test_a_copy_is_verified_and_a_changed_weight_is_not(bench, zoo_folder):
    scaled = "weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 1.01, 'w'))"
    result, (copy, changed) = compared(bench, zoo_folder, "common_work", "", scaled)
    assert copy["verified"] and copy["planted_same"] and not copy["changes"]
    assert copy["nodes"] == result["original"]["nodes"] == 11
    assert changed["outcome"] == "ok" and not changed["verified"]
    assert 1e-4 < changed["worst"] < 1.0


def test_ends_are_told_apart(bench, zoo_folder):
    _, tools = compared(
        bench,
        zoo_folder,
        "common_work",
        "sys.exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "sys.argv[2] += '.other'",
        "open(sys.argv[2], 'wb').write(b'no model'); sys.exit(0)",
    )
    ends = [tool["outcome"] for tool in tools]
    assert ends == ["refused", "crashed", "wrote nothing", "unreadable"]
    _, (slow,) = compared(
        bench, zoo_folder, "common_work", "import time; time.sleep(60)", timeout=2.0
    )
    assert slow["outcome"] == "timed out" and slow["seconds"] < 30


def test_planted_values_show_what_finite_ones_hide(bench, zoo_folder):
    # x / x becomes pow(x, 0), which is 1 for NaN and infinity as well.
    to_power = "n = model.graph.node[2]; n.op_type = 'Pow'; n.input[1] = 'zero'"
    _, (power,) = compared(bench, zoo_folder, "nan_traps", to_power)
    assert power["verified"] and power["worst"] == 0
    assert not power["planted_same"]


def test_interface_is_compared(bench, zoo_folder):
    folded = "del model.graph.input[1:]"
    fixed = "model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2"
    undocumented = "model.doc_string = ''; del model.metadata_props[:]"
    _, (folded, fixed, undocumented) = compared(
        bench, zoo_folder, "overridable_initializer", folded, fixed, undocumented
    )
    assert not folded["verified"], "a caller's value for an initializer has no effect"
    assert folded["changes"] == ["inputs renamed, moved or dropped"]
    assert not fixed["verified"], "it takes one batch size only"
    assert fixed["changes"] == ["symbolic dimension fixed in inputs"]
    assert undocumented["changes"] == ["metadata lost", "doc string lost"]


def test_equal_calls_of_an_unknown_operator_stay_two(bench, zoo_folder):
    merged = (
        "twin = next(n for n in model.graph.node if n.output[0] == 'p'); "
        "twin.input[1] = twin.input[0]"
    )
    _, (copy, merged) = compared(bench, zoo_folder, "custom_domain", "", merged)
    assert copy["verified"]
    assert not merged["verified"]


def test_the_page_shows_every_outcome(bench, zoo_folder):
    result, _ = compared(bench, zoo_folder, "nan_traps", "", "sys.exit(3)")
    names = list(result["tools"])
    document = {
        "command": "python bench/onnx/compare.py",
        "machine": {"processor": "p", "cores": 2, "system": "s", "python": "3", "versions": {}},
        "tools": [{"name": name, "version": "0", "command": "c"} for name in names],
        "missing": [],
        "files": [result],
    }
    page = bench.page.render(document)
    n_nodes = len(onnx.load(zoo_folder / "nan_traps.onnx").graph.node)
    assert f"| nan_traps | {n_nodes} | **{n_nodes}** | refused |" in page
    assert "| files written | 1 | 0 |" in page
