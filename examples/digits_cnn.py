"""Trains a convolutional network on scikit-learn's handwritten digits."""

import copy

import shorthaul
import torch
import torch.nn.functional as F
from side_by_side import options, train
from sklearn.datasets import load_digits
from torch import nn


def network() -> nn.Module:
    """``[N, 1, 8, 8]`` to class scores ``[N, 10]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    """Trains on 1,500 images and prints the accuracy on the other 297."""
    chosen = options(__doc__, steps=45)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    training, testing = order[:1500], order[1500:]

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        rows = training[torch.arange(step * 100, step * 100 + 100) % 1500]
        return F.cross_entropy(model(images[rows]), labels[rows])

    plain = network()
    eager = copy.deepcopy(plain) if chosen.eager else None
    model = shorthaul.module(plain)
    train(
        model,
        eager,
        loss_of,
        lambda optim, m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        chosen.steps,
    )
    # The two share their parameters.
    plain.eval()
    with torch.no_grad():
        accuracy = (plain(images[testing]).argmax(1) == labels[testing]).float().mean().item()
    print(f"accuracy on images it has not seen: {accuracy:.0%}")


if __name__ == "__main__":
    main()
