"""Time in ONNX Runtime of operators beside the steps they stand for.

Owns the pairs that a rewrite chooses between, so that what it chooses can be measured: one session
for each, run in turns; prints medians in microseconds. Run it on a quiet machine:

    python bench/onnx/operator_times.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

DOMAIN = "com.microsoft"


def session(nodes, inputs, outputs, constants, threads):
    """A model of these nodes, ready to run; sizes are by name."""
    declared = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in ports]
        for ports in (inputs.items(), outputs.items())
    ]
    stored = [
        numpy_helper.from_array(np.asarray(v, np.float32), name) for name, v in constants.items()
    ]
    graph = helper.make_graph(nodes, "pair", *declared, stored)
    sets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)


def normalization(rows, width, threads):
    """A sum that is normalized, and SkipLayerNormalization."""
    sizes = [1, rows, width]
    ports = {"x": sizes, "s": sizes}, {"y": sizes, "z": sizes}
    constants = {"g": np.linspace(0.5, 1.5, width), "b": np.linspace(-1, 1, width)}
    steps = [
        helper.make_node("Add", ["x", "s"], ["z"]),
        helper.make_node("LayerNormalization", ["z", "g", "b"], ["y"]),
    ]
    outputs = ["y", "", "", "z"]
    one = helper.make_node("SkipLayerNormalization", ["x", "s", "g", "b"], outputs, domain=DOMAIN)
    return ports[0], [session(nodes, *ports, constants, threads) for nodes in (steps, [one])]


def attention(length, width, threads):
    """Eight heads of scaled products and a softmax, and Attention of operator set 23."""
    sizes = [1, 8, length, width]
    ports = {name: sizes for name in "qkv"}, {"y": sizes}
    steps = [
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "t"], ["p"]),
        helper.make_node("Mul", ["p", "scale"], ["s"]),
        helper.make_node("Softmax", ["s"], ["w"], axis=-1),
        helper.make_node("MatMul", ["w", "v"], ["y"]),
    ]
    one = [helper.make_node("Attention", list("qkv"), ["y"])]
    constants = [{"scale": width**-0.5}, {}]
    pairs = zip((steps, one), constants, strict=True)
    return ports[0], [session(nodes, *ports, kept, threads) for nodes, kept in pairs]


def stacked(rows, width, threads):
    """Three products of one input, and one product with a Split."""
    sizes = [1, rows, width]
    ports = {"x": sizes}, {name: sizes for name in "abc"}
    weights = np.random.default_rng(0).standard_normal((3, width, width))
    three = [helper.make_node("MatMul", ["x", f"w{n}"], [name]) for n, name in enumerate("abc")]
    one = [
        helper.make_node("MatMul", ["x", "w"], ["t"]),
        helper.make_node("Split", ["t"], list("abc"), axis=2, num_outputs=3),
    ]
    constants = [{f"w{n}": w for n, w in enumerate(weights)}, {"w": np.concatenate(weights, 1)}]
    pairs = zip((three, one), constants, strict=True)
    return ports[0], [session(nodes, *ports, kept, threads) for nodes, kept in pairs]


CASES = [
    (normalization, [(16, 64), (128, 768), (512, 1024)]),
    (attention, [(16, 16), (128, 64), (512, 64)]),
    (stacked, [(40, 16), (128, 64), (128, 256), (512, 768)]),
]


def measure(sessions, feeds, rounds, seconds):
    """Median microseconds of each session, in turns."""
    times = [[] for _ in sessions]
    sessions[0].run(None, feeds)
    start = time.perf_counter()
    sessions[0].run(None, feeds)
    repeats = max(1, int(seconds / rounds / (time.perf_counter() - start)))
    for _ in range(rounds):
        for spent, ready in zip(times, sessions, strict=True):
            ready.run(None, feeds)
            start = time.perf_counter()
            for _ in range(repeats):
                ready.run(None, feeds)
            spent.append(1e6 * (time.perf_counter() - start) / repeats)
    return [statistics.median(spent) for spent in times]


def main() -> None:
    """Prints a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of each pair")
    options = parser.parse_args()
    for make, sizes in CASES:
        for size in sizes:
            inputs, sessions = make(*size, options.threads)
            random = np.random.default_rng(1)
            feeds = {n: random.standard_normal(s).astype(np.float32) for n, s in inputs.items()}
            steps, one = measure(sessions, feeds, options.rounds, options.seconds)
            shown = " x ".join(str(n) for n in size)
            print(f"{make.__name__} {shown}: steps {steps:.1f} us, one operator {one:.1f} us")


if __name__ == "__main__":
    main()
