"""Pre-trains a small GPT, character by character, on the Zen of Python."""

import codecs
import copy
import importlib.util
import re
from pathlib import Path

import shorthaul
import torch
import torch.nn.functional as F
from side_by_side import options, train
from torch import nn

CONTEXT = 32


def zen() -> str:
    """The text of ``this``, a module that Python ships; importing it would print it."""
    spec = importlib.util.find_spec("this")
    source = Path(spec.origin).read_text(encoding="utf-8")
    return codecs.decode(re.search(r'"""(.*?)"""', source, re.DOTALL)[1], "rot13")


class Block(nn.Module):
    """Causal attention and a feed-forward network, each after a LayerNorm."""

    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.before_attention = nn.LayerNorm(width)
        self.before_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, T, width]`` to the same."""
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """A decoder over characters; the embedding is the output layer too."""

    def __init__(self, n_tokens: int, width: int = 64, n_layers: int = 2, n_heads: int = 4):
        super().__init__()
        self.tokens = nn.Embedding(n_tokens, width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, n_heads) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, ``[N, T, n_tokens]``."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def main() -> None:
    """Trains, then prints the most likely continuation of a few words."""
    chosen = options(__doc__, steps=40)
    text = zen()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - CONTEXT, (16, 1), generator=generator)
        rows = data[starts + torch.arange(CONTEXT + 1)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    plain = Gpt(len(letters))
    eager = copy.deepcopy(plain) if chosen.eager else None
    model = shorthaul.module(plain)
    train(
        model,
        eager,
        loss_of,
        lambda optim, m: optim.AdamW(m.parameters(), lr=3e-3),
        chosen.steps,
    )
    # `plain` has the trained parameters, too: the lengths grow, and each would be compiled.
    said = "Simple is "
    with torch.no_grad():
        for _ in range(30):
            recent = torch.tensor([[letters.index(letter) for letter in said[-CONTEXT:]]])
            said += letters[int(plain(recent)[0, -1].argmax())]
    print(repr(said))


if __name__ == "__main__":
    main()
