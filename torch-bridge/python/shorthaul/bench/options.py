"""The command line of the bench, and the settings of one measurement.

Owns what a user may ask for; measures nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models import EXAMPLES, Example
from ..models.libraries import MissingLibrary, example_of

#: Shorthaul, what PyTorch offers, and other compilers; the first is always measured.
#: ``shorthaul-f32`` is the same network in f32, which shows what another type gains.
VARIANTS = (
    "shorthaul",
    "shorthaul-f32",
    "eager",
    "channels_last",
    "compile",
    "compile-max-autotune",
    "jax",
    "onnxruntime",
)

#: What a step includes: inference, forward and backward, or also the optimizer's update.
MODES = ("forward", "train", "step")

DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
    "autocast": torch.float32,
}

#: Learning rates by optimizer; SGD has the momentum below, AdamW PyTorch's defaults.
OPTIMIZERS = {"sgd": 1e-3, "adamw": 1e-4}
MOMENTUM = 0.9


@dataclass(frozen=True)
class Setting:
    """What one measurement measures."""

    name: str
    batch: int
    threads: int
    dtype: str = "f32"
    mode: str = "train"
    optimizer: str = "adamw"
    small: bool = False

    @property
    def example(self) -> Example:
        """The network."""
        example = network(self.name)
        return (example.small or example) if self.small else example

    def arguments(self) -> list[str]:
        """The command line that asks for this setting."""
        given = [self.name, "--batch", str(self.batch), "--threads", str(self.threads)]
        given += ["--dtype", self.dtype, "--mode", self.mode, "--optimizer", self.optimizer]
        return given + ["--small"] * self.small

    def __str__(self) -> str:
        what = {"forward": "inference", "train": "forward and backward"}
        step = what.get(self.mode, f"a step with {self.optimizer}")
        size = ", small" if self.small else ""
        threads = "thread" if self.threads == 1 else "threads"
        return (
            f"{self.name}{size}, batch {self.batch}, {self.dtype}, {step}, {self.threads} {threads}"
        )


def network(name: str) -> Example:
    """A network of this package or of another library. Raises ``ValueError`` if there is none."""
    if ":" in name:
        return example_of(name)
    if name not in EXAMPLES:
        raise ValueError(f"there is no network {name}; --list prints all networks")
    return EXAMPLES[name]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options, with ``settings``: one for each network, batch size and number of threads."""
    parser = _parser()
    # Names may stand between options, as they do in a file of arguments.
    options = parser.parse_intermixed_args(arguments)
    if options.list or options.serve:
        return options
    if options.page_from:
        if options.names or not options.html or options.json or options.compare:
            parser.error(
                "--page-from measures nothing: it needs --html, and takes no networks, --json or "
                "--compare"
            )
        return options
    if "all" in options.names:
        options.names = list(EXAMPLES)
    if not options.names:
        parser.error("give the names of networks, or `all`; --list prints the networks")
    for name in options.names:
        try:
            network(name)
        except MissingLibrary:
            pass  # it is skipped when its turn comes
        except ValueError as error:
            parser.error(str(error))
    if options.limits and options.mode == "step":
        parser.error("--limits does not count the optimizer: use --mode train or forward")
    if options.errors and options.mode == "forward":
        parser.error("--errors is about gradients: use --mode train or step")
    if options.errors and options.dtype == "f64":
        parser.error("--errors compares with f64: give another --dtype")
    if options.check and options.dtype == "f64":
        parser.error("--check compares with f64: give another --dtype")
    if options.recipes is not None and options.dtype == "autocast":
        parser.error("--recipes takes no autocast: use --dtype bf16")
    for name in ("predicted", "recipes"):
        if options.separate and getattr(options, name):
            parser.error(f"--{name} measures all networks in one process: leave --separate out")
    if options.tune is not None and options.recipes is None:
        parser.error("--tune writes recipes: name their folder with --recipes")
    if options.recipes is not None and options.mode != "train":
        parser.error("--recipes compares forward and backward passes: use --mode train")
    options.variants = ["shorthaul", *filter(None, options.against.split(","))]
    for variant in options.variants:
        if variant not in VARIANTS:
            parser.error(f"--against takes {', '.join(VARIANTS[1:])}, not {variant}")
    options.settings = [
        Setting(
            name,
            batch or _batch(name, options.small),
            threads or torch.get_num_threads(),
            options.dtype,
            options.mode,
            options.optimizer,
            options.small,
        )
        for name in options.names
        for batch in options.batch or [None]
        for threads in options.threads or [None]
    ]
    return options


def _batch(name: str, small: bool) -> int:
    try:
        example = network(name)
    except MissingLibrary:
        return 1
    return ((example.small or example) if small else example).batch


def _numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError("each number must be at least 1")
    return found


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return count


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError("it must be above 0 and below 1000000")
    return seconds


class _Parser(argparse.ArgumentParser):
    """Reads files of arguments with comments: what follows ``#`` in a line."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return arg_line.split("#")[0].split()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "shorthaul-bench",
        description="Times training steps in Shorthaul and in PyTorch, side by side in one run.",
        epilog="Names of networks in other libraries: timm:NAME, torchvision:NAME, "
        "transformers:FAMILY. @FILE reads arguments from a file; # starts a comment.",
        fromfile_prefix_chars="@",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="networks, or `all`")
    add("--list", action="store_true", help="print the networks and exit")
    add("--small", action="store_true", help="use small configurations, made for tests")
    what = parser.add_argument_group("what is timed")
    add = what.add_argument
    add(
        "--mode",
        choices=MODES,
        default="train",
        help="forward: inference; train: forward and backward (default); step: with the "
        "optimizer's update too",
    )
    add("--optimizer", choices=[*OPTIMIZERS], default="adamw", help="with --mode step (adamw)")
    add("--dtype", choices=list(DTYPES), default="f32", help="type of parameters and inputs (f32)")
    add("--batch", type=_numbers, help="batch sizes: 8 or 1,8,32 (default: the network's own)")
    add("--threads", type=_numbers, help="numbers of threads: 2 or 1,2 (default: PyTorch's)")
    how = parser.add_argument_group("how it is measured")
    add = how.add_argument
    add(
        "--against",
        default="eager,channels_last",
        help=f"what to compare with: {', '.join(VARIANTS[1:])} (default: eager,channels_last)",
    )
    add("--rounds", type=_count, default=7, help="measured steps of each variant (7)")
    add("--warmup", type=_count, default=2, help="steps that run before these (2)")
    add(
        "--seconds",
        type=_seconds,
        help="measure each network for this many seconds: 3 to 50 rounds, whatever --rounds says",
    )
    add("--separate", action="store_true", help="run each network in a process of its own")
    add(
        "--plain-environment",
        action="store_true",
        help="measure with the memory settings as they are",
    )
    add("--no-first-step", action="store_true", help="do not measure first steps and memory")
    add(
        "--limits",
        action="store_true",
        help="measure the machine's limits, and how much of them Shorthaul uses",
    )
    add(
        "--errors",
        action="store_true",
        help="compare each variant's gradients with float64 too, without dropout",
    )
    out = parser.add_argument_group("results")
    add = out.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--html", type=Path, metavar="FILE", help="write one self-contained page")
    add(
        "--page-from",
        type=Path,
        nargs="+",
        metavar="RESULTS.json",
        help="with --html: measure nothing, make the page from these files",
    )
    add("--compare", type=Path, metavar="OLD.json", help="list what became faster or slower")
    instead = parser.add_argument_group("instead of timing steps")
    add = instead.add_argument
    add("--check", action="store_true", help="compare with float64; exit code 1 for large errors")
    add("--seed", type=int, default=0, help="with --check: seed of weights and inputs (0)")
    add("--smooth", action="store_true", help="with --check: replace ReLU by SiLU")
    add("--report", action="store_true", help="print kernels and their bytes, run nothing")
    add("--profile", action="store_true", help="print the time of every kernel")
    add("--predicted", action="store_true", help="print predicted and measured times of kernels")
    add(
        "--recipes",
        type=Path,
        metavar="FOLDER",
        help="time Shorthaul with the recipes in this folder and without them",
    )
    add(
        "--tune",
        type=_seconds,
        metavar="SECONDS",
        help="with --recipes: search, tune for this many seconds, and write the recipes",
    )
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser
