"""``python -m shorthaul.demo``: digits trained by eager PyTorch and by Shorthaul, side by side.

Owns the demonstration: a convolutional network and a small transformer on scikit-learn's digits
from the same seed and batches, then a few training steps of ResNet-50 and of a BERT-large layer.
Prints what it measures and draws the loss curves; asserts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shorthaul

from .bench import check
from .models import EXAMPLES, DigitsConvNet, DigitsTransformer, Example


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(
        "python -m shorthaul.demo",
        description="Trains two small networks on handwritten digits, in eager PyTorch and in "
        "Shorthaul side by side; then times a few steps of ResNet-50 and of a BERT-large layer.",
    )
    parser.add_argument("--epochs", type=int, default=14, help="epochs of 15 steps each (14)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for the loss curves (out)"
    )
    parser.add_argument("--small", action="store_true", help="skip ResNet-50 and BERT-large")
    parser.add_argument(
        "--errors", action="store_true", help="compare these two with float64 as well (minutes)"
    )
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Behind a pipe, Python would keep its lines until the end.
        sys.stdout.reconfigure(line_buffering=True)
    # The test set has another batch size, so each network is compiled once more; that is expected.
    warnings.simplefilter("ignore", shorthaul.RecompileWarning)
    data = _digits()
    for name, model in (("digits_cnn", DigitsConvNet), ("digits_transformer", DigitsTransformer)):
        torch.manual_seed(0)
        runs = _train_both(name, model(), data, options.epochs)
        _draw(name, runs, options.out)
    if not options.small:
        for name in ("resnet50", "bert_large_layer"):
            _one_step(name, errors=options.errors)
    return 0


#: Eager again: how far rounding alone carries two runs apart.
OTHER_THREADS = "eager, other threads"


@dataclass
class Run:
    """What one way of training gave."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    first_step_s: float = 0.0


def _digits():
    """Images ``[N, 1, 8, 8]`` in [0, 1] and labels; the last 297 are for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def _train_both(name: str, model: nn.Module, data, epochs: int) -> dict[str, Run]:
    print(f"\n{name}: {sum(p.numel() for p in model.parameters())} parameters, batch 100")
    models = {
        "eager": copy.deepcopy(model),
        OTHER_THREADS: copy.deepcopy(model),
        "shorthaul": shorthaul.module(model),
    }
    optimizers = {
        way: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for way, m in models.items()
    }
    runs = {way: Run() for way in models}
    for epoch in range(epochs):
        for way in models:
            with _threads_of(way):
                _epoch(models[way], optimizers[way], data, epoch, runs[way])
        eager, ours = runs["eager"], runs["shorthaul"]
        print(
            f"  epoch {epoch + 1}: loss {_last(eager):.4f} eager, {_last(ours):.4f} shorthaul; "
            f"accuracy {eager.accuracies[-1]:.1%}, {ours.accuracies[-1]:.1%}"
        )
    for way, run in runs.items():
        print(
            f"  {way:<20} {statistics.median(run.step_ms[1:]):7.2f} ms/step, "
            f"first step {run.first_step_s:.2f} s"
        )
    print(
        f"  largest difference of a step's loss from eager's over {len(eager.losses)} steps: "
        f"{_difference(eager, ours):.2e} shorthaul, "
        f"{_difference(eager, runs[OTHER_THREADS]):.2e} {OTHER_THREADS}"
    )
    _print_report(models["shorthaul"], data[0][0][:100])
    return runs


@contextlib.contextmanager
def _threads_of(way: str):
    n_threads = torch.get_num_threads()
    torch.set_num_threads(_other_threads() if way == OTHER_THREADS else n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _other_threads() -> int:
    return 1 if torch.get_num_threads() > 1 else 2


def _difference(a: Run, b: Run) -> float:
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def _last(run: Run) -> float:
    return statistics.fmean(run.losses[-15:])


def _epoch(model: nn.Module, optimizer, data, epoch: int, run: Run) -> None:
    (images, labels), (test_images, test_labels) = data
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
    model.train()
    for rows in order.split(100):
        start = time.perf_counter()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds = time.perf_counter() - start
        run.losses.append(loss.item())
        run.step_ms.append(seconds * 1e3)
        run.first_step_s = run.first_step_s or seconds
    model.eval()
    with torch.no_grad():
        correct = (model(test_images).argmax(1) == test_labels).float().mean().item()
    run.accuracies.append(correct)


def _print_report(model: nn.Module, images: torch.Tensor) -> None:
    data = shorthaul.report(model.train(), images).data
    text = f"  {len(data['kernels'])} kernels forward and backward"
    if "bytes_moved" in data:
        text += f", {data['bytes_moved'] / 2**20:.1f} MiB moved"
        if "bytes_least" in data:
            text += f" (least possible {data['bytes_least'] / 2**20:.1f} MiB)"
    print(text)


def _draw(name: str, runs: dict[str, Run], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(runs["eager"].losses, label="PyTorch eager", linewidth=3, alpha=0.5)
    axes.plot(runs["shorthaul"].losses, label="Shorthaul", linewidth=1)
    axes.set(xlabel="step", ylabel="cross-entropy", title=name, yscale="log")
    axes.legend()
    figure.tight_layout()
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"  loss curves: {path}")


def _print_errors(example: Example) -> None:
    checked = check(example, example.batch)
    ratios = [t["error"] / t["eager"] for t in checked["tensors"] if t["eager"] > 0]
    print(
        f"  errors against float64 over {len(checked['tensors'])} tensors: median "
        f"{statistics.median(ratios):.2f} x eager float32's, largest {max(ratios):.2f} x; "
        f"{len(checked['beyond'])} beyond twice eager's plus 1e-6 of the largest value"
    )
    for variant, n_beyond in checked["others_beyond"].items():
        print(f"  PyTorch itself, {variant}: {n_beyond} beyond that")


def _one_step(name: str, errors: bool) -> None:
    example = EXAMPLES[name]
    print(f"\n{name}, batch {example.batch}: one training step")
    if errors:
        _print_errors(example)
    torch.manual_seed(0)
    model, inputs = example.make().train(), example.inputs(example.batch)
    ways = {"eager": copy.deepcopy(model), "shorthaul": shorthaul.module(model)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(4):
        for way, called in ways.items():
            start = time.perf_counter()
            example.loss(called(*inputs)).backward()
            times[way].append(time.perf_counter() - start)
    for way, seconds in times.items():
        print(
            f"  {way:<10} {statistics.median(seconds[1:]) * 1e3:7.0f} ms/step, "
            f"first step {seconds[0]:.2f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
