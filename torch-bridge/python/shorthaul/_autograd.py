"""A compiled program as PyTorch's autograd sees it.

Owns the two passes of a program on tensors, and the autograd function that joins them. Both
allocate what they give (results from PyTorch's allocator, saved blocks from the program's own) and
write nothing else. Never decides what to compile.

A plain ``autograd.Function`` costs a small network's step much less than operators of
``torch.library``, and nothing needs to see a program but autograd: Dynamo calls it between graphs,
and modules under ``torch.func`` or fake tensors run in eager.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd import profiler

from . import _attention, _native
from ._asked import Asked
from ._errors import ShorthaulError
from ._program import GradientPlan, Program, TensorSpec

_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_has_transforms = torch._C._are_functorch_transforms_active

_programs: weakref.WeakSet[Program] = weakref.WeakSet()


class TimedPass(NamedTuple):
    """One pass of a program under a profiler."""

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


def run(
    program: Program, inputs: Sequence[torch.Tensor], is_differentiable: bool
) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
    """The user's outputs, and the new values of what the program writes as one blob of bytes.

    ``inputs`` are contiguous tensors of the sizes and types of ``program.inputs``.
    """
    if not is_differentiable:
        outputs, state, _ = forward(program, inputs)
        return outputs, state
    is_transformed = _has_transforms()
    outputs = (_Passes.apply if is_transformed else _apply)(program, *inputs)
    state = None
    if program.state_bytes:
        *outputs, state = outputs
        # What arrived is the caller's; a large buffer must not stay alive here.
        _latest.state = None
    if len(outputs) > 1 and not is_transformed:
        for output in outputs:
            if output.requires_grad:
                # Puts the tensor behind a node of its own. Otherwise, hooks of a result that no
                # loss uses would be called with `None`, since one node has all results.
                _lift(output)
    return outputs, state


_lift = torch.ops.aten.lift.default


class _Latest(threading.local):
    """What the latest program of a thread wrote, in case its results are never returned."""

    state: torch.Tensor | None = None


_latest = _Latest()


def take_state() -> torch.Tensor | None:
    """The new values of what the latest program of this thread writes."""
    state, _latest.state = _latest.state, None
    return state


class _Passes(torch.autograd.Function):
    """Both passes of a program. Each line here is in every step of a small network."""

    @staticmethod
    def forward(ctx, program: Program, *inputs):
        outputs, state, saved = forward(program, inputs)
        ctx.program = program
        _latest.state = state
        ctx.set_materialize_grads(False)
        kept = [inputs[i] for i in program.backward_reads]
        for position, offset, user in program.backward_output_reads:
            kept.append(outputs[user] if offset is None else program.state_view(state, position))
        if saved is not None:
            kept.append(saved)
        ctx.save_for_backward(*kept)
        if program.rerun is not None:
            program.rerun.keep(ctx, inputs)
        return tuple(outputs) if state is None else (*outputs, state)

    # A function that Dynamo traces may call `backward`; this code is not the user's.
    @staticmethod
    @torch._dynamo.disable
    def backward(ctx, *grads):
        program: Program = ctx.program
        if grads[0] is None and all(grad is None for grad in grads):
            # Nothing flows here, as from statistics that a layer keeps with their history. What
            # was saved may be gone.
            return (None,) * (len(program.inputs) + 1)
        kept = ctx.saved_tensors
        rerun, refusal = program.rerun, ""
        if torch.is_grad_enabled() or _has_batches(grads):
            refusal = rerun.refusal_for(ctx) if rerun is not None else "it runs alone"
            if not refusal:
                reads = kept[: len(program.backward_reads)]
                return None, *rerun.gradients(ctx, reads, grads, _has_batches(grads))
            _refuse_batches(grads, refusal)
        if rerun is not None:
            rerun.release(ctx)
        plan = _plan(ctx, program, grads)
        result = [None] * (len(program.inputs) + 1)
        if not torch.is_grad_enabled():
            _fill(program, plan, grads, kept, result)
            return tuple(result)
        with torch.no_grad():
            computed = _fill(program, plan, grads, kept, result)
        if computed:
            # A second derivative with respect to what these come from is refused, not zero.
            sources = [*kept, *(grads[i] for i in plan.given if grads[i] is not None)]
            once = _Once.apply(refusal, len(computed), *computed, *sources)
            for (_, at), grad in zip(plan.computed, once, strict=True):
                result[at] = grad
        return tuple(result)


#: ``_Passes.apply`` without what ``torch.autograd.Function`` does for transforms of functions.
_apply = super(torch.autograd.Function, _Passes).apply


def _plan(ctx, program: Program, grads: Sequence[torch.Tensor | None]) -> GradientPlan:
    """The plan of a backward pass for these gradients, and for what autograd goes on with."""
    are_given = tuple(grad is not None for grad in grads)
    if len(program.grad_inputs) > 1:
        asked = Asked(ctx)
        if not asked.is_for_all:
            return program.gradients_of(are_given, tuple(i in asked for i in program.grad_inputs))
    return program.gradients_of(are_given)


def _fill(program: Program, plan: GradientPlan, grads, kept, result: list) -> list[torch.Tensor]:
    """Puts the gradients of the inputs into ``result``; returns those that kernels computed."""
    for i in plan.zeros:
        result[i + 1] = _empty(program, program.inputs[i]).zero_()
    if not plan.has_given:
        return []
    n_reads, n_kept = len(program.backward_reads), program.n_kept
    saved = kept[n_kept] if program.saved_bytes else None
    given = [grads[i] for i in plan.given]
    made = backward(program, given, kept[:n_reads], kept[n_reads:n_kept], saved, plan.part)
    found = []
    for k, at in plan.computed:
        result[at] = made[k]
        found.append(made[k])
    return found


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx, refusal: str, n_grads: int, *grads_and_sources):
        ctx.refusal = refusal
        return grads_and_sources[:n_grads]

    @staticmethod
    def backward(ctx, *grads):
        raise ShorthaulError(
            f"this part of a Shorthaul module cannot be differentiated twice: {ctx.refusal}; for "
            f"second derivatives (gradient penalties, Hessians) call the original module"
        )


def _has_batches(grads: Sequence[torch.Tensor | None]) -> bool:
    return any(g is not None and (_is_batched(g) or _is_legacy_batched(g)) for g in grads)


def _refuse_batches(grads: Sequence[torch.Tensor | None], refusal: str) -> None:
    if _has_batches(grads):
        raise ShorthaulError(
            "this part of a Shorthaul module computes one gradient at a time, not a batch of them "
            f"(`is_grads_batched=True`, `torch.vmap`): {refusal}; call the original module for that"
        )


def forward(program: Program, inputs: Sequence[torch.Tensor]):
    """The user's outputs, the blob of what the program writes, the block for the backward pass.

    The last two are ``None`` where there is nothing to put into them.
    """
    addresses = _addresses(program, inputs)
    # On a device, the check would have to wait for an answer; there, what lies outside reads NaN.
    if program.bounds and not program.is_on_device:
        for position, bound in program.bounds:
            bound.check(inputs[position])
    outputs = [torch.empty_like(look) for look in program.output_looks]
    into = [output.data_ptr() for output in outputs]
    state = None
    if program.state_bytes:
        state = torch.empty(program.state_bytes, dtype=torch.uint8, device=program.place.device)
        users, base = iter(into), state.data_ptr()
        into = [next(users) if at is None else base + at for at in program.state_offsets]
    saved = program.lend(program.saved_bytes) if program.saved_bytes else None
    scratch = None
    if program.forward_scratch_bytes:
        scratch = program.lend_briefly(program.forward_scratch_bytes)
    blocks = saved.data_ptr() if saved is not None else 0, _address(scratch)
    if timings is None and not program.runs_cuda_text and not profiler._is_profiler_enabled:
        _call(program.native.forward, addresses, into, *blocks)
        program.give_back(scratch)
        return outputs, state, saved
    _launch(
        program,
        "forward",
        addresses,
        into,
        *blocks,
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
    saved: torch.Tensor | None,
    part: _native.BackwardPart | None = None,
) -> list[torch.Tensor | None]:
    """The gradients of ``program.grad_inputs``, or only those that ``part`` touches."""
    is_plain = timings is None and not program.runs_cuda_text and not profiler._is_profiler_enabled
    if part is None or not is_plain:
        part, grads = None, [torch.empty_like(look) for look in program.grad_looks]
    else:
        grads = [None] * len(program.grad_looks)
        for k in part.touched:
            grads[k] = torch.empty_like(program.grad_looks[k])
    given = [
        _as_program_wants(program, grad, spec)
        for grad, spec in zip(grad_outputs, program.differentiable_outputs, strict=True)
    ]
    scratch = None
    if program.backward_scratch_bytes:
        scratch = program.lend_briefly(program.backward_scratch_bytes)
    arguments = (
        [grad.data_ptr() for grad in given],
        _kept_addresses(reads, program.inputs, program.backward_reads),
        _kept_addresses(output_reads, program.outputs, program.native.backward_output_reads),
        _address(saved),
        [_address(grad) for grad in grads],
        _address(scratch),
    )
    if is_plain:
        _call(program.native.backward, *arguments, False, 0, None, part)
        program.give_back(scratch)
        return grads
    _launch(
        program,
        "backward",
        *arguments,
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


def _address(block: torch.Tensor | None) -> int:
    return 0 if block is None else block.data_ptr()


def _addresses(program: Program, inputs: Sequence[torch.Tensor]) -> list[int]:
    """Where the inputs lie. Refuses tensors whose storage was given back."""
    addresses = []
    for tensor, (end, item) in zip(inputs, program.input_sizes, strict=True):
        offset = tensor.storage_offset()
        if offset:
            end += offset * item
        if tensor.untyped_storage().nbytes() < end:
            _refuse_freed(program.inputs[len(addresses)])
        addresses.append(tensor.data_ptr())
    return addresses


def _kept_addresses(
    kept: Sequence[torch.Tensor], specs: Sequence[TensorSpec], positions: Sequence[int]
) -> list[int]:
    """Where contiguous tensors that the forward pass kept lie; their memory may have gone since."""
    addresses = []
    for tensor in kept:
        end = tensor.nbytes + tensor.storage_offset() * tensor.itemsize
        if tensor.untyped_storage().nbytes() < end:
            _refuse_freed(specs[positions[len(addresses)]], "backward pass")
        addresses.append(tensor.data_ptr())
    return addresses


def _refuse_freed(spec: TensorSpec, before: str = "call") -> None:
    raise ShorthaulError(
        f"the storage of `{spec.name}` {list(spec.shape)} was freed or made smaller than the "
        f"tensor; restore its memory before the {before}"
    )


def _empty(program: Program, spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=program.place.device)


def _as_program_wants(
    program: Program, grad: torch.Tensor | None, spec: TensorSpec
) -> torch.Tensor:
    if grad is None:
        return _empty(program, spec).zero_()
    # A lazy negation, as of the imaginary part of a conjugate, is not in memory yet.
    is_as_wanted = grad.dtype is spec.dtype and grad.is_contiguous() and not grad.is_neg()
    if is_as_wanted and not program.runs_cuda_text:
        return grad
    return program.place.aligned(grad.to(spec.dtype).resolve_neg())


def _call(native, *arguments) -> None:
    try:
        native(*arguments)
    except _native.CompileFailure as error:
        raise ShorthaulError(str(error)) from None


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
