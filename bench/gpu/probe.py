"""What this machine is, what it reaches, and whether every kind of kernel computes what it means.

Items: the ceilings (copy bandwidth counting read and write, bf16 products, the gap between
launches), then small modules that between them use every generator of kernels, forward and
backward, against float64. Times nothing of Shorthaul's; ``tables`` and ``layer`` do.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import shorthaul
import torch
import torch.nn.functional as F
from measuring import Bench, check, parse, without_tf32
from results import Results
from torch import nn

#: What modules are checked in: parameters and inputs of the type, or float32 ones under autocast.
MODES = (
    (torch.float32, "parameters"),
    (torch.bfloat16, "parameters"),
    (torch.float16, "parameters"),
    (torch.bfloat16, "autocast"),
    (torch.float16, "autocast"),
)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def cases(size: int) -> Iterator[tuple[str, nn.Module, tuple]]:
    """Modules with inputs; ``size`` scales rows."""

    def given(*shape):
        return torch.randn(shape).requires_grad_()

    yield "elementwise", Apply(lambda x, y: torch.tanh(x) * F.gelu(y) + x), (given(size, 24),) * 2
    yield "broadcast", Apply(lambda x, y: x * y + 1), (given(size, 24), given(24))
    yield "row_reduction", Apply(lambda x: x.softmax(-1) + x.mean(-1, True)), (given(size, 40),)
    yield "column_reduction", Apply(lambda x: x.sum(0) * x.amax(0)), (given(size, 24),)
    yield "layer_norm", nn.LayerNorm(40), (given(size, 40),)
    yield "rms_norm", nn.RMSNorm(40), (given(size, 40),)
    yield "group_norm", nn.GroupNorm(2, 8), (given(2, 8, 4, 4),)
    yield "batch_norm", nn.BatchNorm2d(8), (given(4, 8, 4, 4),)
    yield "linear", nn.Linear(40, 24), (given(size, 40),)
    yield (
        "linear_gelu",
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)),
        (given(size, 32),),
    )
    yield "batched_product", Apply(torch.bmm), (given(3, 16, 24), given(3, 24, 8))
    yield "convolution", nn.Conv2d(4, 8, 3, padding=1), (given(2, 4, 6, 6),)
    yield "strided_convolution", nn.Conv2d(4, 8, 3, stride=2), (given(2, 4, 9, 9),)
    yield "depthwise", nn.Conv2d(8, 8, 3, padding=1, groups=8), (given(2, 8, 6, 6),)
    yield "dilated", nn.Conv1d(4, 8, 2, dilation=4), (given(2, 4, 16),)
    yield "max_pool", nn.MaxPool2d(3, 2, 1), (given(2, 4, 8, 8),)
    yield "average_pool", nn.AvgPool2d(2), (given(2, 4, 8, 8),)
    yield "attention", Apply(F.scaled_dot_product_attention), (given(2, 2, 8, 8),) * 3
    labels = torch.arange(size) % 10
    yield (
        "cross_entropy",
        Apply(lambda x: F.cross_entropy(x, labels.to(x.device))),
        (given(size, 10),),
    )


def copy_bandwidth(bench: Bench) -> dict:
    """Bytes per second of a device copy, read and written, at several sizes."""
    found = {}
    for mib in (1,) if bench.is_dry else (64, 256, 1024, 4096):
        source = torch.empty(mib << 20, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        times = bench.interleaved({"copy": lambda s=source, t=target: t.copy_(s)})["copy"]
        rate = 2 * source.numel() / times["median_us"] * 1e6
        found[f"{mib} MiB"] = {**times, "bytes_per_s": rate}
    return {"copies": found, "best_bytes_per_s": max(c["bytes_per_s"] for c in found.values())}


def product_rate(bench: Bench) -> dict:
    """Arithmetic of square bf16 products per second."""
    found = {}
    for n in (64,) if bench.is_dry else (2048, 4096, 8192):
        a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
        times = bench.interleaved({"product": lambda a=a, b=b: a @ b})["product"]
        found[str(n)] = {**times, "flop_per_s": 2 * n**3 / times["median_us"] * 1e6}
    return {"products": found, "best_flop_per_s": max(p["flop_per_s"] for p in found.values())}


def launch_gap(bench: Bench) -> dict:
    """Seconds from one tiny kernel to the next: enqueued one by one, and in a replayed graph."""
    x, n = torch.zeros(32, device=bench.device), 10 if bench.is_dry else 1000

    def many():
        for _ in range(n):
            x.add_(1)

    eager = bench.interleaved({"eager": many})["eager"]
    replayed = bench.interleaved({"graph": many}, graph=True)["graph"]
    return {
        "times": {"eager": eager, "graph": replayed},
        "eager_gap_s": eager["median_us"] / n / 1e6,
        "graph_gap_s": replayed["median_us"] / n / 1e6,
    }


def compile_seconds(bench: Bench) -> dict:
    """Wall time of the first call of a small module, capture and compilation included."""
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU()).to(bench.device)
    compiled = bench.module(model)
    start = time.perf_counter()
    compiled(torch.randn(16, 32, device=bench.device)).sum().backward()
    return {"first_step_s": time.perf_counter() - start}


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if anything was wrong."""
    options = parse(__doc__.splitlines()[0], "results/probe.json").parse_args(arguments)
    bench = Bench(options.dry_run, options.rounds)
    print(shorthaul.cuda.info())
    results = Results(options.out, "probe", vars(options))
    ceilings = (copy_bandwidth, product_rate, launch_gap, compile_seconds)
    for measure in ceilings:
        if options.only in measure.__name__:
            results.item(measure.__name__, lambda measure=measure: measure(bench))
    for dtype, mode in MODES[:1] if options.dry_run else MODES:
        torch.manual_seed(0)
        for name, model, inputs in cases(8 if options.dry_run else 64):
            name = f"{name} {str(dtype).removeprefix('torch.')} {mode}"
            if options.only not in name:
                continue
            given = dtype if mode == "parameters" else torch.float32
            model = model.to(bench.device, given)
            inputs = tuple(x.detach().to(bench.device, given).requires_grad_() for x in inputs)
            casts = bench.autocast(dtype) if mode == "autocast" else contextlib.nullcontext()

            def checked(model=model, inputs=inputs, dtype=dtype, casts=casts):
                with without_tf32():
                    return check(bench, model, inputs, dtype, casts)

            results.item(name, checked)
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
