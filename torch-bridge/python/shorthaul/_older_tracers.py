"""What the tracers of older versions of PyTorch do otherwise, changed where Shorthaul needs it.

Owns changes of Dynamo's own classes that make PyTorch 2.6 behave as newer versions do. Each is made
only where the version lacks what a newer one has, and acts only on graphs of Shorthaul's.
``_dynamo_mends`` holds the changes that all versions need.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable

from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import functions
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from ._pytorch_names import PassingError

IsOurs = Callable[[object], bool]


def let_errors_pass(is_ours: IsOurs) -> None:
    """before  ``BackendCompilerFailed`` around an error   after  the error, if it asks for it"""
    original = OutputGraph.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, PassingError):
                raise failure.inner_exception from failure.inner_exception.__cause__
            raise

    OutputGraph.call_user_compiler = call_user_compiler


def guard_inlined_functions(is_ours: IsOurs) -> None:
    """A function or method that is replaced by another one is another graph."""
    original = InliningInstructionTranslator.inline_call_

    def inline_call_(parent, func, args, kwargs):
        source = getattr(func, "source", None)
        if source is not None and is_ours(parent.output.compiler_fn):
            _guard_code(func, source)
        return original(parent, func, args, kwargs)

    InliningInstructionTranslator.inline_call_ = staticmethod(inline_call_)


def _guard_code(func, source) -> None:
    try:
        function = func.get_function()
    except NotImplementedError:  # functions that Dynamo itself runs
        return
    is_plain = isinstance(function, types.FunctionType)
    if not is_plain or (function.__module__ or "").startswith("torch"):
        return
    if isinstance(func, functions.UserMethodVariable):
        source = AttrSource(source, "__func__")
    install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))


def guard_identity(is_ours: IsOurs) -> None:
    """What ``a is b`` decides holds for these two objects."""
    original = BuiltinVariable.call_function

    def call_function(self, tx, args, kwargs):
        result = original(self, tx, args, kwargs)
        if self.fn in (operator.is_, operator.is_not) and is_ours(tx.output.compiler_fn):
            for side in args:
                side = getattr(side, "realize", lambda side=side: side)()
                if isinstance(side, UserDefinedObjectVariable) and side.source is not None:
                    install_guard(side.source.make_guard(GuardBuilder.ID_MATCH))
        return result

    BuiltinVariable.call_function = call_function


__all__ = ["guard_identity", "guard_inlined_functions", "let_errors_pass"]
