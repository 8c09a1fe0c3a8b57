"""A model beyond the 2 GB that one protobuf message holds, with its weights in a file beside it.

Owns that one file: products one after the other, each with something to remove before it. It is
written weight by weight, so that making it takes little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH = 4096
N_LAYERS = 42


def files(file: Callable) -> Iterator:
    """The file; ``file`` is the class ``zoo.File``."""
    sizes = [{"batch": 1}, {"batch": 3}]
    source = f"{N_LAYERS} products of {WIDTH} by {WIDTH}, written by hand"
    yield file("beyond_2_gb", "big", write, sizes=sizes, source=source)


def write(path: Path) -> None:
    """Writes the model, and its weights beside it."""
    place = path.with_name(f"{path.name}.data")
    random = np.random.default_rng(0)
    # Gaussian weights of this scale, shifted from layer to layer, keep values at the same size.
    weight = random.standard_normal((WIDTH, WIDTH), dtype=np.float32) * np.float32(
        (2 / WIDTH) ** 0.5
    )
    weights, nodes, value = [], [], "x"
    with place.open("wb") as data:
        for n in range(N_LAYERS):
            weights.append(_external(f"weight{n}", place.name, data.tell()))
            data.write(np.roll(weight, n, 0).tobytes())
            same, product, after = f"same{n}", f"product{n}", f"after{n}"
            nodes += [
                helper.make_node("Identity", [value], [same]),
                helper.make_node("MatMul", [same, f"weight{n}"], [product]),
                helper.make_node("Relu", [product], [after]),
            ]
            value = after
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH])
        for name in ("x", value)
    ]
    graph = helper.make_graph(nodes, "beyond_2_gb", ports[:1], ports[1:], weights)
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    path.write_bytes(model.SerializeToString())


def _external(name: str, location: str, offset: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, dims=[WIDTH, WIDTH], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    values = {"location": location, "offset": offset, "length": 4 * WIDTH * WIDTH}
    for key, entry in values.items():
        tensor.external_data.add(key=key, value=str(entry))
    return tensor
