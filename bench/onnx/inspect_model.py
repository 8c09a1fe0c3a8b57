"""``inspect_model.py MODEL``: the facts about one ONNX file, as JSON on standard output.

Owns counting nodes and bytes and reading the interface. Runs as a process of its own, as a file may
be too large or too broken for the caller. Executes nothing of the file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

RANDOM = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def inspect(path: Path) -> dict:
    """Nodes, bytes and interface of the file; ``invalid`` says what the checker found."""
    model = onnx.load(path, load_external_data=False)
    initializers = {tensor.name for tensor in model.graph.initializer}
    operators = Counter(_operator(node) for node in _all_nodes(model))
    interface = {
        "inputs": [_value(value) for value in model.graph.input],
        "initialized": [v.name for v in model.graph.input if v.name in initializers],
        "outputs": [_value(value) for value in model.graph.output],
        "opsets": {entry.domain: entry.version for entry in model.opset_import},
        "metadata": {entry.key: entry.value for entry in model.metadata_props},
        "doc": model.doc_string,
        "producer": model.producer_name,
        "ir_version": model.ir_version,
    }
    return {
        "nodes": operators.total(),
        "constants": operators["Constant"],
        "generated": _n_generated(model),
        "functions": len(model.functions),
        "operators": dict(operators.most_common()),
        "bytes": path.stat().st_size + _external_bytes(model, path.parent),
        "interface": interface,
        "invalid": _invalid(path),
    }


def _n_generated(model: ModelProto) -> int:
    """Nodes that compute from constants alone, so that a runtime runs them once, on loading."""
    fed = {value.name for value in model.graph.input} if model.ir_version >= 4 else set()
    tensors = {tensor.name for tensor in model.graph.initializer}
    tensors |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    found = _n_generated_in(model.graph.node, tensors - fed)
    return found + sum(_n_generated_in(function.node, set()) for function in model.functions)


def _n_generated_in(nodes, constants: set[str]) -> int:
    """Such nodes among ``nodes`` and in their graphs; ``constants`` are the names of constants."""
    constants, found = set(constants), 0
    for node in nodes:
        graphs = list(_graphs_of(node))
        for graph in graphs:
            inner = constants - {value.name for value in graph.input}
            inner |= {tensor.name for tensor in graph.initializer}
            found += _n_generated_in(graph.node, inner)
        known = all(name in constants for name in node.input if name)
        if known and not graphs and node.domain in ("", "ai.onnx") and node.op_type not in RANDOM:
            constants.update(node.output)
            found += node.op_type != "Constant"
    return found


def _operator(node: NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node once: of the graph, of the graphs in attributes, and of the functions."""
    yield from _nodes_of(model.graph.node)
    for function in model.functions:
        yield from _nodes_of(function.node)


def _nodes_of(nodes) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for graph in _graphs_of(node):
            yield from _nodes_of(graph.node)


def _graphs_of(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _external_bytes(model: ModelProto, folder: Path) -> int:
    """Bytes of the files that tensors of the model lie in, each file once."""
    tensors = list(model.graph.initializer)
    for node in _all_nodes(model):
        for graph in _graphs_of(node):
            tensors.extend(graph.initializer)
        tensors.extend(a.t for a in node.attribute if a.type == AttributeProto.TENSOR)
    locations = {
        entry.value
        for tensor in tensors
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    paths = [folder / location for location in sorted(locations)]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _value(value: onnx.ValueInfoProto) -> list:
    """Name, type, and dimensions: a number, a name, or null where neither is known."""
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return [value.name, str(kind), None]
    tensor = value.type.tensor_type
    dtype = TensorProto.DataType.Name(tensor.elem_type)
    if not tensor.HasField("shape"):
        return [value.name, dtype, None]
    dims = []
    for dim in tensor.shape.dim:
        known = dim.WhichOneof("value")
        dims.append(getattr(dim, known) if known else None)
    return [value.name, dtype, dims]


def _invalid(path: Path) -> str | None:
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    print(json.dumps(inspect(Path(sys.argv[1]))))
