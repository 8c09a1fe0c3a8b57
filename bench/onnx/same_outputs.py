"""Whether ONNX Runtime gives the same for two files, on random inputs of given sizes.

Owns how the inputs are made up and how outputs are compared. ONNX Runtime runs without its own
optimizations, so that the two files are compared and nothing else. If outputs are as small as
roundings of what they are made of, the difference is held against what ONNX Runtime's own
optimizations change, the basic ones or all; this has a verdict of its own.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from feeds import DTYPES, WORDS

#: By element type, the largest difference, divided by the largest element, that is called the same.
#: Both files round; the program itself compares each with float64.
SAME = {np.dtype(np.float16): 2e-2, np.dtype(np.float32): 2e-3, np.dtype(np.float64): 1e-9}

#: A difference is like theirs if it is at most this many times what ONNX Runtime's own ones change.
OF_THEIRS = 4

#: Verdicts: the same up to rounding; up to :data:`OF_THEIRS` times what they change; neither.
THE_SAME = "same"
LIKE_THEIRS = "within what ONNX Runtime's own optimizations change"
DIFFERENT = "different"


def verdict(largest: float, is_same: bool, theirs: float) -> str:
    """What a difference is called beside ``theirs``, what ONNX Runtime's optimizations change."""
    if is_same:
        return THE_SAME
    return LIKE_THEIRS if largest <= OF_THEIRS * theirs < float("inf") else DIFFERENT


@dataclass
class Difference:
    """What was found: ``refused`` is empty if ONNX Runtime runs the original."""

    verdict: str = ""
    largest: float | None = None
    refused: str = ""
    operators: int | None = None


def same_outputs(path: Path, other: Path | None, sizes: dict[str, list[int]]) -> Difference:
    """Runs both files on the same inputs; ``other`` may be missing."""
    found = Difference()
    try:
        session = _session(path)
        found.operators = _operators_of_runtime(path)
        feeds = _feeds(session, sizes)
        expected = session.run(None, feeds)
    except Exception as error:
        found.refused = str(error).splitlines()[0][:300]
        return found
    if other is None:
        return found
    try:
        given = _session(other).run(None, feeds)
    except Exception as error:
        found.verdict = f"does not run: {str(error).splitlines()[0][:300]}"
        return found
    distances = [_distance(a, b) for a, b in zip(expected, given, strict=True)]
    found.largest = max((d for d, _ in distances), default=0.0)
    is_same = all(same for _, same in distances)
    if is_same:
        found.verdict = THE_SAME
        return found
    levels = onnxruntime.GraphOptimizationLevel
    changed = 0.0
    for level in (levels.ORT_ENABLE_BASIC, levels.ORT_ENABLE_ALL):
        theirs = _session(path, level).run(None, feeds)
        pairs = zip(expected, theirs, strict=True)
        changed = max(changed, max((_distance(a, b)[0] for a, b in pairs), default=0.0))
    found.verdict = verdict(found.largest, is_same, changed)
    return found


def _session(path: Path, level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _operators_of_runtime(path: Path) -> int | None:
    """Nodes after ONNX Runtime's own basic optimizations; unknown if it cannot write the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.graph_optimization_level = level
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "basic.onnx"
        options.optimized_model_filepath = str(written)
        try:
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            graph = onnx.load(written, load_external_data=False).graph
        except Exception:
            return None
        return _count(graph)


def _count(graph: onnx.GraphProto) -> int:
    """Nodes of a graph, bodies included."""
    bodies = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return len(graph.node) + sum(_count(body) for body in bodies)


def _feeds(session, sizes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {}
    for given in session.get_inputs():
        dtype = DTYPES.get(given.type)
        if dtype is None:
            dtype = np.dtype(given.type.removeprefix("tensor(").removesuffix(")"))
        shape = sizes.get(given.name)
        if shape is None:
            shape = [n if isinstance(n, int) else 1 for n in given.shape]
        if dtype is np.str_:
            feeds[given.name] = WORDS[random.integers(0, len(WORDS), shape)]
        elif np.issubdtype(dtype, np.floating):
            feeds[given.name] = random.standard_normal(shape).astype(dtype)
        else:
            feeds[given.name] = random.integers(0, 2, shape).astype(dtype)
    return feeds


def _distance(a, b) -> tuple[float, bool]:
    """The largest difference over the largest element, and whether that is called the same."""
    if isinstance(a, (list, dict)):
        return 0.0, str(a) == str(b)
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf"), False
    if not np.issubdtype(a.dtype, np.floating):
        same = bool((a == b).all())
        return (0.0 if same else float("inf")), same
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf"), False
    finite = np.isfinite(a)
    if not finite.any():
        return 0.0, True
    first, second = a[finite].astype(np.float64), b[finite].astype(np.float64)
    largest = max(np.abs(first).max(), 1e-30)
    distance = float(np.abs(first - second).max() / largest)
    return distance, distance <= SAME.get(a.dtype, 2e-2)
