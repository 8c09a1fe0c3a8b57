"""One AdamW step over the parameters of BERT-large: correctness, bytes, times in graph replay.

Shorthaul's launches beside PyTorch's fused and foreach updates, with float32 and bfloat16
parameters, with plain gradients and with gradients that are unscaled and clipped. The floor is the
time of moving every byte once at the machine's copy bandwidth (``probe.py``). A dry run takes a
tiny encoder on the emulator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from measuring import Bench, parse
from results import Results
from shorthaul import optim

#: Layers, width, inner width, vocabulary, positions.
BERT_LARGE = (24, 1024, 4096, 30522, 512)
TINY = (1, 8, 32, 40, 16)
#: Large, so that a step changes parameters by many roundings.
RATE = 0.1


def shapes(size: tuple[int, int, int, int, int]) -> list[tuple[int, ...]]:
    """The shapes of all parameters of an encoder."""
    layers, width, inner, vocabulary, positions = size
    layer = [(width, width), (width,)] * 4 + [(width,)] * 4
    layer += [(inner, width), (inner,), (width, inner), (width,)]
    return [(vocabulary, width), (positions, width), (2, width), *((width,),) * 2] + layer * layers


def parameters(bench: Bench, size: tuple, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """The same ones every time, with gradients."""
    torch.manual_seed(0)
    made = []
    for shape in shapes(size):
        p = torch.nn.Parameter(0.02 * torch.randn(shape, device=bench.device).to(dtype))
        p.grad = torch.randn(shape, device=bench.device).to(dtype)
        made.append(p)
    return made


def optimizers(bench: Bench, size: tuple, dtype: torch.dtype, max_norm: float | None) -> dict:
    """A step for each variant, with the step's own parameters."""
    settings = {"lr": RATE, "weight_decay": 0.01}
    backend = "cuda-emulated" if bench.is_dry else "auto"
    own = parameters(bench, size, dtype)
    made = {"shorthaul": (own, optim.AdamW(own, **settings, max_norm=max_norm, backend=backend))}
    for name in ("fused", "foreach"):
        some = parameters(bench, size, dtype)
        theirs = torch.optim.AdamW(some, **settings, capturable=not bench.is_dry, **{name: True})
        made[name] = (some, theirs)
    return made


def step_of(some: list, optimizer: Any, max_norm: float | None) -> Callable[[], None]:
    """One step; clips gradients to ``max_norm``, if given, unless the optimizer does so itself."""
    own = isinstance(optimizer, optim.AdamW)

    def step() -> None:
        if max_norm is not None and not own:
            torch.nn.utils.clip_grad_norm_(some, max_norm, foreach=True)
        optimizer.step()

    return step


def judge(found: list, size: tuple, bench: Bench, dtype: torch.dtype, max_norm: float | None):
    """One step's parameters against float64: farther than two roundings of ``dtype`` is wrong."""
    exact = [torch.nn.Parameter(p.detach().double()) for p in parameters(bench, size, dtype)]
    for p, q in zip(exact, parameters(bench, size, dtype), strict=True):
        p.grad = q.grad.double()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(exact, max_norm)
    torch.optim.AdamW(exact, lr=RATE, weight_decay=0.01, foreach=False).step()
    worst = 0.0
    for p, q in zip(found, exact, strict=True):
        scale = q.detach().abs().max().item()
        error = (p.detach().double() - q.detach()).abs().max().item() / scale
        # NaN is larger than anything.
        worst = error if error != error else max(worst, error)
        if worst != worst:
            break
    return {"ok": worst <= 2 * torch.finfo(dtype).eps + 1e-6, "error": worst}


def item(bench: Bench, size: tuple, dtype: torch.dtype, max_norm: float | None) -> dict[str, Any]:
    """Correctness of the first step, then times of further ones."""
    made = optimizers(bench, size, dtype, max_norm)
    steps = {name: step_of(*pair, max_norm) for name, pair in made.items()}
    steps["shorthaul"]()
    own, optimizer = made["shorthaul"]
    judged = judge(own, size, bench, dtype, max_norm)
    n_bytes = sum(step.bytes_moved for step in optimizer._steps.values())
    entry = {**judged, "n_parameters": sum(p.numel() for p in own), "bytes_moved": n_bytes}
    if not judged["ok"]:
        return entry
    times = bench.interleaved(steps, graph=True)
    rate = n_bytes / times["shorthaul"]["median_us"] * 1e6
    return {**entry, "times": times, "bytes_per_s": rate}


def main(arguments: list[str] | None = None) -> int:
    """Runs the items; 1 where one is wrong."""
    options = parse(__doc__.splitlines()[0], "optimizer.json").parse_args(arguments)
    bench = Bench(options.dry_run, options.rounds)
    results = Results(options.out, "optimizer", vars(options))
    size = TINY if bench.is_dry else BERT_LARGE
    for dtype in (torch.float32, torch.bfloat16):
        for max_norm in (None, 1.0):
            name = f"adamw {str(dtype).removeprefix('torch.')}"
            name += "" if max_norm is None else " clipped"
            if options.only in name:
                results.item(name, lambda d=dtype, m=max_norm: item(bench, size, d, m))
    return 0 if results.ok else 1


if __name__ == "__main__":
    sys.exit(main())
