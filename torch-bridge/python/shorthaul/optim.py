"""Optimizers that update many parameters at once, on the CPU and on CUDA devices.

They have the interface, the state and the ``state_dict`` of ``torch.optim``. On the CPU one kernel
updates all parameters of a group that have the same type. On a CUDA device one launch updates up to
a hundred, and nothing waits for the device.

This module owns which parameters are updated together, their state, and the numbers that kernels
read. The update rules are in the compiler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from . import _native, cuda
from ._cpu_optimizer_step import CpuSteps, obstacle
from ._errors import CapturingError, CompileError, InputError
from ._place import Place, place_of
from ._program import progress

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

_Loss = TypeVar("_Loss")

#: Bytes of the widest access of a kernel.
_ALIGNMENT = 16

#: Kernels are kept for this many sets of parameters that had gradients in the same step.
_MOST_STEPS = 64

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Rule:
    """The rule from which the compiler makes kernels; every step reads the numbers."""

    kind: str
    momentum: bool = False
    nesterov: bool = False
    decay: bool = False
    maximize: bool = False

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors of each parameter's state, as in PyTorch's."""
        if self.kind == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Launch:
    """Kernels with their arguments: parameters, gradients, state and numbers."""

    compiled: Any
    arrays: list[list[torch.Tensor]]
    numbers: list[torch.Tensor]

    def run(self, place: Place) -> None:
        """Enqueues the kernels, and tells autograd what they change."""
        tensors = [tensor for array in self.arrays for tensor in array]
        addresses = [tensor.data_ptr() for tensor in (*tensors, *self.numbers)]
        self.compiled.run(addresses, place.stream())
        written = [t for array in self.arrays for n, t in enumerate(array) if n != 1]
        torch.autograd.graph.increment_version(written)


class _Pooled:
    """The part that all optimizers below share; a mix-in for those of ``torch.optim``."""

    #: Whether PyTorch's state has the number of steps.
    _counts_steps = True

    def _prepare(self, max_norm: float | None, backend: str) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, not {max_norm}")
        self._max_norm = max_norm
        self._backend = backend
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[tuple, Any] = {}
        self._cpu_steps = CpuSteps()
        #: Devices and layouts of the parameters, and the place that follows from them.
        self._looks: set[tuple] | None = None
        self._known_place: Place | None = None
        self._numbers: dict[tuple, tuple[float, torch.Tensor]] = {}
        self._constants_there: dict[tuple, tuple[dict, torch.Tensor]] = {}
        # GradScaler then leaves it to the step to undo the scale and to skip what is not finite.
        self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict:
        own = {"_max_norm": self._max_norm, "_backend": self._backend}
        return super().__getstate__() | own

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], _Loss]) -> _Loss: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], _Loss] | None = None) -> _Loss | None:
        """One update of all parameters that have a gradient.

        On a device, the update is enqueued on the current stream. This also works while a CUDA
        graph is captured, if a step was made before. A replay reads the learning rate from the same
        address: pass ``lr`` as a tensor on the device to change it between replays.
        """
        place = self._place()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not gradients:
            return loss
        theirs: dict[int, str] = {}
        if not place.runs_cuda_text:
            theirs = self._cpu_steps.left_to_pytorch(self.param_groups)
        cohorts = [
            (n, group, self._rule(group), parameters)
            for n, group in enumerate(self.param_groups)
            for parameters in self._cohorts(n, group, place, theirs)
        ]
        # How many parameters share each number of steps.
        shared = Counter(id(state["step"]) for state in self.state.values() if "step" in state)
        for _, _, _, parameters in cohorts:
            self._own_step(parameters, shared, place)
        if not place.runs_cuda_text and not self._scales_gradients():
            self._step_on_cpu(cohorts, theirs, 1.0)
            return loss
        factor, skip = self._factor(gradients, place)
        if not place.runs_cuda_text:
            if not float(skip):
                self._step_on_cpu(cohorts, theirs, float(factor))
            return loss
        launches = []
        for n, group, rule, parameters in cohorts:
            rate = self._number(("rate", n), group["lr"], place)
            constants = self._packed(n, self._constants(group), place)
            numbers = [rate, self.state[parameters[0]]["step"], factor, skip, *constants]
            launches.append(self._launch(parameters, rule, numbers, place))
        # Nothing is changed before everything is checked and compiled.
        for launch in launches:
            launch.numbers[1].add_(1.0 - skip)
            try:
                launch.run(place)
            except _native.CompileFailure as error:
                raise CompileError(str(error)) from None
        return loss

    def _place(self) -> Place:
        looks = {(p.device, p.layout) for group in self.param_groups for p in group["params"]}
        if looks == self._looks:
            return self._known_place
        named = [
            (("parameter", n, m), p)
            for m, group in enumerate(self.param_groups)
            for n, p in enumerate(group["params"])
        ]
        names = [(f"parameter {n} of group {m}", p) for (_, n, m), p in named]
        self._known_place = place_of(names, self._backend)
        self._looks = looks
        return self._known_place

    def _step_on_cpu(self, cohorts: list[tuple], theirs: dict[int, str], factor: float) -> None:
        """Kernels for the cohorts; PyTorch updates the parameters whose ids are in `theirs`."""
        prepared = []
        for _, group, rule, parameters in cohorts:
            arrays = [self._array(p, rule) for p in parameters]
            addresses = self._cpu_steps.addresses(arrays)
            numbers = [float(group["lr"]), *self._constants(group).values()]
            compiled = self._cpu_steps.compiled(rule, parameters[0].dtype)
            step = self.state[parameters[0]]["step"]
            prepared.append((compiled, arrays, addresses, numbers, step))
        # Nothing is changed before everything is checked and compiled.
        if theirs:
            self._step_by_pytorch(theirs, factor)
        for compiled, arrays, addresses, (rate, *constants), step in prepared:
            count = float(step) + 1.0
            numbers = [rate, count, factor, 0.0, *constants]
            self._cpu_steps.run(compiled, arrays, addresses, numbers)
            step.fill_(count)

    def _step_by_pytorch(self, theirs: dict[int, str], factor: float) -> None:
        """PyTorch's own update of these parameters, on the same state."""
        chosen = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if id(p) in theirs]
            if parameters:
                chosen.append(group | {"params": parameters, "foreach": False, "fused": False})
            for p in parameters:
                if "step" in self.state[p]:
                    # PyTorch counts the steps of each parameter separately.
                    self.state[p]["step"] = self.state[p]["step"].clone()
        other = self._pytorchs(chosen, lr=0.0)
        other.state = self.state
        step = self._pytorchs.step
        scaled = [p for group in chosen for p in group["params"]] if factor != 1.0 else []
        kept = [p.grad for p in scaled]
        try:
            for p in scaled:
                p.grad = p.grad * factor
            # The hooks of a step already run around our step.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(other)
        finally:
            for p, grad in zip(scaled, kept, strict=True):
                p.grad = grad

    def _scales_gradients(self) -> bool:
        """Whether they may be multiplied with another number than 1, or the step left out."""
        settings = (self._max_norm, *(getattr(self, n, None) for n in ("grad_scale", "found_inf")))
        return any(setting is not None for setting in settings)

    def _factor(
        self, gradients: list[torch.Tensor], place: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What gradients are multiplied with, and whether the step is left out: on the device."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        factor = self._number(("one",), 1.0, place)
        if scale is not None:
            factor = scale.to(place.device, torch.float32).reciprocal()
        if self._max_norm is not None:
            if any(g.is_sparse or g.is_complex() for g in gradients):
                raise InputError(
                    "max_norm takes dense, real gradients; leave it out and call "
                    "torch.nn.utils.clip_grad_norm_ yourself"
                )
            # Squares of half-precision numbers do not fit their type.
            single = [g for g in gradients if g.dtype != torch.float64]
            norms = torch._foreach_norm(single, 2.0, dtype=torch.float32) if single else ()
            double = [g for g in gradients if g.dtype == torch.float64]
            norms = [*norms, *map(torch.linalg.vector_norm, double)]
            wide = torch.float64 if double else torch.float32
            norm = torch.linalg.vector_norm(torch.stack([n.to(wide) for n in norms])) * factor
            factor = factor * (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        if not isinstance(found, torch.Tensor):
            return factor, self._number(("zero",), 0.0, place)
        return factor, self._number(("found",), found, place)

    def _number(self, name: tuple, value: float | torch.Tensor, place: Place) -> torch.Tensor:
        """A number where kernels read it; it is written only if it has changed."""
        if isinstance(value, torch.Tensor) and value.device == place.device:
            value = value.to(torch.float32)
            return value.clone() if value.data_ptr() % _ALIGNMENT else value
        value = float(value)
        known = self._numbers.get((*name, place))
        if known is None or known[0] != value:
            _refuse_capture_of_numbers(place)
            there = None if known is None else known[1].fill_(value)
            if there is None:
                there = torch.full((), value, dtype=torch.float32, device=place.device)
            known = self._numbers[*name, place] = (value, there)
        return known[1]

    def _packed(self, n: int, values: dict[str, float], place: Place) -> torch.Tensor:
        """The rule's constants of the n-th group where kernels read them: a row for each."""
        known = self._constants_there.get((n, place))
        if known is None or known[0] != values:
            _refuse_capture_of_numbers(place)
            # Kernels read vectors, so each starts at an aligned address.
            rows = torch.tensor([[value] * 4 for value in values.values()], dtype=torch.float32)
            known = (values, rows.to(place.device, non_blocking=True))
            self._constants_there[n, place] = known
        return known[1]

    def _cohorts(
        self, n: int, group: dict, place: Place, theirs: dict[int, str]
    ) -> Iterable[list[torch.Tensor]]:
        """Parameters that kernels update, by type and by the number of their next step.

        Those in `theirs` and those without a gradient are left out. Parameters that always had
        their gradients together share one tensor with that number.
        """
        found: dict[tuple, list[torch.Tensor]] = {}
        fresh: dict[torch.dtype, torch.Tensor] = {}
        chosen = [
            (m, p)
            for m, p in enumerate(group["params"])
            if p.grad is not None and id(p) not in theirs
        ]
        if len({id(p) for _, p in chosen}) < len(chosen):
            raise InputError(f"group {n} has the same parameter twice; remove one of them")
        names = self._rule(group).state
        for m, p in chosen:
            if place.runs_cuda_text:
                _check(f"parameter {m} of group {n}", p)
            state = self.state[p]
            if "step" not in state:
                place.refuse_capture("the optimizer's step")
                first = torch.zeros((), dtype=torch.float32, device=place.device)
                state["step"] = fresh.setdefault(p.dtype, first)
            for key in names:
                known = state.get(key)
                if known is None:
                    state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
                elif known.shape != p.shape:
                    raise InputError(
                        f"`{key}` of parameter {m} of group {n} has the shape "
                        f"{tuple(known.shape)}, but the parameter has {tuple(p.shape)}; load the "
                        f"state of this model"
                    )
                elif not _is_laid_out_as(known, p):
                    place.refuse_capture("the optimizer's step")
                    state[key] = _laid_out_as(known, p)
            found.setdefault((p.dtype, id(state["step"])), []).append(p)
        return found.values()

    def _own_step(self, parameters: list[torch.Tensor], shared: Counter, place: Place) -> None:
        """A number of steps that only these parameters share, on the device."""
        step = self.state[parameters[0]]["step"]
        others = shared[id(step)] > len(parameters)
        if others or step.device != place.device or step.dtype != torch.float32:
            place.refuse_capture("the optimizer's step")
            shared[id(step)] -= len(parameters)
            step = step.detach().to(place.device, torch.float32, copy=True)
            for p in parameters:
                self.state[p]["step"] = step

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as PyTorch does: with a number of steps for each parameter."""
        made = super().state_dict()
        alone = {}
        for n, known in made["state"].items():
            state = {key: value for key, value in known.items() if key != "step"}
            if "step" in known and self._counts_steps:
                state["step"] = known["step"].clone()
            if state:
                alone[n] = state
        return made | {"state": alone}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as PyTorch does. Equal numbers of steps become one tensor again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            known: dict[tuple, torch.Tensor] = {}
            for p in group["params"]:
                state = self.state.get(p, {})
                if "step" in state:
                    # A copy, because the same state may be loaded again.
                    step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
                    step = step.detach().clone()
                    state["step"] = known.setdefault((p.dtype, float(step)), step)

    def _launch(
        self, parameters: list[torch.Tensor], rule: _Rule, numbers: list[torch.Tensor], place: Place
    ) -> _Launch:
        """The kernels for these parameters, with their arguments."""
        arrays = [self._array(p, rule) for p in parameters]
        aligned = not any(t.data_ptr() % _ALIGNMENT for tensors in arrays for t in tensors)
        sizes = tuple(p.numel() for p in parameters)
        compiled = self._compiled(rule, parameters[0].dtype, sizes, aligned, place)
        return _Launch(compiled, arrays, numbers)

    def _array(self, p: torch.Tensor, rule: _Rule) -> list[torch.Tensor]:
        """A parameter with its gradient and its state, all laid out alike."""
        grad = p.grad if _is_laid_out_as(p.grad, p) else _laid_out_as(p.grad, p)
        state = self.state[p]
        return [p, grad, *(state[name] for name in rule.state)]

    def _compiled(
        self, rule: _Rule, dtype: torch.dtype, sizes: tuple, aligned: bool, place: Place
    ) -> Any:
        key = (rule, dtype, sizes, aligned, place)
        if key not in self._steps:
            place.refuse_capture("the optimizer's step")
            if len(self._steps) >= _MOST_STEPS:
                self._steps.pop(next(iter(self._steps)))
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
    found = obstacle(p, _DTYPES)
    if found is not None:
        raise InputError(found.format(name=name) + "; use torch.optim for it")


def _is_laid_out_as(tensor: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether the same elements lie at the same places, in the same type."""
    same = tensor.stride() == p.stride() and tensor.shape == p.shape
    # A lazy negation, as of the imaginary part of a conjugate, is not in memory yet.
    same = same and tensor.dtype == p.dtype and tensor.device == p.device
    return same and not tensor.is_neg()


def _laid_out_as(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(p, memory_format=torch.preserve_format).copy_(tensor)


def _refuse_capture_of_numbers(place: Place) -> None:
    if place.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CapturingError(
            "a setting of the optimizer, such as `lr`, changed since the last step, and the CUDA "
            "graph that is being captured would write the same value at every replay; make a step "
            "before the capture, or pass `lr` as a tensor on the device"
        )


def _refused(group: dict, names: tuple[str, ...]) -> None:
    for name in names:
        if group.get(name):
            raise ValueError(f"there is no kernel for {name}; use torch.optim instead")


def _no_tensors(values: Iterable[Any]) -> None:
    if any(isinstance(value, torch.Tensor) for value in values):
        raise ValueError("only `lr` may be a tensor; pass the other settings as numbers")


class SGD(_Pooled, torch.optim.SGD):
    """``torch.optim.SGD`` without ``dampening``; see :class:`AdamW` for ``max_norm`` and more."""

    _pytorchs = torch.optim.SGD
    _counts_steps = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        max_norm: float | None = None,
        backend: Literal["auto", "cuda-emulated"] = "auto",
    ):
        _no_tensors((momentum, weight_decay))
        super().__init__(
            params,
            lr,
            momentum,
            0.0,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self._prepare(max_norm, backend)

    def _rule(self, group: dict) -> _Rule:
        _refused(group, ("dampening", "differentiable"))
        return _Rule(
            "sgd",
            momentum=bool(group["momentum"] != 0),
            nesterov=bool(group["nesterov"]),
            decay=bool(group["weight_decay"] != 0),
            maximize=bool(group["maximize"]),
        )

    def _constants(self, group: dict) -> dict[str, float]:
        return {"decay": group["weight_decay"], "momentum": group["momentum"]}


class Adam(_Pooled, torch.optim.Adam):
    """``torch.optim.Adam`` without ``amsgrad``; see :class:`AdamW` for ``max_norm`` and more."""

    _pytorchs = torch.optim.Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        max_norm: float | None = None,
        backend: Literal["auto", "cuda-emulated"] = "auto",
    ):
        _no_tensors((*betas, eps, weight_decay))
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self._prepare(max_norm, backend)

    def _rule(self, group: dict) -> _Rule:
        _refused(group, ("amsgrad", "differentiable"))
        kind = "adamw" if group.get("decoupled_weight_decay") else "adam"
        decay, maximize = bool(group["weight_decay"] != 0), bool(group["maximize"])
        return _Rule(kind, decay=decay, maximize=maximize)

    def _constants(self, group: dict) -> dict[str, float]:
        made = {"decay": group["weight_decay"], "eps": group["eps"]}
        for n, beta in enumerate(map(float, group["betas"]), 1):
            # Single precision would lose the difference from 1.
            logarithm = math.log(beta) if beta > 0 else -math.inf
            made |= {f"beta{n}": beta, f"1 - beta{n}": 1 - beta, f"ln beta{n}": logarithm}
        return made


class AdamW(Adam):
    """``torch.optim.AdamW`` (Loshchilov and Hutter, arXiv 1711.05101) without ``amsgrad``.

    All parameters must be on one device. One kernel updates the parameters of a group that have
    the same type, in place: on the CPU all of them, on a CUDA device up to a hundred. It reads and
    writes each element of a parameter and its state once, and reads each element of a gradient
    once.

    - ``max_norm``: scales gradients down so that the norm of all of them together is at most this,
      as ``torch.nn.utils.clip_grad_norm_`` does. PyTorch computes the norm first; the kernel then
      scales each gradient as it reads it, and leaves ``.grad`` as it is.
    - With a ``GradScaler``, the same kernel undoes the scale, and skips the step if a gradient is
      not finite. On a CUDA device, nothing waits for this check.
    - ``foreach`` and ``fused`` choose among PyTorch's own implementations. Here they change
      nothing; they are kept for the ``state_dict``.
    - ``backend="cuda-emulated"`` executes the CUDA kernels on the CPU, for tests.

    On the CPU, PyTorch updates parameters that the kernel cannot update: those with gaps in memory,
    a sparse gradient, a complex type or a tensor subclass. A warning says so once. On a CUDA device
    they raise an error.

    The kernel for the CPU is compiled once for each rule and type. Kernels for CUDA are compiled
    for the set of parameters that have gradients. They are compiled again for another set, and for
    arrays whose address is not a multiple of 16 bytes.
    """

    _pytorchs = torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        max_norm: float | None = None,
        backend: Literal["auto", "cuda-emulated"] = "auto",
    ):
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
            max_norm=max_norm,
            backend=backend,
        )
        for settings in (self.defaults, *self.param_groups):
            settings["decoupled_weight_decay"] = True

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


__all__ = ["SGD", "Adam", "AdamW"]
