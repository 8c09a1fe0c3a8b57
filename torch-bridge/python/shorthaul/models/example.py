"""One network with what a training step of it needs: inputs, a loss, sizes, a parameter count.

Owns the type of the entries in ``shorthaul.models.EXAMPLES`` and their losses; builds no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

#: The inputs of a network: tensors by position.
Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Example:
    """A network with what one training step of it needs.

    ``make`` makes the module, ``inputs(batch)`` its inputs. ``small`` is the same network in a size
    for tests. A step differentiates :meth:`loss`: ``loss_of`` if the network has a loss of its own;
    cross-entropy against fixed labels if the output has classes (dimension 1, or the last one of
    ``[N, T, classes]``); otherwise the mean of squares.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    batch: int
    n_classes: int | None = None
    n_parameters: int | None = None
    loss_of: Callable[[Any], torch.Tensor] | None = None
    small: Example | None = None

    def loss(self, output: Any) -> torch.Tensor:
        """A scalar to differentiate."""
        if self.loss_of is not None:
            return self.loss_of(output)
        if self.n_classes is None:
            return output.square().mean()
        scores = output.flatten(0, -2) if output.dim() == 3 else output
        labels = torch.arange(scores.shape[0], device=scores.device) % self.n_classes
        return F.cross_entropy(scores, labels)


def crps(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The continuous ranked probability score of normal forecasts ``(mean, spread)``.

    The truth is a fixed wave of the same shape. The score's closed form: Gneiting and others,
    Monthly Weather Review 133 (2005).
    """
    mean, spread = output
    n = mean.numel()
    truth = torch.arange(n, device=mean.device).remainder(97).to(mean.dtype).div(16).sin()
    z = (truth.reshape(mean.shape) - mean) / spread
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return (spread * (z * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean()


def clicks(output: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of click scores ``[N]`` against alternating labels."""
    labels = torch.arange(output.shape[0], device=output.device).remainder(2).to(output.dtype)
    return F.binary_cross_entropy_with_logits(output, labels)


def images(side: int, channels: int = 3) -> Callable[[int], Inputs]:
    """Normal numbers ``[batch, channels, side, side]``."""
    return lambda batch: (torch.randn(batch, channels, side, side),)


def tokens(length: int, vocabulary: int) -> Callable[[int], Inputs]:
    """Numbers of tokens ``[batch, length]``."""
    return lambda batch: (torch.randint(vocabulary, (batch, length)),)


def padded_tokens(length: int, vocabulary: int) -> Callable[[int], Inputs]:
    """Numbers of tokens, and where they are padding: rows end up to a fifth early."""

    def make(batch: int) -> Inputs:
        lengths = length - torch.arange(1, batch + 1).remainder(4) * (length // 16)
        is_padding = torch.arange(length) >= lengths[:, None]
        return torch.randint(vocabulary, (batch, length)), is_padding

    return make


def without_dropout(model: nn.Module) -> nn.Module:
    """``model`` with every dropout off, so that its numbers can be compared."""
    for child in model.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.p = 0.0
        if isinstance(child, nn.MultiheadAttention):
            child.dropout = 0.0
        if type(child).__name__ == "StochasticDepth":
            child.p = 0.0
    return model
