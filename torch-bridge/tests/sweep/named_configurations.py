"""Tiny configurations of model types of ``transformers`` whose sizes depend on each other.

Owns what the rules of ``tiny_configurations`` cannot find: windows that tile a feature map, strides
that belong to kernels, backbones inside of detectors, horizons of time series.
"""

from __future__ import annotations

from typing import Any

#: Layers of convolutions over sound samples: one in 40 is left.
_SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 4, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
_WINDOWS = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": (1, 2, 1),
    "num_heads": (2, 2, 4),
    "window_size": 4,
    "drop_path_rate": 0.0,
}
_SWIN = {
    "model_type": "swin",
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": (1, 1, 1, 1),
    "num_heads": (2, 2, 4, 4),
    "window_size": 2,
    "drop_path_rate": 0.0,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": (16, 16, 32, 32),
    "depths": (1, 1, 1, 1),
    "layer_type": "basic",
}
_LAST = _RESNET | {"out_features": ["stage4"]}
_DETECTOR = {
    "num_queries": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "d_model": 32,
}
_MASKS = {
    "backbone_config": _SWIN,
    "num_queries": 8,
    "hidden_dim": 32,
    "encoder_feedforward_dim": 48,
    "dim_feedforward": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_attention_heads": 4,
    "dropout": 0.0,
}
_RT_DETR = {
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "embedding_size": 16,
        "hidden_sizes": (16, 16, 32, 32),
        "depths": (1, 1, 1, 1),
        "layer_type": "basic",
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "encoder_hidden_dim": 32,
    "encoder_in_channels": (16, 32, 32),
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "d_model": 32,
    "num_queries": 8,
    "decoder_in_channels": (32, 32, 32),
    "decoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "num_denoising": 0,
}
_HORIZON = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
_PATCHES = {
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "num_input_channels": 3,
}
_ROTARY = {
    "vocab_size": 128,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 4,
    "bos_token_id": 126,
    "eos_token_id": 126,
}
_VISION_TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}

#: Arguments of the configuration by model type.
NAMED: dict[str, dict[str, Any]] = {
    "wav2vec2": _SOUND,
    "hubert": _SOUND,
    "wavlm": _SOUND,
    "unispeech": _SOUND,
    "unispeech-sat": _SOUND,
    "data2vec-audio": _SOUND,
    "wav2vec2-conformer": _SOUND | {"vocab_size": 32, "conv_depthwise_kernel_size": 7},
    "sew": _SOUND | {"squeeze_factor": 2},
    "sew-d": _SOUND | {"squeeze_factor": 2, "position_buckets": 8, "max_position_embeddings": 32},
    "speecht5": _SOUND
    | {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    "wav2vec2-bert": {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "feature_projection_input_dim": 16,
        "conv_depthwise_kernel_size": 7,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "donut-swin": _WINDOWS,
    "maskformer-swin": _WINDOWS,
    "beit": {
        "image_size": 32,
        "patch_size": 4,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "auxiliary_channels": 16,
        "out_indices": [1, 2, 3, 4],
        "use_relative_position_bias": True,
        "drop_path_rate": 0.0,
    },
    "data2vec-vision": {
        "image_size": 32,
        "patch_size": 4,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "auxiliary_channels": 16,
        "out_indices": [0, 1, 2, 3],
        "drop_path_rate": 0.0,
    },
    "mask2former": _MASKS | {"feature_size": 32, "mask_feature_size": 32, "train_num_points": 32},
    "maskformer": {
        "backbone_config": _SWIN,
        "decoder_config": _DETECTOR | {"model_type": "detr"},
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
    },
    "detr": _DETECTOR
    | {
        "backbone_config": _RESNET | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
    },
    "conditional_detr": _DETECTOR | {"backbone_config": _LAST},
    "table-transformer": _DETECTOR | {"backbone_config": _LAST},
    "dab-detr": {k: v for k, v in _DETECTOR.items() if k != "d_model"}
    | {"backbone_config": _LAST, "hidden_size": 32},
    "deformable_detr": _DETECTOR
    | {
        "backbone_config": _RESNET | {"out_features": ["stage2", "stage3", "stage4"]},
        "num_feature_levels": 3,
        "disable_custom_kernels": True,
    },
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR | {"decoder_n_levels": 3},
    "informer": _HORIZON,
    "time_series_transformer": _HORIZON,
    "patchtst": _PATCHES | {"ffn_dim": 32, "num_hidden_layers": 2},
    "patchtsmixer": _PATCHES | {"num_layers": 2},
    "codegen": _ROTARY,
    "gptj": _ROTARY,
    "mamba2": {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "reformer": {
        "vocab_size": 128,
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "attention_head_size": 8,
        "axial_pos_embds": False,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 4,
        "max_position_embeddings": 64,
    },
    "qwen2_vl": {"text_config": _VISION_TEXT, "vision_config": {"depth": 1, "embed_dim": 32}},
    "qwen2_5_vl": {"text_config": _VISION_TEXT, "vision_config": {"depth": 1, "hidden_size": 32}},
}
