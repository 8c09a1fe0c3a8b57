"""Refuses a PyTorch that is too old, with a sentence instead of a missing name of PyTorch's.

``shorthaul`` imports this module before those that use PyTorch's tracer. Owns the oldest version,
which ``pyproject.toml`` repeats as a requirement.
"""

import torch

#: The oldest version whose tracer has all that Shorthaul uses.
OLDEST = (2, 15)


def _check(version: str) -> None:
    numbers = tuple(int(number) for number in version.split(".")[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"Shorthaul needs PyTorch {oldest} or newer, and this is {version}: "
            f"`pip install 'torch>={oldest}'`"
        )


_check(str(torch.__version__))
