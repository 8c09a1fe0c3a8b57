"""Gradients that a program's backward pass does not compute: second derivatives, and batches.

Owns who computes them from the inputs of the forward pass: kernels of a graph of the region's
gradients (``_second_programs``) where there can be one, else PyTorch, which runs the region again
and differentiates it itself. Refuses where that would compute something else than the forward pass
did. Never compiles anything itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from . import _autocast, _random_numbers
from ._asked import Asked
from ._capture import Captured
from ._errors import ShorthaulError
from ._pytorch_names import has_saved_tensors_hooks
from ._second_programs import NotWritten, compiled_gradients

if TYPE_CHECKING:
    from ._program import Program

log = logging.getLogger("shorthaul")

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

#: Operands that an operator of statistics writes, and reads only outside of training.
_STATISTICS = ("running_mean", "running_var")
_IN_TRAINING = ("training", "train", "use_input_stats")


@dataclass(frozen=True)
class Way:
    """How PyTorch computes what a region does, for calls like one."""

    body: fx.GraphModule
    #: The inputs that are no tensors; ``None`` in the places of tensors.
    values: Sequence[Any]
    #: What ``_autocast.key`` gave.
    autocast: tuple
    #: Tells the user that PyTorch runs something.
    say: Callable[[str], None]
    #: Compiles a graph for examples of its inputs.
    compile: Callable[[fx.GraphModule, Sequence[Any]], Callable]
    #: Dynamo's nodes by the names of the body's.
    origins: dict[str, fx.Node]


class Rerun:
    """What computes gradients of a program through PyTorch's operators.

    ``positions`` are those of the program's inputs among the region's, ``outputs`` those of its
    results among the region's. ``written`` are positions of the region's inputs that the forward
    pass writes, and ``copied`` of the program's inputs that are copies made before that.
    """

    def __init__(
        self,
        way: Way,
        captured: Captured,
        program: Program,
        *,
        positions: Sequence[int],
        outputs: Sequence[int],
        written: Sequence[int],
        copied: Sequence[int],
    ):
        self.way = way
        self.positions = positions
        self.outputs = outputs
        self.backward_reads = program.backward_reads
        #: Program inputs that are kept for this alone. The seed is the last one.
        self.n_inputs = len(positions) + program.uses_seed
        self.unread = [i for i in range(self.n_inputs) if i not in set(self.backward_reads)]
        self.written = frozenset(written)
        #: What computes second derivatives, by which of them are asked for.
        self.compiled: dict[tuple, Any] = {}
        self.lock = threading.RLock()
        names = [spec.name for spec in captured.inputs if spec.kind != "constant"]
        own = [i for i in self.unread if i < len(positions)]
        lost = {names[i] for i in own if positions[i] in self.written and i not in copied}
        #: The places that draw random numbers, in order.
        self.draws: list[_random_numbers.Place] | None = []
        if program.uses_seed:
            self.draws = _random_numbers.places(captured.document) or None
        #: Why it would compute something else than the forward pass did.
        self.refusal = ""
        if self.draws is None or (self.draws and program.runs_cuda_text):
            self.refusal = "it draws random numbers, and PyTorch would draw others"
        elif lost & _read_by_users(captured):
            self.refusal = "it reads a tensor that it writes in place"

    def keep(self, ctx, inputs: Sequence[torch.Tensor]) -> None:
        """Keeps on ``ctx`` what the kernels' backward pass does not.

        These are no saved tensors: a write to one of them is an error only if it is read.
        """
        ctx.unread = None
        if self.refusal:
            return
        unread = [inputs[i] for i in self.unread]
        # Whoever handles saved tensors, such as a checkpoint, wants the memory of results back.
        if has_saved_tensors_hooks() and not all(x.is_leaf for x in unread):
            return
        try:
            ctx.unread = [(x, x._version) for x in unread]
        except RuntimeError:  # inference tensors have no version
            return

    def release(self, ctx) -> None:
        """Releases what :meth:`keep` kept, as a backward pass does with saved tensors."""
        if not _keeps_graph():
            ctx.unread = None

    def refusal_for(self, ctx) -> str:
        """Why this call's gradients cannot be computed so; empty if they can."""
        if self.refusal or ctx.unread is not None:
            return self.refusal
        return "its inputs are kept by hooks for saved tensors (a checkpoint), or were given back"

    def gradients(
        self, ctx, kept: Sequence[torch.Tensor], grads, are_batched: bool
    ) -> list[torch.Tensor | None]:
        """A gradient for each of the program's inputs; with history if grad mode is on.

        ``kept`` are the inputs that the backward pass reads, ``grads`` those of the outputs, each
        a batch of gradients where ``are_batched``.
        """
        creates_graph = torch.is_grad_enabled()
        inputs: list[torch.Tensor | None] = [None] * self.n_inputs
        for i, tensor in zip(self.backward_reads, kept, strict=True):
            inputs[i] = tensor
        for i, (tensor, version) in zip(self.unread, ctx.unread, strict=True):
            is_written = i < len(self.positions) and self.positions[i] in self.written
            if tensor._version != version and not is_written:
                raise ShorthaulError(
                    "a tensor that is needed for a second derivative, of the sizes "
                    f"{list(tensor.shape)}, was written in place after the forward pass"
                )
            inputs[i] = tensor
        asked = Asked(ctx)
        if creates_graph and not are_batched:
            found = self._compiled(asked, inputs, grads)
            if found is not None:
                return found
        self.way.say(
            "the backward pass for second derivatives (`create_graph=True`)"
            if creates_graph
            else "the backward pass for a batch of gradients"
        )
        seed = int(inputs.pop()) if self.draws else 0
        given = list(self.way.values)
        wanted: list[tuple[int, torch.Tensor]] = []
        with torch.enable_grad(), _autocast.as_in(self.way.autocast):
            for i, (tensor, position) in enumerate(zip(inputs, self.positions, strict=True)):
                if position in self.written:
                    tensor = tensor.detach().clone()
                elif i in asked:
                    # An input may come from another one: each has a gradient of its own.
                    tensor = tensor.view_as(tensor)
                    wanted.append((i, tensor))
                given[position] = tensor
            if self.draws:
                results = _random_numbers.run_again(self.way.body, seed, self.draws, given)
            else:
                results = self.way.body.forward(*given)
            pairs = [
                (results[at], grad)
                # The gradient of what the program writes, if any, follows those of the results.
                for at, grad in zip(self.outputs, grads, strict=False)
                if grad is not None and results[at].requires_grad
            ]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                found = torch.autograd.grad(
                    [result for result, _ in pairs],
                    [tensor for _, tensor in wanted],
                    [grad for _, grad in pairs],
                    create_graph=creates_graph,
                    allow_unused=True,
                )
        gradients: list[torch.Tensor | None] = [None] * self.n_inputs
        for (i, _), gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
        return gradients

    def _compiled(self, asked: Asked, inputs: Sequence[torch.Tensor], grads) -> list | None:
        """The same by kernels, compiled at the first call; ``None`` where they cannot be used."""
        if self.draws or self.written or self.way.autocast:
            return None
        given = list(self.way.values)
        for tensor, position in zip(inputs, self.positions, strict=True):
            given[position] = tensor
        # The gradient of what the program writes, if any, follows those of the results.
        pairs = [(at, g) for at, g in zip(self.outputs, grads, strict=False) if g is not None]
        outputs, grads = [at for at, _ in pairs], [g for _, g in pairs]
        wanted = [p for i, p in enumerate(self.positions) if i in asked]
        needs = tuple(value.requires_grad for value in inputs)
        key = (tuple(outputs), tuple(wanted), needs)
        with self.lock:
            if key not in self.compiled:
                self.compiled[key] = None
                try:
                    self.compiled[key] = compiled_gradients(
                        self.way.body, given, outputs, wanted, self.way.compile, self.way.origins
                    )
                except NotWritten as why:
                    log.info(f"PyTorch computes second derivatives: {why}")
            compute = self.compiled[key]
        if compute is None:
            return None
        found = compute(given, grads)
        return [found[position] for position in self.positions]


def _read_by_users(captured: Captured) -> set[str]:
    """Names of inputs on whose values the user's outputs depend."""
    outputs = zip(captured.document["outputs"], captured.outputs, strict=True)
    reached = {document["value"] for document, output in outputs if output.kind == "user"}
    for node in reversed(captured.document["nodes"]):
        if not any(value and value["name"] in reached for value in node["outputs"]):
            continue
        args = node["args"]
        skipped = _STATISTICS if any(args.get(name) is True for name in _IN_TRAINING) else ()
        pending = [arg for name, arg in args.items() if name not in skipped]
        while pending:
            arg = pending.pop()
            if isinstance(arg, list):
                pending.extend(arg)
            elif isinstance(arg, dict) and "ref" in arg:
                reached.add(arg["ref"])
    return reached


__all__ = ["Rerun", "Way"]
