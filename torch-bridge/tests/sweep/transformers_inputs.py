"""Random inputs that fit a model of ``transformers``, made from its signature and configuration.

Owns what each name of an argument means. Labels are given if the class computes a loss from them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Kind:
    """Which of the optional inputs are given."""

    labels: bool
    images: bool = True
    text: bool = True
    size: int = 1
    cache: bool = True


#: What is tried, the fullest first.
KINDS = (
    Kind(labels=True),
    Kind(labels=False),
    Kind(labels=True, images=False),
    Kind(labels=False, images=False),
    Kind(labels=False, text=False),
    Kind(labels=False, size=2),
    Kind(labels=True, images=False, cache=False),
    Kind(labels=False, images=False, cache=False),
)


class _Sizes:
    """The sizes of a call, and what the configuration says of inputs."""

    def __init__(self, model: nn.Module, batch: int, length: int, kind: Kind):
        self.batch, self.length, self.kind = batch, length, kind
        self.config = model.config
        self.name = type(model).__name__
        self.generator = torch.Generator().manual_seed(100 * batch + length)

    def of(self, name: str, default: Any = None) -> Any:
        """An attribute of the configuration or of one that is nested in it."""
        waiting = [self.config]
        while waiting:
            config = waiting.pop(0)
            value = getattr(config, name, None)
            if value is not None:
                return value
            for inner in getattr(config, "sub_configs", None) or ():
                if getattr(config, inner, None) is not None:
                    waiting.append(getattr(config, inner))
        return default

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def whole(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)


def inputs(model: nn.Module, batch: int, length: int, kind: Kind) -> dict[str, Any]:
    """Named inputs of one call."""
    sizes = _Sizes(model, batch, length, kind)
    parameters = inspect.signature(type(model).forward).parameters
    given: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        make = _MAKERS.get(name)
        is_required = parameter.default is parameter.empty
        if make is None:
            if is_required:
                raise ValueError(f"no input for {name}")
            continue
        value = make(sizes)
        if value is not None:
            given[name] = value
    main = getattr(model, "main_input_name", None)
    if "inputs_embeds" in parameters and not given:
        raise ValueError(f"no input for {main}")
    if kind.labels:
        labels = _labels(sizes, parameters)
        if not labels:
            raise ValueError("no labels")
        given |= labels
    if not kind.cache and "use_cache" in parameters:
        given["use_cache"] = False
    _place_images(model, sizes, given)
    return given


def _ids(sizes: _Sizes, low: int = 3) -> torch.Tensor | None:
    if not sizes.kind.text:
        return None
    vocabulary = min(sizes.of("vocab_size", 100), 100)
    if "MultipleChoice" in sizes.name:
        return sizes.whole(low, vocabulary, sizes.batch, 2, sizes.length)
    return sizes.whole(low, vocabulary, sizes.batch, sizes.length)


def _mask(sizes: _Sizes) -> torch.Tensor | None:
    """The last sequence is shorter by two."""
    if not sizes.kind.text or not sizes.of("vocab_size"):
        return None
    mask = torch.ones(sizes.batch, sizes.length, dtype=torch.long)
    mask[-1, -2:] = 0
    return mask


def _image_size(sizes: _Sizes) -> tuple[int, int]:
    size = sizes.of("image_size") or 64
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    if isinstance(size, int):
        size = (size, size)
    return size[0] * sizes.kind.size, size[1] * sizes.kind.size


def _channels(sizes: _Sizes) -> int:
    channels = sizes.of("num_channels") or sizes.of("in_channels") or sizes.of("in_chans") or 3
    return channels if isinstance(channels, int) else 3


def _pixels(sizes: _Sizes) -> torch.Tensor | None:
    if not sizes.kind.images:
        return None
    height, width = _image_size(sizes)
    channels = _channels(sizes)
    n_frames = sizes.of("num_frames")
    if n_frames and any(word in sizes.name for word in ("Video", "VJEPA", "Timesformer", "Vivit")):
        return sizes.normal(sizes.batch, n_frames, channels, height, width)
    return sizes.normal(sizes.batch, channels, height, width)


def _features(sizes: _Sizes) -> torch.Tensor | None:
    """Spectrograms: `[batch, bins, time]` as Whisper's, else `[batch, time, bins]`."""
    n_bins = (
        sizes.of("num_mel_bins") or sizes.of("feature_size") or sizes.of("input_feat_per_channel")
    )
    n_bins = n_bins or sizes.of("input_dim") or sizes.of("feature_projection_input_dim") or 80
    positions = sizes.of("max_source_positions")
    if positions and "Whisper" in sizes.name:
        return sizes.normal(sizes.batch, n_bins, 2 * positions)
    time = 64 if sizes.batch == 2 else 48
    if sizes.kind.size == 2:
        return sizes.normal(sizes.batch, n_bins, time)
    return sizes.normal(sizes.batch, time, n_bins)


def _sound(sizes: _Sizes) -> torch.Tensor:
    """Samples: `[batch, time]`, with a channel in models that call it so."""
    n = 1600 if sizes.batch == 2 else 1280
    if sizes.of("audio_channels"):
        return sizes.normal(sizes.batch, sizes.of("audio_channels"), n)
    if sizes.of("max_length") and "AST" in sizes.name:
        return sizes.normal(sizes.batch, sizes.of("max_length"), sizes.of("num_mel_bins"))
    return sizes.normal(sizes.batch, n)


def _boxes(sizes: _Sizes) -> torch.Tensor | None:
    corners = sizes.whole(0, 50, sizes.batch, sizes.length, 4)
    corners[..., 2:] += corners[..., :2]
    return corners


def _hidden_patches(sizes: _Sizes) -> torch.Tensor | None:
    if "MaskedImage" not in sizes.name and "ForPreTraining" not in sizes.name:
        return None
    patch = sizes.of("patch_size", 8)
    height, width = _image_size(sizes)
    n = (height // patch) * (width // patch)
    return sizes.whole(0, 2, sizes.batch, n).bool()


def _past(sizes: _Sizes) -> int:
    lags = sizes.of("lags_sequence") or [0]
    return (sizes.of("context_length") or sizes.of("prediction_length") or 8) + max(lags)


def _series(n: str):
    def make(sizes: _Sizes) -> torch.Tensor:
        length = _past(sizes) if n == "past" else sizes.of("prediction_length") or 4
        n_channels = sizes.of("input_size") or sizes.of("num_input_channels") or 1
        shape = (sizes.batch, length) if n_channels == 1 else (sizes.batch, length, n_channels)
        return sizes.normal(*shape)

    return make


def _time_features(n: str):
    def make(sizes: _Sizes) -> torch.Tensor:
        length = _past(sizes) if n == "past" else sizes.of("prediction_length") or 4
        return sizes.normal(sizes.batch, length, sizes.of("num_time_features") or 1)

    return make


_MAKERS = {
    "input_ids": _ids,
    "attention_mask": _mask,
    "decoder_input_ids": _ids,
    "bbox": _boxes,
    "pixel_values": _pixels,
    "input_features": _features,
    "audio_values": _sound,
    "input_values": _sound,
    "bool_masked_pos": _hidden_patches,
    "past_values": _series("past"),
    "past_observed_mask": lambda sizes: torch.ones_like(_series("past")(sizes)),
    "future_values": _series("future"),
    "past_time_features": _time_features("past"),
    "future_time_features": _time_features("future"),
}


def _labels(sizes: _Sizes, parameters) -> dict[str, torch.Tensor]:
    name, batch = sizes.name, sizes.batch
    n_labels = sizes.of("num_labels") or 2
    if "start_positions" in parameters:
        return {
            "start_positions": sizes.whole(0, sizes.length, batch),
            "end_positions": sizes.whole(0, sizes.length, batch),
        }
    if "labels" not in parameters or "Detection" in name or "Universal" in name:
        return {}
    if "CTC" in name:
        return {"labels": sizes.whole(3, 20, batch, 3)}
    if "SemanticSegmentation" in name:
        return {"labels": sizes.whole(0, n_labels, batch, *_image_size(sizes))}
    if "Classification" in name and "Token" not in name:
        return {"labels": sizes.whole(0, n_labels, batch)}
    if "TokenClassification" in name:
        return {"labels": sizes.whole(0, n_labels, batch, sizes.length)}
    if "MultipleChoice" in name:
        return {"labels": sizes.whole(0, 2, batch)}
    ids = _ids(sizes)
    return {} if ids is None else {"labels": ids}


def _place_images(model: nn.Module, sizes: _Sizes, given: dict[str, Any]) -> None:
    """Puts as many image tokens into the text as the image has features."""
    token = sizes.of("image_token_id") or sizes.of("image_token_index")
    if token is None or "pixel_values" not in given or given.get("input_ids") is None:
        return
    inner = model if hasattr(model, "get_image_features") else getattr(model, "model", None)
    if not hasattr(inner, "get_image_features"):
        return
    with torch.no_grad():
        features = inner.get_image_features(given["pixel_values"])
    features = getattr(features, "pooler_output", features)
    if not isinstance(features, torch.Tensor):
        features = torch.cat([f.reshape(-1, f.shape[-1]) for f in features])
    n = features.reshape(-1, features.shape[-1]).shape[0] // sizes.batch
    images = torch.full((sizes.batch, n), token)
    text = given["input_ids"]
    given["input_ids"] = torch.cat([text[:, :1], images, text[:, 1:]], 1)
    for name in ("attention_mask", "labels"):
        if name in given and given[name].shape == text.shape:
            ones = torch.ones_like(images) if name == "attention_mask" else images * 0 - 100
            given[name] = torch.cat([given[name][:, :1], ones, given[name][:, 1:]], 1)
