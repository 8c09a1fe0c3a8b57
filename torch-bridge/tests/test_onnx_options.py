"""Python's functions take what the program takes, and every option changes what it says."""

import inspect
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import shorthaul.onnx
from test_onnx_optimize import double, run

PROGRAM = Path(__file__).resolve().parents[2] / "cli" / "src"

# Options of the program that have another name in Python, and those that it has in another form.
OPTIMIZE = {"bind": "sizes", "set_shape": "shapes", "no_verify": "verify", "from": "from_"}
GRAD = {"bind": "sizes", "no_verify": "verify", "no_gradients": "gradients"}
OTHERWISE = {"json", "list_rules"}


def options(file, struct):
    """Names of the options of a command, as fields of its arguments."""
    text = (PROGRAM / file).read_text(encoding="utf-8")
    body = re.search(rf"^pub struct {struct} {{\n(.*?)^}}", text, re.S | re.M).group(1)
    found = re.findall(r"#\[arg\((.*?)\)\]\s+(?:pub )?(\w+): ", body, re.S)
    return {name for given, name in found if re.search(r"\blong\b", given)}


@pytest.mark.parametrize(
    "file, struct, function, names",
    [
        ("optimize.rs", "Optimize", shorthaul.onnx.optimize, OPTIMIZE),
        ("grad.rs", "Grad", shorthaul.onnx.grad, GRAD),
    ],
)
def test_python_takes_the_options_of_the_program(file, struct, function, names):
    known = options(file, struct)
    assert {"out", "bind", "no_verify", "json"} <= known
    wanted = {names.get(name, name) for name in known - OTHERWISE}
    taken = inspect.signature(function).parameters.keys() - {"model"}
    assert taken == wanted
    for name in taken:
        assert f"``{name}``" in function.__doc__, name


def test_rewrites_are_listed():
    listed = shorthaul.onnx.rewrites()
    assert "remove-no-op" in listed
    assert all(listed.values())


def test_only_some_rewrites():
    data = double().SerializeToString()
    operators = {}
    for rules in (None, [], ["fold-constants"], ["remove-no-op"]):
        made = shorthaul.onnx.optimize(data, rules=rules)
        operators[str(rules)] = made.summary["after"]["operators"]
    assert operators == {"None": 1, "[]": 3, "['fold-constants']": 3, "['remove-no-op']": 1}
    with pytest.raises(shorthaul.onnx.OnnxError, match="no rule `no-such`"):
        shorthaul.onnx.optimize(data, rules=["no-such"])


def test_a_part_with_other_names_and_a_free_size():
    data = double().SerializeToString()
    part = shorthaul.onnx.optimize(data, from_=["i0"], to=["i1"], rules=[])
    graph = onnx.load_from_string(part.model).graph
    assert [[p.name for p in ports] for ports in (graph.input, graph.output)] == [["i0"], ["i1"]]
    made = shorthaul.onnx.optimize(data, rename={"x": "a", "y": "b"}, free_shape={"x": [None, "n"]})
    port = onnx.load_from_string(made.model).graph.input[0]
    assert port.name == "a"
    assert [d.dim_param for d in port.type.tensor_type.shape.dim] == ["batch", "n"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(run(made.model, {"a": x})[0], 2 * x)


def test_another_version_and_what_is_written_down():
    stored = double()
    stored.doc_string = "a model"
    made = shorthaul.onnx.optimize(stored, opset=21, infer_shapes=True, rules=[])
    proto = onnx.load_from_string(made.model)
    assert proto.opset_import[0].version == 21
    assert [v.name for v in proto.graph.value_info] == ["i0", "i1"]
    assert proto.doc_string == "a model"
    stripped = shorthaul.onnx.optimize(stored, strip=True, rules=[])
    proto = onnx.load_from_string(stripped.model)
    assert (proto.doc_string, len(proto.graph.value_info)) == ("", 0)


@pytest.mark.parametrize("half, wanted", [("f16", "float16"), ("bf16", "bfloat16")])
def test_half_precision(half, wanted):
    found = shorthaul.onnx.optimize(double(), half=half).summary["half"]
    assert (found["type"], found["nodes"] > 0) == (wanted, True)
    assert found["tolerance"] == {"f16": 0.01, "bf16": 0.05}[half]
    kept = shorthaul.onnx.optimize(double(), half=half, keep_f32=["Add"], tolerance=0.125)
    assert kept.summary["half"]["kept_f32"]["Add"] == 1
    assert kept.summary["half"]["tolerance"] == 0.125
    assert shorthaul.onnx.optimize(double()).summary["half"] is None


def test_a_difference_in_half_precision_names_no_option_of_the_program():
    with pytest.raises(shorthaul.onnx.OnnxError, match="set a larger tolerance") as refused:
        shorthaul.onnx.optimize(double(), half="f16", tolerance=1e-9)
    assert "--" not in str(refused.value)


def test_a_time_limit():
    limited = shorthaul.onnx.optimize(double(), time_limit=600)
    assert limited.summary["stopped"] is None
    # What is not verified by then is not made.
    late = shorthaul.onnx.optimize(double(), time_limit=1e-9)
    assert late.summary["stopped"] == {"n_rewrites": 2, "n_verified": 0}
    assert late.summary["after"]["operators"] == 3


@pytest.mark.parametrize(
    "given, message",
    [
        ({"half": "f16", "verify": False}, "half needs verification"),
        ({"time_limit": 1, "verify": False}, "time_limit needs verification"),
        ({"rename": {"x": "a"}, "measure": True}, "rename gives another file"),
        ({"keep_f32": ["Add"]}, "keep_f32 needs half"),
        ({"strip": True, "infer_shapes": True}, "infer_shapes writes"),
        ({"tolerance": 1.5}, "from 0 to below 1, not 1.5"),
        ({"time_limit": 0}, "above 0, not 0"),
        ({"opset": 6}, "at least 7, not 6"),
    ],
)
def test_what_does_not_go_together_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        shorthaul.onnx.optimize(double(), **given)
