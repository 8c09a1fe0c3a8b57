"""What becomes of a piece of Python that Dynamo reaches while a compiled module runs.

Owns the answer to a frame that Dynamo cannot make a graph of. By default Dynamo would leave all of
the frame's code to Python for ever, without a word, also the calls that it has programs for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._changes import why_broken
from ._dynamo import GraphCompiler
from ._errors import first_line
from ._origins import line_of, refused_at
from ._pytorch_names import (
    TRACER_ERRORS,
    WRAPPED,
    is_tracers_own,
    keep_programs,
    leave_frame,
    sets_strategy,
    wrapped_by,
)

#: Makes programs of code without tensors too, so that their guards say when that changes.
_SETTINGS = {"allow_empty_graphs": True}


class FrameCompiler:
    """Handles frames as Dynamo does, except that frames on which it fails run in eager.

    Eager then raises errors of the model's own, and errors of the tracer's are not raised at all.
    Code on which the tracer itself fails twice for one reason, or thrice on what eager runs, is not
    given to it again, whoever runs it in this process. What that code calls still is, and calls
    that it has programs for still run these. If leaving something to Python is an error, each call
    tries again, and reports it again.
    """

    def __init__(self, convert, compiler: GraphCompiler, settings: dict[str, Any] | None = None):
        functools.wraps(convert)(self)
        for name in WRAPPED:
            if hasattr(convert, name):
                setattr(self, name, getattr(convert, name))
        self.convert = convert
        self.refused = _note_refusals(convert)
        known = {k: v for k, v in _SETTINGS.items() if hasattr(torch._dynamo.config, k)}
        self.settings = {**known, **(settings or {})}
        self.compiler = compiler

    def __call__(self, frame, *more):
        self.refused.clear()
        try:
            with torch._dynamo.config.patch(self.settings):
                answer = self.convert(frame, *more)
        except TRACER_ERRORS as failure:
            reason, most = first_line(failure).rstrip(": "), 2 if is_tracers_own(failure) else 3
            what = f"PyTorch's tracer failed: {reason}{_place(frame.f_code)}"
            return leave_frame(self._is_too_often(frame.f_code, reason, what, most))
        if not self.refused:
            self.compiler.changes.say_pending()
            return answer
        self.compiler.changes.pending = None
        failure = self.refused.pop()
        reason = why_broken(first_line(failure))
        if "graph break in loop" in str(failure):
            reason += ", inside of a loop"
        where = refused_at(failure) or line_of(frame.f_code)
        what = f"its tracer leaves `{frame.f_code.co_name}` to Python at {where}: {reason}"
        if self._is_too_often(frame.f_code, reason, what, 3):
            return keep_programs()
        return leave_frame(False)

    def _is_too_often(self, code, reason: str, what: str, most: int) -> bool:
        """Notes that code is left to Python. Returns whether it was ``most`` times or more."""
        compiler = self.compiler
        if what not in compiler.left.to_python:
            compiler.left.to_python.append(what)
        compiler.failures[code, reason] += 1
        return compiler.options.fallback != "error" and compiler.failures[code, reason] >= most


def _place(code) -> str:
    # Our own frames say nothing about the model.
    is_own = code.co_filename.endswith("/shorthaul/module.py")
    return "" if is_own else f", in `{code.co_name}` ({line_of(code)})"


class _Noting:
    """Handles frames as Dynamo does, but notes its refusals before they become an answer."""

    def __init__(self, convert, refused: list[Exception]):
        self._convert, self._refused = convert, refused

    def __call__(self, *args, **kwargs):
        try:
            return self._convert(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as failure:
            if not sets_strategy(failure):
                self._refused.append(failure)
            raise

    def __getattr__(self, name: str):
        return getattr(self._convert, name)


def _note_refusals(convert) -> list[Exception]:
    """A list to which every refusal of ``convert`` will be added."""
    refused: list[Exception] = []
    while convert is not None:
        # A wrapper may have a copy of what it wraps, and does not call it.
        if hasattr(convert, "_inner_convert"):
            convert._inner_convert = _Noting(convert._inner_convert, refused)
        convert = wrapped_by(convert)
    return refused


__all__ = ["FrameCompiler"]
