"""Runs models in ONNX Runtime: outputs MODEL (IN.npz OUT.npz)..., or measure A B IN.npz."""

import sys
import time

import numpy as np
import onnxruntime


def session(path, level):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds(path, opened):
    given = np.load(path)
    wanted = {port.name: port.type for port in opened.get_inputs()}
    text = {name for name, kind in wanted.items() if kind == "tensor(string)"}
    arrays = {name: given[name] for name in given.files if name in wanted}
    return {name: a.astype(object) if name in text else a for name, a in arrays.items()}


def outputs(model, *files):
    opened = session(model, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for given, made in zip(files[::2], files[1::2], strict=True):
        found = opened.run(None, feeds(given, opened))
        arrays = {f"{n:06}": np.asarray(a) for n, a in enumerate(found)}
        text = {name: a.astype(str) for name, a in arrays.items() if a.dtype == object}
        np.savez(made, **{**arrays, **text})


def measure(before, after, given):
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    sessions = [session(path, level) for path in (before, after)]
    inputs = [feeds(given, opened) for opened in sessions]
    times = [[], []]
    end = time.perf_counter() + 5
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 200):
        for n in (0, 1) if len(times[0]) % 2 else (1, 0):
            start = time.perf_counter()
            sessions[n].run(None, inputs[n])
            times[n].append(1e3 * (time.perf_counter() - start))
    # The first runs allocate.
    print(*(np.median(t[2:]) for t in times))


match sys.argv[1]:
    case "outputs":
        outputs(*sys.argv[2:])
    case "measure":
        measure(*sys.argv[2:])
