"""Programs of hundreds of operators, and operators with hundreds of operands, beside eager."""

import pytest
import torch
from against_eager import assert_matches
from torch import nn


class Parts(nn.Module):
    """A concatenation of 400 parts."""

    def forward(self, x):
        return torch.cat([x] * 400) * 2


class Terms(nn.Module):
    """A sum of 400 rows."""

    def forward(self, x):
        return sum(row * 1.5 for row in x)


class Chain(nn.Module):
    """800 operators, each of which reads the one before."""

    def forward(self, x):
        for _ in range(400):
            x = x * 0.999 + 0.001
        return x


@pytest.mark.parametrize("program", [Parts, Terms, Chain])
def test_hundreds_of_operators_compile(program):
    torch.manual_seed(0)
    assert_matches(program(), torch.randn(400, 8, requires_grad=True))
