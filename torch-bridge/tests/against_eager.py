"""Compares a compiled module with eager, both against float64.

Owns the rule of the tests here: an output, gradient or buffer may be no farther from PyTorch's
float64 result than twice PyTorch's own float32 result is, plus 1e-6 of the largest value.
"""

from __future__ import annotations

import copy

import pytest
import shorthaul
import torch
from shorthaul._pytorch_version import VERSION
from torch import nn
from torch.utils import _pytree as pytree

#: For tests of what is compiled around a recurrent layer that PyTorch runs.
breaks_at_recurrent_layers = pytest.mark.skipif(
    VERSION < (2, 15), reason="PyTorch 2.14 leaves a whole function with such a layer to Python"
)

#: For tests of recurrent layers in kernels.
compiles_recurrent_layers = pytest.mark.skipif(
    VERSION < (2, 13), reason="the tracers before 2.13 have wrong shapes of their states"
)

#: For tests of how few traces serve many sizes; with other traces the results are the same.
needs_open_numbers = pytest.mark.skipif(
    VERSION < (2, 14), reason="older exporters take fewer numbers without their values"
)


def assert_matches(model: nn.Module, *args, wrap=shorthaul.module, **kwargs) -> None:
    """One forward and backward of ``model`` compiled by ``wrap``, eager, and eager in float64."""
    runs = _runs(model, args, kwargs, wrap)
    wrong = []
    for what, exact in runs["float64"].items():
        try:
            assert_close(what, runs["compiled"][what], runs["eager"][what], exact)
        except AssertionError as error:
            wrong.append(str(error).split("\n")[0])
    assert not wrong, "\n".join(wrong)


def assert_network_matches(model: nn.Module, *args, wrap=shorthaul.module, **kwargs) -> None:
    """Like ``assert_matches``, for networks so deep that each tensor's rounding is up to luck.

    Outputs, gradients and buffers are held to the rule together, by the root mean square of their
    relative errors.
    """
    runs = _runs(model, args, kwargs, wrap)
    for kind in ("output", "gradient", "buffer"):
        exact = {
            what: tensor.double().norm().item()
            for what, tensor in runs["float64"].items()
            if what.startswith(kind) and tensor is not None
        }
        # A bias before BatchNorm has a gradient of nothing but rounding.
        largest = max(exact.values(), default=0.0)
        scales = {what: norm for what, norm in exact.items() if norm > 1e-10 * largest}
        errors = {"compiled": 0.0, "eager": 0.0}
        for name in errors:
            for what in exact:
                found = runs[name][what].double() - runs["float64"][what]
                assert what in scales or found.norm() <= 1e-4 * largest, what
                relative = found.norm().item() / scales.get(what, float("inf"))
                errors[name] += relative**2 / len(scales)
        bound = 2 * errors["eager"] ** 0.5 + 1e-6
        assert errors["compiled"] ** 0.5 <= bound, (kind, errors)


def _runs(model: nn.Module, args: tuple, kwargs: dict, wrap) -> dict[str, dict[str, torch.Tensor]]:
    runs = {}
    for name in ("compiled", "eager", "float64"):
        candidate = copy.deepcopy(model)
        inputs = pytree.tree_map(_leaf_copy, (args, kwargs))
        if name == "float64":
            candidate, inputs = candidate.double(), pytree.tree_map(_double, inputs)
        runs[name] = step(wrap(candidate) if name == "compiled" else candidate, *inputs)
    assert runs["compiled"].keys() == runs["eager"].keys()
    return runs


def assert_close(
    what: str, found: torch.Tensor | None, eager: torch.Tensor | None, exact: torch.Tensor | None
) -> None:
    """The rule of this file for one tensor."""
    if exact is None:
        assert found is None, what
        return
    assert found is not None, f"{what} is missing"
    assert found.shape == exact.shape and found.dtype == eager.dtype, (
        what,
        found.shape,
        found.dtype,
    )
    if not exact.dtype.is_floating_point:
        assert torch.equal(found, exact), f"{what}: {found} is not {exact}"
        return
    # Where one of eager's results is not finite, the same as one of them; the numbers elsewhere.
    special = ~(eager.isfinite() & exact.isfinite())
    as_eager = _same(found, eager) | _same(found, exact)
    assert as_eager[special].all() and found[~special].isfinite().all(), (
        f"{what}: {found.tolist()} is not {eager.tolist()}"
    )
    found, eager, exact = found[~special], eager[~special], exact[~special]
    scale = exact.abs().max().item() if exact.numel() else 0.0
    error = (found.double() - exact).abs().max().item() if exact.numel() else 0.0
    own = (eager.double() - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= 2 * own + 1e-6 * max(scale, 1e-30), (
        f"{what}: error {error:.3g}, eager's {own:.3g}, scale {scale:.3g}"
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def step(model: nn.Module, args: tuple, kwargs: dict) -> dict[str, torch.Tensor | None]:
    """Outputs, gradients and buffers after one forward and backward of a fixed weighting."""
    result = model(*args, **kwargs)
    tensors = _tensors(result)
    found = {f"output {path}": tensor.detach() for path, tensor in tensors.items()}
    losses = [
        (tensor * _weights(tensor)).sum() for tensor in tensors.values() if tensor.requires_grad
    ]
    if losses:
        sum(losses).backward()
    leaves = _tensors((args, kwargs))
    found |= {f"gradient of input {path}": leaf.grad for path, leaf in leaves.items()}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found


def _tensors(tree) -> dict[str, torch.Tensor]:
    """The tensors of a structure, by their place in it."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype) - 0.3


def _leaf_copy(leaf):
    return (
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
    )


def _double(leaf):
    if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
        return leaf.detach().double().requires_grad_(leaf.requires_grad)
    return leaf


def emulated(model: nn.Module, **options) -> nn.Module:
    """``model`` whose CUDA text the CPU executes."""
    return shorthaul.module(model, backend="cuda-emulated", **options)


def assert_emulated_matches(model: nn.Module, *args) -> None:
    """One forward and backward in the emulator, held to the rule for CPU kernels."""
    runs = {}
    for name in ("emulated", "eager", "float64"):
        candidate = copy.deepcopy(model)
        inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
        if name == "float64":
            candidate = candidate.double()
            inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
        runs[name] = step(emulated(candidate) if name == "emulated" else candidate, inputs, {})
    for what, exact in runs["float64"].items():
        assert_close(what, runs["emulated"][what], runs["eager"][what], exact)
