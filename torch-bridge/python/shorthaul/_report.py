"""``shorthaul.report``: what a program does, in numbers.

Owns the Python face of the compiler's report; the numbers are the compiler's own.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from .module import module, original_of, runner_of


class Report:
    """A compiler's report: ``data`` as parsed JSON, ``str()`` as text."""

    def __init__(self, data: dict[str, Any], text: str):
        self.data = data
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return self._text


def report(model: nn.Module, *inputs, **kwargs) -> Report:
    """Compiles ``model`` for these inputs, in its present mode, and reports on the program.

    Kernels after fusion, bytes moved by each against the least possible, arithmetic, arena size.
    Raises what :func:`shorthaul.module` raises; nothing is run.
    """
    compiled = model if hasattr(type(model), "_shorthaul_options") else module(model)
    call = runner_of(compiled).prepare(compiled, inputs, kwargs)
    if call is None:
        raise ValueError(
            f"{type(original_of(compiled)).__name__} runs through PyTorch for these inputs"
        )
    native = call.program.native
    return Report(json.loads(native.report()), native.report_text())
