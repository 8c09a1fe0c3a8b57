"""Refuses a version of PyTorch that is too old, with an error that names those that work.

``shorthaul`` imports this module before those that use PyTorch's tracer. Owns the oldest version,
which ``pyproject.toml`` repeats as a requirement. Where PyTorch's versions differ, others look for
what a version has (``_pytorch_names``), or compare with ``VERSION``.
"""

import torch

#: The oldest version that works.
OLDEST = (2, 6)

#: The version that runs.
VERSION = tuple(int(number) for number in str(torch.__version__).split(".")[:2])

if VERSION < OLDEST:
    _oldest = "{}.{}".format(*OLDEST)
    raise ImportError(
        f"Shorthaul works with PyTorch {_oldest} or newer, and this is {torch.__version__}: "
        f"`pip install 'torch>={_oldest}'`"
    )
