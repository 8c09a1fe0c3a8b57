"""Families of operators: one module that gives one output for each case, so that a family costs one
compilation.

Owns the inputs of the operators' tests. Where a result differs, the case's name leads the message.
"""

import zlib

import torch
from against_eager import assert_matches
from torch import nn


class Family(nn.Module):
    """One output for each case, each from its own inputs."""

    def __init__(self, cases):
        super().__init__()
        self.cases = cases

    def forward(self, inputs):
        return {name: self.cases[name](*inputs[name]) for name in self.cases}


def check(cases):
    """``cases``: name to ``(function, *inputs)``. Inputs of a floating type get a gradient."""
    functions = {name: case[0] for name, case in cases.items()}
    inputs = {
        name: tuple(
            x.requires_grad_(not x.requires_grad and x.is_floating_point()) for x in case[1:]
        )
        for name, case in cases.items()
    }
    assert_matches(Family(functions), inputs)


def normal(*shape, seed="", scale=1.0):
    """Normal numbers, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape}{seed}".encode()))
    return torch.randn(shape, generator=generator) * scale


def between(low, high, *shape):
    """Uniform numbers."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{shape}".encode()))
    return torch.rand(shape, generator=generator) * (high - low) + low


def constant(x):
    """An input that gets no gradient."""
    return x.requires_grad_() if x.is_floating_point() else x


def ints(high, *shape, dtype=torch.int64):
    """Whole numbers in ``[0, high)``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{high}{shape}".encode()))
    return torch.randint(high, shape, generator=generator).to(dtype)
