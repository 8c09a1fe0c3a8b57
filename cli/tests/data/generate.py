"""Writes the small models that cli/tests/commands.rs looks at; needs the PyPI package `onnx`."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

HERE = Path(__file__).parent


def write(name, nodes, parameters, *, more=()):
    """Writes a model with input `x` and output `y`, [batch, 4], and more outputs."""
    shapes = {"x": ["batch", 4], "y": ["batch", 4]}
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    stored = [numpy_helper.from_array(v, k) for k, v in parameters.items()]
    graph = helper.make_graph(nodes, name, ports[:1], [*ports[1:], *more], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 8
    model.producer_name = "shorthaul-tests"
    save(model, HERE / f"{name}.onnx")


def main():
    """Writes all models."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((4, 8), dtype=np.float32),
        "b1": rng.standard_normal(8, dtype=np.float32),
        "w2": rng.standard_normal((8, 4), dtype=np.float32),
    }
    write(
        "mlp",
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="hidden"),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("MatMul", ["r", "w2"], ["y"], name="out"),
        ],
        weights,
    )
    norm = ["scale", "bias", "mean", "var"]
    write(
        "normalized",
        [helper.make_node("BatchNormalization", ["x", *norm], ["y"], name="norm")],
        {name: np.full(4, n % 2, np.float32) for n, name in enumerate(norm, 1)},
    )
    write(
        "unsupported",
        [
            helper.make_node("NonZero", ["x"], ["i"], name="find"),
            helper.make_node("RandomNormalLike", ["x"], ["d"], name="first"),
            helper.make_node("RandomNormalLike", ["x"], ["e"], name="second"),
            helper.make_node("Add", ["d", "e"], ["y"], name="sum"),
        ],
        {},
        more=[helper.make_tensor_value_info("i", TensorProto.INT64, [2, "found"])],
    )


if __name__ == "__main__":
    main()
