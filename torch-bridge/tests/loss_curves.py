"""Trains a small model twice, in eager and through Shorthaul, and compares the losses.

Owns the rule of the framework tests: 20 steps, each loss within ``TOLERANCE`` of eager's, and
programs of Shorthaul's ran in every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import shorthaul
import torch
from shorthaul._call import recorded
from torch import nn

N_STEPS = 20

#: Relative and absolute tolerance of a loss. Rounding differs by about 1e-6 in a step, and twenty
#: updates let it grow.
TOLERANCE = 1e-4

#: The two ways to compile a model.
WRAPS = {
    "module": shorthaul.module,
    "compile": lambda model: torch.compile(model, backend="shorthaul"),
}


def assert_same_curve(found: Sequence[float], eager: Sequence[float]) -> None:
    """Twenty losses that are eager's, and that fall."""
    assert len(found) == len(eager) == N_STEPS, (len(found), len(eager))
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(eager), rtol=TOLERANCE, atol=TOLERANCE
    )
    assert sum(eager[-5:]) < sum(eager[:5]), "the model learns nothing, so the test sees nothing"


def compare_training(
    model: nn.Module, train: Callable[[nn.Module], list[float]], wrap: str
) -> nn.Module:
    """Runs ``train`` on a copy in eager and on a compiled copy; gives the compiled copy."""
    torch._dynamo.reset()
    eager = train(copy.deepcopy(model))
    compiled = WRAPS[wrap](copy.deepcopy(model))
    with recorded() as calls:
        found = train(compiled)
    assert_same_curve(found, eager)
    assert len(calls) >= N_STEPS, f"only {len(calls)} calls of programs in {N_STEPS} steps"
    return compiled


class Block(nn.Module):
    """A residual block of a small transformer without attention."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """A classifier of four-element rows, made of blocks."""

    def __init__(self, width: int = 16, n_blocks: int = 2):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows_and_labels(n: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with labels that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 4, generator=generator)
    return rows, rows[:, :3].argmax(1)
