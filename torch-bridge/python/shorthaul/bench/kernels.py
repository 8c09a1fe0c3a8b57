"""Times of single kernels: ``--profile``."""

from __future__ import annotations

import torch

import shorthaul

from .options import Setting
from .variants import inputs_of, model_of


def print_profile(setting: Setting, rounds: int, warmup: int) -> None:
    """The slowest kernels of a training step: medians over the rounds."""
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    example, inputs = setting.example, inputs_of(setting)
    measured = shorthaul.profile(
        shorthaul.module(model_of(setting)),
        *inputs,
        rounds=rounds,
        warmup=warmup,
        loss=example.loss,
    )
    print(f"{example.name}:\n{measured}")
