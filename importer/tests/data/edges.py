"""Writes cases of unusual values for importer/tests/operators.rs and tests/tests/edge_values.rs.

Run `python importer/tests/data/edges.py` with the PyPI packages `onnx`, `onnxruntime` and `numpy`;
it rewrites `edges.cases` beside itself, in the form that `generate.py` describes. Each case is a
model of one node, or of few, with infinities, ties, overflow, empty dimensions, negative axes and
the like. The expected outputs are ONNX Runtime's, without its optimizations; where it has no
kernel, those of onnx's reference evaluator. The cases are in `edges_*.py`.
"""

from pathlib import Path

import edges_arithmetic
import edges_models
import edges_shapes
import edges_windows
import numpy as np
import onnx
import onnxruntime
from edges_made import Edge
from generate import field
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

HERE = Path(__file__).parent


def model_of(edge: Edge) -> onnx.ModelProto:
    """The model of a case: constants are initializers, all else are inputs."""
    info = helper.make_tensor_value_info
    ports, initializers = [], []
    for name, array in edge.inputs.items():
        if name in edge.known:
            initializers.append(numpy_helper.from_array(array, name))
        else:
            element = helper.np_dtype_to_tensor_dtype(array.dtype)
            ports.append(info(name, element, array.shape))
    graph = helper.make_graph(edge.nodes, "case", ports, [], initializers)
    for name in edge.outputs:
        graph.output.append(onnx.ValueInfoProto(name=name))
    domains = {node.domain for node in edge.nodes} - {""}
    sets = [helper.make_opsetid("", edge.opset)]
    version = {"TreeEnsemble": 5, "TreeEnsembleRegressor": 3}.get(edge.nodes[0].op_type, 1)
    sets += [helper.make_opsetid(domain, version) for domain in sorted(domains)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)


def answers(model: onnx.ModelProto, edge: Edge) -> tuple[list[np.ndarray], str]:
    """The expected outputs, and whose they are."""
    feeds = {n: a for n, a in edge.inputs.items() if n not in edge.known}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if not edge.by_reference:
        try:
            session = onnxruntime.InferenceSession(model.SerializeToString(), options)
            return session.run(None, feeds), "onnxruntime"
        except Exception as error:
            if "NOT_IMPLEMENTED" not in str(error) and "Unrecognized" not in str(error):
                known = ("opset", "is under development", "not a registered", "INVALID_GRAPH")
                if not any(part in str(error) for part in known):
                    raise
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, feeds), "reference"


def typed(model: onnx.ModelProto, outputs: list[np.ndarray]) -> None:
    """Gives the model's outputs their element types and numbers of dimensions."""
    for port, array in zip(model.graph.output, outputs, strict=True):
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        port.CopyFrom(helper.make_tensor_value_info(port.name, element, array.shape))


def encode(edge: Edge, outputs: list[np.ndarray], model: onnx.ModelProto) -> bytes:
    """A case as bytes."""
    case = field(1, edge.name.encode()) + field(2, model.SerializeToString())
    for name, array in edge.inputs.items():
        if name not in edge.known:
            case += field(3, numpy_helper.from_array(array, name).SerializeToString())
    for name, array in zip(edge.outputs, outputs, strict=True):
        case += field(4, numpy_helper.from_array(array, name).SerializeToString())
    return field(1, case)


def main() -> None:
    """Writes the file and says whose answers it has."""
    edges = [
        *edges_arithmetic.EDGES,
        *edges_shapes.EDGES,
        *edges_windows.EDGES,
        *edges_models.EDGES,
    ]
    names = [edge.name for edge in edges]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"several cases have one name: {twice}"
    data, counts, failed = b"", {}, []
    for edge in edges:
        model = model_of(edge)
        try:
            outputs, whose = answers(model, edge)
        except Exception as error:
            failed.append(f"{edge.name}: {error}")
            continue
        # The reference evaluator computes some outputs in double precision.
        has_doubles = any(array.dtype == np.float64 for array in edge.inputs.values())
        for n, output in enumerate(outputs):
            is_wide = output.dtype == np.float64 and whose == "reference" and not has_doubles
            outputs[n] = np.asarray(output, np.float32 if is_wide else None)
        typed(model, outputs)
        counts[whose] = counts.get(whose, 0) + 1
        data += encode(edge, outputs, model)
    if failed:
        raise SystemExit("\n".join(failed))
    (HERE / "edges.cases").write_bytes(data)
    print(f"{len(edges)} cases, {len(data)} bytes, answers by {counts}")


if __name__ == "__main__":
    main()
