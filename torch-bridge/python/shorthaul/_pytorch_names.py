"""Names of PyTorch's internals that differ between the versions that Shorthaul works with.

Owns the one place where such a name is looked up. Each is found by what a version has, not by its
number. Never changes PyTorch: ``_dynamo_mends`` and ``_older_tracers`` do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any, NoReturn

import torch
from torch._dynamo import exc
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import builtin
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses import FakeTensorMode

from ._pytorch_version import VERSION

try:
    #: What Dynamo lets through unchanged where a backend raises it.
    from torch._dynamo.exc import ShortenTraceback as PassingError
except ImportError:  # PyTorch 2.6: `_older_tracers` lets it through
    from torch._dynamo.exc import BackendCompilerFailed as PassingError

try:
    from torch._dynamo.types import ConvertFrameReturn
except ImportError:
    ConvertFrameReturn = None

try:
    from torch._dynamo.types import FrameAction, FrameExecStrategy
except ImportError:
    FrameAction = FrameExecStrategy = None

try:
    from torch._dynamo.variables import object_protocol
except ImportError:
    object_protocol = None

#: The modules that look up how Dynamo compares objects by identity.
IDENTITY_MODULES = tuple(
    module for module in (object_protocol, builtin) if hasattr(module, "vt_identity_compare")
)

#: The guard on the keys of a dictionary.
dict_keys_guard = getattr(GuardBuilder, "DICT_KEYS_MATCH", None) or GuardBuilder.DICT_KEYS

#: Names under which wrappers of a backend hold what they wrap.
WRAPPED = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")

#: Settings of Dynamo's that ``_older_tracers`` replaces where a version lacks them.
REPLACED = frozenset({"skip_tensor_guards_with_matching_dict_tags"})

#: Settings of Dynamo's that versions lack together with what they turn off.
ABSENT = frozenset({"use_recursive_dict_tags_for_guards", "skip_guards_on_constant_func_defaults"})

#: Whether Dynamo wraps every error of a backend.
WRAPS_ERRORS = PassingError is exc.BackendCompilerFailed

#: Errors of Dynamo's own, for which a frame runs in eager. Older versions let an assertion out.
TRACER_ERRORS = (exc.TorchRuntimeError, exc.InternalTorchDynamoError)
if VERSION < (2, 12):
    TRACER_ERRORS += (AssertionError,)

#: The setting of how many graphs Dynamo holds for one piece of Python, where its functions do not
#: take it.
GRAPH_LIMIT = "recompile_limit"
if not hasattr(torch._dynamo.config, GRAPH_LIMIT):
    GRAPH_LIMIT = "cache_size_limit"


@functools.cache
def _keeps_modes_apart() -> bool:
    """Whether fake tensors of another mode than that of the graph's tracer are no error."""
    of_tracer, other = FakeTensorMode(), FakeTensorMode()
    with tracing(TracingContext(of_tracer)), other:
        try:
            return detect_fake_mode() is of_tracer
        except AssertionError:
            return False


def tracing_apart() -> contextlib.AbstractContextManager:
    """A context in which another tracer may run, while Dynamo calls a backend."""
    return contextlib.nullcontext() if _keeps_modes_apart() else tracing(None)


def unimplemented(what: str, why: str) -> NoReturn:
    """Makes Dynamo break the graph here."""
    structured = getattr(exc, "unimplemented_v2", exc.unimplemented)
    if "gb_type" in structured.__code__.co_varnames:
        structured(gb_type=what, context="", explanation=why, hints=[])
    exc.unimplemented(f"{what} Explanation: {why}")


def is_tracers_own(failure: Exception) -> bool:
    """Whether Dynamo failed on code that may run well in eager."""
    return isinstance(failure, exc.InternalTorchDynamoError)


def leave_frame(for_ever: bool) -> Any:
    """What a compiler of frames answers if Python is to run this frame, or all of its code."""
    return None if ConvertFrameReturn is None else ConvertFrameReturn(apply_to_code=for_ever)


def keep_programs() -> Any:
    """What a compiler of frames answers if Python is to run calls that no program holds for."""
    if ConvertFrameReturn is None or FrameExecStrategy is None:
        return leave_frame(True)
    strategy = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.DEFAULT)
    return ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=True)


def sets_strategy(failure: Exception) -> bool:
    """Whether an error of Dynamo's says itself what becomes of the frame."""
    return getattr(failure, "frame_exec_strategy", None) is not None


def wrapped_by(compiler: Any) -> Any:
    """What a wrapper of a backend wraps; ``None`` if it is no wrapper."""
    for name in (*WRAPPED, "compiler_fn"):
        found = getattr(compiler, name, None)
        if found is not None:
            return found
    return None


def hints_of(env: Any) -> Any:
    """The numbers of the example behind the symbols of a ``ShapeEnv``."""
    found = getattr(env, "backed_var_to_val", None)
    return env.var_to_val if found is None else found


def has_unbacked(env: Any) -> bool:
    """Whether a ``ShapeEnv`` made symbols for what follows from values of tensors."""
    counter = env.unbacked_symint_counter
    return bool(counter if isinstance(counter, int) else next(copy.copy(counter)))


def in_backward_pass() -> bool:
    """Whether a backward pass runs this code."""
    return torch._C._current_graph_task_id() != -1


if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    _top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

    def has_saved_tensors_hooks() -> bool:
        """Whether somebody handles the tensors that are saved for a backward pass."""
        return _top_hooks(False) is not None
else:

    def has_saved_tensors_hooks() -> bool:
        """Whether somebody handles the tensors that are saved for a backward pass."""
        autograd = torch._C._autograd
        if autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return False
        try:
            # Autograd refuses to forbid what is in use.
            autograd._saved_tensors_hooks_disable("asked whether there are any")
        except RuntimeError:
            return True
        finally:
            autograd._saved_tensors_hooks_enable()
        return False


__all__ = [
    "ABSENT",
    "GRAPH_LIMIT",
    "IDENTITY_MODULES",
    "REPLACED",
    "TRACER_ERRORS",
    "WRAPPED",
    "WRAPS_ERRORS",
    "PassingError",
    "dict_keys_guard",
    "has_saved_tensors_hooks",
    "has_unbacked",
    "hints_of",
    "in_backward_pass",
    "is_tracers_own",
    "keep_programs",
    "leave_frame",
    "sets_strategy",
    "tracing_apart",
    "unimplemented",
    "wrapped_by",
]
