"""Small networks for scikit-learn's digits, 8 by 8 pixels."""

from __future__ import annotations

import torch
from torch import nn


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
