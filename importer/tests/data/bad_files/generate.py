"""Writes the files that importer/tests/bad_files.rs reads; needs the PyPI package `onnx`."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
FLOAT = TensorProto.FLOAT


def port(name, shape=("batch", 4), dtype=FLOAT):
    """An input or output."""
    return helper.make_tensor_value_info(name, dtype, list(shape))


def write(name, nodes, inputs, outputs, stored=(), *, opset=18, functions=(), domains=()):
    """Writes a model."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(stored))
    opsets = [helper.make_opsetid("", opset)] + [helper.make_opsetid(d, 1) for d in domains]
    model = helper.make_model(graph, opset_imports=opsets, functions=list(functions))
    model.ir_version = 8
    (HERE / name).write_bytes(model.SerializeToString())


def external(location, length=32, offset=4):
    """A [4, 2] tensor whose elements are in another file."""
    tensor = TensorProto(name="w", dims=[4, 2], data_type=FLOAT, data_location=1)
    for key, value in [("location", location), ("offset", offset), ("length", length)]:
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def write_problems():
    """A model with a problem of every kind."""
    node = helper.make_node
    branch = helper.make_graph([node("Identity", ["x"], ["b"])], "branch", [], [port("b")])
    short = numpy_helper.from_array(np.zeros((2, 3), np.float32), "short")
    short.raw_data = short.raw_data[:20]
    nodes = [node("ImageDecoder", ["x"], [f"det{n}"], name=f"d{n}") for n in range(5)]
    nodes += [
        node("If", ["flag"], ["i"], name="choose", then_branch=branch, else_branch=branch),
        node("Magic", ["x"], ["m"], name="magic", domain="com.example"),
        node("Twice", ["x"], ["t"], name="twice", domain="local"),
        node("Add", ["m", "t"], ["u"], name="depends_on_unsupported"),
        node("Relu", ["nowhere"], ["r"], name="lost"),
        node("Reshape", ["x", "x"], ["s"], name="shape"),
        node("Pad", ["x", "pads"], ["p"], name="mode", mode="mirror"),
        node("Relu", ["x"], ["a"], name="attribute", magic=1),
    ]
    stored = [
        numpy_helper.from_array(np.zeros(2, np.uint64), "wide"),
        short,
        numpy_helper.from_array(np.array([1, 0, 0, 0]), "pads"),
    ]
    inputs = [port("x"), port("flag", (), TensorProto.BOOL), port("text", (1,), TensorProto.STRING)]
    twice = helper.make_function(
        "local",
        "Twice",
        ["v"],
        ["w"],
        [node("Add", ["v", "v"], ["w"])],
        [helper.make_opsetid("", 18)],
    )
    write(
        "problems.onnx",
        nodes,
        inputs,
        [port("u"), port("missing")],
        stored,
        functions=[twice],
        domains=["com.example", "local"],
    )


def main():
    """Writes all files."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((4, 2), dtype=np.float32), "w")
    product = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    ports = [port("x")], [port("y", ("batch", 2))]
    write("mlp.onnx", product, *ports, [weight])
    write("opset12.onnx", product, *ports, [weight], opset=12)
    write("opset99.onnx", product, *ports, [weight], opset=99)
    write("external.onnx", product, *ports, [external("weights.bin")])
    write("external_short.onnx", product, *ports, [external("weights.bin", offset=8)])
    write("external_missing.onnx", product, *ports, [external("no-such.bin")])
    write("external_escape.onnx", product, *ports, [external("../weights.bin")])
    values = np.concatenate([[-1], np.arange(8)]).astype(np.float32)
    (HERE / "weights.bin").write_bytes(values.tobytes())
    write_problems()


if __name__ == "__main__":
    main()
