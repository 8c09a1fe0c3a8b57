"""Optimizers whose step over all parameters is one CUDA kernel: ``shorthaul.optim.AdamW``.

Owns the choice of which parameters are updated together, their state, and the numbers that kernels
read on the device. The update rules are in the compiler; the interface, the state and its
dictionary are those of ``torch.optim``. Never waits for the device.

Parameters on the CPU are updated by PyTorch's own fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import _native, cuda
from ._errors import CompileError, InputError
from ._place import Place, place_of
from ._program import progress

#: Bytes of the widest access of a kernel.
_ALIGNMENT = 16

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Rule:
    """What the compiler makes kernels of; the learning rate is read at every step."""

    kind: str
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    maximize: bool = False

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors that each parameter has besides, as in PyTorch's state."""
        if self.kind == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq")


class _Pooled:
    """What the optimizers below share; mixed into those of ``torch.optim``."""

    def _prepare(self, max_norm: float | None, backend: str) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm is a length above 0, not {max_norm}")
        self._max_norm = max_norm
        self._backend = backend
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[tuple, Any] = {}
        self._numbers: dict[tuple, tuple[float, torch.Tensor]] = {}
        # GradScaler then leaves it to the step to undo the scale and to skip what is not finite.
        self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict:
        own = {"_max_norm": self._max_norm, "_backend": self._backend}
        return super().__getstate__() | own

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient.

        On a device it is enqueued on the current stream, also while a CUDA graph is captured, for
        which one step must have been made before. Gradients stay as they are.
        """
        place = self._place()
        if not place.runs_cuda_text:
            return self._step_on_cpu(super().step.__func__, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, skip = self._factor(place)
        for n, group in enumerate(self.param_groups):
            rule = self._rule(group)
            rate = self._number(("rate", n), group["lr"], place)
            for parameters in self._cohorts(group, rule, place):
                self._update(parameters, rule, (rate, factor, skip), place)
        return loss

    def _place(self) -> Place:
        named = [
            (("parameter", n, m), p)
            for m, group in enumerate(self.param_groups)
            for n, p in enumerate(group["params"])
        ]
        if len({(p.device, p.layout) for _, p in named}) == 1:
            named = named[:1]
        names = [(f"parameter {n} of group {m}", p) for (_, n, m), p in named]
        return place_of(names, self._backend)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]

    def _step_on_cpu(self, step: Callable, closure: Callable[[], Any] | None) -> Any:
        if self._max_norm is not None:
            if closure is not None or getattr(self, "grad_scale", None) is not None:
                raise InputError("max_norm with a closure or a GradScaler needs a CUDA device")
            parameters = [p for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
        for group in self.param_groups:
            self._rule(group)
            group["fused"] = True
        # Hooks of a step are called around ours already.
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)

    def _factor(self, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """What gradients are multiplied with, and whether the step is left out: on the device."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        one = self._number(("one",), 1.0, place)
        factor = one if scale is None else scale.to(place.device, torch.float32).reciprocal()
        if self._max_norm is not None and (gradients := self._gradients()):
            norm = torch.nn.utils.get_total_norm(gradients).to(torch.float32) * factor
            factor = factor * (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        if found is None:
            return factor, self._number(("zero",), 0.0, place)
        return factor, found.to(place.device, torch.float32)

    def _number(self, name: tuple, value: float | torch.Tensor, place: Place) -> torch.Tensor:
        """A number where kernels read it; written only when it is another than before."""
        if isinstance(value, torch.Tensor) and value.device == place.device:
            return value.to(torch.float32)
        value = float(value)
        known = self._numbers.get((*name, place))
        if known is None:
            place.refuse_capture("the optimizer's step")
            known = (value, torch.full((), value, dtype=torch.float32, device=place.device))
        elif known[0] != value:
            known = (value, known[1].fill_(value))
        self._numbers[*name, place] = known
        return known[1]

    def _cohorts(self, group: dict, rule: _Rule, place: Place) -> Iterable[list[torch.Tensor]]:
        """Parameters with a gradient, by type and by the number of their next step.

        Parameters that always had their gradients together share one tensor with that number.
        """
        found: dict[tuple, list[torch.Tensor]] = {}
        fresh: dict[tuple, torch.Tensor] = {}
        for n, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            _check(f"parameter {n}", p)
            state = self.state[p]
            if "step" not in state:
                place.refuse_capture("the optimizer's step")
                first = torch.zeros((), dtype=torch.float32, device=place.device)
                state["step"] = fresh.setdefault((p.dtype,), first)
            for name in rule.state:
                if state.get(name) is None:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            found.setdefault((p.dtype, id(state["step"])), []).append(p)
        for parameters in found.values():
            self._own_step(group, parameters, place)
        return list(found.values())

    def _own_step(self, group: dict, parameters: list[torch.Tensor], place: Place) -> None:
        """A number of steps that only these parameters share, on the device."""
        step = self.state[parameters[0]]["step"]
        others = sum(self.state.get(p, {}).get("step") is step for p in group["params"])
        if others > len(parameters) or step.device != place.device or step.dtype != torch.float32:
            place.refuse_capture("the optimizer's step")
            step = step.detach().to(place.device, torch.float32, copy=True)
            for p in parameters:
                self.state[p]["step"] = step

    def state_dict(self) -> dict:
        """As in PyTorch, whose optimizers count each parameter's steps by themselves."""
        made = super().state_dict()
        alone = {
            n: state | {"step": state["step"].clone()} if "step" in state else state
            for n, state in made["state"].items()
        }
        return made | {"state": alone}

    def load_state_dict(self, state_dict: dict) -> None:
        """As in PyTorch. Numbers of steps that are equal are one tensor again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            known: dict[tuple, torch.Tensor] = {}
            for p in group["params"]:
                state = self.state.get(p, {})
                if "step" in state:
                    step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
                    state["step"] = known.setdefault((p.dtype, float(step)), step)

    def _update(
        self,
        parameters: list[torch.Tensor],
        rule: _Rule,
        numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        place: Place,
    ) -> None:
        rate, factor, skip = numbers
        step = self.state[parameters[0]]["step"]
        step.add_(1.0 - skip)
        arrays, kept = [], []
        for p in parameters:
            grad = p.grad
            if grad.stride() != p.stride():
                # The same elements at the same places.
                grad = torch.empty_like(p, memory_format=torch.preserve_format).copy_(grad)
                kept.append(grad)
            arrays += [p, grad, *(self.state[p][name] for name in rule.state)]
        addresses = [tensor.data_ptr() for tensor in arrays]
        aligned = not any(address % _ALIGNMENT for address in addresses)
        sizes = tuple(p.numel() for p in parameters)
        compiled = self._compiled(rule, parameters[0].dtype, sizes, aligned, place)
        addresses += [number.data_ptr() for number in (rate, step, factor, skip)]
        try:
            compiled.run(addresses, place.stream())
        except _native.CompileFailure as error:
            raise CompileError(str(error)) from None
        written = [tensor for n, tensor in enumerate(arrays) if n % (2 + len(rule.state)) != 1]
        torch.autograd.graph.increment_version(written)

    def _compiled(
        self, rule: _Rule, dtype: torch.dtype, sizes: tuple, aligned: bool, place: Place
    ) -> Any:
        key = (rule, dtype, sizes, aligned, place)
        if key not in self._steps:
            place.refuse_capture("the optimizer's step")
            try:
                self._steps[key] = _native.PooledStep.compile(
                    rule,
                    str(dtype).removeprefix("torch."),
                    list(sizes),
                    aligned,
                    place.device.index if place.is_cuda else None,
                    cuda.nvrtc_folders(),
                    progress(),
                )
            except _native.CompileFailure as error:
                raise CompileError(str(error)) from None
        return self._steps[key]


def _check(name: str, p: torch.Tensor) -> None:
    if p.dtype not in _DTYPES:
        raise InputError(f"{name} is of {p.dtype}; kernels update real numbers")
    if p.grad.is_sparse:
        raise InputError(f"the gradient of {name} is sparse; use torch.optim for it")
    if p.grad.dtype != p.dtype:
        raise InputError(f"the gradient of {name} is of {p.grad.dtype}, the parameter of {p.dtype}")
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size > 1 and stride != expected:
            raise InputError(
                f"{name} has gaps in memory (strides {p.stride()}); make it contiguous"
            )
        expected *= max(size, 1)


def _refused(group: dict, names: tuple[str, ...]) -> None:
    for name in names:
        if group.get(name):
            raise ValueError(f"{name} has no kernel; use torch.optim with it")


def _constants(values: Iterable[Any]) -> None:
    if any(isinstance(value, torch.Tensor) for value in values):
        raise ValueError("only the learning rate may be a tensor")


class SGD(_Pooled, torch.optim.SGD):
    """``torch.optim.SGD`` without ``dampening``; see :class:`AdamW` for the rest."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        backend: str = "auto",
    ):
        _constants((momentum, weight_decay))
        super().__init__(
            params, lr, momentum, 0.0, weight_decay, nesterov, maximize=maximize, foreach=False
        )
        self._prepare(max_norm, backend)

    def _rule(self, group: dict) -> _Rule:
        _refused(group, ("dampening", "differentiable"))
        return _Rule(
            "sgd",
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )


class Adam(_Pooled, torch.optim.Adam):
    """``torch.optim.Adam`` without ``amsgrad``; see :class:`AdamW` for the rest."""

    _kind = "adam"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        backend: str = "auto",
    ):
        _constants((*betas, eps, weight_decay))
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, foreach=False, capturable=False
        )
        self._prepare(max_norm, backend)

    def _rule(self, group: dict) -> _Rule:
        _refused(group, ("amsgrad", "differentiable"))
        return _Rule(
            self._kind,
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
        )


class AdamW(Adam):
    """``torch.optim.AdamW`` (Loshchilov and Hutter, arXiv 1711.05101) without ``amsgrad``.

    On a CUDA device all parameters of a group with one type are updated by one kernel, or one for
    every hundred of them, in place: each element of the parameter and its state is read and written
    once, each of the gradient read once. A ``GradScaler``'s scale is undone in that kernel, and a
    step with gradients that are not finite is left out without waiting for the device.
    ``max_norm``: gradients are scaled down to that norm together, as by
    ``torch.nn.utils.clip_grad_norm_``, but in the same kernel: ``.grad`` stays as it is.
    ``backend="cuda-emulated"`` executes the kernels on the CPU, for tests.
    """

    _kind = "adamw"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_norm: float | None = None,
        backend: str = "auto",
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            max_norm=max_norm,
            backend=backend,
        )
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


__all__ = ["SGD", "Adam", "AdamW"]
