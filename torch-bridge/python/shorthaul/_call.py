"""A program bound to a region: one call of it.

Owns how the order of a region's inputs and outputs maps to the program's, the writes of a call, and
the record of calls on request. Never runs kernels itself: ``_autograd`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import _StopRecomputationError

from . import _autograd
from ._capture import Captured
from ._draws import Seed
from ._program import Program
from ._second_derivatives import Rerun, Way
from ._strides import overlap, with_stride

if TYPE_CHECKING:
    from ._region import Region


class _Recorder(list):
    """Collected calls, and whether their kernels run."""

    runs = True


#: The recorders that collect now; see :func:`recorded`.
_recorders: list[_Recorder] = []


@contextlib.contextmanager
def recorded(*, runs: bool = True):
    """Collects the calls of programs that are made inside, in order.

    Without ``runs``, no kernel runs, and the results are zeros.
    """
    calls = _Recorder()
    calls.runs = runs
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _recorders[:] = [recorder for recorder in _recorders if recorder is not calls]


def is_recorded() -> bool:
    """Whether calls are being collected now."""
    return bool(_recorders)


class Call:
    """A program bound to the order of its region's inputs and outputs."""

    def __init__(
        self,
        captured: Captured,
        program: Program,
        requires_grad: Sequence[bool],
        differentiable: bool,
    ):
        self.captured = captured
        self.program = program
        _autograd.register(program)
        self.specs = [spec for spec in captured.inputs if spec.kind != "constant"]
        self.positions = [spec.user_idx for spec in self.specs]
        #: Positions of the inputs that the call writes.
        self.written = [o.user_idx for o in captured.outputs if o.kind == "user_input"]
        self.is_checked = any(output.kind == "check" for output in captured.outputs)
        users = {}
        for i, output in enumerate(captured.outputs):
            if output.kind == "user":
                users[i] = len(users)
        #: Where each result comes from, as in ``Captured`` but with the positions of this call.
        self.returns = [
            (kind, users[value])
            if kind == "output"
            else (kind, captured.inputs[value].user_idx if kind == "input" else value)
            for kind, value in captured.returns
        ]
        self.strides = captured.strides
        self.is_differentiable = differentiable
        #: Results that need no gradient in eager, although some input does.
        self.detached = [
            i
            for i, ((kind, _), wanted) in enumerate(zip(self.returns, requires_grad, strict=True))
            if kind == "output" and differentiable and not wanted
        ]
        #: Whether the number of threads at a call may differ from the planned number.
        self.counts_threads = False
        #: Inputs that the call writes after the forward pass, although the backward pass reads
        #: their old value.
        self.kept = [
            i
            for i, spec in enumerate(self.specs)
            if i in program.backward_reads and spec.user_idx in self.written
        ]
        #: Inputs on which no result depends: autograd may have freed their own history by then.
        self.unreached: list[int] = []
        if differentiable:
            reached = set().union(*program.reaches)
            self.unreached = [i for i in range(len(self.specs)) if i not in reached]
        #: Whether the results are the program's outputs in their order.
        self.is_direct = not self.detached and self.returns == [
            ("output", i) for i in range(len(self.strides)) if self.strides[i] is None
        ]

    def keep(self, written_later: set[int]) -> None:
        """Also copies inputs that are written before the backward pass reads them."""
        reads = set(self.program.backward_reads)
        later = {i for i, spec in enumerate(self.specs) if spec.user_idx in written_later}
        self.kept = sorted({*self.kept, *(later & reads)})

    def rerun_by(self, way: Way) -> Rerun | None:
        """Computes gradients that the kernels do not compute; ``None`` if nothing needs one."""
        if not self.is_differentiable:
            return None
        at: dict[int, int] = {}
        for i, (kind, value) in enumerate(self.returns):
            if kind == "output" and (value not in at or at[value] in self.detached):
                at[value] = i
        return Rerun(
            way,
            self.captured,
            self.program,
            positions=self.positions,
            outputs=[at[i] for i in range(len(self.program.user_outputs))],
            written=self.written,
            copied=self.kept,
        )

    def __call__(self, region: Region, inputs, seed: Seed):
        if _recorders:
            for recorder in _recorders:
                recorder.append(self)
            if not all(recorder.runs for recorder in _recorders):
                return self._returned(inputs, self._zeros(inputs))
        if self.written and overlap(inputs, self.written):
            return region.body.forward(*inputs)
        program = self.program
        tensors = [inputs[i] for i in self.positions]
        for i in self.unreached:
            tensors[i] = tensors[i].detach()
        if program.runs_cuda_text:
            tensors = [program.place.aligned(tensor) for tensor in tensors]
        else:
            for i, tensor in enumerate(tensors):
                if not tensor.is_contiguous():
                    tensors[i] = tensor.contiguous()
        for i in self.kept:
            tensors[i] = tensors[i].clone()
        if program.uses_seed:
            tensors.append(seed.on(program.place))
        if self.counts_threads:
            program.native.use_threads(torch.get_num_threads())
        try:
            outputs, state = _autograd.run(program, tensors, self.is_differentiable)
        except _StopRecomputationError:
            # A checkpoint around the module has what it needs. Eager has written buffers by now.
            state = _autograd.take_state()
            if state is not None:
                self._write_state(inputs, state)
            raise
        if state is not None:
            self._write_state(inputs, state)
        return outputs if self.is_direct else self._returned(inputs, outputs)

    def _zeros(self, inputs) -> list[torch.Tensor]:
        """Zeros that look like the outputs."""
        needs = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
        )
        device = self.program.place.device
        results = []
        for spec in self.program.user_outputs:
            zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
            if needs and spec.dtype.is_floating_point:
                # This must not be a leaf, since Python may write into it.
                zeros = zeros.requires_grad_().clone()
            results.append(zeros)
        return results

    def _write_state(self, inputs, state: torch.Tensor) -> None:
        """Checks indices and divisors, then writes inputs as eager does."""
        views = self.program.state_views(state)
        others = [output for output in self.captured.outputs if output.kind != "user"]
        targets, values = [], []
        for output, view in zip(others, views, strict=True):
            if output.kind == "check":
                output.check(view)
            else:
                targets.append(inputs[output.user_idx])
                values.append(view)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, values)

    def _returned(self, inputs, outputs) -> list:
        results = []
        for (kind, value), stride in zip(self.returns, self.strides, strict=True):
            if kind == "output":
                result = outputs[value]
                if stride is not None:
                    result = with_stride(result, stride)
                results.append(result)
            elif kind == "empty":
                shape, dtype = value
                device = self.program.place.device
                results.append(torch.empty(shape, dtype=dtype, device=device))
            else:
                results.append(inputs[value] if kind == "input" else value)
        for i in self.detached:
            results[i] = results[i].detach()
        return results


__all__ = ["Call", "recorded"]
