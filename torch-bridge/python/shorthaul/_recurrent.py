"""Recurrent layers of PyTorch: which of them kernels cannot run, and why.

Takes nodes of Dynamo's graphs apart; makes no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch.utils import _pytree


def reason(name: str, node: fx.Node, value_of: Callable[[fx.Node], object]) -> str | None:
    """Why PyTorch runs a recurrent layer; ``None`` for other operators and a plain LSTM."""
    if name in ("gru", "rnn_relu", "rnn_tanh"):
        return f"recurrent layer `{name}`"
    if name != "lstm" or isinstance(node.target, str):
        return None
    # lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
    # of a packed sequence, the lengths come second.
    if len(node.args) != 9 or not isinstance(node.args[1], (list, tuple)):
        return "recurrent layer `lstm` over a packed sequence"
    _, _, params, has_biases, n_layers, dropout, train, both, _ = node.args
    if len(params) != n_layers * (1 + both) * (4 if has_biases else 2):
        return "recurrent layer `lstm` with projections"
    if n_layers > 1 and train and dropout > 0:
        return "recurrent layer `lstm` with dropout between its layers"
    values = _pytree.tree_leaves([value_of(arg) for arg in node.all_input_nodes])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    is_float = all(t.dtype in (torch.float32, torch.float64) for t in tensors)
    if not is_float or any(t.device.type != "cpu" for t in tensors):
        return "recurrent layer `lstm` of 16 bits or on a GPU"
    return None


def in_autocast(name: str, autocasts: Sequence[tuple]) -> str | None:
    """Why PyTorch runs an LSTM within ``torch.autocast``: it casts states and weights too.

    ``autocasts`` are the arguments of the regions around the node that the model itself enters.
    """
    if name != "lstm":
        return None
    is_on = autocasts[-1][2] if autocasts else torch.is_autocast_enabled("cpu")
    return "recurrent layer `lstm` within torch.autocast" if is_on else None
