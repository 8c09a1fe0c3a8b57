"""Whole training steps of networks: loss curves against PyTorch, times, peak memory.

A step is zero_grad, forward, loss, backward, SGD with momentum, with bf16 autocast and float32
parameters. Each network first trains some steps on fixed batches in every variant. A curve is wrong
and its variant not timed if it differs from eager's by much more than eager's runs in float32 and
bf16 differ. Peak memory is that of PyTorch's allocator, without a compiled module's constants.
PyTorch runs convolutional networks channels_last; Shorthaul chooses layouts itself.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Bench, parse
from results import Results
from shorthaul.models import EXAMPLES, DigitsConvNet, DigitsTransformer, Example, without_dropout
from torch import nn


@dataclass(frozen=True)
class Network:
    """A network with its batch and the steps of its loss curve."""

    example: Example
    batch: int
    steps: int


NETWORKS = {
    "resnet50": Network(EXAMPLES["resnet50"], 64, 20),
    "mobilenet_v2": Network(EXAMPLES["mobilenet_v2"], 64, 20),
    "efficientnet_b0": Network(EXAMPLES["efficientnet_b0"], 64, 20),
    "bert_large_layer": Network(EXAMPLES["bert_large_layer"], 8, 20),
}


def _digits(channels: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randn(batch, channels, 8, 8),)


DRY = {
    "digits_cnn": Network(Example("digits_cnn", lambda: DigitsConvNet(4), _digits(1), 2, 10), 2, 2),
    "digits_transformer": Network(
        Example("digits_transformer", lambda: DigitsTransformer(8, 2, 1), _digits(1), 2, 10), 2, 2
    ),
}


class Training:
    """One variant of a network in training."""

    def __init__(
        self,
        bench: Bench,
        network: Network,
        called: nn.Module,
        dtype: torch.dtype,
        batches: list[tuple],
    ):
        self.bench, self.network, self.called, self.dtype = bench, network, called, dtype
        self.batches = batches
        self.optimizer = torch.optim.SGD(
            called.parameters(), lr=0.01, momentum=0.9, fused=not bench.is_dry
        )

    def step(self, n: int = 0) -> torch.Tensor:
        """The loss before the step on the n-th batch, not waited for."""
        self.optimizer.zero_grad()
        with self.bench.autocast(self.dtype):
            output = self.called(*self.batches[n % len(self.batches)])
        loss = self.network.example.loss(output.float())
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measure(bench: Bench, network: Network) -> dict[str, Any]:
    """Loss curves of all variants, then times of a step, then peak memory."""
    torch.manual_seed(0)
    model = without_dropout(network.example.make().train()).to(bench.device)
    batches = [
        tuple(x.to(bench.device) for x in network.example.inputs(network.batch)) for _ in range(4)
    ]
    half = torch.float32 if bench.is_dry else torch.bfloat16
    trainings: dict[str, Training | str] = {}
    for name, called in bench.variants(model).items():
        if isinstance(called, str):
            trainings[name] = called
            continue
        given = batches
        if name != "shorthaul" and batches[0][0].dim() == 4:
            called, given = channels_last(called), [tuple(map(channels_last, b)) for b in batches]
        trainings[name] = Training(bench, network, called, half, given)
    float32 = Training(bench, network, copy.deepcopy(model), torch.float32, batches)
    curves = {"eager_float32": curve(float32)}
    peaks = {}
    for name, training in trainings.items():
        if isinstance(training, str):
            continue
        if not bench.is_dry:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        before = 0 if bench.is_dry else torch.cuda.memory_allocated()
        curves[name] = curve(training)
        if not bench.is_dry:
            peaks[name] = torch.cuda.max_memory_allocated() - before
    verdict = {"ok": fits(curves), "losses": curves, "peak_bytes": peaks}
    if not verdict["ok"]:
        return verdict
    calls = {name: t if isinstance(t, str) else t.step for name, t in trainings.items()}
    return {**verdict, "times": bench.interleaved(calls)}


def channels_last(value):
    """A module or tensor with images stored pixel by pixel."""
    return value.to(memory_format=torch.channels_last)


def curve(training: Training) -> list[float]:
    """The losses of a network's steps."""
    losses = [training.step(n) for n in range(training.network.steps)]
    return [float(loss) for loss in losses]


def fits(curves: dict[str, list[float]]) -> bool:
    """Whether the curve differs from eager's by at most twice what rounding does, plus 1%."""
    found, eager, exact = curves["shorthaul"], curves["eager"], curves["eager_float32"]
    spread = max(abs(a - b) for a, b in zip(eager, exact, strict=True))
    bound = 2 * spread + 0.01 * max(map(abs, exact))
    return all(abs(a - b) <= bound for a, b in zip(found, eager, strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if anything was wrong."""
    options = parse(__doc__.splitlines()[0], "results/step.json").parse_args(arguments)
    bench = Bench(options.dry_run, options.rounds)
    results = Results(options.out, "step", vars(options))
    for name, network in (DRY if options.dry_run else NETWORKS).items():
        if options.only in name:
            results.item(name, lambda n=network: measure(bench, n))
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
