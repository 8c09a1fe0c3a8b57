"""The operators behind the fast paths of PyTorch's attention layers in inference.

Owns their definitions by simpler operators: if no gradient is wanted, ``nn.MultiheadAttention``
and ``nn.TransformerEncoderLayer`` each call one operator for the whole layer, which would keep
the layer out of the compiled step. Nested tensors stay as they are.
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


def _encoder_layer(
    src,
    embed_dim,
    num_heads,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    use_gelu,
    norm_first,
    eps,
    norm_weight_1,
    norm_bias_1,
    norm_weight_2,
    norm_bias_2,
    ffn_weight_1,
    ffn_bias_1,
    ffn_weight_2,
    ffn_bias_2,
    mask=None,
    mask_type=None,
):
    """An encoder layer in inference: attention and two linear layers, each added to its input.

    Layer normalization comes before both parts (``norm_first``) or after each sum.
    """
    if src.is_nested:
        return NotImplemented

    def norm_1(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x):
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    def attention(x):
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attention(x, num_heads, weights, mask, mask_type)[0]

    def feed_forward(x):
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else hidden.relu(), ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attention(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attention(src))
    return norm_2(x + feed_forward(x))


RULES = {
    aten._native_multi_head_attention.default: _multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}

#: Operators that stay PyTorch's within autocast, where they cast only some of their parts.
WITHOUT_AUTOCAST = frozenset({aten._transformer_encoder_layer_fwd.default})

__all__ = ["RULES", "WITHOUT_AUTOCAST"]
