"""Optimized files give in ONNX Runtime what the originals give."""

import io
import sys
import threading
import time
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import shorthaul.onnx
import torch
from onnx import TensorProto, helper
from shorthaul.models import DigitsConvNet, DigitsTransformer


def exported(model, *inputs):
    """The model as a message, with a dynamic batch size."""
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model.eval(),
            inputs,
            dynamo=True,
            input_names=names,
            dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in inputs),
            optimize=False,
            verbose=False,
        )
    return program.model_proto


def run(data, feeds):
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def ports(proto):
    graph = proto.graph
    return [p.SerializeToString() for p in [*graph.input, *graph.output]]


def double(n_identities=2):
    """``y = x + x`` through Identity nodes, float [batch, 4]."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    names = ["x", *(f"i{n}" for n in range(n_identities))]
    nodes = [helper.make_node("Identity", [a], [b]) for a, b in zip(names, names[1:], strict=False)]
    nodes.append(helper.make_node("Add", [names[-1], names[-1]], ["y"]))
    graph = helper.make_graph(nodes, "double", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("network", [DigitsConvNet, DigitsTransformer])
def test_networks_with_dynamic_axes(network):
    torch.manual_seed(0)
    model = network()
    original = exported(model, torch.randn(2, 1, 8, 8))
    made = shorthaul.onnx.optimize(original)
    better = onnx.load_from_string(made.model)
    assert ports(better) == ports(original)
    assert len(better.graph.node) < len(original.graph.node)
    assert len(better.graph.node) == made.summary["after"]["operators"]
    assert len(made.summary["runs"]) >= 2
    for batch in (1, 5):
        x = torch.randn(batch, 1, 8, 8)
        with torch.no_grad():
            wanted = model.double()(x.double()).numpy()
        model.float()
        for found in run(made.model, {"x0": x.numpy()}):
            scale = np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * scale)


def test_every_form_of_a_model(tmp_path):
    proto = double()
    path, out = tmp_path / "m.onnx", tmp_path / "t.onnx"
    onnx.save(proto, path)
    made = [
        shorthaul.onnx.optimize(model).model
        for model in (path, str(path), path.read_bytes(), proto)
    ]
    assert len(set(made)) == 1
    written = shorthaul.onnx.optimize(path, out=out)
    assert written.model is None and written.path == out
    assert out.read_bytes() == made[0]
    text = str(written)
    assert "operators     3 → 1" in text and "worst error" in text
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(made[0], {"x": x})[0], 2 * x)


def test_options():
    data = double().SerializeToString()
    bound = shorthaul.onnx.optimize(data, sizes={"batch": 7}, seeds=1)
    assert bound.summary["shapes"] == {"x": [7, 4]}
    given = shorthaul.onnx.optimize(data, inputs={"x": np.zeros((3, 4), np.float32)})
    assert given.summary["shapes"] == {"x": [3, 4]}
    kept = shorthaul.onnx.optimize(data, without=["remove-no-op"], verify=False)
    assert kept.summary["after"]["operators"] == 3
    assert "not verified" in str(kept)
    with pytest.raises(ValueError, match="none of standard, ort-cpu, ort-cuda"):
        shorthaul.onnx.optimize(data, target="tpu")
    with pytest.raises(shorthaul.onnx.OnnxError, match="no rule `no-such`"):
        shorthaul.onnx.optimize(data, without=["no-such"])


def test_sizes_are_fixed_or_follow_from_others():
    data = double().SerializeToString()
    fixed = shorthaul.onnx.optimize(data, shapes={"x": [2, None]})
    assert fixed.summary["shapes"]["x"][0] == 2
    dim = onnx.load_from_string(fixed.model).graph.input[0].type.tensor_type.shape.dim[0]
    assert dim.dim_value == 2
    with pytest.raises(shorthaul.onnx.OnnxError, match="the inputs are x"):
        shorthaul.onnx.optimize(data, shapes={"other": [2]})
    with pytest.raises(shorthaul.onnx.OnnxError, match="no input has a size `p`"):
        shorthaul.onnx.optimize(data, sizes={"batch": "p+1"})


def test_another_runtime_as_witness_and_clock(monkeypatch):
    data = double().SerializeToString()
    made = shorthaul.onnx.optimize(data, oracle="ort", measure=True)
    assert made.model == shorthaul.onnx.optimize(data).model
    for side in ("before", "after"):
        assert made.summary[side]["milliseconds"] > 0
    assert "ONNX Runtime" in str(made)
    with pytest.raises(ValueError, match="oracle is None or 'ort', not 'tract'"):
        shorthaul.onnx.optimize(data, oracle="tract")
    with pytest.raises(ValueError, match="leave out verify=False"):
        shorthaul.onnx.optimize(data, oracle="ort", verify=False)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(shorthaul.onnx.OnnxError, match="pip install onnxruntime"):
        shorthaul.onnx.optimize(data, oracle="ort")


def test_growth_is_refused(tmp_path):
    out = tmp_path / "t.onnx"
    for where in ({}, {"out": out}):
        shorthaul.onnx.optimize(double(), max_growth=1, **where)
        with pytest.raises(shorthaul.onnx.OnnxError, match="the largest allowed growth is 0.5"):
            shorthaul.onnx.optimize(double(1), max_growth=0.5, **where)
    assert out.read_bytes() == shorthaul.onnx.optimize(double()).model


def test_what_is_refused_leaves_the_target(tmp_path):
    out = tmp_path / "t.onnx"
    out.write_bytes(b"as it was")
    whole = double().SerializeToString()
    cyclic = double()
    cyclic.graph.node[0].input[0] = "y"
    cases = [
        (whole[: len(whole) // 2], "damaged"),
        (cyclic, "cycle of 3 nodes"),
        (tmp_path / "none.onnx", "cannot read"),
    ]
    for model, message in cases:
        with pytest.raises(shorthaul.onnx.OnnxError, match=message):
            shorthaul.onnx.optimize(model, out=out)
    assert out.read_bytes() == b"as it was"
    assert [p.name for p in tmp_path.iterdir()] == ["t.onnx"]


def test_other_threads_go_on():
    """While a file is optimized, another thread gets the interpreter."""
    n = 384
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", n])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", n])
    weight = onnx.numpy_helper.from_array(np.full((n, n), 1e-3, np.float32), "w")
    names = ["x", *(f"h{k}" for k in range(7)), "y"]
    nodes = [
        helper.make_node("MatMul", [a, "w"], [b]) for a, b in zip(names, names[1:], strict=False)
    ]
    graph = helper.make_graph(nodes, "slow", [x], [y], [weight])
    opsets = [helper.make_opsetid("", 18)]
    buffer = io.BytesIO()
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), buffer)
    thread = threading.Thread(
        target=shorthaul.onnx.optimize, args=(buffer.getvalue(),), kwargs={"sizes": {"batch": n}}
    )
    thread.start()
    ticks = 0
    while thread.is_alive():
        time.sleep(0.005)
        ticks += 1
    assert ticks > 3
