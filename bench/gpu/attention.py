"""Rows of attention in the table that programs are compiled with: our own kernels beside PyTorch's
operators.

Owns what is measured. Each candidate computes attention of heads that lie beside each other in one
array, as one product for queries, keys and values leaves them, and gives its result as the next
product reads it: the time of a candidate includes whatever it must copy for that. One row is the
time of all launches of forward and backward, another one that of forward alone. A candidate whose
results are wrong is not timed.
"""

from __future__ import annotations

from typing import Any

import shorthaul
import torch
import torch.nn.functional as F
from measuring import Bench, reference, results_of, without_tf32
from products import ProductTable
from shorthaul._report import programs_of
from torch import nn


class Stacked(nn.Module):
    """Attention of ``[batch, rows, 3, heads, width]`` to ``[batch, rows, heads, width]``."""

    def __init__(self, is_causal: bool):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in x.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return y.transpose(1, 2)


def measure(
    bench: Bench,
    table: ProductTable,
    shape: tuple[int, int, int, int],
    is_causal: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Adds the rows of one shape ``(batch, heads, rows, width)``; returns each one's verdict."""
    batch, heads, rows, width = shape
    torch.manual_seed(0)
    x = torch.randn(batch, rows, 3, heads, width, device=bench.device, dtype=dtype)
    verdicts, ok = {}, True
    for trains in (True, False):
        given = x.clone().requires_grad_(trains)
        for kind in ("own", *shorthaul.products.ATTENTION_KINDS):
            candidate = (Stacked(is_causal), given, kind)
            with shorthaul.products.every(kind, 0, table.workspace_bytes):
                try:
                    verdict = _one(bench, table, candidate)
                except (RuntimeError, shorthaul.ShorthaulError) as error:
                    # If a device refuses one candidate, the others still get their rows.
                    verdict = {"ok": kind != "own", "failed": str(error)}
            verdicts[f"{kind} {'forward and backward' if trains else 'forward'}"] = verdict
            ok &= verdict["ok"]
    table.write()
    return {"ok": ok, "candidates": verdicts}


def _one(bench: Bench, table: ProductTable, candidate: tuple[nn.Module, torch.Tensor, str]):
    """Checks and times one candidate; the verdict says why if it cannot compute this."""
    model, x, kind = candidate
    trains = x.requires_grad
    called = bench.module(model)
    native = programs_of(called, (x,))[0].native
    ((product, rest, found, reason, _),) = native.cuda_attentions()
    if found != kind:
        return {"ok": True, "left out": reason}
    if trains:
        with without_tf32():
            known = reference(bench, model, (x,), x.dtype, bench.autocast(torch.float32))
        verdict = known.judge(results_of(called, (x,), known.grad))
        if not verdict["ok"]:
            return verdict
        grad = known.grad.to(x.dtype)
    else:
        exact = model(x.double())
        error = (called(x).double() - exact).abs().max().item()
        own = (model(x).double() - exact).abs().max().item()
        scale = exact.abs().max().item()
        # Written so that NaN, which is not larger than anything, is refused too.
        if not error <= 2 * own + torch.finfo(x.dtype).eps * scale:
            return {"ok": False, "error": error, "eager_error": own, "scale": scale}

    def step() -> None:
        x.grad = None
        output = called(x)
        if trains:
            output.backward(grad)

    for _ in range(bench.warmup):
        step()
    taken = [shorthaul.products.launched(step) for _ in range(bench.rounds)]
    candidates = table.samples.setdefault((product, rest), {})
    candidates.setdefault((kind, None), []).extend(taken)
    return {"ok": True, "product": product, "rest": rest}
