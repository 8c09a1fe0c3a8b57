"""``shorthaul.module``: a PyTorch module whose forward and backward run as compiled programs.

Owns the wrapper. It is an instance of a subclass of the model's own class that shares the model's
``__dict__``: parameters, buffers, submodules, hooks and the training flag are the model's, so
``state_dict`` keys, ``isinstance`` and attribute access do not change, and the model itself stays
an eager module.

Its ``forward`` goes through PyTorch's own tracer, Dynamo, whose guards decide when a program holds
and whose graph breaks leave to Python what no graph can hold; ``_dynamo`` compiles the graphs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn.modules.lazy import LazyModuleMixin

from ._dynamo import GraphCompiler, Options, make_guards_complete
from ._errors import ShorthaulError, first_line
from ._frames import FrameCompiler
from ._pytorch_names import GRAPH_LIMIT
from ._recipe import Recipe, text_of

_numbers = itertools.count()

#: How many graphs Dynamo may hold for one piece of Python before it runs in eager.
_MAX_GRAPHS = 64

#: How many deep copies of a module may need graphs of their own before later copies start anew.
_MOST_FAILED_COPIES = 4


_Model = TypeVar("_Model", bound=nn.Module)
_Class = TypeVar("_Class", bound=type[nn.Module])


class _Settings(TypedDict, total=False):
    """The options of :func:`module`, for type checkers."""

    fallback: Literal["eager", "error"]
    max_programs: int
    backend: Literal["auto", "cuda-emulated"]
    fullgraph: bool
    dynamic: bool | None
    warmup: Literal["wait", "background"]
    recipe: Recipe | str | os.PathLike[str] | None
    memory_budget: float | None
    planned_threads: int | None


@overload
def module(model: _Class, /, **settings: Unpack[_Settings]) -> _Class: ...
@overload
def module(model: _Model, /, **settings: Unpack[_Settings]) -> _Model: ...
@overload
def module(**settings: Unpack[_Settings]) -> Callable[[_Class], _Class]: ...
def module(
    model: nn.Module | type[nn.Module] | None = None,
    /,
    *,
    fallback: Literal["eager", "error"] = "eager",
    max_programs: int = 16,
    backend: Literal["auto", "cuda-emulated"] = "auto",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    warmup: Literal["wait", "background"] = "wait",
    recipe: Recipe | str | os.PathLike[str] | None = None,
    memory_budget: float | None = None,
    planned_threads: int | None = None,
) -> nn.Module | type[nn.Module] | Callable[[_Class], _Class]:
    """Returns a module that compiles ``model`` on its first call.

    ``model`` is an ``nn.Module``, or a class derived from it. For a module, the result is a
    compiled module that shares its parameters. For a class (also as ``@shorthaul.module``), the
    result is the class, whose instances are compiled. Without ``model``, the result is a decorator
    with these options. The module is compiled again when sizes, types, attributes, hooks or its
    mode change.

    - ``fallback``: what to do with operators that Shorthaul does not have. With ``"eager"``,
      PyTorch runs them between compiled regions, and each is named in one warning. ``"error"``
      raises :class:`shorthaul.Unsupported`, which lists all of them. It also raises
      :class:`shorthaul.CaptureError` where Python would run between two graphs, and where PyTorch
      would run a part or all of the module, as it does with packed sequences.
    - ``max_programs``: the largest number of programs of each part of the module, over all sizes
      and modes; after the first program of a trace with symbolic sizes, eight more of that trace
      count as one. PyTorch runs calls that would need another one, and a warning says so once.
    - ``backend``: ``"auto"`` runs on the device of the tensors, the CPU or a CUDA device.
      ``"cuda-emulated"`` takes a model of CPU tensors and executes its CUDA kernels on the CPU,
      slowly and with every memory access checked, for tests and dry runs.
    - ``fullgraph``: ``True`` raises an error if ``forward`` breaks into several graphs, as in
      ``torch.compile``.
    - ``dynamic``: whether Dynamo treats sizes as symbols, as in ``torch.compile``. With ``False``,
      programs of different sizes share no kernels.
    - ``warmup``: with ``"wait"``, a call waits until its kernels are compiled. With
      ``"background"``, PyTorch runs the calls until the kernels are ready, for every new size too.
      The machine's speed then decides which step is the first compiled one, so the last bits of
      results may vary.
    - ``recipe``: changes to the compiler's decisions, from :func:`shorthaul.recipe` or the path of
      a file. A :class:`shorthaul.RecipeWarning` names each change that cannot be made.
    - ``memory_budget``: memory for the intermediate results of a training step: the values kept for
      the backward pass, and the working memory of the larger pass. A number of bytes for each
      program, or a fraction below 1 of what the program takes without a budget. The backward pass
      computes values again to keep the budget, first those that add the least time per byte saved.
      Raises :class:`shorthaul.BudgetError`, with the least memory that was found, if it cannot.
    - ``planned_threads``: how many threads the kernels are planned for, by default as many as
      PyTorch has at the first call. Sums are cut into that many parts, so with a fixed number the
      results have the same bits whatever number of threads runs them. More threads than planned
      are not used.
    """
    text = None if recipe is None else text_of(recipe)
    options = Options(
        fallback,
        max_programs,
        backend,
        fullgraph,
        dynamic,
        warmup,
        text,
        memory_budget,
        planned_threads,
    )
    if model is None:
        return functools.partial(
            module,
            fallback=fallback,
            max_programs=max_programs,
            backend=backend,
            fullgraph=fullgraph,
            dynamic=dynamic,
            warmup=warmup,
            recipe=recipe,
            memory_budget=memory_budget,
            planned_threads=planned_threads,
        )
    if isinstance(model, type):
        return _decorate(model, options)
    return _wrap(model, options)


def _wrap(model: nn.Module, options: Options) -> nn.Module:
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        raise TypeError(
            f"shorthaul.module takes an nn.Module (not scripted) or a class derived from it, not "
            f"{type(model).__name__}"
        )
    if "forward" in model.__dict__:
        raise TypeError(
            f"this {type(model).__name__} has its own `forward` attribute; wrap the model "
            f"before patching it"
        )
    if hasattr(type(model), "_shorthaul_options"):
        return model
    wrapper = object.__new__(_wrapper_class(type(model), options))
    object.__setattr__(wrapper, "__dict__", model.__dict__)
    _share_distributed_state(model, wrapper)
    return wrapper


def _share_distributed_state(model: nn.Module, wrapper: nn.Module) -> None:
    """Lets FSDP2 find for the wrapper what it keeps for the model, by the module's identity."""
    states = sys.modules.get("torch.distributed._composable_state")
    known = states and states._module_state_mapping.get(model)
    if known is not None:
        states._module_state_mapping[wrapper] = known


@functools.cache
def _wrapper_class(base: type, options: Options) -> type:
    """A subclass of ``base`` that runs compiled; pickling and copying go through ``base``."""

    def reduce(self, protocol):
        return _wrap, (original_of(self), options)

    entry = _entry(base)
    run = getattr(base, entry)
    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": reduce,
        "_shorthaul_options": options,
        "_shorthaul_base": base,
        "_shorthaul_forward": run,
        entry: _compiled_forward(run),
    }
    if getattr(base, "__deepcopy__", None) is None:
        members["__deepcopy__"] = _deep_copy
    if getattr(base, "cls_to_become", None) is not None:
        members["cls_to_become"] = _wrapper_class(base.cls_to_become, options)
    return type(base.__name__, (base,), members)


def _deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a compiled module, which runs the same programs as long as they serve it."""
    copied = _wrap(copy.deepcopy(original_of(self), memo), type(self)._shorthaul_options)
    runner = _runners.get(self)
    if isinstance(runner, _RunnerOfCopy):
        runner = runner.runner
    if runner is not None and runner.has_room_for_copies():
        _runners[copied] = _RunnerOfCopy(runner)
    return copied


def _decorate(cls: type, options: Options) -> type:
    if not issubclass(cls, nn.Module):
        raise TypeError(
            f"@shorthaul.module decorates classes derived from nn.Module, not {cls.__name__}"
        )
    entry = _entry(cls)
    run = getattr(cls, entry)
    cls._shorthaul_options = options
    cls._shorthaul_forward = run
    setattr(cls, entry, _compiled_forward(run))
    return cls


def _entry(cls: type) -> str:
    """What a call of a module runs: ``forward``, or the ``__call__`` of a class without one."""
    has_forward = cls.forward is not nn.Module.forward
    return "forward" if has_forward or cls.__call__ is nn.Module.__call__ else "__call__"


def _compiled_forward(forward):
    @functools.wraps(forward)
    def compiled(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling() and not _is_ours():
                return _outside(self, args, kwargs)
            return forward(self, *args, **kwargs)
        if _is_transformed():
            return forward(self, *args, **kwargs)
        return runner_of(self)(self, args, kwargs)

    return compiled


def _run(self: nn.Module, args: tuple, kwargs: dict[str, Any]):
    return runner_of(self)(self, args, kwargs)


def _outside(self: nn.Module, args: tuple, kwargs: dict[str, Any]):
    """Runs a compiled module between the graphs of another compiler, which stops in front of it."""
    return torch.compiler.disable(_run)(self, args, kwargs)


# As `torch.compiler.disable` marks it, which would import PyTorch's compiler for everybody.
_outside._torchdynamo_disable = True


class _Calling(threading.local):
    """How many compiled modules this thread is inside of."""

    depth = 0


_calling = _Calling()


def _is_ours() -> bool:
    """Whether the tracer that runs now works for a compiled module around this one."""
    return _calling.depth > 0


# As `torch._dynamo.assume_constant_result` marks it: an answer, without a guard on it.
_is_ours._dynamo_marked_constant = True


_innermost_transform = torch._C._functorch.peek_interpreter_stack
_n_dispatch_modes = torch._C._len_torch_dispatch_stack


def _is_transformed() -> bool:
    """Whether PyTorch differentiates forward, maps, traces or fakes what runs now.

    A program is no function of such tensors; the module's own Python is.
    """
    return (
        _innermost_transform() is not None
        or _n_dispatch_modes() > 0
        or torch.jit.is_tracing()
        or forward_ad._current_level >= 0
    )


def original_of(wrapper: nn.Module) -> nn.Module:
    """The eager module that shares everything with ``wrapper``."""
    base = getattr(type(wrapper), "_shorthaul_base", None)
    if base is None:
        return wrapper
    original = object.__new__(base)
    object.__setattr__(original, "__dict__", wrapper.__dict__)
    return original


_runners: weakref.WeakKeyDictionary[nn.Module, Runner | _RunnerOfCopy]
_runners = weakref.WeakKeyDictionary()


def runner_of(wrapper: nn.Module) -> Runner | _RunnerOfCopy:
    """What runs a compiled module."""
    runner = _runners.get(wrapper)
    if runner is None:
        cls = type(wrapper)
        runner = _runners[wrapper] = Runner(
            cls._shorthaul_forward, cls._shorthaul_options, cls.__name__
        )
    return runner


class Runner:
    """A module's ``forward`` behind Dynamo, with a cache of its own."""

    def __init__(self, forward, options: Options, name: str):
        self.forward = forward
        self.is_first = True
        #: How many copies of the module needed graphs of their own.
        self.failed_copies = 0
        #: Whether what runs outside of programs is an error.
        self.is_strict = options.fallback == "error"
        self.compiler = GraphCompiler(options, name)
        self.max_programs = options.max_programs
        self.compiler.changes.arguments = _arguments_of(forward)
        self.optimized = _optimized(_with_own_code(forward), self.compiler)

    def __call__(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]):
        is_first = self.is_first
        if is_first:
            self.is_first = False
            if any(_is_uninitialized(child) for child in owner.modules()):
                # What a lazy module makes of its first inputs is made by Python alone.
                return self.forward(owner, *args, **kwargs)
        for value in args:
            if type(value) not in _PLAIN and _is_subclass(value):
                self.compiler.say_takes_subclass(type(value))
                return self.forward(owner, *args, **kwargs)
        for value in kwargs.values() if kwargs else ():
            if _is_subclass(value):
                self.compiler.say_takes_subclass(type(value))
                return self.forward(owner, *args, **kwargs)
        breaks = _breaks() if self.is_strict or is_first else {}
        left = self.compiler.left.to_python
        left_before = len(left)
        _calling.depth += 1
        try:
            result = self.optimized(owner, *args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, ShorthaulError):
                raise failure.inner_exception from None
            raise
        except Exception:
            # The tracer may have failed on what eager refuses as well.
            self.compiler.failures.clear()
            raise
        else:
            return self._checked(result, owner, left[left_before:], breaks, is_first)
        finally:
            _calling.depth -= 1
            del left[left_before:]

    def has_room_for_copies(self) -> bool:
        """Whether copies run by these graphs do not use up the number of programs or of graphs."""
        n_programs = max(self.compiler.n_programs.values(), default=0)
        return self.failed_copies < _MOST_FAILED_COPIES and 2 * n_programs < self.max_programs

    def _checked(self, result, owner: nn.Module, left: list[str], breaks, is_first: bool):
        """The result of a call, after what Python ran of it is said."""
        if is_first:
            new = _new_breaks(breaks)
            for reason in new:
                self.compiler.note_break(reason)
            if not self.compiler.n_graphs and any(True for _ in owner.parameters()):
                self.compiler.say_runs_nothing(left, new)
                return result
        for what in left:
            self.compiler.say_falls_back(what)
        if self.is_strict:
            for reason in _new_breaks(breaks):
                self.compiler.say_falls_back(f"Python runs it: {reason}")
        return result


class _RunnerOfCopy:
    """Runs a deep copy of a module for the first time, by the graphs of the module.

    Their guards decide whether they serve the copy. Where they often do not, later copies get
    runners of their own, because all graphs of a runner are looked through at each call.
    """

    def __init__(self, runner: Runner):
        self.runner = runner

    @property
    def compiler(self) -> GraphCompiler:
        """What compiles the graphs."""
        return self.runner.compiler

    def __call__(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]):
        runner = _runners[owner] = self.runner
        n_graphs = runner.compiler.n_graphs
        result = runner(owner, args, kwargs)
        runner.failed_copies += runner.compiler.n_graphs > n_graphs
        return result


def _breaks() -> dict[str, int]:
    """How often Dynamo left something to Python, by reason."""
    return dict(counters["graph_break"])


def _new_breaks(before: dict[str, int]) -> list[str]:
    """Why Dynamo has left something to Python since :func:`_breaks` gave ``before``."""
    new = [why for why, n in _breaks().items() if n > before.get(why, 0)]
    # The kind of break, and the line that explains it.
    return [" ".join([first_line(why), *map(str.strip, why.splitlines()[1:2])]) for why in new]


def _is_subclass(value: Any) -> bool:
    """Whether a tensor's own class says what operators do with it."""
    kind = type(value)
    return kind not in _PLAIN and issubclass(kind, torch.Tensor)


_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def _is_uninitialized(child: nn.Module) -> bool:
    return isinstance(child, LazyModuleMixin) and child.has_uninitialized_params()


def _with_own_code(forward):
    """A copy of a function whose code is its own, and with it Dynamo's cache."""
    if not isinstance(forward, types.FunctionType) or _is_torchs(forward):

        def run(module, /, *args, **kwargs):
            return forward(module, *args, **kwargs)

        # Dynamo remembers by a code's name and line which sizes change from call to call.
        run.__code__ = run.__code__.replace(co_name=f"run_{next(_numbers)}")
        return _with_own_code(run)
    own = types.FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    own.__dict__.update(forward.__dict__)
    own.__qualname__, own.__module__ = forward.__qualname__, forward.__module__
    return own


def _arguments_of(forward) -> tuple[str, ...]:
    """The names of what ``forward`` takes by position, without the module."""
    try:
        named = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in named if one.kind in by_position)


def _is_torchs(forward: types.FunctionType) -> bool:
    """Whether Dynamo takes a function for its own, which it would wrap under another name."""
    return os.path.dirname(torch.__file__) in forward.__code__.co_filename


def _optimized(forward, compiler: GraphCompiler):
    from torch import _dynamo

    make_guards_complete()
    options = compiler.options
    known = inspect.signature(_dynamo.optimize).parameters
    wanted = {"recompile_limit": _MAX_GRAPHS, "isolate_recompiles": True}
    more = {name: value for name, value in wanted.items() if name in known}
    optimize = _dynamo.optimize(
        compiler,
        nopython=options.fullgraph,
        dynamic=options.dynamic,
        guard_fail_fn=compiler.changes.note,
        **more,
    )
    if not options.fullgraph:
        limit = {} if "recompile_limit" in known else {GRAPH_LIMIT: _MAX_GRAPHS}
        optimize.callback = FrameCompiler(optimize.callback, compiler, limit)
    return optimize(forward)


__all__ = ["Options", "module"]
