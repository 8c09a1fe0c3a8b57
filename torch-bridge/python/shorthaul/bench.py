"""``python -m shorthaul.bench NAME...``: training steps beside PyTorch's, in one run.

Owns the measurement: forward and backward of one batch, variants interleaved round by round in
one process so that they meet the same machine, medians and interquartile ranges of wall time.
First-step time and peak memory are taken in processes of their own for each variant: the first
finds an empty cache of compiled kernels, the second the cache that the first left. With ``--check``
it compares outputs and gradients with float64 instead of measuring time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import shorthaul

from . import _autograd
from .models import EXAMPLES, Example, without_dropout

VARIANTS = ("shorthaul", "eager", "channels_last", "compile")


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench; the exit status is 1 where ``--check`` finds a difference."""
    options = _parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.alone:
        print(json.dumps(_first_step(EXAMPLES[options.names[0]], options)))
        return 0
    results, ok = [], True
    for name in options.names:
        example = EXAMPLES[name]
        if options.profile:
            _print_profile(example, options)
        elif options.report:
            model = example.make().train()
            print(shorthaul.report(model, *example.inputs(options.batch or example.batch)))
        elif options.check:
            checked = check(
                example, options.batch or example.batch, smooth=options.smooth, seed=options.seed
            )
            results.append(checked)
            ok &= not checked["beyond"]
            _print_check(checked)
        else:
            measured = measure(example, options)
            results.append(measured)
            _print_table(measured)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": _machine(), "results": results}, file, indent=1)
    return 0 if ok else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m shorthaul.bench", description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(EXAMPLES), metavar="NAME")
    parser.add_argument(
        "--against",
        default="eager,channels_last",
        help="comma-separated: eager, channels_last, compile (default: eager,channels_last)",
    )
    parser.add_argument("--batch", type=int, help="batch size (default: the network's own)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds measured (default: 7)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (default: 2)")
    parser.add_argument("--threads", type=int, help="threads (default: PyTorch's)")
    parser.add_argument("--check", action="store_true", help="compare with float64")
    parser.add_argument("--seed", type=int, default=0, help="with --check: seed (default: 0)")
    parser.add_argument("--smooth", action="store_true", help="with --check: SiLU for ReLU")
    parser.add_argument(
        "--report", action="store_true", help="print kernels and bytes, run nothing"
    )
    parser.add_argument("--profile", action="store_true", help="time every kernel")
    parser.add_argument("--no-first-step", action="store_true", help="skip first step and memory")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.variants = ["shorthaul", *filter(None, options.against.split(","))]
    for variant in options.variants:
        if variant not in VARIANTS:
            parser.error(f"--against knows {', '.join(VARIANTS[1:])}, not {variant}")
    return options


def _stepper(example: Example, variant: str, model: nn.Module, inputs) -> Callable[[], None]:
    """One training step without the optimizer, for a variant of its own copy of the model."""
    model = copy.deepcopy(model)
    if variant == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        layout = torch.channels_last
        inputs = tuple(x.to(memory_format=layout) if x.dim() == 4 else x for x in inputs)
    called = model
    if variant == "shorthaul":
        called = shorthaul.module(model)
    elif variant == "compile":
        called = torch.compile(model)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        example.loss(called(*inputs)).backward()

    return step


def _variants_of(example: Example, options: argparse.Namespace) -> list[str]:
    images = example.inputs(1)[0].dim() == 4
    return [v for v in options.variants if images or v != "channels_last"]


def measure(example: Example, options: argparse.Namespace) -> dict:
    """Times of one step for every variant: milliseconds, medians over interleaved rounds."""
    torch.manual_seed(0)
    batch = options.batch or example.batch
    model, inputs = example.make().train(), example.inputs(batch)
    variants = _variants_of(example, options)
    steps = {variant: _stepper(example, variant, model, inputs) for variant in variants}
    for step in steps.values():
        for _ in range(options.warmup):
            step()
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(options.rounds):
        for variant, step in steps.items():
            start = time.perf_counter()
            step()
            times[variant].append((time.perf_counter() - start) * 1e3)
    result = {
        "name": example.name,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "variants": {},
    }
    for variant in variants:
        quartiles = statistics.quantiles(times[variant], n=4)
        entry = {
            "median_ms": statistics.median(times[variant]),
            "iqr_ms": quartiles[2] - quartiles[0],
            "times_ms": times[variant],
        }
        ratios = [
            other / own for other, own in zip(times[variant], times["shorthaul"], strict=True)
        ]
        entry["over_shorthaul"] = statistics.median(ratios)
        if not options.no_first_step:
            entry |= _alone(example, variant, options)
        result["variants"][variant] = entry
    return result


def _alone(example: Example, variant: str, options: argparse.Namespace) -> dict:
    """First-step seconds with an empty and a filled cache, and peak memory, in processes."""
    with tempfile.TemporaryDirectory(prefix="shorthaul-bench-") as cache:
        cold = _in_process(example, variant, options, cache)
        if variant in ("shorthaul", "compile"):
            warm = _in_process(example, variant, options, cache)
            return warm | {"first_step_s": cold["first_step_s"], "warm_first_step": warm}
    return cold


def _in_process(
    example: Example, variant: str, options: argparse.Namespace, cache: str
) -> dict[str, float]:
    command = [sys.executable, "-m", "shorthaul.bench", example.name, "--alone", variant]
    command += ["--threads", str(torch.get_num_threads())]
    if options.batch:
        command += ["--batch", str(options.batch)]
    environment = {"SHORTHAUL_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _first_step(example: Example, options: argparse.Namespace) -> dict:
    # PyTorch's exporter is code, not training memory: every variant has it loaded.
    importlib.import_module("torch._dynamo")
    torch.manual_seed(0)
    model = example.make().train()
    inputs = example.inputs(options.batch or example.batch)
    base = _resident_bytes()
    start = time.perf_counter()
    step = _stepper(example, options.alone, model, inputs)
    step()
    first = time.perf_counter() - start
    step()  # what is left over from compilation is used again or given back
    _forget_peak()
    start = time.perf_counter()
    for _ in range(3):
        step()
    seconds = (time.perf_counter() - start) / 3
    return {
        "first_step_s": first,
        "step_s": seconds,
        "export_s": _autograd.export_seconds(),
        "peak_bytes": max(0, _peak_bytes() - base),
    }


def _resident_bytes() -> int:
    return _status_bytes("VmRSS") or _peak_bytes()


def _peak_bytes() -> int:
    """The largest resident size since the process began, or since :func:`_forget_peak`."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_bytes("VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def _status_bytes(field: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
    except (OSError, StopIteration):
        return None


def _forget_peak() -> None:
    """Lets the peak start anew, so that compilation does not count; where the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def check(example: Example, batch: int, *, smooth: bool = False, seed: int = 0) -> dict:
    """Errors of Shorthaul and of eager float32 against eager float64.

    A tensor is beyond the bound if Shorthaul's largest error exceeds twice eager's own plus 1e-6 of
    the largest value. PyTorch's own float32 with another number of threads, and for images in
    another memory format, is held to the same bound: where units of a ReLU sit on either side of
    zero by rounding alone, gradients differ by whole terms, whoever computes them. With ``smooth``,
    SiLU takes the place of ReLU, so that there is no such side.
    """
    torch.manual_seed(seed)
    model, inputs = without_dropout(example.make().train()), example.inputs(batch)
    if smooth:
        model = _smooth(model)
    n_threads = torch.get_num_threads()
    others = {f"eager, {3 - min(n_threads, 2)} threads": 3 - min(n_threads, 2)}
    if inputs[0].dim() == 4:
        others["channels_last"] = n_threads
    runs = {}
    for variant in ("shorthaul", "eager", "float64", *others):
        torch.set_num_threads(others.get(variant, n_threads))
        runs[variant] = _results(example, variant, model, inputs)
    torch.set_num_threads(n_threads)
    tensors = []
    for name, exact in runs["float64"].items():
        if exact is None or not exact.is_floating_point():
            continue
        scale = exact.abs().max().item()
        errors = {
            variant: (run[name].double() - exact).abs().max().item()
            for variant, run in runs.items()
            if variant != "float64"
        }
        tensors.append(
            {
                "name": name,
                "error": errors["shorthaul"],
                "eager": errors["eager"],
                "scale": scale,
                "bound": 2 * errors["eager"] + 1e-6 * scale,
                "errors": errors,
            }
        )
    return {
        "name": example.name,
        "batch": batch,
        "tensors": tensors,
        "beyond": [t for t in tensors if not t["error"] <= t["bound"]],
        "others_beyond": {
            variant: sum(not t["errors"][variant] <= t["bound"] for t in tensors)
            for variant in others
        },
    }


def _smooth(model: nn.Module) -> nn.Module:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, (nn.ReLU, nn.ReLU6)):
                setattr(parent, name, nn.SiLU())
    return model


def _results(example: Example, variant: str, model: nn.Module, inputs) -> dict[str, torch.Tensor]:
    """Output, gradients and buffers of one step of a copy of the model."""
    own, fed = copy.deepcopy(model), inputs
    if variant == "float64":
        own, fed = own.double(), tuple(x.double() for x in inputs)
    elif variant == "channels_last":
        own = own.to(memory_format=torch.channels_last)
        fed = tuple(x.to(memory_format=torch.channels_last) for x in inputs)
    called = shorthaul.module(own) if variant == "shorthaul" else own
    output = called(*fed)
    example.loss(output).backward()
    found = {"output": output.detach()}
    found |= {f"gradient of {n}": p.grad for n, p in own.named_parameters()}
    return found | {f"buffer {n}": b for n, b in own.named_buffers()}


def _print_profile(example: Example, options: argparse.Namespace) -> None:
    """The slowest kernels of a training step: medians over the rounds."""
    torch.manual_seed(0)
    model = shorthaul.module(example.make().train())
    inputs = example.inputs(options.batch or example.batch)
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(options.warmup + options.rounds):
        _autograd.timings = []
        example.loss(model(*inputs)).backward()
        if i >= options.warmup:
            for which, launch, seconds in _autograd.timings:
                times.setdefault((which, launch), []).append(seconds)
    _autograd.timings = None
    kernels = shorthaul.report(model, *inputs).data["kernels"]
    rows = []
    for (which, launch), seconds in times.items():
        name = launch.removeprefix("k_")
        made = max(
            (k for k in kernels if k["stage"] == which and name.startswith(k["name"])),
            key=lambda k: len(k["name"]),
            default={"origin": "", "path": "", "operations": 0},
        )
        rows.append((statistics.median(seconds) * 1e3, which, launch, made))
    rows.sort(key=lambda row: -row[0])
    print(f"{example.name}: {sum(row[0] for row in rows):.1f} ms in {len(rows)} launches")
    for ms, which, launch, made in rows[:40]:
        rate = made["operations"] / ms / 1e6
        print(
            f"{ms:9.2f} ms {which:<9}{made['path']:<12}{rate:8.1f} GFLOP/s  "
            f"{launch}  {made['origin'][:60]}"
        )
    by_path: dict[str, float] = {}
    for ms, which, _, made in rows:
        by_path[f"{which} {made['path']}"] = by_path.get(f"{which} {made['path']}", 0.0) + ms
    print(", ".join(f"{path}: {ms:.1f} ms" for path, ms in sorted(by_path.items())))


def _print_check(checked: dict) -> None:
    tensors, beyond = checked["tensors"], checked["beyond"]
    ratios = [t["error"] / t["eager"] for t in tensors if t["eager"] > 0]
    print(
        f"{checked['name']}, batch {checked['batch']}: {len(tensors)} tensors against float64, "
        f"median error {statistics.median(ratios):.2f} x eager's, largest {max(ratios):.2f} x; "
        f"{len(beyond)} beyond twice eager's"
    )
    for variant, n_beyond in checked["others_beyond"].items():
        print(f"  PyTorch's own float32, {variant}: {n_beyond} beyond twice eager's")
    for t in sorted(beyond, key=lambda t: -t["error"] / t["bound"])[:10]:
        print(f"  {t['name']}: {t['error']:.3g}, eager {t['eager']:.3g}, scale {t['scale']:.3g}")


def _print_table(measured: dict) -> None:
    print(
        f"\n{measured['name']}, batch {measured['batch']}, {measured['threads']} threads, "
        f"{measured['rounds']} rounds"
    )
    print(
        f"{'':<14}{'median ms':>10}{'IQR':>8}{'/shorthaul':>12}{'first s':>9}{'warm s':>8}"
        f"{'export s':>10}{'peak MiB':>10}"
    )
    for variant, entry in measured["variants"].items():
        line = (
            f"{variant:<14}{entry['median_ms']:>10.1f}{entry['iqr_ms']:>8.1f}"
            f"{entry['over_shorthaul']:>11.2f}x"
        )
        if "first_step_s" in entry:
            line += f"{entry['first_step_s']:>9.1f}"
            warm = entry.get("warm_first_step")
            line += f"{warm['first_step_s']:>8.1f}" if warm else f"{'-':>8}"
            line += f"{warm['export_s']:>10.1f}" if variant == "shorthaul" else f"{'-':>10}"
            line += f"{entry['peak_bytes'] / 2**20:>10.0f}"
        print(line)


def _machine() -> dict:
    return {
        "torch": torch.__version__,
        "shorthaul": shorthaul.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "logical_cpus": os.cpu_count(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
        return names[0]
    except (OSError, IndexError):
        return platform.processor()


if __name__ == "__main__":
    warnings.simplefilter("ignore", shorthaul.RecompileWarning)
    sys.exit(main())
