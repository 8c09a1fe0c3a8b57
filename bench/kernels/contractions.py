"""Emitted contractions beside PyTorch's (oneDNN), one by one, in the shapes of three networks.

Run it as ``python bench/kernels/contractions.py``. Each contraction is a module of one layer: its
forward pass, the gradient of its input and the gradient of its weight are timed apart, in rounds
that go through the variants in turn, in one process. The ratio is PyTorch's time over ours. Peers
of a convolution are PyTorch with row-major images and with channels-last ones; ours reads and
writes channels-last images, as our convolutions pass them to each other. The last column names what
wrote our kernels. ``loops`` or ``reduced`` in a forward pass or a gradient of an input says that
the compiler chose row-major images for so small a program: such a time includes the conversion.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import shorthaul
import torch
from shorthaul.bench.timing import ratio, summary
from torch import nn

PASSES = ("forward", "data gradient", "weight gradient")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Case:
    """A layer and the shape of its input."""

    network: str
    name: str
    shape: tuple[int, ...]
    n_outputs: int
    kernel: int = 0
    stride: int = 1
    groups: int = 1

    def layer(self) -> nn.Module:
        """The layer, without a bias."""
        n_inputs = self.shape[1]
        if self.kernel == 0:
            return nn.Linear(self.shape[-1], self.n_outputs, bias=False)
        size, padding = self.kernel, self.kernel // 2
        settings = {"padding": padding, "groups": self.groups, "bias": False}
        return nn.Conv2d(n_inputs, self.n_outputs, size, self.stride, **settings)


def _resnet(batch: int) -> Iterator[Case]:
    network = "ResNet-50"
    yield Case(network, "7x7, stride 2", (batch, 3, 224, 224), 64, 7, 2)
    for width, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        image = (batch, width, size, size)
        wide = (batch, 4 * width, size, size)
        yield Case(network, f"1x1, {4 * width} to {width}", wide, width, 1)
        yield Case(network, f"3x3, {width}", image, width, 3)
        yield Case(network, f"1x1, {width} to {4 * width}", image, 4 * width, 1)
    for width, size in ((128, 56), (256, 28), (512, 14)):
        yield Case(network, f"3x3, {width}, stride 2", (batch, width, size, size), width, 3, 2)


def _resnext(batch: int) -> Iterator[Case]:
    for width, size in ((128, 56), (256, 28), (512, 14), (1024, 7)):
        name = f"3x3, {width} in 32 groups"
        yield Case("ResNeXt-50", name, (batch, width, size, size), width, 3, 1, 32)


def _mobilenet(batch: int) -> Iterator[Case]:
    network = "MobileNetV2"
    for width, size, stride in (
        (96, 112, 2),
        (144, 56, 1),
        (192, 28, 1),
        (384, 14, 1),
        (960, 7, 1),
    ):
        image = (batch, width, size, size)
        name = f"depthwise 3x3, {width}, stride {stride}"
        yield Case(network, name, image, width, 3, stride, width)
    for width, size, out in ((24, 56, 144), (32, 28, 192), (64, 14, 384), (160, 7, 960)):
        yield Case(network, f"1x1, {width} to {out}", (batch, width, size, size), out, 1)


def _bert(batch: int) -> Iterator[Case]:
    for before, after in ((1024, 1024), (1024, 4096), (4096, 1024)):
        yield Case("BERT-large", f"{before} to {after}", (batch, 512, before), after)


class ChannelsLast(nn.Module):
    """A layer on images ``[batch, height, width, channels]``.

    With ``bounded`` a bias is added at the end, so that the permutation is inside what is compiled.
    Otherwise the result is a view of a row-major image, and its gradient is copied to be one.
    """

    def __init__(self, layer: nn.Module, bounded: bool):
        super().__init__()
        self.layer = layer
        self.register_buffer("bias", torch.zeros(layer.out_channels) if bounded else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return y if self.bias is None else y + self.bias


NETWORKS: dict[str, tuple[Callable[[int], Iterator[Case]], int]] = {
    "resnet": (_resnet, 8),
    "resnext": (_resnext, 8),
    "mobilenet": (_mobilenet, 8),
    "bert": (_bert, 2),
}


def _given(case: Case, variant: str, which: str) -> tuple[nn.Module, torch.Tensor]:
    """The layer and its input in the variant's order; only what is asked for has a gradient."""
    torch.manual_seed(0)
    layer, x = case.layer(), torch.randn(case.shape)
    if case.kernel and variant != "eager":
        layer, x = ChannelsLast(layer, variant == "shorthaul"), x.permute(0, 2, 3, 1).contiguous()
    layer.requires_grad_(which == "weight gradient")
    x.requires_grad_(which == "data gradient")
    return layer, x


def thunks(case: Case, which: str) -> dict[str, Callable[[], Callable[[], object]]]:
    """The function of each variant that prepares one run and returns what is timed."""
    found = {}
    for variant in ["shorthaul", "eager"] + (["channels_last"] if case.kernel else []):
        layer, x = _given(case, variant, which)
        if variant == "channels_last":
            layer = layer.to(memory_format=torch.channels_last)
        found[variant] = _prepared(
            shorthaul.module(layer) if variant == "shorthaul" else layer, x, which
        )
    return found


def _prepared(model: nn.Module, x: torch.Tensor, which: str) -> Callable[[], Callable[[], object]]:
    if which == "forward":

        def run() -> object:
            with torch.no_grad():
                return model(x)

        return lambda: run
    wanted = [x] if which == "data gradient" else [p for p in model.parameters()]
    dy = torch.randn_like(model(x))

    def prepare() -> Callable[[], object]:
        y = model(x)
        return lambda: torch.autograd.grad(y, wanted, dy)

    return prepare


def measure(case: Case, which: str, options: argparse.Namespace) -> dict:
    """Times by variant and the ratio of each peer's to ours."""
    clock = CLOCKS[options.clock]
    prepared = thunks(case, which)
    times: dict[str, list[float]] = {variant: [] for variant in prepared}
    for i in range(options.warmup + options.rounds):
        order = list(prepared) if i % 2 == 0 else list(reversed(prepared))
        for variant in order:
            timed = prepared[variant]()
            start = clock()
            timed()
            if i >= options.warmup:
                times[variant].append((clock() - start) * 1e3)
    own = times["shorthaul"]
    peers = {variant: taken for variant, taken in times.items() if variant != "shorthaul"}
    best = min(peers, key=lambda variant: statistics.median(peers[variant]))
    return asdict(case) | {
        "pass": which,
        "variants": {variant: summary(taken) for variant, taken in times.items()},
        "best_peer": best,
        "ratio": ratio(peers[best], own),
        "kernels": paths(case, which),
    }


def paths(case: Case, which: str) -> list[str]:
    """Which generator wrote each of our kernels of a pass."""
    layer, x = _given(case, "shorthaul", which)
    stage = "forward" if which == "forward" else "backward"
    with torch.set_grad_enabled(which != "forward"):
        kernels = shorthaul.report(layer, x).data["kernels"]
    return [k["path"] for k in kernels if k["stage"] == stage]


def row(result: dict) -> str:
    """A line of the printed table."""
    own, peer = (result["variants"][v]["median_ms"] for v in ("shorthaul", result["best_peer"]))
    spread = result["ratio"]
    interval = f"{spread['low']:.2f} to {spread['high']:.2f}"
    return (
        f"| {result['network']} | {result['name']} | {result['pass']} | {own:.2f} | {peer:.2f} "
        f"({result['best_peer']}) | **{spread['median']:.2f}** ({interval}) "
        f"| {', '.join(result['kernels'])} |"
    )


def main() -> None:
    """Prints a table; writes JSON where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(NETWORKS), help="of: " + ", ".join(NETWORKS))
    parser.add_argument("--passes", default=",".join(PASSES), help="of: " + ", ".join(PASSES))
    parser.add_argument("--only", default="", help="cases of which the name contains this")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of all threads")
    parser.add_argument("--json", help="file for all rounds, such as bench/results/kernels.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| network | contraction | pass | ours, ms | best peer, ms | ratio | our kernels |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for name in options.networks.split(","):
        cases, batch = NETWORKS[name]
        for case in cases(batch):
            for which in options.passes.split(",") if options.only in case.name else []:
                results.append(measure(case, which, options))
                print(row(results[-1]), flush=True)
    if results:
        ratios = sorted(result["ratio"]["median"] for result in results)
        print(f"\nmedian ratio {statistics.median(ratios):.2f}, least {ratios[0]:.2f}")
    if options.json:
        settings = {k: v for k, v in vars(options).items() if k != "json"}
        found = {"settings": settings, "torch": torch.__version__, "results": results}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
