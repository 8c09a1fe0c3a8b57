"""Training steps of decoder layers on sequences of several lengths, beside eager.

Run it as ``python bench/long_sequences.py``. The model is two layers of LLaMA's form with causal
attention; with ``--written``, the layers write its products, mask and softmax themselves. Every
pair of length and variant runs in a process of its own; a process runs both variants for the times,
one step of each in turn, and one variant for the peak memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import shorthaul
import torch
from torch import nn


class Layer(nn.Module):
    """Attention and a gated unit, each after a norm."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        width, self.heads = options.width, options.heads
        self.dropout, self.is_written = options.dropout, options.written
        self.before, self.behind = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.up, self.gate = nn.Linear(width, 3 * width, False), nn.Linear(width, 3 * width, False)
        self.down = nn.Linear(3 * width, width, False)

    def forward(self, x):
        batch, rows, width = x.shape
        own = self.qkv(self.before(x)).view(batch, rows, 3, self.heads, width // self.heads)
        q, k, v = own.permute(2, 0, 3, 1, 4)
        if self.is_written:
            hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            y = nn.functional.dropout(p, self.dropout) @ v
        else:
            attention = nn.functional.scaled_dot_product_attention
            y = attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, rows, width))
        inner = self.behind(x)
        return x + self.down(self.up(inner) * nn.functional.silu(self.gate(inner)))


def train(model: nn.Module, x: torch.Tensor, has_autocast: bool) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - began


def measure(options: argparse.Namespace) -> dict:
    """Milliseconds of both variants, or the peak memory of a process that trains one of them."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layers = [Layer(options) for _ in range(options.layers)]
    own = nn.Sequential(*layers)
    x = torch.randn(1, options.length, options.width)
    variants = {"eager": own, "shorthaul": shorthaul.module(own)}
    if options.only != "both":
        for _ in range(3):
            train(variants[options.only], x, options.autocast)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_mib": peak >> 10}
    for model in variants.values():
        train(model, x, options.autocast)
        train(model, x, options.autocast)
    times = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, model in variants.items():
            times[name].append(1e3 * train(model, x, options.autocast))
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    """Prints a line for each length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dropout", type=float, default=0.0, help="probability in the attention")
    parser.add_argument("--written", action="store_true", help="attention of single operations")
    parser.add_argument("--autocast", action="store_true", help="within autocast in bf16")
    parser.add_argument("--only", choices=("both", "eager", "shorthaul"))
    parser.add_argument("--length", type=int, help="measure this length in this process")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options)))
        return
    for length in options.lengths.split(","):
        found = {}
        for only in ("both", "eager", "shorthaul"):
            own = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:]]
            run = subprocess.run(
                [*own, "--only", only, "--length", length],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[only] = json.loads(run.stdout.splitlines()[-1])
        times = found["both"]
        print(
            f"{length:>6} tokens: Shorthaul {times['shorthaul']:.0f} ms, "
            f"eager {times['eager']:.0f} ms, "
            f"ratio {times['eager'] / times['shorthaul']:.2f}; peak memory "
            f"{found['shorthaul']['peak_mib']} MiB, eager {found['eager']['peak_mib']} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
