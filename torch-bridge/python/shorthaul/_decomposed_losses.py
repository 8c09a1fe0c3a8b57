"""Losses that PyTorch computes piece by piece to save memory, written as one.

Owns the whole forms: the compiler decides for itself what is kept and what is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _linear_cross_entropy(x, linear_weight, target, linear_bias, weight, **options):
    if x.dtype != linear_weight.dtype:
        return NotImplemented
    scores = F.linear(x, linear_weight, linear_bias)
    return F.cross_entropy(scores, target, weight, **options)


def linear_cross_entropy(
    x,
    linear_weight,
    target,
    linear_bias,
    weight,
    reduction,
    ignore_index,
    label_smoothing,
    batch_chunk_size,
    acc_policy,
    acc_dtype,
    allow_retain_graph,
    compute_input_grad,
    compute_linear_weight_grad,
    compute_linear_bias_grad,
):
    """The loss. The gradients behind it are for the operator's own backward pass alone."""
    loss = _linear_cross_entropy(
        x,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if loss is NotImplemented:
        return loss
    sizes = (
        x.shape if compute_input_grad else (0, 0),
        linear_weight.shape if compute_linear_weight_grad else (0, 0),
        linear_weight.shape[:-1] if compute_linear_bias_grad else (0,),
    )
    return loss, *(torch.zeros(size, dtype=x.dtype) for size in sizes)


def linear_cross_entropy_of_each(
    x, linear_weight, target, linear_bias, weight, ignore_index, *chunks
):
    """The loss of each row."""
    return _linear_cross_entropy(
        x,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction="none",
        ignore_index=ignore_index,
    )


def _rules() -> dict[Any, Any]:
    """What this version of PyTorch has of these operators."""
    try:
        from torch.nn.modules import linear_cross_entropy as module
    except ImportError:
        return {}
    found = {
        "_linear_cross_entropy_batch_chunked": linear_cross_entropy,
        "_linear_cross_entropy_batch_chunked_no_reduction": linear_cross_entropy_of_each,
    }
    return {
        getattr(torch.ops.torch_nn, name).default: rule
        for name, rule in found.items()
        if hasattr(module, name)
    }


RULES = _rules()

__all__ = ["RULES"]
