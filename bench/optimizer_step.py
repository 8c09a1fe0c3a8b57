"""Times steps of optimizers on the CPU, `shorthaul.optim` beside PyTorch's own ways.

Owns the measurement and its table. It counts processor time of all threads, so that other programs
on the machine matter little on one thread; with more, threads that wait for each other count too.
Rounds are interleaved. The column `floor` is an estimate, no bound: the time that one pass in place
over a large array takes for as many bytes. A step that walks through several arrays may take less.

    .venv/bin/python bench/optimizer_step.py --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import shorthaul
import torch
from torch import nn

#: Bytes of one element that a step moves: parameter and state in and out, gradient in.
BYTES = {"AdamW": 28, "SGD": 20}

SETTINGS = {"AdamW": {"lr": 1e-4}, "SGD": {"lr": 1e-3, "momentum": 0.9}}

WAYS = {
    "shorthaul": (shorthaul.optim, {}),
    "fused": (torch.optim, {"fused": True}),
    "foreach": (torch.optim, {"foreach": True}),
    "loop": (torch.optim, {"foreach": False}),
}


def resnet50() -> nn.Module:
    """The network of torchvision."""
    from torchvision.models import resnet50 as make

    return make()


def bert_layer() -> nn.Module:
    """One layer of BERT-large."""
    return nn.TransformerEncoderLayer(1024, 16, 4096)


def perceptron() -> nn.Module:
    """A network so small that calls count more than bytes."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


NETWORKS = {"ResNet-50": resnet50, "BERT-large layer": bert_layer, "two-layer MLP": perceptron}


def per_call(run: Callable[[], object], calls: int) -> float:
    """Processor milliseconds of one call."""
    begun = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begun) / calls * 1e3


def floor(rounds: int) -> float:
    """Processor milliseconds for each byte that a pass in place over a large array moves."""
    x = torch.ones(1 << 26)
    x.mul_(1.0)
    times = [per_call(lambda: x.mul_(1.0), 1) for _ in range(rounds)]
    return statistics.median(times) / (2 * x.numel() * x.element_size())


def measure(make: Callable[[], nn.Module], name: str, rounds: int) -> tuple[int, dict]:
    """Elements, and each way's processor milliseconds of a step by round."""
    steps, n = {}, 0
    for way, (optimizers, settings) in WAYS.items():
        parameters = list(make().parameters())
        for p in parameters:
            p.grad = torch.randn_like(p) * 1e-3
        n = sum(p.numel() for p in parameters)
        optimizer = getattr(optimizers, name)(parameters, **SETTINGS[name], **settings)
        steps[way] = optimizer.step
        optimizer.step()
    calls = max(1, 2_000_000 // n)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            times[way].append(per_call(step, calls))
    return n, times


def main() -> None:
    """Prints a row for each network and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    per_byte = floor(chosen.rounds)
    print(
        f"{torch.get_num_threads()} threads; {1 / per_byte / 1e6:.1f} GB for each processor second"
    )
    print(f"| step | floor | {' | '.join(WAYS)} |")
    print("|---|---" + "|---" * len(WAYS) + "|")
    for title, make in NETWORKS.items():
        for name, n_bytes in BYTES.items():
            n, times = measure(make, name, chosen.rounds)
            cells = [f"{n * n_bytes * per_byte:.3f}"]
            cells += [f"{statistics.median(found):.3f}" for found in times.values()]
            print(f"| {title}, {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
