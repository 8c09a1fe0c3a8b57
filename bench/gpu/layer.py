"""One BERT-large encoder layer beside eager and torch.compile, in graph replay.

Forward and backward. Shapes of "Data Movement Is All You Need" (arXiv 2007.00072): B=8 L=512 and
B=96 L=128, hidden 1024, 16 heads, intermediate 4096, bf16 by autocast with float32 parameters.
Results at the same shape are compared with float64 first, without dropout; then all variants are
captured as CUDA graphs and replayed in turn.
"""

from __future__ import annotations

import sys
from typing import Any

import shorthaul
import torch
from measuring import Bench, backward, check, parse, without_tf32
from results import Results
from shorthaul.models import without_dropout
from torch import nn

#: (batch, length).
SHAPES = [(8, 512), (96, 128)]


def encoder(is_dry: bool, dropout: float) -> nn.Module:
    """The layer: BERT-large's, or one that an emulator can run."""
    width, heads, inner = (16, 2, 32) if is_dry else (1024, 16, 4096)
    layer = nn.TransformerEncoderLayer(
        width, heads, inner, dropout, activation="gelu", batch_first=True
    )
    return layer.train()


def measure(bench: Bench, batch: int, length: int, dropout: float, dtype) -> dict[str, Any]:
    """Checks the results, then times all variants."""
    torch.manual_seed(0)
    layer = encoder(bench.is_dry, dropout).to(bench.device)
    width = layer.linear1.in_features
    x = torch.randn(batch, length, width, device=bench.device, requires_grad=True)
    bare = without_dropout(encoder(bench.is_dry, dropout).to(bench.device))
    with without_tf32():
        verdict = check(bench, bare, (x,), dtype)
    if not verdict["ok"]:
        return verdict
    grad = torch.randn(batch, length, width, device=bench.device)
    calls = {}
    for name, variant in bench.variants(layer).items():
        if isinstance(variant, str):
            calls[name] = variant
            continue
        own = x.detach().clone().requires_grad_()
        step = backward(variant, (own,), grad)

        def cast_step(step=step):
            with bench.autocast(dtype):
                step()

        calls[name] = cast_step
    with bench.autocast(dtype):
        moved = shorthaul.report(bench.module(layer), x).data
    return {
        **verdict,
        "bytes_moved": float(moved["bytes_moved"]),
        "bytes_least": float(moved["bytes_least"]),
        "times": bench.interleaved(calls, graph=True),
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if anything was wrong."""
    parser = parse(__doc__.splitlines()[0], "results/layer.json")
    parser.add_argument("--dropout", type=float, default=0.1, help="in the timed layer (0.1)")
    options = parser.parse_args(arguments)
    bench = Bench(options.dry_run, options.rounds)
    results = Results(options.out, "layer", vars(options))
    dtype = torch.float32 if options.dry_run else torch.bfloat16
    for batch, length in [(1, 4)] if options.dry_run else SHAPES:
        name = f"encoder layer B={batch} L={length}"
        if options.only in name:
            results.item(
                name,
                lambda b=batch, n=length: measure(bench, b, n, options.dropout, dtype),
            )
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
