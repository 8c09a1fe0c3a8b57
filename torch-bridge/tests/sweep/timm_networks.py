"""Networks of ``timm``: the smallest of each family of models.

A family is a module of timm, or the models of a module whose names have the same first word. Owns
the choice and the sizes of images.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import timm
import torch
from torch import nn

from .run import Network, NotMade, Step

#: Images of these sizes are tried, smallest first, where a model takes any.
_SIZES = (64, 96, 128, 160, 224)


def networks() -> list[Network]:
    """One network of each family."""
    made = []
    for module in timm.list_modules():
        families: dict[str, list[str]] = {}
        for name in timm.list_models(module=module):
            families.setdefault(_first_word(name), []).append(name)
        for word, names in families.items():
            called = f"{module}/{word}" if len(families) > 1 else module
            made.append(Network(called, functools.partial(_make, tuple(names))))
    return made


def _first_word(name: str) -> str:
    """``resnet`` of ``resnet18d``, ``convnextv2`` of ``test_convnextv2_atto``."""
    return re.match(r"[a-z]+?(v\d|(?=[^a-z]|$))", name.removeprefix("test_")).group()


def _make(names: tuple[str, ...]) -> tuple[nn.Module, list[Step]]:
    name = _smallest(names)
    size = timm.get_pretrained_cfg(name).input_size[-1] if timm.get_pretrained_cfg(name) else 224
    problems = []
    for tried in (*_SIZES, size):
        try:
            model = _model(name, tried)
            with torch.no_grad():
                model.eval()(_images(2, tried))
        except Exception as error:
            problems.append(f"{name} with {tried}: {type(error).__name__} {error}")
            continue
        return model, [
            Step("training", {"x": _images(2, tried)}),
            Step("training, batch of 3", {"x": _images(3, tried)}),
            Step("evaluation", {"x": _images(2, tried)}, training=False),
        ]
    raise NotMade(problems[-1])


def _smallest(names: tuple[str, ...]) -> str:
    """The name with the fewest parameters, counted on no device; the first few are asked."""
    sizes = {}
    # The names say it roughly; making hundreds of large models would take minutes.
    words = ("test", "femto", "atto", "nano", "pico", "tiny", "small", "_18", "18", "xxs", "b0")
    preferred = [n for n in names if any(w in n for w in words)] or list(names)
    for name in preferred[:12]:
        with torch.device("meta"):
            try:
                model = timm.create_model(name)
            except Exception:
                continue
        sizes[name] = sum(p.numel() for p in model.parameters())
    return min(sizes, key=lambda name: sizes[name]) if sizes else names[0]


def _model(name: str, size: int) -> nn.Module:
    options: dict[str, Any] = {"num_classes": 10}
    try:
        return timm.create_model(name, img_size=size, **options)
    except TypeError:
        return timm.create_model(name, **options)


def _images(n: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, size, size, generator=generator)
