"""Models with second derivatives beside PyTorch's eager: times of whole steps.

Owns the models; ``beside_eager`` measures:

    .venv/bin/python bench/second_derivatives.py --threads 2
"""

from __future__ import annotations

import torch
from beside_eager import Case, main
from torch import nn
from torch.func import hessian, vmap

grad = torch.autograd.grad


class Burgers(nn.Module):
    """The residual of Burgers' equation of a network (Raissi et al. 2019)."""

    def __init__(self, width: int):
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(3):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """u_t + u·u_x − u_xx / 100"""
        x, t = x.requires_grad_(), t.requires_grad_()
        u = self.net(torch.cat([x, t], 1))
        u_x, u_t = grad(u, (x, t), torch.ones_like(u), create_graph=True)
        u_xx = grad(u_x, x, torch.ones_like(u), create_graph=True)[0]
        return u_t + u * u_x - 0.01 * u_xx


class Laplacian(nn.Module):
    """The Laplacian of a network at each point, by ``torch.func``."""

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, width), nn.Softplus(), nn.Linear(width, width), nn.Softplus()
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The trace of the Hessian of each row."""
        curvature = vmap(hessian(lambda row: self.head(self.net(row)).squeeze(-1)))(x)
        return curvature.diagonal(dim1=-2, dim2=-1).sum(-1)


class Forces(nn.Module):
    """An energy of all pairs of atoms and their forces, in the style of SchNet."""

    def __init__(self, width: int):
        super().__init__()
        self.kinds = nn.Embedding(8, width)
        self.filter = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.out = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centres", torch.linspace(0, 5, 32))

    def forward(self, kinds, positions, first, second):
        """Energy and forces."""
        features = self.kinds(kinds)
        distances = (positions[first] - positions[second]).norm(dim=-1)
        radial = torch.exp(-2 * (distances[:, None] - self.centres) ** 2)
        messages = features[first] * self.filter(radial)
        energy = self.out(features.index_add(0, second, messages)).sum()
        return energy, -grad(energy, positions, create_graph=True)[0]


def _critic() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2)]
    for n in (64, 128):
        layers += [
            nn.Conv2d(n, 2 * n, 4, 2, 1),
            nn.InstanceNorm2d(2 * n, affine=True),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 8))


def _burgers(model: nn.Module) -> None:
    x, t = torch.rand(2, 1024, 1)
    model(x, t).square().mean().backward()


def _laplacian(model: nn.Module) -> None:
    model(torch.randn(512, 3)).square().mean().backward()


def _forces(model: nn.Module) -> None:
    n = 64
    first, second = torch.triu_indices(n, n, 1)
    positions = torch.randn(n, 3, requires_grad=True)
    energy, forces = model(torch.arange(n) % 8, positions, first, second)
    (energy + forces.square().sum()).backward()


def _penalty(model: nn.Module) -> None:
    """WGAN-GP (Gulrajani et al. 2017): the gradient is taken outside of the critic."""
    x = torch.randn(16, 3, 64, 64, requires_grad=True)
    y = model(x)
    slope = grad(y.sum(), x, create_graph=True)[0].flatten(1)
    (y.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()


MODELS: dict[str, Case] = {
    "Burgers' equation, 1024 points, 4 × 64": (lambda: Burgers(64), _burgers),
    "Laplacian by `torch.func`, 512 points, 2 × 64": (lambda: Laplacian(64), _laplacian),
    "forces of 64 atoms, 2016 pairs, width 128": (lambda: Forces(128), _forces),
    "WGAN-GP critic, 16 × 64², penalty outside": (_critic, _penalty),
}

if __name__ == "__main__":
    main(__doc__.splitlines()[0], MODELS)
