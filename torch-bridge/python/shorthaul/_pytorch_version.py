"""Refuses a PyTorch that is too old, with a sentence instead of a missing name of PyTorch's.

``shorthaul`` imports this module before those that use PyTorch's tracer. Owns the oldest version,
which ``pyproject.toml`` repeats as a requirement. Where PyTorch's versions differ, others compare
with ``VERSION``.
"""

import torch

#: The oldest version whose tracer has all that Shorthaul uses.
OLDEST = (2, 6)

#: The version that runs.
VERSION = tuple(int(number) for number in str(torch.__version__).split(".")[:2])

if VERSION < OLDEST:
    _oldest = ".".join(map(str, OLDEST))
    raise ImportError(
        f"Shorthaul needs PyTorch {_oldest} or newer, and this is {torch.__version__}: "
        f"`pip install 'torch>={_oldest}'`"
    )
