"""Times of variants beside each other, and the comparison that comes before any time.

Owns how a time is taken: warm-up, variants interleaved round by round in one process, CUDA events
around calls or around replays of a captured graph, the median with quartiles and all samples. In
a dry run everything runs on the CPU, Shorthaul's kernels in the emulator, and times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import shorthaul
import torch
from torch import nn

#: Options of ``torch.compile`` by variant. We capture CUDA graphs, not PyTorch's compiler.
COMPILED = {
    "compile": {},
    "compile_max_autotune": {"mode": "max-autotune-no-cudagraphs"},
}


class Bench:
    """How this run measures."""

    def __init__(self, is_dry: bool, rounds: int = 20, warmup: int = 5):
        self.is_dry = is_dry
        self.rounds = 1 if is_dry else rounds
        self.warmup = 1 if is_dry else warmup
        self.device = torch.device("cpu" if is_dry else "cuda")
        #: Written between samples, so that none finds its data in the second-level cache.
        self.flush = None if is_dry else torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def module(self, model: nn.Module) -> nn.Module:
        """``model`` through Shorthaul."""
        return shorthaul.module(model, backend="cuda-emulated" if self.is_dry else "auto")

    def variants(self, model: nn.Module) -> dict[str, nn.Module | str]:
        """Copies of ``model`` by variant, or why there is none."""
        made: dict[str, nn.Module | str] = {
            "shorthaul": self.module(copy.deepcopy(model)),
            "eager": copy.deepcopy(model),
        }
        for name, options in COMPILED.items():
            if self.is_dry:
                made[name] = "left out of dry runs"
            else:
                made[name] = torch.compile(copy.deepcopy(model), **options)
        return made

    def autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        """The region that a variant of ``dtype`` runs in."""
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def interleaved(self, calls: dict[str, Callable | str], graph: bool = False) -> dict[str, Any]:
        """Microseconds of each call: ``{name: {median_us, quartiles_us, samples_us}}``."""
        runs, found = {}, {}
        for name, call in calls.items():
            if isinstance(call, str):
                found[name] = {"skipped": call}
                continue
            for _ in range(self.warmup):
                call()
            runs[name] = self._captured(call) if graph and not self.is_dry else call
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                samples[name].append(self._one(run))
        for name, taken in samples.items():
            found[name] = spread(taken)
        return found

    def _one(self, run: Callable) -> float:
        if self.is_dry:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6
        self.flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _captured(self, call: Callable) -> Callable:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def spread(samples: list[float]) -> dict[str, Any]:
    """Median, quartiles and every sample."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return {
        "median_us": statistics.median(samples),
        "quartiles_us": [quartiles[0], quartiles[2]],
        "samples_us": samples,
    }


def backward(model: nn.Module, inputs: tuple, grad: torch.Tensor) -> Callable[[], None]:
    """Forward and backward of a module with one output and a given gradient."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for tensor in inputs:
            tensor.grad = None
        model(*inputs).backward(grad.to(torch.float32) if grad.dtype == torch.float64 else grad)

    return step


def results_of(model: nn.Module, inputs: tuple, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of one forward and backward."""
    inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
    model.zero_grad()
    output = model(*inputs)
    output.backward(grad.to(output.dtype))
    found = {"output": output.detach()}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found


@dataclass(frozen=True)
class Reference:
    """Eager's results of one step, in float64 and as it is, for one gradient of the output."""

    exact: dict[str, torch.Tensor]
    eager: dict[str, torch.Tensor]
    grad: torch.Tensor
    dtype: torch.dtype

    def judge(self, found: dict[str, torch.Tensor]) -> dict[str, Any]:
        """A tensor may be no farther from float64 than twice eager's own, plus the resolution of
        ``dtype`` relative to the largest value.
        """
        rows, ok = {}, True
        for name, reference in self.exact.items():
            error = (found[name].double() - reference).abs().max().item()
            own = (self.eager[name].double() - reference).abs().max().item()
            scale = reference.abs().max().item()
            fits = error <= 2 * own + torch.finfo(self.dtype).eps * scale
            rows[name] = {"error": error, "eager_error": own, "scale": scale, "ok": fits}
            ok &= fits
        return {"ok": ok, "tensors": rows}


def reference(
    bench: Bench,
    model: nn.Module,
    inputs: tuple,
    dtype: torch.dtype,
    casts: contextlib.AbstractContextManager,
) -> Reference:
    """What a step of ``model`` gives in float64, and as it is within ``casts``."""
    exact_model = copy.deepcopy(model).double()
    exact_inputs = tuple(
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    )
    output = exact_model(*exact_inputs)
    generator = torch.Generator().manual_seed(7)
    grad = (torch.rand(output.shape, generator=generator, dtype=torch.float64) - 0.3).to(output)
    exact = results_of(exact_model, exact_inputs, grad)
    with casts:
        eager = results_of(copy.deepcopy(model), inputs, grad)
    return Reference(exact, eager, grad, dtype)


def check(
    bench: Bench,
    model: nn.Module,
    inputs: tuple,
    dtype: torch.dtype = torch.float32,
    casts: contextlib.AbstractContextManager | None = None,
) -> dict[str, Any]:
    """Shorthaul's results of one step against eager's, as :class:`Reference` judges.

    Both run within ``casts``, by default autocast to ``dtype``.
    """
    casts = bench.autocast(dtype) if casts is None else casts
    known = reference(bench, model, inputs, dtype, casts)
    with casts:
        found = results_of(bench.module(copy.deepcopy(model)), inputs, known.grad)
    return known.judge(found)


def parse(description: str, default_out: str) -> argparse.Namespace:
    """The arguments that all scripts take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the emulator, no GPU")
    parser.add_argument("--out", default=default_out, help=f"results file ({default_out})")
    parser.add_argument("--only", default="", help="items whose name contains this")
    parser.add_argument("--rounds", type=int, default=20, help="samples per variant (20)")
    return parser


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Inside, products of float32 numbers are computed in float32, not in TF32."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    torch.set_float32_matmul_precision("highest")
    # The function sets all of them.
    others = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    try:
        with cudnn.flags(**others, benchmark_limit=cudnn.benchmark_limit, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
