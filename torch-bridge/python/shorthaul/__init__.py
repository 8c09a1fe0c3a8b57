"""Shorthaul for PyTorch: training with less data movement.

``shorthaul.module(model)`` gives a module with the same parameters, ``state_dict`` keys and
hooks whose forward and backward run as fused kernels; ``torch.compile(model,
backend="shorthaul")`` does the same behind PyTorch's own capture.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

# The version is checked before PyTorch's tracer is imported.
from . import _accelerate, _pytorch_version, _threads, cache, cuda, optim, products  # noqa: F401
from ._bisect import Bisection, bisect
from ._decisions import recipe
from ._errors import (
    BudgetError,
    CaptureError,
    CapturingError,
    CompileError,
    DivisionByZero,
    FallbackWarning,
    InputError,
    InternalError,
    InternalErrorWarning,
    OutOfRange,
    RecipeError,
    RecipeWarning,
    RecompileWarning,
    ShorthaulError,
    ToolchainError,
    Unsupported,
)
from ._machine import Level, Machine, machine
from ._profile import Profile, profile
from ._recipe import Decision, Recipe
from ._report import Report, report
from ._search import Searched, search
from ._tune import Tuned, tune
from .module import module

_threads.share_with_pytorch()
_accelerate.add_backend()

__version__ = "0.1.0"


if TYPE_CHECKING:
    from . import onnx as onnx
else:  # A type checker would take every name for one that this function knows.

    def __getattr__(name: str) -> ModuleType:
        """``shorthaul.onnx`` is imported when it is first used."""
        if name == "onnx":
            return importlib.import_module(".onnx", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Bisection",
    "BudgetError",
    "CaptureError",
    "CapturingError",
    "CompileError",
    "Decision",
    "DivisionByZero",
    "FallbackWarning",
    "InputError",
    "InternalError",
    "InternalErrorWarning",
    "Level",
    "Machine",
    "OutOfRange",
    "Recipe",
    "RecipeError",
    "RecipeWarning",
    "RecompileWarning",
    "Profile",
    "Report",
    "Searched",
    "ShorthaulError",
    "ToolchainError",
    "Tuned",
    "Unsupported",
    "bisect",
    "cache",
    "cuda",
    "machine",
    "module",
    "optim",
    "products",
    "profile",
    "recipe",
    "report",
    "search",
    "tune",
]
