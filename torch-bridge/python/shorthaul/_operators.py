"""The operators through which PyTorch sees a compiled program.

Owns ``torch.ops.shorthaul.forward`` and ``.backward``: their schemas, implementations,
fake implementations and autograd registration. Both are functional: they allocate what they
return (results from PyTorch's allocator, saved blocks from the program's own) and write nothing
else. Never decides what to compile.

``forward(inputs, program)`` gives the user's outputs, then one byte blob with the new values of
the buffers that the module writes, then one byte blob with what the backward pass needs.
"""

from __future__ import annotations

import itertools
import weakref

import torch

from . import _attention, _native
from ._errors import ShorthaulError
from ._program import Program, TensorSpec

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_handles = itertools.count(1)

_library = torch.library.Library("shorthaul", "DEF")
_library.define("forward(Tensor[] inputs, int program) -> Tensor[]")
_library.define(
    "backward(Tensor?[] grad_outputs, Tensor[] reads, Tensor[] output_reads, Tensor saved, "
    "int program) -> Tensor[]"
)


#: Where launches' times go while somebody profiles: ``(pass, launch, seconds)``.
timings: list[tuple[str, str, float]] | None = None


def _note(which: str, times: list[tuple[str, float]]) -> None:
    if timings is not None:
        timings.extend((which, launch, seconds) for launch, seconds in times)


def export_seconds() -> float:
    """What PyTorch's export took for all programs that are alive."""
    return sum(program.captured.export_seconds for program in _programs.values())


def register(program: Program) -> int:
    """A handle under which the operators find ``program`` for as long as it lives."""
    handle = next(_handles)
    _programs[handle] = program
    return handle


def _bytes(program: Program, n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device=program.place.device)


def _empty(program: Program, spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=program.place.device)


def _forward_results(program: Program, saved: torch.Tensor) -> list[torch.Tensor]:
    outputs = [_empty(program, spec) for spec in program.user_outputs]
    return [*outputs, _bytes(program, program.state_bytes), saved]


def _refuse_freed(inputs: list[torch.Tensor], program: Program) -> None:
    """A tensor whose storage somebody gave back has an address that is not its own."""
    for tensor, spec in zip(inputs, program.inputs, strict=True):
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < end:
            raise ShorthaulError(
                f"the storage of `{spec.name}` {list(spec.shape)} was freed or made smaller than "
                f"the tensor; give its memory back before the call"
            )


def _forward(inputs: list[torch.Tensor], program: int) -> list[torch.Tensor]:
    owner = _programs[program]
    _refuse_freed(inputs, owner)
    # On a device the answer would have to be waited for; there, what lies outside reads NaN.
    if not owner.place.is_cuda:
        for position, bound in owner.bounds:
            bound.check(inputs[position])
    results = _forward_results(owner, owner.lend(owner.saved_bytes))
    *outputs, state, saved = results
    state_ptr = state.data_ptr()
    user_ptrs = iter([output.data_ptr() for output in outputs])
    scratch = owner.lend(owner.forward_scratch_bytes)
    times = _launch(
        owner.native.forward,
        [tensor.data_ptr() for tensor in inputs],
        [
            next(user_ptrs) if offset is None else state_ptr + offset
            for offset in owner.state_offsets
        ],
        saved.data_ptr(),
        scratch.data_ptr(),
        timings is not None,
        owner.place.stream(),
        _attention.operators(
            owner.forward_calls, lambda: _forward_slots(owner, inputs, results), scratch, saved
        ),
    )
    _note("forward", times)
    return results


forward_of_nothing = _forward


def _forward_slots(program: Program, inputs, results) -> list[torch.Tensor | None]:
    """The tensors of a forward pass as the native half counts its buffers."""
    *outputs, state, _ = results
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


def _launch(native, *arguments):
    """Calls the native half; what the driver or the emulator refuses is an error of Shorthaul's."""
    try:
        return native(*arguments)
    except _native.CompileFailure as error:
        raise ShorthaulError(str(error)) from None


def _forward_fake(inputs: list[torch.Tensor], program: int) -> list[torch.Tensor]:
    owner = _programs[program]
    return _forward_results(owner, _bytes(owner, owner.saved_bytes))


def _backward(
    grad_outputs,
    reads: list[torch.Tensor],
    output_reads: list[torch.Tensor],
    saved: torch.Tensor,
    program: int,
) -> list[torch.Tensor]:
    owner = _programs[program]
    grads = _grads(owner)
    given = [
        _as_program_wants(owner, grad, spec)
        for grad, spec in zip(grad_outputs, owner.differentiable_outputs, strict=True)
    ]
    scratch = owner.lend(owner.backward_scratch_bytes)
    times = _launch(
        owner.native.backward,
        [grad.data_ptr() for grad in given],
        [tensor.data_ptr() for tensor in reads],
        [tensor.data_ptr() for tensor in output_reads],
        saved.data_ptr(),
        [grad.data_ptr() for grad in grads],
        scratch.data_ptr(),
        timings is not None,
        owner.place.stream(),
        _attention.operators(
            owner.backward_calls,
            lambda: _backward_slots(owner, given, reads, output_reads, grads),
            scratch,
            saved,
        ),
    )
    _note("backward", times)
    return grads


def _as_program_wants(
    program: Program, grad: torch.Tensor | None, spec: TensorSpec
) -> torch.Tensor:
    if grad is None:
        return _empty(program, spec).zero_()
    return program.place.aligned(grad.to(spec.dtype))


def _grads(program: Program) -> list[torch.Tensor]:
    return [_empty(program, program.inputs[i]) for i in program.grad_inputs]


def _backward_fake(grad_outputs, reads, output_reads, saved, program: int) -> list[torch.Tensor]:
    return _grads(_programs[program])


def _save(ctx, inputs, output) -> None:
    tensors, handle = inputs
    program = _programs[handle]
    ctx.program, ctx.handle = program, handle
    ctx.set_materialize_grads(False)
    *outputs, state, saved = output
    reads = [tensors[i] for i in program.backward_reads]
    output_reads = [
        outputs[user] if offset is None else program.state_view(state, position)
        for position, offset, user in program.backward_output_reads
    ]
    ctx.save_for_backward(*reads, *output_reads, saved)


def _differentiate(ctx, grads):
    program: Program = ctx.program
    *kept, saved = ctx.saved_tensors
    n_reads = len(program.backward_reads)
    given = [grads[i] for i in program.differentiable_user_outputs]
    result = [None] * len(program.inputs)
    if any(grad is not None for grad in given):
        try:
            computed = torch.ops.shorthaul.backward(
                given, kept[:n_reads], kept[n_reads:], saved, ctx.handle
            )
        except RuntimeError as error:
            if "Batching rule" not in str(error):
                raise
            raise ShorthaulError(
                "a Shorthaul module computes one gradient at a time, not a batch of them "
                "(`is_grads_batched=True`, `torch.vmap`); call the original module for that"
            ) from None
        # What no output with a gradient comes from gets none, not zeros.
        reached = set()
        for i, grad in enumerate(grads[: len(program.reaches)]):
            if grad is not None:
                reached |= program.reaches[i]
        for i, grad in zip(program.grad_inputs, computed, strict=True):
            result[i] = grad if i in reached else None
        for i in program.zero_inputs:
            if i in reached:
                result[i] = _empty(program, program.inputs[i]).zero_()
    return result, None


def _refuse_twice(ctx, grads):
    raise ShorthaulError(
        "a Shorthaul module cannot be differentiated twice; for second derivatives (gradient "
        "penalties, Hessians) call the original module"
    )


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)
torch.library.register_fake("shorthaul::forward", _forward_fake, lib=_library)
torch.library.register_fake("shorthaul::backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "shorthaul::forward", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd("shorthaul::backward", _refuse_twice, lib=_library)
