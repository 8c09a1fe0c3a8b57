"""The hard files of the zoo: graphs given as text, and those that text cannot hold.

Owns how random initializers are filled in, and the files with external data, sparse initializers,
equal weights and thousands of nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import hard_graphs
import hard_values
import numpy as np
import onnx
from hard_graphs import HardGraph
from onnx import TensorProto, helper, numpy_helper, parser

TEXTS = (
    *hard_graphs.CONTROL_FLOW,
    *hard_graphs.FUNCTIONS,
    *hard_graphs.QUANTIZED,
    *hard_graphs.SHAPES,
    *hard_values.TRAPS,
    *hard_values.TYPES,
    *hard_values.PATTERNS,
)


def files(file: Callable) -> Iterator:
    """Every hard file; ``file`` is the class ``zoo.File``."""
    for graph in TEXTS:
        yield file(
            graph.name,
            "hard",
            lambda path, graph=graph: _write_text(graph, path),
            sizes=[dict(sizes) for sizes in graph.sizes],
            ranges=graph.ranges,
            overrides=list(graph.overrides),
            convolutional=graph.convolutional,
            runtime=graph.runtime,
            source=graph.why,
        )
    sizes = [{"N": 2}, {"N": 5}]
    yield file(
        "external_data", "hard", _write_external, sizes, source="weights in a file of their own"
    )
    yield file(
        "equal_weights", "hard", _write_equal, sizes, source="the same weight stored three times"
    )
    yield file("sparse_weight", "hard", _write_sparse, sizes, source="a sparse initializer")
    yield file("deep_chain", "hard", _write_chain, sizes, source="3000 nodes in one chain")


def _write_text(graph: HardGraph, path: Path) -> None:
    model = parser.parse_model(graph.model_text())
    _fill(model.graph)
    for function in model.functions:
        function.doc_string = "kept"
    for idx, node in enumerate(model.graph.node):
        node.name = f"{graph.name}/{node.op_type}_{idx}"
    if graph.runtime == "onnxruntime":
        onnx.checker.check_model(model, full_check=graph.ir > 3)
    onnx.save(model, path)


def _fill(graph: onnx.GraphProto) -> None:
    """Makes declared values that nothing computes random initializers, unless they have numbers."""
    computed = {name for node in graph.node for name in node.output}
    computed |= {tensor.name for tensor in graph.initializer}
    computed |= {value.name for value in graph.input}
    open_values = [value for value in graph.value_info if value.name not in computed]
    kept = [value for value in graph.value_info if value.name in computed]
    del graph.value_info[:]
    graph.value_info.extend(kept)
    for value in open_values:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        graph.initializer.append(_random(value.name, kind.elem_type, shape))


def _random(name: str, kind: int, shape: list[int]) -> TensorProto:
    """Random numbers that depend on name and shape alone, scaled as weights are."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *shape])
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if kind == TensorProto.INT4:
        values = rng.integers(-8, 8, shape)
    elif np.issubdtype(dtype, np.integer):
        values = rng.integers(-100, 100, shape)
    elif name.startswith("var"):
        values = rng.uniform(0.5, 1.5, shape)
    elif len(shape) == 1:
        values = rng.uniform(0.5, 1.5, shape)
    else:
        values = rng.standard_normal(shape) / np.sqrt(max(np.prod(shape[1:]), 1))
    return numpy_helper.from_array(values.astype(dtype), name)


def _model(nodes, inputs, outputs, initializers, opset: int = 17) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "agraph", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, producer_name="zoo", ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


def _value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _dense_model(weights: list[TensorProto]) -> onnx.ModelProto:
    """Products with these weights one after the other, with a rectifier after each."""
    nodes, value = [], "x"
    for idx, weight in enumerate(weights):
        nodes.append(helper.make_node("MatMul", [value, weight.name], [f"m{idx}"]))
        nodes.append(helper.make_node("Relu", [f"m{idx}"], [f"r{idx}"]))
        value = f"r{idx}"
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    return _model(nodes, [_value("x", "N", 256)], [_value("y", "N", 256)], weights)


def _write_external(path: Path) -> None:
    weights = [_random(f"w{idx}", TensorProto.FLOAT, [256, 256]) for idx in range(4)]
    location = f"{path.name}.data"
    (path.parent / location).unlink(missing_ok=True)
    onnx.save(_dense_model(weights), path, save_as_external_data=True, location=location)


def _write_equal(path: Path) -> None:
    weights = [_random("w", TensorProto.FLOAT, [256, 256]) for _ in range(3)]
    for idx, weight in enumerate(weights):
        weight.name = f"w{idx}"
    onnx.save(_dense_model(weights), path)


def _write_sparse(path: Path) -> None:
    values = numpy_helper.from_array(np.array([1.5, -2.0, 3.0], np.float32), "w")
    indices = numpy_helper.from_array(np.array([1, 6, 11], np.int64), "w_indices")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Identity", ["m"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "agraph", [_value("x", "N", 4)], [_value("y", "N", 4)])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 4]))
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)


def _write_chain(path: Path) -> None:
    nodes, value = [], "x"
    for idx in range(3000):
        operator = ("Relu", "Neg", "Identity", "Abs")[idx % 4]
        nodes.append(helper.make_node(operator, [value], [f"v{idx}"]))
        value = f"v{idx}"
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    onnx.save(_model(nodes, [_value("x", "N", 4)], [_value("y", "N", 4)], []), path)
