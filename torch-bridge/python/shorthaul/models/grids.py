"""Networks over images and volumes that torchvision lacks: U-Nets, MLP-Mixer, a YOLO block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def twice(dimensions: int, before: int, after: int) -> nn.Sequential:
    """Two convolutions of width 3, each with BatchNorm and ReLU, in two or three dimensions."""
    conv = nn.Conv2d if dimensions == 2 else nn.Conv3d
    norm = nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm3d
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [conv(channels, after, 3, padding=1, bias=False), norm(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet2d(nn.Module):
    """U-Net (arXiv 1505.04597) with padded convolutions and BatchNorm."""

    def __init__(self, n_in: int = 3, n_classes: int = 2, width: int = 64, depth: int = 4):
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.first = twice(2, n_in, width)
        self.down = nn.ModuleList(twice(2, w, 2 * w) for w in widths[:-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(twice(2, 2 * w, w) for w in reversed(widths[:-1]))
        self.out = nn.Conv2d(width, n_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, n_in, H, W] -> [N, n_classes, H, W]``; sides are multiples of ``2**depth``."""
        levels = [self.first(x)]
        for layer in self.down:
            levels.append(layer(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], 1))
        return self.out(x)


@dataclass(frozen=True)
class EnsembleConfig:
    """Ensemble forecasts as ENS-10 (arXiv 2206.14786) has them, on a grid of 0.5 degrees.

    ``height`` and ``width`` are the grid without the rows near the poles that a U-Net cannot halve.
    """

    n_members: int = 11
    n_fields: int = 2
    n_levels: int = 11
    height: int = 352
    width: int = 720
    channels: int = 16
    depth: int = 3


class EnsembleUNet(nn.Module):
    """A 3-D U-Net over levels, latitudes and longitudes, pooled in the plane only.

    Ten members and the control forecast come in as channels; mean and spread of the first field go
    out for every level. The mean corrects that of the members.
    """

    def __init__(self, config: EnsembleConfig):
        super().__init__()
        self.config = config
        widths = [config.channels << i for i in range(config.depth + 1)]
        self.first = twice(3, config.n_members * config.n_fields, config.channels)
        self.down = nn.ModuleList(twice(3, w, 2 * w) for w in widths[:-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(2 * w, w, (1, 2, 2), (1, 2, 2)) for w in reversed(widths[:-1])
        )
        self.join = nn.ModuleList(twice(3, 2 * w, w) for w in reversed(widths[:-1]))
        self.out = nn.Conv3d(config.channels, 2, 1)

    def forward(self, ensemble: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[N, members * fields, levels, H, W]`` to mean and spread ``[N, levels, H, W]``."""
        levels = [self.first(ensemble)]
        for layer in self.down:
            levels.append(layer(F.max_pool3d(levels[-1], (1, 2, 2))))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], 1))
        correction, spread = self.out(x).unbind(1)
        members = ensemble.unflatten(1, (self.config.n_members, self.config.n_fields))[:, :, 0]
        return members.mean(1) + correction, F.softplus(spread) + 1e-3


def ensembles(config: EnsembleConfig):
    """What an :class:`EnsembleUNet` is called with."""
    channels = config.n_members * config.n_fields
    sizes = (channels, config.n_levels, config.height, config.width)
    return lambda batch: (torch.randn(batch, *sizes),)


@dataclass(frozen=True)
class MixerConfig:
    """MLP-Mixer (arXiv 2105.01601); the defaults are B/16."""

    side: int = 224
    patch: int = 16
    width: int = 768
    n_layers: int = 12
    n_token_inner: int = 384
    n_channel_inner: int = 3072
    n_classes: int = 1000


def mlp(width: int, inner: int) -> nn.Sequential:
    """Two linear layers with GELU between."""
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class MixerBlock(nn.Module):
    """A feed-forward network over patches, then one over channels."""

    def __init__(self, n_patches: int, config: MixerConfig):
        super().__init__()
        self.before_tokens = nn.LayerNorm(config.width)
        self.tokens = mlp(n_patches, config.n_token_inner)
        self.before_channels = nn.LayerNorm(config.width)
        self.channels = mlp(config.width, config.n_channel_inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, patches, width]`` to the same."""
        x = x + self.tokens(self.before_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.before_channels(x))


class Mixer(nn.Module):
    """Patches, blocks, and a head on their mean."""

    def __init__(self, config: MixerConfig):
        super().__init__()
        self.patches = nn.Conv2d(3, config.width, config.patch, config.patch)
        n_patches = (config.side // config.patch) ** 2
        self.blocks = nn.Sequential(
            *(MixerBlock(n_patches, config) for _ in range(config.n_layers))
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def conv_mish(before: int, after: int, size: int) -> nn.Sequential:
    """A convolution with BatchNorm and Mish (arXiv 1908.08681)."""
    return nn.Sequential(
        nn.Conv2d(before, after, size, padding=size // 2, bias=False),
        nn.BatchNorm2d(after),
        nn.Mish(),
    )


class YoloBlock(nn.Module):
    """A cross-stage block of YOLOv4 (arXiv 2004.10934): half of the channels go around."""

    def __init__(self, width: int = 128, n_layers: int = 4):
        super().__init__()
        half = width // 2
        self.around, self.into = conv_mish(width, half, 1), conv_mish(width, half, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(conv_mish(half, half, 1), conv_mish(half, half, 3))
            for _ in range(n_layers)
        )
        self.leave, self.join = conv_mish(half, half, 1), conv_mish(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, width, H, W]`` to the same."""
        y = self.into(x)
        for layer in self.layers:
            y = y + layer(y)
        return self.join(torch.cat([self.leave(y), self.around(x)], 1))
