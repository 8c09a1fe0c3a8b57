"""Calls of ``torch.utils.checkpoint`` inside a model, around a body that is compiled.

Owns what such a call saves, and which bodies PyTorch runs: those that write in place, as a batch
norm writes its statistics. Eager computes a body again up to the last value that it needs, so how
often it writes depends on the order of its operators.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ._writes import written_statistics


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node of Dynamo's is such a call."""
    return str(node.target) == "tag_activation_checkpoint"


def written_by(body: fx.GraphModule, looks: Sequence[Any], fakes: FakeTensorMode) -> set[int]:
    """The operands that a graph writes in place; ``looks`` are its operands, without memory.

    If the graph cannot run without memory, none is known. What is written is then saved as well,
    and autograd raises an error.
    """
    versions = [getattr(look, "_version", None) for look in looks]
    try:
        with fakes, torch.no_grad():
            body(*looks)
    except Exception:
        return set()
    written = {i for i, n in enumerate(versions) if getattr(looks[i], "_version", None) != n}
    placeholders = body.graph.find_nodes(op="placeholder")
    statistics = {operand for node in body.graph.nodes for operand in written_statistics(node)}
    written |= {i for i, operand in enumerate(placeholders) if operand in statistics}
    return written


def checkpointed(node: fx.Node, run: Callable, written: Container[int]) -> Callable:
    """``run`` instead of ``node``; its values are computed again in the backward pass.

    Autograd refuses a saved operand that has been written since. In eager only the arguments are
    saved, and what ``run`` writes is mostly a buffer.
    """
    operands = node.args[1:]
    n_inputs = len(operands)
    around = {i for i, operand in enumerate(operands) if i in written and not _is_argument(operand)}
    keeps_random_state = node.kwargs.get("preserve_rng_state", True)

    def call(*inputs):
        buffers = {i: inputs[i] for i in around}
        given = [value for i, value in enumerate(inputs) if i not in buffers]

        def run_again(*given):
            rest = iter(given)
            return run(*(buffers[i] if i in buffers else next(rest) for i in range(n_inputs)))

        return checkpoint(
            run_again, *given, use_reentrant=False, preserve_rng_state=keeps_random_state
        )

    return call


def _is_argument(node: fx.Node) -> bool:
    """Whether a tensor is an argument of the function that was traced."""
    return isinstance(getattr(node.meta.get("grapharg"), "source", None), LocalSource)


__all__ = ["checkpointed", "is_checkpoint", "written_by"]
