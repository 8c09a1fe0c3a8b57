"""The threads that run the kernels.

They are PyTorch's OpenMP threads if these can be found, so that two teams do not wait on the same
cores; threads of Shorthaul's own otherwise, or with ``SHORTHAUL_THREADS=own`` in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from . import _native


def share_with_pytorch() -> bool:
    """Takes PyTorch's threads for the kernels of this process. Returns whether it found them."""
    if os.environ.get("SHORTHAUL_THREADS") == "own":
        return False
    package = Path(torch.__file__).resolve().parent
    return _native.share_threads([str(package), str(package.with_name("torch.libs"))])
