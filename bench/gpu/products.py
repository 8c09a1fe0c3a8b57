"""The table of products that programs are compiled with: every candidate in whole training steps.

Owns what is measured and the table's file. Each candidate (our own kernel, the library with its own
epilogue, the library and a kernel for the rest; each algorithm that the library offers; on Hopper
our kernel by products of warpgroups in each of its tiles) computes all products and convolutions
of a model that it can (the library is cuBLASLt for products and cuDNN for convolutions). It does so
in place: between the launches that stand before and after it in the model, and with their data in
the caches. A candidate whose results are
wrong is not timed. The file is written anew after every model; kernels/cuda/src/vendor/table.rs
describes its format.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shorthaul
import torch
from measuring import Bench, reference, results_of, without_tf32
from torch import nn

#: Bytes of workspace of each product: what NVIDIA recommends for Hopper, and for what is older.
WORKSPACE_BYTES = {9: 32 << 20}
OLDER_WORKSPACE_BYTES = 4 << 20

#: A product and its rest, as tables know them.
Key = tuple[str, str]
#: A candidate's kind and rank.
Candidate = tuple[str, int | None]


class ProductTable:
    """Times by product and candidate, and the file that holds their medians."""

    def __init__(self, bench: Bench, path: str | Path, ranks: int):
        self.bench = bench
        self.path = Path(path)
        self.ranks = ranks
        self.machine = shorthaul.products.machine(bench.is_dry)
        self.workspace_bytes = 1024 if bench.is_dry else _workspace_bytes()
        self.samples: dict[Key, dict[Candidate, list[float]]] = {}

    def measure(self, model: nn.Module, inputs: tuple, dtype: torch.dtype) -> dict[str, Any]:
        """Adds the products of one model; says how many, and which candidates were wrong."""
        before = set(self.samples)
        found: set[Key] = set()
        verdicts, ok = {}, True
        with without_tf32():
            known = reference(self.bench, model, inputs, dtype, self.bench.autocast(dtype))
        for kind, rank in self._candidates():
            called = self.bench.module(copy.deepcopy(model))
            with (
                shorthaul.products.every(kind, rank, self.workspace_bytes),
                self.bench.autocast(dtype),
            ):
                verdict = known.judge(results_of(called, inputs, known.grad))
                taken = self._times(called, inputs, known.grad) if verdict["ok"] else []
            # Our own kernel computes what the candidate cannot; that is timed already.
            own = [t for t in taken if (t.kind, t.rank or 0) == (kind, rank)]
            verdicts[f"{kind} {rank}"] = {"ok": verdict["ok"], "products": len(own)}
            ok &= verdict["ok"]
            for t in own:
                candidates = self.samples.setdefault((t.product, t.rest), {})
                candidates.setdefault((t.kind, t.rank), []).append(t.microseconds)
                found.add((t.product, t.rest))
        self.write()
        return {
            "ok": ok,
            "candidates": verdicts,
            "products": len(found),
            "new_products": len(found - before),
        }

    def _candidates(self) -> Iterator[tuple[str, int]]:
        yield "own", 0
        for kind in shorthaul.products.KINDS[1:]:
            if kind == "wgmma" and not (self.bench.is_dry or _is_hopper()):
                continue
            for rank in range(self.ranks):
                yield kind, rank

    def _times(
        self, called: nn.Module, inputs: tuple, grad: torch.Tensor
    ) -> list[shorthaul.products.Timed]:
        """Every product of every round; the first steps of a program are left out."""
        inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        taken = []

        def step() -> None:
            for tensor in (*called.parameters(), *inputs):
                tensor.grad = None
            output = called(*inputs)
            output.backward(grad.to(output.dtype))

        for _ in range(self.bench.warmup):
            step()
        for _ in range(self.bench.rounds):
            taken += shorthaul.products.timed(called, inputs, step)
        return taken

    def table(self) -> dict[str, Any]:
        """The file's content, the same for the same samples."""
        entries = []
        for (product, rest), candidates in sorted(self.samples.items()):
            rows = []
            for (kind, rank), samples in sorted(candidates.items(), key=lambda c: _order(c[0])):
                row: dict[str, Any] = {"kind": kind}
                if rank is not None:
                    row["rank"] = rank
                row["microseconds"] = statistics.median(samples)
                rows.append(row)
            entries.append({"product": product, "rest": rest, "candidates": rows})
        return {
            "format": "shorthaul products",
            "version": 1,
            "machine": self.machine,
            "workspace_bytes": self.workspace_bytes,
            "entries": entries,
        }

    def write(self) -> None:
        """Writes under another name first, so that there is always a whole file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.table(), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self.path)


def _order(candidate: Candidate) -> tuple[int, int]:
    kind, rank = candidate
    kinds = shorthaul.products.KINDS + shorthaul.products.ATTENTION_KINDS
    return kinds.index(kind), rank or 0


def _is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _workspace_bytes() -> int:
    major, _ = torch.cuda.get_device_capability()
    return WORKSPACE_BYTES.get(major, OLDER_WORKSPACE_BYTES)
