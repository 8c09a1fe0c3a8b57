"""Errors of Shorthaul, of PyTorch and of other compilers, in one type, against eager float64.

Owns the comparisons of ``--check`` and ``--errors``; takes no times.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..models import Example, without_dropout
from .options import DTYPES, Setting
from .variants import OTHERS, called, inputs_of, model_of, precision, stepper


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


def gradient_errors(setting: Setting, variants: list[str]) -> dict[str, dict[str, Any]]:
    """By variant, how far its gradients are from eager float64, which has the same parameters.

    A parameter's error is the largest difference of its gradient over the largest value of the
    exact one; given are ``median`` and ``largest`` over the parameters, or ``error``, why there are
    none. Dropout is left out.
    """
    setting = replace(setting, mode="train")
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    model, inputs = without_dropout(model_of(setting)), inputs_of(setting)
    try:
        exact = _gradients(setting, "float64", model, inputs)
    except Exception as error:
        return dict.fromkeys(variants, {"error": "eager in float64: " + _said(error)})
    found = {}
    for variant in variants:
        try:
            own = _gradients(setting, variant, model, inputs)
        except Exception as error:
            found[variant] = {"error": _said(error)}
            continue
        errors = [
            ((own[name] - x).abs().max() / x.abs().max()).item()
            for name, x in exact.items()
            if x.numel() and x.any()
        ]
        found[variant] = {"median": statistics.median(errors), "largest": max(errors)}
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def _gradients(setting: Setting, variant: str, model: nn.Module, inputs) -> dict[str, torch.Tensor]:
    """Gradients of one step in float64, by parameter."""
    names = [name for name, _ in model.named_parameters()]
    if variant in OTHERS:
        import numpy as np  # both of them need it, PyTorch does not

        given = stepper(setting, variant, model, inputs)()
        by_name = given[1] if variant == "jax" else given
        behind = "" if variant == "jax" else ".grad"
        arrays = {name: np.asarray(by_name[f"model.{name}{behind}"]) for name in names}
        return {name: torch.tensor(array.astype("float64")) for name, array in arrays.items()}
    with precision(None if variant in ("float64", "shorthaul-f32") else setting.dtype):
        found = _results(setting.example, variant, model, inputs)
    found = {name: found[f"gradient of {name}"] for name in names}
    return {name: x.double() for name, x in found.items() if x is not None}


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
    elif variant == "shorthaul-f32":
        own = own.float()
        fed = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    output = called(variant, own)(*fed)
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
