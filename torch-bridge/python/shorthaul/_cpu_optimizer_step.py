"""Steps of optimizers on the CPU: one kernel updates all parameters of a group in place.

Owns compiled kernels, which depend on the update rule and the type alone, and the choice of the
parameters that they cannot update. ``shorthaul.optim`` owns the state and the numbers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from . import _native
from ._dynamo import _outside_level
from ._errors import CompileError, FallbackWarning, InputError, ToolchainError
from ._program import progress

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: How many parameters a message names.
_NAMED = 4


def obstacle(p: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why kernels cannot update a parameter that has a gradient, with ``{name}`` for its name."""
    if p.dtype not in dtypes:
        types = ", ".join(str(dtype) for dtype in dtypes)
        return f"{{name}} is {p.dtype}, and kernels update {types}"
    grad = p.grad
    if grad.is_sparse:
        return "the gradient of {name} is sparse"
    if grad.dtype != p.dtype:
        return f"the gradient of {{name}} is {grad.dtype}, but the parameter is {p.dtype}"
    for tensor in (p, grad):
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"{{name}} or its gradient is a {type(tensor).__name__}"
    return None if _is_dense(p) else f"{{name}} has gaps in memory (strides {p.stride()})"


def _is_dense(p: torch.Tensor) -> bool:
    if p.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


class CpuSteps:
    """The kernels of one optimizer, and what it said about parameters that it leaves to PyTorch."""

    def __init__(self) -> None:
        self._compiled: dict[tuple, Any] = {}
        self._said: set[str] = set()
        self._places: list[tuple[int, int, int]] = []
        self._overlapping: set[int] = set()

    def left_to_pytorch(self, groups: list[dict]) -> dict[int, str]:
        """Ids of the parameters with a gradient that kernels cannot update, with the reason.

        A warning says each reason once.
        """
        chosen = [
            (m, n, p)
            for n, group in enumerate(groups)
            for m, p in enumerate(group["params"])
            if p.grad is not None
        ]
        reasons = [obstacle(p, CPU_DTYPES) for _, _, p in chosen]
        dense = [p for (_, _, p), reason in zip(chosen, reasons, strict=True) if reason is None]
        overlapping = self._find_overlapping(dense)
        found = {}
        for (m, n, p), reason in zip(chosen, reasons, strict=True):
            if id(p) in overlapping:
                reason = "{name} shares memory with another parameter"
            if reason is not None:
                found[id(p)] = reason.format(name=f"parameter {m} of group {n}")
        new = [reason for reason in found.values() if reason not in self._said]
        if new:
            self._said.update(new)
            more = f"; and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            warnings.warn(
                f"PyTorch's own optimizer updates parameters that the kernel cannot: "
                f"{'; '.join(new[:_NAMED])}{more}",
                FallbackWarning,
                stacklevel=_outside_level(),
            )
        return found

    def _find_overlapping(self, parameters: list[torch.Tensor]) -> set[int]:
        """Ids of dense parameters that share memory: threads would update it at the same time."""
        places = [(p.data_ptr(), p.nbytes, id(p)) for p in parameters]
        if places == self._places:
            return self._overlapping
        spans = sorted((start, start + n, name) for start, n, name in places if n)
        self._places, self._overlapping = places, set()
        last_end, last = 0, 0
        for start, end, name in spans:
            if start < last_end and name != last:
                self._overlapping |= {name, last}
            if end > last_end:
                last_end, last = end, name
        return self._overlapping

    def compiled(self, rule: Any, dtype: torch.dtype) -> Any:
        """The kernel of a rule for parameters of a type."""
        if (rule, dtype) not in self._compiled:
            name = str(dtype).removeprefix("torch.")
            try:
                self._compiled[rule, dtype] = _native.CpuStep.compile(rule, name, progress())
            except _native.ToolchainFailure as error:
                raise ToolchainError(str(error)) from None
            except _native.CompileFailure as error:
                raise CompileError(str(error)) from None
        return self._compiled[rule, dtype]

    @staticmethod
    def addresses(arrays: list[list[torch.Tensor]]) -> list[int]:
        """Where each parameter, its gradient and its state lie.

        Raises ``InputError`` if the storage of one was freed or made smaller.
        """
        for array in arrays:
            for n, tensor in enumerate(array):
                end = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
                if tensor.nbytes and tensor.untyped_storage().nbytes() < end:
                    raise InputError(_freed(array[0], n))
        return [tensor.data_ptr() for array in arrays for tensor in array]

    @staticmethod
    def run(
        compiled: Any,
        arrays: list[list[torch.Tensor]],
        addresses: list[int],
        numbers: list[float],
    ) -> None:
        """Updates each parameter and its state in place, and tells autograd."""
        sizes = [array[0].numel() for array in arrays]
        try:
            compiled.run(addresses, sizes, numbers, torch.get_num_threads())
        except _native.CompileFailure as error:
            raise CompileError(str(error)) from None
        written = [t for array in arrays for n, t in enumerate(array) if n != 1]
        torch.autograd.graph.increment_version(written)


def _freed(p: torch.Tensor, n: int) -> str:
    """The message about the n-th array of a parameter: itself, its gradient, its state."""
    what = {0: "", 1: "the gradient of "}.get(n, "the optimizer's state of ")
    return (
        f"the storage of {what}a parameter of the sizes {list(p.shape)} was freed or made "
        f"smaller than the tensor; restore its memory before the step"
    )
