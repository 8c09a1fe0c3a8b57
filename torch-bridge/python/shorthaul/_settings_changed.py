"""PyTorch's settings that a compiled program depends on: what each is now, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch


def which_settings(names: Iterable[str]) -> str:
    """What the settings that changed are now; ``names`` are Dynamo's."""
    clauses = dict.fromkeys(filter(None, map(_is_now, names)))
    return " and ".join(clauses) or "a setting of PyTorch changed"


def _is_now(name: str) -> str:
    """What a setting is now; empty where it has no effect."""
    autocast = re.match(r"autocast\((\w+)\)_(enabled|dtype)", name)
    if autocast is not None:
        return _autocast_is_now(*autocast.groups())
    if name == "grad_mode":
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        return f"gradients are switched {_switched(torch.is_grad_enabled(), f' (`torch.{mode}`)')}"
    if name == "num_threads":
        return f"PyTorch's number of threads is {torch.get_num_threads()} now"
    if name == "default_dtype":
        return f"the default type is {str(torch.get_default_dtype()).removeprefix('torch.')} now"
    if name == "autocast_cache_enabled":
        return f"the cache of autocast is switched {_switched(torch.is_autocast_cache_enabled())}"
    if name.startswith("deterministic_algorithms"):
        state = _switched(torch.are_deterministic_algorithms_enabled())
        if torch.is_deterministic_algorithms_warn_only_enabled():
            state += " (with `warn_only`)"
        return f"deterministic algorithms are switched {state}"
    if name.startswith("torch_function"):
        return "`__torch_function__` was switched on or off"
    if "tf32" in name or "precision" in name or "reduce" in name:
        return "the precision of matrix products changed"
    return f"a setting of PyTorch changed (`{name}`)"


def _autocast_is_now(device: str, what: str) -> str:
    is_on = torch.is_autocast_enabled(device)
    if what == "enabled":
        return f"autocast is switched {_switched(is_on)}"
    dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return f"autocast computes in {dtype} now" if is_on else ""


def _switched(is_on: bool, by: str = "") -> str:
    return "on" if is_on else f"off{by}"


__all__ = ["which_settings"]
