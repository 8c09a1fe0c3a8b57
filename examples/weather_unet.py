"""Post-processes ensemble forecasts with a 3-D U-Net trained on CRPS.

The data have the form of ENS-10 (arXiv 2206.14786): ten members and a control run, several fields
on several pressure levels, a grid of latitudes and longitudes. The script makes them: waves with a
bias and too little spread, which the network learns to correct.
"""

import copy
import math

import shorthaul
import torch
from side_by_side import options, train
from torch import nn

N_MEMBERS, N_FIELDS, N_LEVELS, HEIGHT, WIDTH = 11, 2, 4, 16, 32


def forecasts(n: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ensembles ``[n, N_MEMBERS * N_FIELDS, N_LEVELS, HEIGHT, WIDTH]`` and the truth of a field."""
    generator = torch.Generator().manual_seed(step)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    lat = torch.linspace(-1, 1, HEIGHT)[:, None]
    lon = torch.linspace(0, 2 * math.pi, WIDTH)
    phase, size = normal(n, 1, 1, 1) * 2, 1 + 0.2 * normal(n, 1, 1, 1)
    level = torch.linspace(1, 0.5, N_LEVELS)[:, None, None]
    truth = size * level * (torch.sin(2 * lon + phase) + lat)
    fields = torch.stack([truth, torch.cos(truth)], 1)
    noise = 0.1 * normal(n, N_MEMBERS, N_FIELDS, N_LEVELS, HEIGHT, WIDTH)
    ensemble = 0.8 * fields[:, None] + 0.3 + noise
    return ensemble.flatten(1, 2), truth


def crps(mean: torch.Tensor, spread: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The continuous ranked probability score of normal forecasts, averaged."""
    z = (truth - mean) / spread
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    below = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return (spread * (z * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean()


def twice(before: int, after: int) -> nn.Sequential:
    """Two convolutions with batch normalization."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv3d(channels, after, 3, padding=1), nn.BatchNorm3d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two resolutions; mean and spread of one field on every level."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.down = twice(N_MEMBERS * N_FIELDS, width)
        self.pool = nn.MaxPool3d((1, 2, 2))
        self.middle = twice(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, (1, 2, 2), (1, 2, 2))
        self.out = nn.Sequential(twice(2 * width, width), nn.Conv3d(width, 2, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and spread, each ``[N, N_LEVELS, HEIGHT, WIDTH]``."""
        fine = self.down(x)
        coarse = self.up(self.middle(self.pool(fine)))
        correction, spread = self.out(torch.cat([fine, coarse], 1)).unbind(1)
        # The network corrects the mean of the members.
        members = x.unflatten(1, (N_MEMBERS, N_FIELDS))[:, :, 0]
        return members.mean(1) + correction, nn.functional.softplus(spread) + 1e-3


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """CRPS over one batch."""
    ensemble, truth = forecasts(2, step)
    return crps(*model(ensemble), truth)


def main() -> None:
    """Trains and compares with the raw ensemble."""
    chosen = options(__doc__, steps=40)
    ensemble, truth = forecasts(4, 10_000)
    members = ensemble.unflatten(1, (N_MEMBERS, N_FIELDS))[:, :, 0]
    raw = crps(members.mean(1), members.std(1), truth).item()
    plain = UNet()
    eager = copy.deepcopy(plain) if chosen.eager else None
    model = shorthaul.module(plain)
    train(
        model,
        eager,
        loss_of,
        lambda optim, m: optim.AdamW(m.parameters(), lr=1e-2),
        chosen.steps,
    )
    # The two share their parameters.
    plain.eval()
    with torch.no_grad():
        corrected = crps(*plain(ensemble), truth).item()
    print(f"CRPS of the raw ensemble {raw:.3f}, after {chosen.steps} steps {corrected:.3f}")


if __name__ == "__main__":
    main()
