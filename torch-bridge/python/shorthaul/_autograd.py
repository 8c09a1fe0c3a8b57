"""A compiled program as PyTorch's autograd sees it.

Owns the two passes of a program on tensors, and the autograd function that joins them. Both
allocate what they give (results from PyTorch's allocator, saved blocks from the program's own) and
write nothing else. Never decides what to compile.

A plain ``autograd.Function`` costs a small network's step much less than operators of
``torch.library``, and nothing needs to see a program but autograd: Dynamo calls it between graphs,
and modules under ``torch.func`` or fake tensors run in eager.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import profiler

from . import _attention, _native
from ._errors import ShorthaulError
from ._program import Program, TensorSpec

_programs: weakref.WeakSet[Program] = weakref.WeakSet()


class TimedPass(NamedTuple):
    """One pass of a program while somebody profiles."""

    program: Program
    #: ``forward`` or ``backward``.
    stage: str
    #: When it started, in seconds of ``time.perf_counter``.
    started: float
    #: Names and seconds of its launches, in order.
    launches: list[tuple[str, float]]


#: Where passes go while somebody profiles.
timings: list[TimedPass] | None = None


def register(program: Program) -> None:
    """Counts ``program`` among those that are alive."""
    _programs.add(program)


def export_seconds() -> float:
    """What PyTorch's export took for all programs that are alive."""
    return sum(program.captured.export_seconds for program in _programs)


def run(program: Program, inputs: Sequence[torch.Tensor], is_differentiable: bool):
    """The user's outputs, then the new values of what the program writes as one blob of bytes.

    ``inputs`` are contiguous tensors of the sizes and types of ``program.inputs``.
    """
    if is_differentiable:
        return _Passes.apply(program, *inputs)
    outputs, state, _ = forward(program, inputs)
    return *outputs, state


class _Passes(torch.autograd.Function):
    """Both passes of a program."""

    @staticmethod
    def forward(ctx, program: Program, *inputs):
        outputs, state, saved = forward(program, inputs)
        ctx.program = program
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *[inputs[i] for i in program.backward_reads],
            *[
                outputs[user] if offset is None else program.state_view(state, position)
                for position, offset, user in program.backward_output_reads
            ],
            saved,
        )
        return *outputs, state

    # A function that Dynamo traces may call `backward`; this code is not the user's.
    @staticmethod
    @torch._dynamo.disable
    def backward(ctx, *grads):
        program: Program = ctx.program
        *kept, saved = ctx.saved_tensors
        result = [None] * (len(program.inputs) + 1)
        _refuse_batches(grads)
        reached = _reached(program, grads)
        with torch.no_grad():
            for i in reached.intersection(program.zero_inputs):
                result[i + 1] = _empty(program, program.inputs[i]).zero_()
        given = [grads[i] for i in program.differentiable_user_outputs]
        if all(grad is None for grad in given):
            return tuple(result)
        n_reads = len(program.backward_reads)
        with torch.no_grad():
            computed = backward(program, given, kept[:n_reads], kept[n_reads:], saved)
        if torch.is_grad_enabled():
            # A second derivative with respect to what these come from is refused, not zero.
            sources = [*kept, *(grad for grad in given if grad is not None)]
            computed = _Once.apply(len(computed), *computed, *sources)
        for i, grad in zip(program.grad_inputs, computed, strict=True):
            if i in reached:
                result[i + 1] = grad
        return tuple(result)


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx, n_grads: int, *grads_and_sources):
        return grads_and_sources[:n_grads]

    @staticmethod
    def backward(ctx, *grads):
        raise ShorthaulError(
            "a Shorthaul module cannot be differentiated twice; for second derivatives (gradient "
            "penalties, Hessians) call the original module"
        )


def _refuse_batches(grads: Sequence[torch.Tensor | None]) -> None:
    functorch = torch._C._functorch
    batched = (functorch.is_batchedtensor, functorch.is_legacy_batchedtensor)
    if any(grad is not None and any(is_one(grad) for is_one in batched) for grad in grads):
        raise ShorthaulError(
            "a Shorthaul module computes one gradient at a time, not a batch of them "
            "(`is_grads_batched=True`, `torch.vmap`); call the original module for that"
        )


def _reached(program: Program, grads: Sequence[torch.Tensor | None]) -> set[int]:
    """Inputs that an output with a gradient comes from; eager gives others ``None``, not zeros."""
    reached = set()
    for inputs, grad in zip(program.reaches, grads, strict=False):
        if grad is not None:
            reached |= inputs
    return reached


def forward(program: Program, inputs: Sequence[torch.Tensor]):
    """The user's outputs, the blob of what the program writes, the block for the backward pass."""
    addresses = _addresses(program, inputs)
    # On a device the answer would have to be waited for; there, what lies outside reads NaN.
    if not program.place.is_cuda:
        for position, bound in program.bounds:
            bound.check(inputs[position])
    outputs = [_empty(program, spec) for spec in program.user_outputs]
    state = _bytes(program, program.state_bytes)
    saved = program.lend(program.saved_bytes)
    scratch = program.lend(program.forward_scratch_bytes)
    into = [output.data_ptr() for output in outputs]
    if program.state_bytes:
        users, base = iter(into), state.data_ptr()
        into = [next(users) if at is None else base + at for at in program.state_offsets]
    _launch(
        program,
        "forward",
        addresses,
        into,
        saved.data_ptr(),
        scratch.data_ptr(),
        timings is not None,
        program.place.stream(),
        _attention.operators(
            program.forward_calls,
            lambda: _forward_slots(program, inputs, outputs, state),
            scratch,
            saved,
        ),
    )
    return outputs, state, saved


def backward(
    program: Program,
    grad_outputs: Sequence[torch.Tensor | None],
    reads: Sequence[torch.Tensor],
    output_reads: Sequence[torch.Tensor],
    saved: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of ``program.grad_inputs``."""
    grads = [_empty(program, program.inputs[i]) for i in program.grad_inputs]
    given = [
        _as_program_wants(program, grad, spec)
        for grad, spec in zip(grad_outputs, program.differentiable_outputs, strict=True)
    ]
    scratch = program.lend(program.backward_scratch_bytes)
    _launch(
        program,
        "backward",
        [grad.data_ptr() for grad in given],
        [tensor.data_ptr() for tensor in reads],
        [tensor.data_ptr() for tensor in output_reads],
        saved.data_ptr(),
        [grad.data_ptr() for grad in grads],
        scratch.data_ptr(),
        timings is not None,
        program.place.stream(),
        _attention.operators(
            program.backward_calls,
            lambda: _backward_slots(program, given, reads, output_reads, grads),
            scratch,
            saved,
        ),
    )
    return grads


def _addresses(program: Program, inputs: Sequence[torch.Tensor]) -> list[int]:
    """Where the inputs lie. Refuses tensors whose storage was given back."""
    addresses = []
    for tensor, spec in zip(inputs, program.inputs, strict=True):
        end = tensor.storage_offset() * tensor.element_size() + spec.n_bytes
        if tensor.untyped_storage().nbytes() < end:
            raise ShorthaulError(
                f"the storage of `{spec.name}` {list(spec.shape)} was freed or made smaller than "
                f"the tensor; restore its memory before the call"
            )
        addresses.append(tensor.data_ptr())
    return addresses


def _bytes(program: Program, n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=program.place.device)


def _empty(program: Program, spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=program.place.device)


def _as_program_wants(
    program: Program, grad: torch.Tensor | None, spec: TensorSpec
) -> torch.Tensor:
    if grad is None:
        return _empty(program, spec).zero_()
    return program.place.aligned(grad.to(spec.dtype))


def _launch(program: Program, stage: str, *arguments) -> None:
    """Calls the native half; what the driver or the emulator refuses is an error of Shorthaul's.

    While ``torch.profiler`` runs, the pass is a range of its own there.
    """
    native = program.native.backward if stage == "backward" else program.native.forward
    started = time.perf_counter() if timings is not None else 0.0
    try:
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"shorthaul {stage}: {program.title}"):
                launches = native(*arguments)
        else:
            launches = native(*arguments)
    except _native.CompileFailure as error:
        raise ShorthaulError(str(error)) from None
    if timings is not None:
        timings.append(TimedPass(program, stage, started, launches))


def _forward_slots(program: Program, inputs, outputs, state) -> list[torch.Tensor | None]:
    """The tensors of a forward pass as the native half counts its buffers."""
    users = iter(outputs)
    offsets = enumerate(program.state_offsets)
    made = [next(users) if at is None else program.state_view(state, i) for i, at in offsets]
    seeds = [None] * len(program.differentiable_user_outputs)
    return [*inputs, *seeds, *made, *[None] * len(program.grad_inputs)]


def _backward_slots(program: Program, given, reads, output_reads, grads) -> list:
    """The tensors of a backward pass as the native half counts its buffers."""
    inputs: list[torch.Tensor | None] = [None] * len(program.inputs)
    for i, tensor in zip(program.backward_reads, reads, strict=True):
        inputs[i] = tensor
    outputs: list[torch.Tensor | None] = [None] * len(program.outputs)
    for (i, _, _), tensor in zip(program.backward_output_reads, output_reads, strict=True):
        outputs[i] = tensor
    return [*inputs, *given, *outputs, *grads]


__all__ = ["TimedPass", "backward", "export_seconds", "forward", "register", "run", "timings"]
