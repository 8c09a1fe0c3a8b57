"""Step time in ONNX Runtime of training graphs: ours beside onnxsim's, from the same forward file.

Owns the networks, the two ways to a training graph, and the measurement: both graphs take the same
step of Adam on the same batch, their losses are compared, then they run in turns. Run it with a
Python that has torch, torchvision, onnxruntime and onnxsim, and the program `shorthaul`:

    python bench/onnx/training_graphs.py --out bench/results/onnx-training-graphs.json
"""

import argparse
import io
import json
import platform
import statistics
import subprocess
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxsim
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

PROGRAM = Path(__file__).resolve().parents[2] / "target" / "release" / "shorthaul"


class Attending(nn.Module):
    """Two encoder layers over tokens, and a classifier of their mean."""

    def __init__(self, width=128, heads=4, layers=2, vocabulary=1000, classes=10):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        parts = ("q", "k", "v", "out")
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {part: nn.Linear(width, width) for part in parts}
                | {"before": nn.LayerNorm(width), "between": nn.LayerNorm(width)}
                | {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        # onnxsim differentiates lookups by a vector only.
        x = self.embedding(tokens.reshape(-1)).reshape(*tokens.shape, -1)
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        for layer in self.layers:
            y = layer["before"](x)
            q, k, v = (layer[part](y).reshape(split).transpose(1, 2) for part in "qkv")
            scores = q @ k.transpose(2, 3) / split[-1] ** 0.5
            y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
            x = x + layer["out"](y)
            x = x + layer["down"](F.gelu(layer["up"](layer["between"](x))))
        return self.head(x.mean(1))


def perceptron():
    """784 to 10 through two layers of 256."""
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def lenet():
    """Two convolutions with pooling, two dense layers, for images of 28 x 28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def resnet():
    """ResNet-18 with ten classes."""
    return torchvision.models.resnet18(num_classes=10)


#: Network and the shape of its input without the batch; tokens are integers.
NETWORKS = {
    "perceptron": (perceptron, (784,), 64),
    "lenet": (lenet, (1, 28, 28), 32),
    "resnet18": (resnet, (3, 32, 32), 8),
    "transformer": (Attending, (64,), 4),
}


class WithLoss(nn.Module):
    """The network and its mean cross-entropy with one-hot targets, of operators both tools know."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, target):
        scores = self.network(x)
        return (scores.exp().sum(-1).log() - (scores * target).sum(-1)).mean()


def forward_file(make, shape, batch):
    """The forward model with its loss: sizes fixed, in evaluation form, and simplified by onnxsim,
    as onnxsim's training graphs need it. Weights are not folded as constants."""
    torch.manual_seed(0)
    model = WithLoss(make()).eval()
    with torch.no_grad():
        # The exporter stores equal parameters, ones for example, once.
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    x = torch.randint(1000, (batch, *shape)) if make is Attending else torch.randn(batch, *shape)
    target = F.one_hot(torch.randint(10, (batch,)), 10).float()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (x, target),
            file,
            dynamo=False,
            opset_version=17,
            input_names=["x", "target"],
            output_names=["loss"],
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    exported, _ = onnxsim.simplify(
        onnx.load_from_string(file.getvalue()),
        skip_fuse_bn=True,
        initializers_as_constants=False,
    )
    spell_out(exported.graph, batch)
    stored = {tensor.name for tensor in exported.graph.initializer}
    names = [name for name, _ in model.named_parameters() if name in stored]
    return exported, names, {"x": x.numpy(), "target": target.numpy()}


def spell_out(graph, batch):
    """Writes Flatten as Reshape, constants as initializers: onnxsim differentiates only those."""
    rows = onnx.numpy_helper.from_array(np.array([batch, -1]), "rows")
    stored = [rows]
    for node in graph.node:
        if node.op_type == "Flatten":
            node.CopyFrom(onnx.helper.make_node("Reshape", [node.input[0], "rows"], node.output))
        elif node.op_type == "Constant":
            value = onnx.numpy_helper.to_array(node.attribute[0].t)
            stored.append(onnx.numpy_helper.from_array(value, node.output[0]))
    kept = [node for node in graph.node if node.op_type != "Constant"]
    del graph.node[:]
    graph.node.extend(kept)
    graph.initializer.extend(stored)


class Step:
    """A training graph in a session, with everything it reads and its state held by the runtime."""

    def __init__(self, model, feeds, state, threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.state = state
        self.outputs = [output.name for output in self.session.get_outputs()]
        given = {i.name for i in self.session.get_inputs()}
        self.values = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
            for name, value in feeds.items()
            if name in given
        }

    def run(self):
        """One step; the state it leaves is the next one's."""
        results = self.session.run_with_ort_values(self.outputs, self.values)
        found = dict(zip(self.outputs, results, strict=True))
        self.values |= {name: found[output] for name, output in self.state.items()}
        return found


def ours(program, exported, names, feeds, threads):
    """Our graph of the file, with the inputs of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "model.onnx", Path(folder) / "train.onnx"
        onnx.save(exported, path)
        # A training loop reads the loss and the state; onnxsim's graph gives no gradients.
        command = [program, "grad", path, "-o", out, "--loss", "loss", "--optimizer", "adam"]
        command += ["--no-gradients", "--wrt", ",".join(names)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr.strip())
        model = onnx.load(out)
    initial = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    given = {"lr": np.float32(1e-3), "step": np.float32(1), **feeds}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        given.setdefault(value.name, initial.get(value.name, np.zeros(shape, np.float32)))
    outputs = {output.name for output in model.graph.output}
    state = {n: f"{n}.next" for n in given if f"{n}.next" in outputs}
    return model, Step(model, given, state, threads), "loss"


def theirs(exported, names, feeds, threads):
    """onnxsim's graph of the file, with the inputs of its first step."""
    loop = onnxsim.compile_training_loop(exported, "loss", names, optimizer="adam")
    step = loop.step_graph
    given = {**feeds, **loop.initial_state, "lr": np.float32(1e-3)}
    corrections = onnxsim.qat_graph.adam_bias_corrections(0)
    given |= {name: np.asarray(value, np.float32) for name, value in corrections.items()}
    return step.model, Step(step.model, given, step.state, threads), step.loss_name


def measure(steps, rounds, seconds):
    """Milliseconds a step, one median a round, the graphs in turns."""
    times = {name: [] for name in steps}
    repeats = {}
    for name, step in steps.items():
        step.run()
        start = time.perf_counter()
        step.run()
        repeats[name] = max(1, int(seconds / (time.perf_counter() - start)))
    for _ in range(rounds):
        for name, step in steps.items():
            spent = []
            for _ in range(repeats[name]):
                start = time.perf_counter()
                step.run()
                spent.append(1e3 * (time.perf_counter() - start))
            times[name].append(statistics.median(spent))
    return times


def compare(name, options):
    """One network: nodes, losses of the first steps, times."""
    make, shape, batch = NETWORKS[name]
    exported, names, feeds = forward_file(make, shape, options.batch or batch)
    steps, row = {}, {"network": name, "batch": options.batch or batch, "graphs": {}}
    for tool, build in [("shorthaul", partial(ours, options.shorthaul)), ("onnxsim", theirs)]:
        start = time.perf_counter()
        try:
            model, step, loss = build(exported, names, feeds, options.threads)
        except Exception as error:  # a tool that cannot is a result
            row["graphs"][tool] = {"refused": f"{type(error).__name__}: {error}"[:300]}
            continue
        built = time.perf_counter() - start
        losses = [float(step.run()[loss].numpy().ravel()[0]) for _ in range(3)]
        row["graphs"][tool] = {
            "nodes": len(model.graph.node),
            "seconds_to_build": built,
            "losses": losses,
        }
        steps[tool] = step
    for tool, times in measure(steps, options.rounds, options.seconds).items():
        row["graphs"][tool] |= {"ms": times, "median_ms": statistics.median(times)}
    both = [graph.get("median_ms") for graph in row["graphs"].values()]
    if all(both):
        row["times_as_fast"] = both[1] / both[0]
    return row


def main():
    """Writes a JSON file and prints a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="all if none is given")
    parser.add_argument("--batch", type=int, help="another batch size than each network's own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each graph in each round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shorthaul", type=Path, default=PROGRAM, help="the program")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.networks:
        row = compare(name, options)
        rows.append(row)
        for tool, graph in row["graphs"].items():
            if "refused" in graph:
                print(f"{name}: {tool} refuses: {graph['refused']}")
            else:
                print(f"{name}: {tool} {graph['median_ms']:.2f} ms, {graph['nodes']} nodes")
        if "times_as_fast" in row:
            print(f"{name}: {row['times_as_fast']:.2f} times as fast as onnxsim's")
    if options.out:
        versions = {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (torch, onnx, onnxruntime, onnxsim)},
        }
        how = {k: v for k, v in vars(options).items() if k not in ("out", "networks", "shorthaul")}
        result = {"versions": versions, "machine": platform.processor(), **how, "results": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
