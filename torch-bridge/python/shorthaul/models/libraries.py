"""Networks of other libraries by name: ``torchvision:resnet101``, ``timm:convnext_atto``,
``transformers:bert``.

Owns how such a name becomes an :class:`Example` with made-up weights and inputs; nothing is
downloaded. A library is imported when one of its networks is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .example import Example, Inputs

#: Sizes for families of ``transformers``, whose default configurations hold up to billions of
#: parameters. A configuration takes those of these that it has.
_TRANSFORMER_SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "embedding_size": 128,
    "vocab_size": 8000,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}

#: What a family calls these sizes, where it has names of its own, or what else it needs; ``None``
#: leaves a size out.
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "bart": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 256, "encoder_ffn_dim": 1024}
    | {"decoder_ffn_dim": 1024, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "t5": {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 2, "num_heads": 4},
    "xlnet": {"d_model": 256, "d_inner": 1024, "n_layer": 4, "n_head": 4}
    | {"max_position_embeddings": None},
    "mamba": {"state_size": 16},
    "opt": {"ffn_dim": 1024, "word_embed_proj_dim": 256},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4},
    "vit": {"image_size": 224, "patch_size": 16},
    "segformer": {},
    "falcon": {"head_dim": None},
    "wav2vec2": {"conv_dim": (64,) * 7, "num_conv_pos_embeddings": 32},
}

#: Families that see images ``[batch, 3, 224, 224]``, and those that hear ``[batch, 8000]``.
_IMAGE_FAMILIES = {"vit", "deit", "beit", "segformer", "dinov2", "convnext", "mobilevit", "regnet"}
_SOUND_FAMILIES = {"wav2vec2", "hubert"}
_OWN_SIZES = {"segformer", "convnext", "mobilevit", "regnet"}

#: Tokens in a sentence, as default.
_LENGTH = 128

#: Frames of a video, and the side of its images.
_FRAMES, _VIDEO_SIDE = 8, 112


class MissingLibrary(ValueError):
    """The library of a network is not installed."""


def example_of(name: str) -> Example:
    """The network that ``library:name`` means.

    Raises ``ValueError`` for a library that is not known and for a network that the library does
    not have, :class:`MissingLibrary` for one that is not installed.
    """
    library, _, network = name.partition(":")
    if library not in _LIBRARIES:
        known = ", ".join(f"{known}:NAME" for known in _LIBRARIES)
        raise ValueError(f"there is no library {library}; names have the form {known}")
    try:
        make, inputs, batch = _LIBRARIES[library](network)
    except ImportError:
        raise MissingLibrary(f"{name} needs the package {library}: pip install {library}") from None
    return Example(name, make, inputs, batch, loss_of=distance_from_wave)


def distance_from_wave(output: Any) -> torch.Tensor:
    """The mean squared distance of each result in real numbers from a fixed wave, added.

    The mean of squares alone has no gradient worth comparing where a network ends in a
    normalization.
    """
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    parts = []
    for leaf in leaves:
        if leaf.is_floating_point() and (leaf.requires_grad or not torch.is_grad_enabled()):
            wave = torch.arange(leaf.numel(), device=leaf.device).remainder(97).to(leaf.dtype)
            parts.append((leaf - wave.div(16).sin().reshape(leaf.shape)).square().mean())
    return torch.stack(parts).sum()


_Made = tuple[Callable[[], nn.Module], Callable[[int], Inputs], int]


def _from_torchvision(name: str) -> _Made:
    import torchvision

    if name not in torchvision.models.list_models():
        raise ValueError(f"torchvision has no network {name}; see torchvision.models.list_models()")
    options: dict[str, Any] = {"weights": None}
    if "segmentation" in torchvision.models.get_model_builder(name).__module__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False

    def make() -> nn.Module:
        return torchvision.models.get_model(name, **options)

    if ".video" in torchvision.models.get_model_builder(name).__module__:
        shape = (3, 16 if name.startswith(("mvit", "s3d")) else _FRAMES, *_video_sides(name))
        return make, lambda batch: (torch.randn(batch, *shape),), 1
    side = {"inception_v3": 299, "swin_v2_t": 256}.get(name, 224)
    return make, lambda batch: (torch.randn(batch, 3, side, side),), 4


def _video_sides(name: str) -> tuple[int, int]:
    side = 224 if name.startswith(("mvit", "swin", "s3d")) else _VIDEO_SIDE
    return side, side


def _from_timm(name: str) -> _Made:
    import timm

    if not timm.is_model(name):
        raise ValueError(f"timm has no network {name}; see timm.list_models()")
    known = timm.get_pretrained_cfg(name, allow_unregistered=True)
    shape = known.input_size if known else (3, 224, 224)
    return (
        lambda: timm.create_model(name, pretrained=False),
        lambda batch: (torch.randn(batch, *shape),),
        4,
    )


def _from_transformers(name: str) -> _Made:
    import transformers

    if name not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers has no family {name}; see transformers.CONFIG_MAPPING")

    def make() -> nn.Module:
        kind = transformers.CONFIG_MAPPING[name]
        sizes = {} if name in _OWN_SIZES else _TRANSFORMER_SIZES
        default = kind()
        chosen = {size: value for size, value in sizes.items() if hasattr(default, size)}
        chosen |= _FAMILY_SIZES.get(name, {})
        config = kind(**{size: value for size, value in chosen.items() if value is not None})
        config.use_cache = False
        return transformers.AutoModel.from_config(config)

    if name in _IMAGE_FAMILIES:
        return make, lambda batch: (torch.randn(batch, 3, 224, 224),), 4
    if name in _SOUND_FAMILIES:
        return make, lambda batch: (torch.randn(batch, 8000),), 4

    def sentences(batch: int) -> Inputs:
        tokens = torch.randint(1, 8000, (batch, _LENGTH))
        is_text_to_text = name in ("t5", "mt5", "umt5")
        return (tokens, torch.ones_like(tokens), tokens) if is_text_to_text else (tokens,)

    return make, sentences, 4


_LIBRARIES = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "transformers": _from_transformers,
}
