"""``time_models.py ENTRY NAME=MODEL...``: times models side by side, as JSON on standard output.

Owns the measurement: ONNX Runtime on the CPU with all its optimizations, two threads, all models in
one process, rounds interleaved so that they meet the same machine. The first model is the original;
it is there twice, and the ratio of the two copies tells how much of a difference is noise.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import feeds
import onnxruntime

N_ROUNDS = 15
# A round of one model takes at least this long, in seconds; short models run several times.
MIN_ROUND = 0.01
THREADS = 2


def main() -> None:
    """Prints the median milliseconds of each model and its median ratio to the original's."""
    entry = json.loads(sys.argv[1])
    models = dict(argument.split("=", 1) for argument in sys.argv[2:])
    original = next(iter(models))
    models["again"] = models[original]
    run = feeds.runs(entry, n_seeds=1)[0]
    steps, errors = {}, {}
    for name, path in models.items():
        try:
            steps[name] = _step(path, run, entry, models[original])
            steps[name]()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    n_calls = _calls(steps[original])
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for idx in range(N_ROUNDS):
        # Each round starts with another model, so that none always follows the same one.
        names = list(steps)
        for name in names[idx % len(names) :] + names[: idx % len(names)]:
            start = time.perf_counter()
            for _ in range(n_calls):
                steps[name]()
            rounds[name].append((time.perf_counter() - start) / n_calls * 1e3)
    result = {name: _summary(times, rounds[original]) for name, times in rounds.items()}
    print(json.dumps({"sizes": run.sizes, "calls": n_calls, "models": result, "errors": errors}))


def _step(path: str, run: feeds.Run, entry: dict, original: str) -> Callable[[], None]:
    session = _session(path)
    values = session.get_inputs()
    # The original's shapes, as an output may have lost the names of its dimensions.
    known = {value.name: value for value in _session(original).get_inputs()}
    inputs = [(v.name, v.type, known[v.name].shape) for v in values if v.name in known]
    feed = feeds.feed(run, entry, inputs)
    return lambda: session.run(None, feed)


def _session(path: str) -> onnxruntime.InferenceSession:
    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # Spinning threads of one session would take the cores from the next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _calls(step: Callable[[], None]) -> int:
    step()
    start = time.perf_counter()
    step()
    return max(1, min(1000, round(MIN_ROUND / max(time.perf_counter() - start, 1e-6))))


def _summary(times: list[float], original: list[float]) -> dict:
    ratios = [ours / theirs for ours, theirs in zip(times, original, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "ms": statistics.median(times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quarters[0], quarters[2]],
        "rounds_ms": times,
    }


if __name__ == "__main__":
    main()
