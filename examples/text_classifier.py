"""Fine-tunes a text classifier: first the new head alone, then all parameters.

The sentences are made from two lists of words, so that nothing is downloaded.
"""

import copy

import shorthaul
import torch
import torch.nn.functional as F
from side_by_side import options, train
from torch import nn

GOOD = "bright calm clear fine fresh gentle kind lucky merry warm".split()
BAD = "bitter cold dark dull grim harsh sad stale weary wrong".split()
NEUTRAL = "the a day sea road house was and with of in after before two".split()
WORDS = ["<pad>", *NEUTRAL, *GOOD, *BAD]
LENGTH = 12


def sentences(n: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Word numbers ``[n, LENGTH]``, padded with 0, and labels: 1 where good words prevail."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(2, (n,), generator=generator)
    tokens = torch.zeros(n, LENGTH, dtype=torch.int64)
    for row, label in enumerate(labels.tolist()):
        mood = GOOD if label else BAD
        length = int(torch.randint(6, LENGTH + 1, (), generator=generator))
        for place in range(length):
            words = mood if place % 3 == 0 else NEUTRAL
            word = words[int(torch.randint(len(words), (), generator=generator))]
            tokens[row, place] = WORDS.index(word)
    return tokens, labels


class Classifier(nn.Module):
    """A transformer encoder over words, and a head on the mean of its outputs."""

    def __init__(self, width: int = 32, n_layers: int = 2):
        super().__init__()
        self.words = nn.Embedding(len(WORDS), width, padding_idx=0)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Class scores ``[N, 2]``."""
        is_padding = tokens == 0
        hidden = self.encoder(self.words(tokens) + self.places, src_key_padding_mask=is_padding)
        kept = (~is_padding).unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Cross-entropy over one batch."""
    tokens, labels = sentences(16, step)
    return F.cross_entropy(model(tokens), labels)


def main() -> None:
    """Trains the head, then everything, and prints the accuracy on new sentences."""
    chosen = options(__doc__, steps=20)
    plain = Classifier()
    model = shorthaul.module(plain)
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    n_head_steps = chosen.steps // 2
    for parameter in body:
        parameter.requires_grad_(False)
    print("the head alone")
    train(
        model,
        copy.deepcopy(plain) if chosen.eager else None,
        loss_of,
        lambda optim, m: optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2),
        n_head_steps,
    )
    for parameter in body:
        parameter.requires_grad_(True)
    print("all parameters")
    train(
        model,
        copy.deepcopy(plain) if chosen.eager else None,
        lambda m, step: loss_of(m, n_head_steps + step),
        lambda optim, m: optim.AdamW(m.parameters(), lr=3e-3),
        chosen.steps - n_head_steps,
    )
    tokens, labels = sentences(64, 10_000)
    with torch.no_grad():
        accuracy = (plain(tokens).argmax(1) == labels).float().mean().item()
    print(f"accuracy on new sentences: {accuracy:.0%}")


if __name__ == "__main__":
    main()
