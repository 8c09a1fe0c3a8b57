"""Networks over tokens and samples: BERT, GPT-2, LLaMA, WaveNet, LSTM; their configurations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class BertConfig:
    """BERT (arXiv 1810.04805); the defaults are BERT-large."""

    vocabulary: int = 30522
    length: int = 512
    width: int = 1024
    n_heads: int = 16
    n_layers: int = 24
    n_inner: int = 4096
    dropout: float = 0.1


def bert_layer(config: BertConfig) -> nn.Module:
    """One encoder layer: attention, GELU feed-forward, LayerNorm after each."""
    return nn.TransformerEncoderLayer(
        config.width,
        config.n_heads,
        config.n_inner,
        config.dropout,
        activation="gelu",
        batch_first=True,
    )


def bert_large_layer() -> nn.Module:
    """One encoder layer of BERT-large: hidden 1024, 16 heads, intermediate 4096, GELU."""
    return bert_layer(BertConfig())


class Bert(nn.Module):
    """BERT with the head for masked words, whose matrix is the embedding's."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width, padding_idx=0)
        self.places = nn.Embedding(config.length, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(bert_layer(config) for _ in range(config.n_layers))
        self.head = nn.Sequential(
            nn.Linear(config.width, config.width), nn.GELU(), nn.LayerNorm(config.width)
        )
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, tokens: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Tokens ``[N, T]`` and where they are padding to word scores ``[N, T, vocabulary]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places) + self.segments(torch.zeros_like(tokens))
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=is_padding)
        return F.linear(self.head(x), self.words.weight, self.bias)


@dataclass(frozen=True)
class GptConfig:
    """GPT-2 (Radford and others, 2019); the defaults are its smallest size."""

    vocabulary: int = 50257
    length: int = 1024
    width: int = 768
    n_heads: int = 12
    n_layers: int = 12
    dropout: float = 0.1


class GptBlock(nn.Module):
    """Causal attention and a feed-forward network, each after a LayerNorm."""

    def __init__(self, config: GptConfig):
        super().__init__()
        width = config.width
        self.n_heads, self.dropout = config.n_heads, config.dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.after = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, T, width]`` to the same."""
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropped)
        x = x + self.after(self.project(y.transpose(1, 2).flatten(2)))
        return x + self.after(self.mlp(self.before_mlp(x)))


class Gpt(nn.Module):
    """A decoder; the matrix of the output is the embedding's."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.Sequential(*(GptBlock(config) for _ in range(config.n_layers)))
        self.norm = nn.LayerNorm(config.width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens ``[N, T]`` to scores of the next ones, ``[N, T, vocabulary]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.words(tokens) + self.places(places))
        return F.linear(self.norm(x), self.words.weight)


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder as LLaMA (arXiv 2302.13971), with shared keys; the defaults are SmolLM-135M's."""

    vocabulary: int = 49152
    width: int = 576
    n_heads: int = 9
    n_key_heads: int = 3
    n_layers: int = 30
    n_inner: int = 1536
    rotation_base: float = 10000.0


class LlamaBlock(nn.Module):
    """Attention with rotated positions and shared keys, then SwiGLU, each after an RMSNorm."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head = config.width // config.n_heads
        self.n_heads, self.n_key_heads = config.n_heads, config.n_key_heads
        width, keys = config.width, config.n_key_heads * self.head
        self.before_attention = nn.RMSNorm(width, eps=1e-5)
        self.before_mlp = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.project = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, config.n_inner, bias=False) for _ in range(2))
        self.down = nn.Linear(config.n_inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """``[N, T, width]`` to the same; ``cos`` and ``sin`` are ``[T, head]``."""
        y = self.before_attention(x)
        q = rotated(self.q(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2), cos, sin)
        k = rotated(self.k(y).unflatten(-1, (self.n_key_heads, -1)).transpose(1, 2), cos, sin)
        v = self.v(y).unflatten(-1, (self.n_key_heads, -1)).transpose(1, 2)
        n_shared = self.n_heads // self.n_key_heads
        k, v = (t.repeat_interleave(n_shared, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864) on ``[N, heads, T, head]``."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """A decoder; the matrix of the output is the embedding's."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.base, self.head = config.rotation_base, config.width // config.n_heads
        self.words = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens ``[N, T]`` to scores of the next ones, ``[N, T, vocabulary]``."""
        x = self.words(tokens)
        places = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)
        powers = torch.arange(0, self.head, 2, device=x.device, dtype=x.dtype) / self.head
        angles = torch.outer(places, self.base**-powers).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.words.weight)


@dataclass(frozen=True)
class WaveNetConfig:
    """WaveNet (arXiv 1609.03499): stacks of gated convolutions whose dilation doubles."""

    n_levels: int = 256
    width: int = 64
    n_skip: int = 256
    n_stacks: int = 3
    n_dilations: int = 10


class WaveNet(nn.Module):
    """Each layer sees its past only: ``[N, T]`` levels to scores ``[N, levels, T]``."""

    def __init__(self, config: WaveNetConfig):
        super().__init__()
        width = config.width
        self.dilations = [2**i for i in range(config.n_dilations)] * config.n_stacks
        self.levels = nn.Embedding(config.n_levels, width)
        self.gated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.dilations
        )
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations)
        self.skip = nn.ModuleList(nn.Conv1d(width, config.n_skip, 1) for _ in self.dilations)
        self.head = nn.Sequential(
            nn.ReLU(),
            nn.Conv1d(config.n_skip, config.n_skip, 1),
            nn.ReLU(),
            nn.Conv1d(config.n_skip, config.n_levels, 1),
        )

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Scores of the next level at each place."""
        x, out = self.levels(samples).transpose(1, 2), None
        for i, dilation in enumerate(self.dilations):
            filtered, gate = self.gated[i](F.pad(x, (dilation, 0))).chunk(2, 1)
            y = torch.tanh(filtered) * torch.sigmoid(gate)
            skip = self.skip[i](y)
            out = skip if out is None else out + skip
            x = x + self.residual[i](y)
        return self.head(out).transpose(1, 2)


class LstmClassifier(nn.Module):
    """An LSTM over rows ``[N, T, n_inputs]`` and a linear layer on its last state."""

    def __init__(self, n_inputs: int = 128, width: int = 256, n_layers: int = 1, n_out: int = 10):
        super().__init__()
        self.lstm = nn.LSTM(n_inputs, width, n_layers, batch_first=True)
        self.head = nn.Linear(width, n_out)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(self.lstm(rows)[0][:, -1])
