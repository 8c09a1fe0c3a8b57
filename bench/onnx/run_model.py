"""``run_model.py MODEL ORIGINAL ENTRY OUT``: runs a model as it is and saves what it gives.

Owns execution without any optimization, in ONNX Runtime or in the onnx package's reference. It is
a process of its own, as a file may crash it. ``ENTRY`` is the file's entry of the manifest as JSON;
the inputs are those of ``ORIGINAL``. Standard output is JSON: the error of each run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import feeds
import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

RUNTIME_TYPES = {1: "tensor(float)", 7: "tensor(int64)", 11: "tensor(double)"}


class Mystery(OpRun):
    """The operator of the zoo's ``custom_domain``, which no runtime knows.

    Each call gives other numbers, as a random operator may: two equal calls are not one.
    """

    op_domain = "acme"
    n_calls = 0

    def _run(self, x, w, depth=None):
        Mystery.n_calls += 1
        return (np.sin(x * depth) + w * Mystery.n_calls,)


def main() -> None:
    """Saves each run's outputs as ``RUN/OUTPUT`` in OUT."""
    model, original, entry_text, out = sys.argv[1:5]
    entry = json.loads(entry_text)
    if entry["runtime"] == "reference":
        call, _ = _reference(model)
        _, inputs = _reference(original)
    else:
        call, _ = _session(model)
        _, inputs = _session(original)
    errors, arrays = {}, {}
    for run in feeds.runs(entry, n_seeds=2):
        try:
            outputs = call(feeds.feed(run, entry, inputs))
        except Exception as error:
            errors[run.name] = f"{type(error).__name__}: {error}"
            continue
        for name, value in outputs.items():
            arrays[f"{run.name}/{name}"] = _plain(value)
    np.savez(out, **arrays)
    print(json.dumps(errors))


Caller = Callable[[dict], dict]


def _session(path: str) -> tuple[Caller, list]:
    """What runs ``path`` in ONNX Runtime without optimizations, and the file's inputs."""
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    values = [*session.get_inputs(), *session.get_overridable_initializers()]
    inputs = [(value.name, value.type, value.shape) for value in values]
    names = {name for name, _, _ in inputs}
    outputs = [value.name for value in session.get_outputs()]

    def call(feed: dict) -> dict:
        # A missing input is reported elsewhere; here only the numbers count.
        given = {name: value for name, value in feed.items() if name in names}
        return dict(zip(outputs, session.run(outputs, given), strict=True))

    return call, inputs


def _reference(path: str) -> tuple[Caller, list]:
    """What runs ``path`` in the onnx package's evaluator, and the file's inputs."""
    model = onnx.load(path)
    evaluator = ReferenceEvaluator(model, new_ops=[Mystery])
    inputs = []
    for value in model.graph.input:
        tensor = value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        inputs.append((value.name, RUNTIME_TYPES[tensor.elem_type], dims))
    names = {name for name, _, _ in inputs}
    outputs = [value.name for value in model.graph.output]

    def call(feed: dict) -> dict:
        given = {name: value for name, value in feed.items() if name in names}
        Mystery.n_calls = 0
        return dict(zip(outputs, evaluator.run(None, given), strict=True))

    return call, inputs


def _plain(value) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.str_) if array.dtype == object else array


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
