"""Networks of ``transformers``: one of each model type, tiny, with a head if it has one.

Owns the choice of the class and the order in which configurations and inputs are tried until eager
runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from . import transformers_inputs as inputs_of
from .named_configurations import NAMED
from .run import Network, NotMade, Step
from .tiny_configurations import configurations

#: Heads in the order of preference; a type without any of them has its bare model.
_HEADS = (
    "IMAGE_TEXT_TO_TEXT",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "DEPTH_ESTIMATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "MASK_GENERATION",
    "MASKED_IMAGE_MODELING",
    "QUESTION_ANSWERING",
    "MULTIMODAL_LM",
    "PRETRAINING",
)
#: A network with more parameters takes too long to be worth its turn.
_MOST_PARAMETERS = 20_000_000


def networks() -> list[Network]:
    """One network of each model type of the mappings."""
    classes: dict[str, str] = {}
    for head in _HEADS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")
        for model_type, name in mapping.items():
            classes.setdefault(model_type, _first(name))
    for model_type, name in modeling_auto.MODEL_MAPPING_NAMES.items():
        classes.setdefault(model_type, _first(name))
    return [
        Network(f"{model_type}/{name}", functools.partial(_make, model_type, name))
        for model_type, name in sorted(classes.items())
    ]


def _first(name: str | tuple[str, ...]) -> str:
    return name if isinstance(name, str) else name[0]


def _make(model_type: str, name: str) -> tuple[nn.Module, list[Step]]:
    if not hasattr(transformers, name):
        raise NotMade(f"transformers has no {name}")
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    if config_class is None:
        config_class = transformers.CONFIG_MAPPING[model_type]
    problems = []
    for config in _configurations(config_class, model_type):
        if isinstance(config, Exception):
            problems.append(_line(config))
            continue
        try:
            with torch.device("meta"):
                shape = model_class(config)
            if (n := sum(p.numel() for p in shape.parameters())) > _MOST_PARAMETERS:
                problems.append(f"{n} parameters")
                continue
            torch.manual_seed(0)
            model = model_class(config).float()
            for module in model.modules():
                if getattr(module, "_requires_grad", False):
                    # Encoders of sound set a flag of their input that the inputs of steps have.
                    module._requires_grad = False
        except Exception as error:
            problems.append(_line(error))
            continue
        for kind in inputs_of.KINDS:
            try:
                steps = _steps(model, kind)
            except Exception as error:
                problems.append(_line(error))
                continue
            return model, steps
    raise NotMade("; ".join(list(dict.fromkeys(problems))[:4]))


def _configurations(config_class: type, model_type: str) -> Iterator[Any]:
    """The tiny configuration by name, then those that rules make."""
    if model_type in NAMED:
        try:
            yield config_class(**NAMED[model_type])
        except Exception as error:
            yield error
    yield from configurations(config_class)


def _steps(model: nn.Module, kind: inputs_of.Kind) -> list[Step]:
    first = inputs_of.inputs(model, 2, 12, kind)
    second = inputs_of.inputs(model, 3, 9, kind)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(0)
    with torch.no_grad():
        model.train()(**first)
        for given in (second, first):
            model.eval()(**given)
    model.load_state_dict(state)
    return [
        Step("training", first),
        Step("training, other sizes", second),
        Step("evaluation", first, training=False),
    ]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
