"""Refuses a version of PyTorch that is not tested, with an error that names those that work.

``shorthaul`` imports this module before those that use PyTorch's tracer. Owns the versions, which
``pyproject.toml`` repeats as a requirement. Where PyTorch's versions differ, others look for what a
version has (``_pytorch_names``), or compare with ``VERSION``.
"""

import torch

#: The oldest version that works.
OLDEST = (2, 6)

#: The first and the last version of those in between that the tests have not run with: where a
#: tracer differs, results may differ without a word.
EXCLUDED = ((2, 7), (2, 13))

#: The version that runs.
VERSION = tuple(int(number) for number in str(torch.__version__).split(".")[:2])

if VERSION < OLDEST or EXCLUDED[0] <= VERSION <= EXCLUDED[1]:
    _oldest, _newer = "{}.{}".format(*OLDEST), f"{EXCLUDED[1][0]}.{EXCLUDED[1][1] + 1}"
    raise ImportError(
        f"Shorthaul works with PyTorch {_oldest}, and with {_newer} or newer, and this is "
        f"{torch.__version__}: `pip install 'torch>={_newer}'`, or 'torch=={_oldest}.*'"
    )
