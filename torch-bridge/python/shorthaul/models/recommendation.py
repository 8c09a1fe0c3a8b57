"""DLRM, a recommendation network with embedding tables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class DlrmConfig:
    """DLRM (arXiv 1906.00091); the defaults have Criteo's 13 numbers and 26 categories.

    Each category has a table of ``n_rows`` rows, of which an example looks up ``n_looked_up``.
    """

    n_numbers: int = 13
    n_tables: int = 26
    n_rows: int = 20000
    n_looked_up: int = 4
    width: int = 64
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)


def layers(*widths: int) -> list[nn.Module]:
    """Linear layers, each with ReLU."""
    made: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        made += [nn.Linear(before, after), nn.ReLU()]
    return made


class Dlrm(nn.Module):
    """Numbers through a network, categories through tables, all pairs multiplied."""

    def __init__(self, config: DlrmConfig):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(config.n_rows, config.width, mode="sum") for _ in range(config.n_tables)
        )
        self.bottom = nn.Sequential(*layers(config.n_numbers, *config.bottom, config.width))
        n_vectors = config.n_tables + 1
        n_pairs = n_vectors * (n_vectors - 1) // 2
        self.top = nn.Sequential(
            *layers(config.width + n_pairs, *config.top), nn.Linear(config.top[-1], 1)
        )
        pairs = torch.tril_indices(n_vectors, n_vectors, -1)
        self.register_buffer("pairs", pairs[0] * n_vectors + pairs[1], persistent=False)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        """``[N, n_numbers]`` and rows ``[N, n_tables, n_looked_up]`` to click scores ``[N]``."""
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *looked_up], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def visits(config: DlrmConfig):
    """What a :class:`Dlrm` is called with."""
    shape = (config.n_tables, config.n_looked_up)
    return lambda batch: (
        torch.randn(batch, config.n_numbers),
        torch.randint(config.n_rows, (batch, *shape)),
    )
