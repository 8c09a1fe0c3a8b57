"""Fine-tunes a text classifier whose body has learned to guess hidden words.

The body is trained to guess words first; then comes a new head, at first alone, then with the body.

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
WORDS = ["<pad>", "<hidden>", *NEUTRAL, *GOOD, *BAD]
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


class Body(nn.Module):
    """A transformer encoder over words: ``[N, LENGTH]`` to ``[N, LENGTH, width]``."""

    def __init__(self, width: int = 32, n_layers: int = 2):
        super().__init__()
        self.width = width
        self.words = nn.Embedding(len(WORDS), width, padding_idx=0)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the encoder makes of each word and its neighbors."""
        embedded = self.words(tokens) + self.places
        return self.encoder(embedded, src_key_padding_mask=tokens == 0)


class Guesser(nn.Module):
    """The body, and scores of all words at each place ``[N, LENGTH, words]``."""

    def __init__(self, body: Body):
        super().__init__()
        self.body = body
        self.guess = nn.Linear(body.width, len(WORDS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the words that may stand at each place."""
        return self.guess(self.body(tokens))


class Classifier(nn.Module):
    """The body, and a head on the mean of its outputs."""

    def __init__(self, body: Body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Class scores ``[N, 2]``."""
        hidden = self.body(tokens)
        kept = (tokens != 0).unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


def loss_of_guesses(model: nn.Module, step: int) -> torch.Tensor:
    """Cross-entropy of the words of one batch that are hidden, about a third of them."""
    tokens, _ = sentences(16, step)
    drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(step))
    is_hidden = (drawn < 1 / 3) & (tokens != 0)
    scores = model(tokens.masked_fill(is_hidden, WORDS.index("<hidden>")))
    wanted = tokens.masked_fill(~is_hidden, -100)
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-100)


def loss_of_classes(model: nn.Module, step: int) -> torch.Tensor:
    """Cross-entropy over one batch."""
    tokens, labels = sentences(16, step)
    return F.cross_entropy(model(tokens), labels)


def main() -> None:
    """Trains the body, the head, then both, and prints the accuracy on new sentences."""
    chosen = options(__doc__, steps=80)
    n_guesses, n_heads = max(1, chosen.steps // 2), max(1, chosen.steps // 4)

    def phase(title: str, plain: nn.Module, model: nn.Module, loss_of, lr: float, steps: int):
        print(title)
        train(
            model,
            copy.deepcopy(plain) if chosen.eager else None,
            loss_of,
            lambda optim, m: optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=lr),
            steps,
        )

    body = Body()
    guesser = Guesser(body)
    phase("hidden words", guesser, shorthaul.module(guesser), loss_of_guesses, 1e-2, n_guesses)
    plain = Classifier(body)
    model = shorthaul.module(plain)
    body.requires_grad_(False)
    phase("the head alone", plain, model, loss_of_classes, 1e-2, n_heads)
    body.requires_grad_(True)
    n_rest = chosen.steps - n_guesses - n_heads
    phase("all parameters", plain, model, loss_of_classes, 3e-3, n_rest)
    tokens, labels = sentences(64, 10_000)
    with torch.no_grad():
        accuracy = (plain(tokens).argmax(1) == labels).float().mean().item()
    print(f"accuracy on new sentences: {accuracy:.0%}")


if __name__ == "__main__":
    main()
