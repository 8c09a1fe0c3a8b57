"""Where the tests get their native half: the real one, or the interpreter of the document.

``SHORTHAUL_NATIVE=interpreter`` runs the wrapper's tests without a compiler.

The tests keep kernels in a cache folder of their own: the user's may hold measured limits of the
machine, from which the compiler would make other plans.
"""

import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

_CACHE = Path(__file__).resolve().parents[2] / "target" / "test-cache"
os.environ.setdefault("SHORTHAUL_CACHE_DIR", str(_CACHE))

if importlib.util.find_spec("shorthaul") is None or os.environ.get("SHORTHAUL_NATIVE"):
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

if os.environ.get("SHORTHAUL_NATIVE") == "interpreter":
    import document_interpreter

    sys.modules["shorthaul._native"] = document_interpreter

if not metadata.entry_points(group="torch_dynamo_backends", name="shorthaul"):
    # Not installed but found on the path: register what the entry point would have.
    from shorthaul._dynamo import shorthaul as backend

    torch._dynamo.register_backend(backend, name="shorthaul")


@pytest.fixture(autouse=True)
def _threads():
    """What a test does with the number of threads ends with it."""
    n_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True)
def _seed(request):
    if "interpreter" in os.environ.get("SHORTHAUL_NATIVE", "") and "missing" in request.node.name:
        pytest.skip("PyTorch's own operators lack nothing")
    torch.manual_seed(0)
