"""Trains a compiled model and, on request, a copy in eager PyTorch.

Owns the training loop and the command line that the examples here share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType

import shorthaul
import torch
from torch import nn


def options(description: str, steps: int) -> argparse.Namespace:
    """The command line: ``--steps``, ``--eager``, ``--seed``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, default=steps, help=f"training steps ({steps})")
    parser.add_argument("--eager", action="store_true", help="also train a copy in eager PyTorch")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (0)")
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    return chosen


def train(
    model: nn.Module,
    eager: nn.Module | None,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    optimizer_of: Callable[[ModuleType, nn.Module], torch.optim.Optimizer],
    steps: int,
) -> None:
    """Trains ``model``, and ``eager`` if given.

    ``loss_of(model, step)`` is the loss of one batch. ``optimizer_of(optim, model)`` makes an
    optimizer of ``shorthaul.optim``, and for ``eager`` of ``torch.optim``.
    """
    ways = {"shorthaul": (model, optimizer_of(shorthaul.optim, model))}
    if eager is not None:
        ways["eager"] = (eager, optimizer_of(torch.optim, eager))
    for step in range(steps):
        losses = []
        for way, (called, optimizer) in ways.items():
            optimizer.zero_grad()
            loss = loss_of(called, step)
            loss.backward()
            optimizer.step()
            losses.append(f"{way} {loss.item():.4f}")
        print(f"step {step}: loss {', '.join(losses)}")
