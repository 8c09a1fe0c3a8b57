"""One step of a network in each variant: Shorthaul, what PyTorch offers, other compilers.

Owns how a variant is made from a fresh copy of the model; takes no times.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

import shorthaul

from ..models.example import Inputs
from . import jax_peer, onnxruntime_peer
from .options import DTYPES, MOMENTUM, OPTIMIZERS, Setting

#: Compilers beside PyTorch, which have steps of their own.
OTHERS = {"jax": jax_peer.stepper, "onnxruntime": onnxruntime_peer.stepper}


def inputs_of(setting: Setting) -> Inputs:
    """What the network is called with, in the setting's type."""
    dtype = DTYPES[setting.dtype]
    given = setting.example.inputs(setting.batch)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in given)


def model_of(setting: Setting) -> nn.Module:
    """The network, in the setting's type and in training mode, or evaluation mode for inference."""
    model = setting.example.make().to(DTYPES[setting.dtype])
    return model.train(setting.mode != "forward")


def precision(dtype: str | None) -> contextlib.AbstractContextManager:
    """Where model and loss are called: for ``autocast``, inside ``torch.autocast`` in bf16."""
    if dtype == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def has_images(inputs: Inputs) -> bool:
    """Whether there is a memory format to choose."""
    return any(x.dim() == 4 and x.is_floating_point() for x in inputs)


def stepper(
    setting: Setting, variant: str, model: nn.Module, inputs: Inputs
) -> Callable[[], object]:
    """One step of a variant, on a copy of the model of its own.

    A step of Shorthaul or PyTorch has an attribute ``model``: what it calls.
    """
    model = copy.deepcopy(model)
    if variant == "shorthaul-f32":
        setting, model = replace(setting, dtype="f32"), model.float()
        inputs = tuple(x.float() if x.is_floating_point() else x for x in inputs)
    if variant == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(_channels_last(x) for x in inputs)
    if variant in OTHERS:
        return OTHERS[variant](setting, model, inputs)
    run = called(variant, model)
    if setting.mode == "forward":

        def infer() -> object:
            return _infer(run, inputs, setting)

        infer.model = run
        return infer
    parameters, loss = list(model.parameters()), setting.example.loss
    optimizer = optimizer_of(setting, variant, parameters) if setting.mode == "step" else None

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with precision(setting.dtype):
            result = loss(run(*inputs))
        result.backward()
        if optimizer is not None:
            optimizer.step()

    step.model = run
    return step


def optimizer_of(
    setting: Setting, variant: str, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Shorthaul's own update, or PyTorch's fused one for its variants."""
    optimizers, settings = torch.optim, {"fused": True}
    if variant.startswith("shorthaul"):
        optimizers, settings = shorthaul.optim, {}
    settings["lr"] = OPTIMIZERS[setting.optimizer]
    if setting.optimizer == "sgd":
        return optimizers.SGD(parameters, momentum=MOMENTUM, **settings)
    return optimizers.AdamW(parameters, **settings)


def called(variant: str, model: nn.Module) -> nn.Module:
    """What a variant calls in place of the model: Shorthaul's, PyTorch's, or the model itself."""
    if variant.startswith("shorthaul"):
        return shorthaul.module(model)
    if variant == "compile":
        return torch.compile(model)
    if variant == "compile-max-autotune":
        return torch.compile(model, mode="max-autotune")
    return model


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


@torch.no_grad()
def _infer(run: nn.Module, inputs: Inputs, setting: Setting) -> object:
    with precision(setting.dtype):
        return run(*inputs)
