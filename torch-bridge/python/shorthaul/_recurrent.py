"""Recurrent layers of PyTorch: which of them kernels cannot run, and why.

Takes nodes of Dynamo's graphs apart; makes no kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch.utils import _pytree

#: Operators of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``.
NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def reason(name: str, node: fx.Node, value_of: Callable[[fx.Node], object]) -> str | None:
    """Why PyTorch runs a recurrent layer; ``None`` for other operators and a plain layer."""
    if name not in NAMES or isinstance(node.target, str):
        return None
    # lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
    # for a packed sequence, the numbers of rows come second, and everything else one place later.
    if len(node.args) != 9 or not isinstance(node.args[3], bool):
        return f"recurrent layer `{name}` over a packed sequence"
    _, _, params, has_biases, n_layers, _, _, both, _ = node.args
    if len(params) != n_layers * (1 + both) * (4 if has_biases else 2):
        return f"recurrent layer `{name}` with projections"
    values = _pytree.tree_leaves([value_of(arg) for arg in node.all_input_nodes])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return f"recurrent layer `{name}` on a GPU"
    return None
