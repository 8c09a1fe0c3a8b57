"""Trains in ONNX Runtime: the training step is an ONNX file that ``shorthaul.onnx.grad`` writes."""

import copy
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import shorthaul.onnx
import torch
import torch.nn.functional as F
from side_by_side import options
from sklearn.datasets import load_digits
from torch import nn

RATE = 0.3


def network() -> nn.Module:
    """``[N, 1, 8, 8]`` to class scores ``[N, 10]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def training_graph(model: nn.Module, folder: Path) -> Path:
    """The file of one step of SGD with cross-entropy."""
    forward, step = folder / "model.onnx", folder / "train.onnx"
    torch.onnx.export(
        model.eval(),
        (torch.zeros(2, 1, 8, 8),),
        forward,
        dynamo=True,
        # The exporter's own optimizer would store equal parameters as one.
        optimize=False,
        verbose=False,
        external_data=False,
        input_names=["images"],
        output_names=["scores"],
        dynamic_shapes=[{0: torch.export.Dim("batch")}],
    )
    shorthaul.onnx.grad(forward, loss="cross-entropy", optimizer="sgd", gradients=False, out=step)
    return step


def main() -> None:
    """Gives every ``NAME.next`` back as ``NAME``."""
    chosen = options(__doc__, steps=20)
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    model = network()
    onnxruntime.set_default_logger_severity(3)
    with tempfile.TemporaryDirectory() as folder:
        session = onnxruntime.InferenceSession(
            training_graph(model, Path(folder)), providers=["CPUExecutionProvider"]
        )
    names = [output.name for output in session.get_outputs()]
    # The file holds the first values of the parameters, so the first step passes none.
    state: dict[str, np.ndarray] = {}
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=RATE)
    for step in range(chosen.steps):
        rows = np.arange(step * 100, step * 100 + 100) % len(labels)
        given = {"images": images[rows], "labels": labels[rows], "lr": np.array(RATE, np.float32)}
        results = dict(zip(names, session.run(names, given | state), strict=True))
        state = {
            name.removesuffix(".next"): value
            for name, value in results.items()
            if name.endswith(".next")
        }
        said = f"onnxruntime {float(results['loss']):.4f}"
        if chosen.eager:
            optimizer.zero_grad()
            loss = F.cross_entropy(eager(torch.tensor(images[rows])), torch.tensor(labels[rows]))
            loss.backward()
            optimizer.step()
            said += f", eager {loss.item():.4f}"
        print(f"step {step}: loss {said}")


if __name__ == "__main__":
    main()
