"""``time_models.py ENTRY SECONDS NAME=MODEL...``: times models side by side, as JSON.

Owns the measurement: ONNX Runtime on the CPU with all its optimizations, two threads, all models in
one process, rounds interleaved so that they meet the same machine. The first model is the original;
it is there twice, and the ratio of the two copies tells how much of a difference is noise. Where a
model of ours may be slower than ``LIMIT`` of the original, further rounds in new sessions follow
until the 95 % interval of the median lies on one side of it, for at most SECONDS.
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
# A model is slower if it takes more than this many times the original's time.
LIMIT = 1.02
MAX_ROUNDS = 600


def main() -> None:
    """Prints the median milliseconds of each model and its median ratio to the original's."""
    entry = json.loads(sys.argv[1])
    seconds = float(sys.argv[2])
    models = dict(argument.split("=", 1) for argument in sys.argv[3:])
    original = next(iter(models))
    models["again"] = models[original]
    run = feeds.runs(entry, n_seeds=1)[0]
    errors: dict[str, str] = {}
    rounds: dict[str, list[float]] = {name: [] for name in models}
    copies = (original, "again")
    n_calls = _batch(0, models, run, entry, rounds, errors)
    start, n_batches = time.perf_counter(), 1
    while n_batches * N_ROUNDS < MAX_ROUNDS and time.perf_counter() - start < seconds:
        undecided = [
            name
            for name in models
            if name.startswith("shorthaul") and name not in errors
            if _verdict(_paired(rounds, name, copies)) == "open"
        ]
        if not undecided or set(copies) & set(errors):
            break
        some = {name: models[name] for name in (*copies, *undecided)}
        _batch(n_batches, some, run, entry, rounds, errors)
        n_batches += 1
    result = {
        name: {**_summary(times, rounds[original]), **_interval(_paired(rounds, name, copies))}
        for name, times in rounds.items()
        if name not in errors
    }
    print(json.dumps({"sizes": run.sizes, "calls": n_calls, "models": result, "errors": errors}))


def _batch(number: int, models: dict, run, entry: dict, rounds: dict, errors: dict) -> int:
    """Adds rounds of each model in new sessions. These are made in another order every time, since
    times depend on where a session's memory lies. A model that fails goes into ``errors``."""
    original = next(iter(models))
    names = list(models)
    names = names[number % len(names) :] + names[: number % len(names)]
    steps = {}
    for name in names:
        try:
            steps[name] = _step(models[name], run, entry, models[original])
            steps[name]()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    n_calls = _calls(steps[original])
    for idx in range(N_ROUNDS):
        # Each round starts with another model, so that none always follows the same one.
        order = [name for name in names if name in steps]
        for name in order[idx % len(order) :] + order[: idx % len(order)]:
            start = time.perf_counter()
            for _ in range(n_calls):
                steps[name]()
            rounds[name].append((time.perf_counter() - start) / n_calls * 1e3)
    return n_calls


def _paired(rounds: dict[str, list[float]], name: str, copies: tuple[str, str]) -> list[float]:
    """Ratios of a model's rounds to the mean of the original's two copies in the same round."""
    first, second = (rounds[copy] for copy in copies)
    return [2 * t / (a + b) for t, a, b in zip(rounds[name], first, second, strict=False)]


def _interval(ratios: list[float]) -> dict:
    """The 95 % interval of the median ratio, from the binomial distribution of ranks."""
    if len(ratios) < 6:
        return {}
    rank = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    ordered = sorted(ratios)
    ends = [ordered[rank], ordered[-1 - rank]]
    return {"interval": ends, "n_rounds": len(ratios), "verdict": _verdict(ratios)}


def _verdict(ratios: list[float]) -> str:
    """``slower`` or ``not slower`` than the limit where the interval decides, else ``open``."""
    if len(ratios) < 6:
        return "not slower"
    rank = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    ordered = sorted(ratios)
    if ordered[-1 - rank] <= LIMIT:
        return "not slower"
    return "slower" if ordered[rank] > LIMIT else "open"


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
    # Further rounds are of the original and some of the models only.
    ratios = [ours / theirs for ours, theirs in zip(times, original, strict=False)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "ms": statistics.median(times),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quarters[0], quarters[2]],
        "rounds_ms": times,
    }


if __name__ == "__main__":
    main()
