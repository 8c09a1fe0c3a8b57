"""Models with custom autograd functions beside PyTorch's eager: times of whole steps.

Owns the models; ``beside_eager`` measures:

    .venv/bin/python bench/custom_functions.py --threads 2
"""

from __future__ import annotations

import torch
from beside_eager import Case, main
from torch import nn
from torch.autograd import Function
from torch.nn import functional


class Spike(Function):
    """A step function; its gradient is that of a steep sigmoid (Zenke and Ganguli 2018)."""

    @staticmethod
    def forward(ctx, x):
        """1 where x is positive."""
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        """The surrogate."""
        (x,) = ctx.saved_tensors
        return grad / (25 * x.abs() + 1) ** 2


class Spiking(nn.Module):
    """Two layers of leaky neurons over time."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(784, width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is time × batch × 784; gives counts of spikes."""
        a = x.new_zeros(x.shape[1], self.first.out_features)
        b, count = x.new_zeros(x.shape[1], 10), 0.0
        for current in self.first(x):
            a = 0.9 * a + current
            spike = Spike.apply(a - 1)
            a = a - spike
            b = 0.9 * b + self.second(spike)
            out = Spike.apply(b - 1)
            b, count = b - out, count + out
        return count


class Quantize(Function):
    """Rounding to 8 bits; the gradient passes where nothing was clipped."""

    @staticmethod
    def forward(ctx, x, scale):
        """Fake quantization, symmetric."""
        scaled = x / scale
        ctx.save_for_backward(scaled.abs() <= 127)
        return scaled.round().clamp(-127, 127) * scale

    @staticmethod
    def backward(ctx, grad):
        """Straight through."""
        (inside,) = ctx.saved_tensors
        return grad * inside, None


class QuantizedBlock(nn.Module):
    """A residual block whose weights and activations are quantized."""

    def __init__(self, channels: int):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both convolutions and the residual."""
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            weight = Quantize.apply(conv.weight, 0.01)
            y = functional.conv2d(Quantize.apply(y, 0.05), weight, conv.bias, padding=1)
            y = norm(y).relu()
        return x + y


class Swish(Function):
    """x·σ(x) that keeps x alone, as in EfficientNet's implementations."""

    @staticmethod
    def forward(ctx, x):
        """x·σ(x)"""
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        """The derivative, from x."""
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s * (1 + x * (1 - s)))


class Inverted(nn.Module):
    """An inverted residual block with the activation above."""

    def __init__(self, channels: int):
        super().__init__()
        wide = 6 * channels
        self.grow, self.shrink = nn.Conv2d(channels, wide, 1), nn.Conv2d(wide, channels, 1)
        self.depth = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (wide, wide, channels)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Expansion, depthwise convolution, projection."""
        y = Swish.apply(self.norms[0](self.grow(x)))
        y = Swish.apply(self.norms[1](self.depth(y)))
        return x + self.norms[2](self.shrink(y))


def _spiking(model: nn.Module) -> None:
    model(torch.rand(25, 64, 784)).square().mean().backward()


def _images(model: nn.Module) -> None:
    model(torch.randn(8, 32, 56, 56)).square().mean().backward()


MODELS: dict[str, Case] = {
    "spiking network, 25 steps, 64 × 784, width 256": (lambda: Spiking(256), _spiking),
    "quantized residual block, 8 × 32 × 56²": (lambda: QuantizedBlock(32), _images),
    "inverted residual block with its own swish, 8 × 32 × 56²": (lambda: Inverted(32), _images),
}

if __name__ == "__main__":
    main(__doc__.splitlines()[0], MODELS)
