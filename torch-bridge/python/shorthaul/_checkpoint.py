"""Calls of ``torch.utils.checkpoint`` inside a model, around a body that is compiled.

Owns what such a call saves. Eager saves the arguments; what the function reads from its module it
finds there again. Dynamo makes both operands of one node.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx
from torch._dynamo.source import LocalSource
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node of Dynamo's is such a call."""
    return str(node.target) == "tag_activation_checkpoint"


def checkpointed(node: fx.Node, run: Callable) -> Callable:
    """``run``, whose values are computed again in the backward pass, in the place of ``node``.

    Autograd refuses a saved operand that has been written since, and ``run`` itself writes the
    statistics of a batch norm. It writes them when all is computed, so it does not stop early.
    """
    operands = node.args[1:]
    of_module = {i for i, operand in enumerate(operands) if _is_found_again(operand)}
    keeps_random_state = node.kwargs.get("preserve_rng_state", True)

    def call(*inputs):
        found = {i: inputs[i] for i in of_module}

        def run_again(*given):
            rest = iter(given)
            return run(*(found[i] if i in found else next(rest) for i in range(len(inputs))))

        given = [value for i, value in enumerate(inputs) if i not in found]
        with set_checkpoint_early_stop(False):
            return checkpoint(
                run_again, *given, use_reentrant=False, preserve_rng_state=keeps_random_state
            )

    return call


def _is_found_again(node: fx.Node) -> bool:
    """Whether a value comes from outside, as parameters do, but is no argument of the function."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is not None and not isinstance(source, LocalSource)


__all__ = ["checkpointed", "is_checkpoint"]
