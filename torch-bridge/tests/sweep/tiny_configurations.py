"""Makes a configuration of ``transformers`` tiny: a table of attribute names with small values.

Owns the table and the ways to use it: all of it, or parts, for architectures whose sizes depend on
each other in a way that the names do not tell. Nested configurations shrink by the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VOCABULARY = 128
HIDDEN = 32
HEADS = 4

_END = r"$"


def _rule(pattern: str, size: Any, group: str) -> tuple[re.Pattern, Any, str]:
    return re.compile(rf"^(?:.*_)?(?:{pattern}){_END}"), size, group


#: Name pattern, the largest value, and the group that a way may leave out.
_RULES = [
    _rule("vocab_size|codebook_size|n_embeddings|num_embeddings", VOCABULARY, "vocabulary"),
    _rule("type_vocab_size", 2, "vocabulary"),
    _rule("qk_head_dim", 16, "head_dim"),
    _rule("head_dim|kv_channels|d_kv|v_head_dim|dim_head|attention_head_size", 8, "head_dim"),
    _rule("q_lora_rank|kv_lora_rank|index_topk|o_lora_rank", 16, "head_dim"),
    _rule("num_key_value_heads|num_kv_heads|n_kv_heads|index_n_heads", 2, "heads"),
    _rule("attention_heads|n_head|num_heads|n_heads|num_attn_heads|heads", HEADS, "heads"),
    _rule("linear_num_key_heads", 2, "heads"),
    _rule("linear_num_value_heads", 4, "heads"),
    _rule("moe_intermediate_size|shared_intermediate_size", 16, "dims"),
    _rule("intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|d_inner", 48, "dims"),
    _rule("hidden_size|d_model|n_embd|hidden_dim|projection_dim|embedding_size|embed_dim", 32, "d"),
    _rule(
        "embed_size|emb_dim|hid_dim|codebook_dim|latent_dim|encoder_dim|decoder_dim|dim", 32, "d"
    ),
    _rule("embed_proj_dim|output_dim|hidden_sizes|entity_emb_size|channels_dim", 32, "d"),
    _rule("conv_channels|fusion_hidden_size|out_hidden_size|text_hidden_size", 32, "d"),
    _rule("num_hidden_layers|n_layer|n_layers|num_layers|depth|layers|num_blocks", 2, "layers"),
    _rule("max_window_layers|num_hidden_groups|num_stages_layers", 1, "layers"),
    _rule("num_experts|n_routed_experts|num_local_experts|moe_num_experts", 4, "experts"),
    _rule("num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_selected_experts", 2, "experts"),
    _rule("n_group|topk_group", 1, "experts"),
    _rule("n_shared_experts", 1, "experts"),
    _rule("num_queries|num_object_queries|num_proposals", 8, "queries"),
    _rule("max_position_embeddings|n_positions|max_source_positions", 128, "positions"),
    _rule("max_target_positions", 128, "positions"),
    _rule("upsample_initial_channel|auxiliary_channels|num_filters", 16, "d"),
    _rule("num_conv_pos_embedding_groups", 4, "d"),
    _rule("num_conv_pos_embeddings", 16, "d"),
    _rule("image_size|input_size", 32, "images"),
    _rule("patch_size", 8, "images"),
    _rule("num_position_embeddings", 64, "images"),
    _rule("sliding_window", 8, "windows"),
    _rule("num_frames", 4, "images"),
]

#: Lists that say how wide or deep each stage is.
_DEPTHS = re.compile(r"(depths|blocks_per_stage|stage_num_blocks|layers_per_stage|num_layers)$")
_WIDTHS = re.compile(r"(hidden_sizes|embed_dims|stage_channels|conv_dim|embed_dim|tdnn_dim)$")

#: Groups that each way leaves as they are, from tiniest to safest.
WAYS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        [
            (),
            ("head_dim",),
            ("images",),
            ("heads", "lists"),
            ("lists", "images", "windows"),
            ("head_dim", "heads", "images", "lists", "positions"),
            ("d", "dims", "heads", "head_dim", "images", "lists"),
            ("d", "dims", "heads", "head_dim", "images", "lists", "layers"),
        ],
    )
)


def configurations(config_class: type) -> Iterator[Any]:
    """Tiny configurations of a class, each made in another way; not all of them are valid."""
    default = config_class()
    seen = []
    for kept in WAYS:
        changes = _changes(default, kept, {"next": VOCABULARY - 2})
        if changes in seen:
            continue
        seen.append(changes)
        try:
            yield config_class(**changes)
        except Exception as error:
            yield error


def _changes(config: Any, kept: frozenset[str], ids: dict[str, int]) -> dict[str, Any]:
    nested = set(getattr(config, "sub_configs", None) or ())
    changes: dict[str, Any] = {}
    for name in nested:
        inner = getattr(config, name, None)
        if inner is not None and not isinstance(inner, dict):
            changes[name] = _changes(inner, kept, ids)
            if getattr(inner, "model_type", ""):
                changes[name]["model_type"] = inner.model_type
    attributes = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    for name, value in attributes.items():
        if name in nested or name == "num_labels":
            continue
        new = _shrunk(name, value, kept, ids, attributes)
        if new is not None and new != value:
            changes[getattr(config, "attribute_map", {}).get(name, name)] = new
    return changes


def _shrunk(name: str, value: Any, kept, ids, attributes) -> Any:
    if isinstance(value, bool):
        return None
    if re.search(r"(token_id|token_index)$", name) and isinstance(value, int):
        return _token(name, value, ids)
    if isinstance(value, float) and "drop" in name:
        return 0.0
    if isinstance(value, int):
        for pattern, size, group in _RULES:
            if pattern.match(name):
                if group in kept or value <= size:
                    return None
                if "key_value" in name and value == attributes.get("num_attention_heads"):
                    return HEADS
                return size
        return None
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        if "lists" in kept:
            return None
        if _DEPTHS.search(name) and "layers" not in kept:
            return type(value)(1 for _ in value)
        if _WIDTHS.search(name) and "d" not in kept:
            factor = max(1, min(value) // 16)
            return type(value)(max(16, v // factor // 16 * 16) for v in value)
        if name.endswith("image_size") and "images" not in kept:
            return type(value)(32 for _ in value)
    return None


def _token(name: str, value: int, ids: dict[str, int]) -> int | None:
    """Special tokens move to the end of the vocabulary, each to a place of its own."""
    if 0 <= value < 8 or value < 0:
        return None
    ids["next"] -= 1
    return ids["next"]
