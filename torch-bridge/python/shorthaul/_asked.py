"""Which gradients the backward pass that runs now is for.

Owns what PyTorch tells about that: whether it goes on with a gradient, and the tensors that
``torch.autograd.grad`` or ``backward`` was called with.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

#: Where PyTorch's autograd is called from Python.
_CALLS = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)


class Asked:
    """The inputs of a program whose gradients are asked for, as far as that can be known.

    PyTorch tells functions of results whether it goes on with them, but not leaves: the tensors
    that ``torch.autograd.grad`` was called with are found in its frame.
    """

    def __init__(self, ctx):
        self._ctx = ctx
        leaves = _leaves_asked_for()
        self._leaves = None if leaves is None else {id(leaf) for leaf in leaves}

    @property
    def is_for_all(self) -> bool:
        """Whether nothing is known that some gradients are not asked for."""
        return self._leaves is None

    @functools.cached_property
    def _sources(self) -> tuple:
        return self._ctx.next_functions

    def __contains__(self, i: int) -> bool:
        """Whether the gradient of the program's ``i``-th input is asked for."""
        if not self._ctx.needs_input_grad[i + 1]:
            return False
        source = self._sources[i][0]
        # A function of the user may have an attribute of this name too.
        is_leaf = type(source).__name__ == "AccumulateGrad"
        leaf = source.variable if is_leaf else None
        if leaf is None:
            return source is None or _goes_on_with(source)
        return self._leaves is None or id(leaf) in self._leaves


def _goes_on_with(source) -> bool:
    """Whether autograd will run the function that a gradient is given to, as far as it tells."""
    try:
        return torch._C._will_engine_execute_node(source)
    except RuntimeError:  # the backward pass was not started by PyTorch's engine
        return True


def _leaves_asked_for() -> Sequence[torch.Tensor] | None:
    """The tensors that the innermost call of PyTorch's autograd names; ``None``: any."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code not in _CALLS:
        frame = frame.f_back
    given = frame.f_locals if frame is not None else {}
    if given.get("inputs") is None:
        return None
    tensors = given.get("inputs_tuple", given["inputs"])
    if not isinstance(tensors, tuple) or not tensors:
        return None
    return tensors if all(isinstance(one, torch.Tensor) for one in tensors) else None
