"""Small models and inference beside PyTorch's eager: what a call costs besides its kernels.

Owns the models; ``beside_eager`` measures. Calls that take microseconds are repeated, and the table
has the time of all:

    .venv/bin/python bench/small_models.py --threads 2
"""

from __future__ import annotations

import torch
import torchvision
from beside_eager import main
from torch import nn


def mlp() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def encoder() -> nn.Module:
    """Four layers of an encoder of width 256."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()


class Decoder(nn.Module):
    """Four layers of a causal language model of width 256, with attention as most write it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(1000, 256)
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(8))
        self.qkv = nn.ModuleList(nn.Linear(256, 768) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.wide = nn.ModuleList(nn.Linear(256, 1024) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Linear(1024, 256) for _ in range(4))

    def forward(self, tokens):
        """Scores ``[batch, length, 1000]`` of the next tokens."""
        x = self.tokens(tokens)
        for i in range(4):
            joint = self.qkv[i](self.norms[2 * i](x)).unflatten(-1, (3, 4, 64))
            q, k, v = joint.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out[i](y.transpose(1, 2).flatten(2))
            y = nn.functional.gelu(self.wide[i](self.norms[2 * i + 1](x)))
            x = x + self.narrow[i](y)
        return x @ self.tokens.weight.T


def inference(x: torch.Tensor, n_calls: int = 1):
    """A step that calls a model without gradients."""

    def step(model):
        with torch.no_grad():
            for _ in range(n_calls):
                model(x)

    return step


def training(x: torch.Tensor, classes: torch.Tensor, n_calls: int = 1):
    """A step of forward and backward passes."""

    def step(model):
        for _ in range(n_calls):
            nn.functional.cross_entropy(model(x).flatten(0, -2), classes).backward()

    return step


if __name__ == "__main__":
    torch.manual_seed(0)
    IMAGE, VECTORS = torch.randn(1, 3, 224, 224), torch.randn(1, 64, 256)
    ROWS, TOKENS = torch.randn(32, 64), torch.randint(1000, (1, 64))
    CLASSES, FOLLOWING = torch.randint(10, (32,)), torch.randint(1000, (64,))
    main(
        __doc__.splitlines()[0],
        {
            "100 calls of two linear layers, 32 × 64": (mlp, inference(ROWS, 100)),
            "100 training steps of two linear layers, 32 × 64": (mlp, training(ROWS, CLASSES, 100)),
            "ResNet-18, inference, 1 × 224²": (
                lambda: torchvision.models.resnet18().eval(),
                inference(IMAGE),
            ),
            "`nn.TransformerEncoder`, inference, 1 × 64 × 256": (encoder, inference(VECTORS)),
            "causal decoder of 4 layers, inference, 1 × 64": (Decoder, inference(TOKENS)),
            "causal decoder of 4 layers, training, 1 × 64": (Decoder, training(TOKENS, FOLLOWING)),
        },
    )
