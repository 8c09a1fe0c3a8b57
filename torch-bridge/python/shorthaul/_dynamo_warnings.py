"""``warnings.warn`` inside of a captured graph.

Dynamo would break the graph, and where it cannot go on behind the break, Python would run the whole
model. A warning whose text is known becomes a call behind the graph, on every call of the model;
Python's filters then decide, as in eager, and know the same line. Only the order of warnings and
computation is another.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

from torch._dynamo.source import GlobalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, functions
from torch._dynamo.variables.misc import DebuggingVariable


def repeat_warnings(is_ours: Callable[[object], bool]) -> None:
    """Makes the change; ``is_ours`` tells whether a compiler of Dynamo's is Shorthaul's."""
    call_any = functions.SkipFunctionVariable.call_function

    def call_function(self, tx, args, kwargs):
        if self.value is not warnings.warn or not is_ours(tx.output.compiler_fn):
            return call_any(self, tx, args, kwargs)
        values = [*args, *kwargs.values()]
        if not values or not all(value.is_python_constant() for value in values):
            return call_any(self, tx, args, kwargs)
        named = {key: value.as_python_constant() for key, value in kwargs.items()}
        say = _warning(tx, *(value.as_python_constant() for value in args), **named)
        if say is None:
            return call_any(self, tx, args, kwargs)
        source = GlobalSource(tx.output.install_global("shorthaul_warning", say))
        tx.output.root_tx.debug_locals.append((DebuggingVariable(say, source=source), []))
        return ConstantVariable.create(None)

    functions.SkipFunctionVariable.call_function = call_function


def _warning(tx: InstructionTranslator, message, category=None, stacklevel=1, **more):
    """A function that gives the warning for the line that eager's names; ``None`` if unknown."""
    if more or not isinstance(message, str) or not isinstance(stacklevel, int):
        return None
    for _ in range(stacklevel - 1):
        tx = getattr(tx, "parent", None)
        if tx is None:
            return None
    place = tx.f_globals
    return functools.partial(
        warnings.warn_explicit,
        message,
        category or UserWarning,
        tx.f_code.co_filename,
        tx.lineno,
        place.get("__name__"),
        place.setdefault("__warningregistry__", {}),
    )
