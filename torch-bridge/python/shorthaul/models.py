"""The networks that the bench and the demo train, by name.

Owns the small networks for scikit-learn's digits and the BERT-large layer; ResNet-50 and
MobileNetV2 are torchvision's, imported when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Example:
    """A network with what one training step of it needs.

    ``make`` gives the module, ``inputs(batch)`` its inputs; a step is the mean of the output as a
    loss, unless the output has classes, for which cross-entropy against fixed labels is taken.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    batch: int
    n_classes: int | None

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        """A scalar to differentiate."""
        if self.n_classes is None:
            return output.square().mean()
        labels = torch.arange(output.shape[0], device=output.device) % self.n_classes
        return F.cross_entropy(output, labels)


class DigitsConvNet(nn.Module):
    """Two convolutions with BatchNorm and a linear layer: ``[N, 1, 8, 8] -> [N, 10]``."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(self.features(images).mean((2, 3)))


class DigitsTransformer(nn.Module):
    """The eight rows of a digit as a sequence: ``[N, 1, 8, 8] -> [N, 10]``."""

    def __init__(self, width: int = 64, n_heads: int = 4, n_layers: int = 2, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, n_heads, 4 * width, dropout, activation="gelu", batch_first=True
            )
            for _ in range(n_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        rows = self.embed(images.squeeze(1)) + self.position
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows.mean(1))


def bert_large_layer() -> nn.Module:
    """One encoder layer of BERT-large: hidden 1024, 16 heads, intermediate 4096, GELU."""
    return nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, activation="gelu", batch_first=True)


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)()

    return make


def _images(side: int, channels: int = 3) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randn(batch, channels, side, side),)


EXAMPLES = {
    example.name: example
    for example in (
        Example("resnet50", _vision("resnet50"), _images(224), 8, 1000),
        Example("resnet18", _vision("resnet18"), _images(224), 8, 1000),
        Example("mobilenet_v2", _vision("mobilenet_v2"), _images(224), 8, 1000),
        Example("efficientnet_b0", _vision("efficientnet_b0"), _images(224), 8, 1000),
        Example(
            "bert_large_layer",
            bert_large_layer,
            lambda batch: (torch.randn(batch, 512, 1024),),
            2,
            None,
        ),
        Example("digits_cnn", DigitsConvNet, _images(8, 1), 64, 10),
        Example("digits_transformer", DigitsTransformer, _images(8, 1), 64, 10),
    )
}


def without_dropout(model: nn.Module) -> nn.Module:
    """``model`` with every dropout off, so that its numbers can be compared."""
    for child in model.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.p = 0.0
        if isinstance(child, nn.MultiheadAttention):
            child.dropout = 0.0
    return model
