"""Kernels stay within their own arrays, as the compiler's checks of bounds see it."""

import os
import subprocess
import sys

PARTS = """
import shorthaul, torch
import torch.nn.functional as F
from torch import nn

class Parts(nn.Module):
    # The gradient of each part is 0 outside of it. A block of 64 channels ends before others begin.
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(96, 96, 4, padding=3, groups=96)

    def forward(self, x, mask):
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        first, second, third = (F.silu(y) * mask[:, :, None]).split([64, 16, 16], -1)
        return first.square(), second.sin(), third.exp()

torch.set_num_threads(1)
model = shorthaul.module(Parts(), fallback="error")
x = torch.randn(2, 12, 96, requires_grad=True)
results = model(x, torch.ones(2, 12, dtype=torch.long))
sum(result.sum() for result in results).backward()
assert x.grad.isfinite().all()
"""


def test_parts_of_channels_stay_within_their_blocks(tmp_path):
    environment = os.environ | {
        "SHORTHAUL_CC": "cc -fsanitize=bounds -fsanitize-undefined-trap-on-error",
        "SHORTHAUL_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PARTS], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
