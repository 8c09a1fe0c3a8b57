"""Bytes that a training step moves: Shorthaul's kernels beside those of ``torch.compile``.

Each kernel counts each element that it reads or writes once. Shorthaul's number is that of its
report; that of ``torch.compile`` is the count of its compiler, inductor. Nothing is timed:

    .venv/bin/python bench/bytes_moved.py bert_large_layer resnet50 --json bytes.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import shorthaul
import torch
from shorthaul.bench import results
from shorthaul.bench.options import Setting, network
from shorthaul.bench.variants import inputs_of, model_of


def inductor_bytes(setting: Setting) -> int:
    """What the kernels of ``torch.compile`` move in one step, forward and backward."""
    from torch._inductor import metrics

    model, inputs = model_of(setting), inputs_of(setting)
    counts = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    counts.addFilter(lambda _: False)  # the numbers are wanted, not the lines
    with tempfile.TemporaryDirectory() as folder:
        # A graph that is in a cache is not counted again.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch._dynamo.reset()
        metrics.reset()
        torch._logging.set_logs(inductor_metrics=True)
        setting.example.loss(torch.compile(model)(*inputs)).backward()
        torch._logging.set_logs()
    return metrics.num_bytes_accessed


def counted(setting: Setting) -> dict:
    """The bytes of both, and the least that any step moves."""
    torch.manual_seed(0)
    model = model_of(setting)
    report = shorthaul.report(model, *inputs_of(setting)).data
    found = {"name": setting.name, "batch": setting.batch, "small": setting.small}
    found |= {"bytes_moved": report["bytes_moved"], "bytes_least": report["bytes_least"]}
    return found | {"inductor_bytes": inductor_bytes(setting)}


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="networks of the bench")
    parser.add_argument("--batch", type=int, help="batch size (default: the network's own)")
    parser.add_argument("--small", action="store_true", help="small configurations")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.names:
        example = network(name)
        batch = options.batch or ((example.small or example) if options.small else example).batch
        row = counted(Setting(name, batch, torch.get_num_threads(), small=options.small))
        rows.append(row)
        own, other = row["bytes_moved"] / 1e6, row["inductor_bytes"] / 1e6
        print(
            f"{name}, batch {batch}: Shorthaul {own:,.1f} MB, torch.compile {other:,.1f} MB "
            f"({1 - own / other:+.1%} saved), least possible {row['bytes_least'] / 1e6:,.1f} MB",
            flush=True,
        )
    if options.json:
        command = " ".join(["python bench/bytes_moved.py", *(arguments or sys.argv[1:])])
        machine = results.machine() | {"command": command}
        text = json.dumps({"machine": machine, "results": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
