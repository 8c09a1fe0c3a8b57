"""Errors of Shorthaul and of eager PyTorch, in one type, against eager float64.

Owns the comparison of ``--check``; takes no times.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shorthaul

from ..models import Example, without_dropout
from .options import DTYPES
from .variants import precision


def check(
    example: Example, batch: int, *, dtype: str = "f32", smooth: bool = False, seed: int = 0
) -> dict:
    """Errors of Shorthaul and of eager PyTorch in ``dtype`` against eager float64.

    The model in float64 starts from the same parameters and inputs, which are rounded to ``dtype``.

    A tensor is beyond the bound if Shorthaul's largest error exceeds twice eager's own plus 1e-6 of
    the largest value. PyTorch itself, with another number of threads and for images in another
    memory format, is compared with the same bound: if rounding decides whether units of a ReLU are
    above or below zero, gradients differ by whole terms, whoever computes them. With ``smooth``,
    SiLU replaces ReLU, which removes this effect.
    """
    torch.manual_seed(seed)
    model = without_dropout(example.make().train()).to(DTYPES[dtype])
    inputs = tuple(
        x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in example.inputs(batch)
    )
    if smooth:
        model = smoothed(model)
    n_threads = torch.get_num_threads()
    others = {f"eager, {3 - min(n_threads, 2)} threads": 3 - min(n_threads, 2)}
    if inputs[0].dim() == 4:
        others["channels_last"] = n_threads
    runs = {}
    for variant in ("shorthaul", "eager", "float64", *others):
        torch.set_num_threads(others.get(variant, n_threads))
        with precision(None if variant == "float64" else dtype):
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
        "dtype": dtype,
        "tensors": tensors,
        "beyond": [t for t in tensors if not t["error"] <= t["bound"]],
        "others_beyond": {
            variant: sum(not t["errors"][variant] <= t["bound"] for t in tensors)
            for variant in others
        },
    }


def smoothed(model: nn.Module) -> nn.Module:
    """``model`` with SiLU for ReLU, in place."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, (nn.ReLU, nn.ReLU6)):
                setattr(parent, name, nn.SiLU())
    return model


def _results(example: Example, variant: str, model: nn.Module, inputs) -> dict[str, torch.Tensor]:
    """Outputs, gradients and buffers of one step of a copy of the model."""
    own, fed = copy.deepcopy(model), inputs
    if variant == "float64":
        own = own.double()
        fed = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    elif variant == "channels_last":
        own = own.to(memory_format=torch.channels_last)
        fed = tuple(x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs)
    called = shorthaul.module(own) if variant == "shorthaul" else own
    output = called(*fed)
    loss = example.loss(output)
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    found = _outputs(output)
    found |= {f"gradient of {n}": p.grad for n, p in own.named_parameters()}
    return found | {f"buffer {n}": b for n, b in own.named_buffers()}


def _outputs(output: Any) -> dict[str, torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return {"output": output.detach()}
    leaves, _ = pytree.tree_flatten_with_path(output)
    return {f"output {pytree.keystr(path)}": leaf.detach() for path, leaf in leaves}


def print_check(checked: dict) -> None:
    """The summary, and the worst tensors."""
    tensors, beyond = checked["tensors"], checked["beyond"]
    ratios = [t["error"] / t["eager"] for t in tensors if t["eager"] > 0]
    print(
        f"{checked['name']}, batch {checked['batch']}, {checked['dtype']}: {len(tensors)} tensors "
        f"against float64, median error {statistics.median(ratios):.2f} x eager's, "
        f"largest {max(ratios):.2f} x; "
        f"{len(beyond)} beyond twice eager's plus 1e-6 of the largest value"
    )
    for variant, n_beyond in checked["others_beyond"].items():
        print(f"  PyTorch itself, {variant}: {n_beyond} beyond that")
    for t in sorted(beyond, key=lambda t: -t["error"] / t["bound"])[:10]:
        print(f"  {t['name']}: {t['error']:.3g}, eager {t['eager']:.3g}, scale {t['scale']:.3g}")
