"""The operator behind the fast path of ``nn.MultiheadAttention`` in inference.

Owns its definition by simpler operators: PyTorch calls one operator for the whole layer if no
gradient is wanted, which would keep the layer out of the compiled step. Nested tensors stay as
they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def _hidden(scores, mask, mask_type):
    """``scores`` [batch, heads, rows, columns], minus infinity where ``mask`` hides a column.

    PyTorch's types of masks: 0 is [rows, columns], 1 is [batch, columns], 2 has all dimensions. A
    mask of numbers hides what is not zero. A row without columns becomes NaN, as in PyTorch.
    """
    hides = mask.to(torch.bool)
    if mask_type == 0:
        hides = hides[None, None]
    elif mask_type == 1:
        hides = hides[:, None, None]
    return scores.masked_fill(hides, -math.inf)


def _attention(x, n_heads, weights, mask, mask_type):
    """Self-attention [batch, rows, features] and its probabilities [batch, heads, rows, rows]."""
    qkv_weight, qkv_bias, out_weight, out_bias = weights
    joint = F.linear(x, qkv_weight, qkv_bias)
    q, k, v = (part.unflatten(-1, (n_heads, -1)).transpose(1, 2) for part in joint.chunk(3, -1))
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        scores = _hidden(scores, mask, mask_type)
    probabilities = scores.softmax(-1)
    found = (probabilities @ v).transpose(1, 2).flatten(2)
    return F.linear(found, out_weight, out_bias), probabilities


def _multi_head_attention(
    query,
    key,
    value,
    embed_dim,
    num_head,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    mask=None,
    need_weights=True,
    average_attn_weights=True,
    mask_type=None,
):
    """Self-attention in inference, and the probabilities if they are wanted."""
    if query is not key or key is not value or query.is_nested:
        return NotImplemented
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    found, probabilities = _attention(query, num_head, weights, mask, mask_type)
    if not need_weights:
        return found, query.new_empty(0)
    return found, probabilities.mean(1) if average_attn_weights else probabilities


RULES = {aten._native_multi_head_attention.default: _multi_head_attention}

__all__ = ["RULES"]
