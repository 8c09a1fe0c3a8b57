"""``shorthaul.module``: a PyTorch module whose forward and backward are compiled programs.

Owns the wrapper, and the choice of a program for a call. The wrapper is an instance of a subclass
of the model's own class that shares the model's ``__dict__``: parameters, buffers, submodules,
hooks and the training flag are the model's, so ``state_dict`` keys, ``isinstance`` and attribute
access do not change, and the model itself stays an eager module.

A program is specific to the inputs' structure, shapes and dtypes, to the train/eval flag of
every submodule, and to which tensors require a gradient. Never captures (``_capture``) nor runs
kernels (``_operators``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _autocast, _native, _operators
from ._capture import Captured, capture
from ._errors import (
    CaptureError,
    CompileError,
    InputError,
    RecompileWarning,
    ShorthaulError,
    Unsupported,
)
from ._guards import Guards, watching
from ._place import BACKENDS, named_tensors, place_of
from ._program import Program, compile_program

log = logging.getLogger("shorthaul")

_FALLBACKS = ("error", "eager")


@dataclass(frozen=True)
class Options:
    """How a module is compiled; see :func:`module`."""

    fallback: str = "error"
    max_programs: int = 8
    backend: str = "auto"

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is one of {BACKENDS}, not {self.backend!r}")
        if self.fallback not in _FALLBACKS:
            raise ValueError(f"fallback is one of {_FALLBACKS}, not {self.fallback!r}")
        if self.max_programs < 1:
            raise ValueError(f"max_programs is at least 1, not {self.max_programs}")


def module(model=None, /, *, fallback: str = "error", max_programs: int = 8, backend: str = "auto"):
    """Compiles ``model`` on its first call, and again for new shapes, dtypes or modes.

    ``model`` is an ``nn.Module`` (a compiled module that shares its parameters is returned) or a
    class derived from it (its instances become compiled modules; usable as ``@shorthaul.module``).

    ``fallback``: what to do with a model that Shorthaul cannot compile: ``"error"`` raises
    ``Unsupported`` or ``CaptureError``; ``"eager"`` says so once and runs it through PyTorch.
    ``max_programs``: how many programs one module may have; further shapes run through PyTorch,
    said aloud once.
    ``backend``: ``"auto"`` runs where the tensors are, on the CPU or on a CUDA device;
    ``"cuda-emulated"`` executes the CUDA kernels of a model of CPU tensors on the CPU, slowly and
    with every access checked, for tests and dry runs.
    """
    options = Options(fallback, max_programs, backend)
    if model is None:
        return functools.partial(
            module, fallback=fallback, max_programs=max_programs, backend=backend
        )
    if isinstance(model, type):
        return _decorate(model, options)
    return _wrap(model, options)


def _wrap(model: nn.Module, options: Options) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        raise TypeError(
            f"shorthaul.module takes an nn.Module (not scripted) or a class of them, not "
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
    return wrapper


@functools.cache
def _wrapper_class(base: type, options: Options) -> type:
    """A subclass of ``base`` that runs compiled; pickling and copying go through ``base``."""

    def reduce(self, protocol):
        return _wrap, (original_of(self), options)

    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": reduce,
        "_shorthaul_options": options,
        "_shorthaul_base": base,
        "_shorthaul_forward": base.forward,
        "forward": _compiled_forward(base.forward),
    }
    return type(base.__name__, (base,), members)


def _decorate(cls: type, options: Options) -> type:
    if not issubclass(cls, nn.Module):
        raise TypeError(
            f"@shorthaul.module decorates classes derived from nn.Module, not {cls.__name__}"
        )
    cls._shorthaul_options = options
    cls._shorthaul_forward = cls.forward
    cls.forward = _compiled_forward(cls.forward)
    return cls


def _compiled_forward(forward):
    @functools.wraps(forward)
    def compiled(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            return _outside(self, args, kwargs)
        if _is_being_traced():
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


def original_of(wrapper: nn.Module) -> nn.Module:
    """The eager module that shares everything with ``wrapper``."""
    base = getattr(type(wrapper), "_shorthaul_base", None)
    if base is None:
        return wrapper
    original = object.__new__(base)
    object.__setattr__(original, "__dict__", wrapper.__dict__)
    return original


_tracing = threading.local()


@contextlib.contextmanager
def _traced():
    """Inside, compiled modules run their own Python forward, so that it can be captured."""
    before = getattr(_tracing, "on", False)
    _tracing.on = True
    try:
        yield
    finally:
        _tracing.on = before


def _is_being_traced() -> bool:
    return torch.compiler.is_compiling() or getattr(_tracing, "on", False) or torch.jit.is_tracing()


_runners: weakref.WeakKeyDictionary[nn.Module, Runner] = weakref.WeakKeyDictionary()


def runner_of(wrapper: nn.Module) -> Runner:
    """The programs of a compiled module; a copy of a module starts with none."""
    runner = _runners.get(wrapper)
    if runner is None:
        cls = type(wrapper)
        runner = _runners[wrapper] = Runner(cls._shorthaul_forward, cls._shorthaul_options)
    return runner


class Runner:
    """The programs of one module, by what they are specific to."""

    def __init__(self, forward, options: Options):
        self.forward = forward
        self.options = options
        self.structure: Structure | None = None
        #: What was made for a key, with the attributes it holds for; ``None``: PyTorch runs it.
        self.calls: dict[Any, list[tuple[Guards, Call | None]]] = {}
        self.is_full = False
        self.lock = threading.RLock()

    def __call__(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]):
        call, leaves = self._call_for(owner, args, kwargs)
        if call is None:
            return self._run_eagerly(owner, args, kwargs)
        return call(self.structure, leaves)

    def prepare(self, owner: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Call | None:
        """The compiled call for these arguments, without running it."""
        return self._call_for(owner, args, kwargs)[0]

    def _call_for(self, owner, args, kwargs) -> tuple[Call | None, list[Any]]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        mode = (torch.is_grad_enabled(), _autocast.key(), torch.get_num_threads())
        key = (self._structure_of(owner).key(), spec, _leaf_keys(leaves), mode)
        found = self._made_for(key)
        if not found:
            with self.lock:
                # Another thread may have made it meanwhile.
                found = self._made_for(key) or [self._prepare(owner, args, kwargs, leaves, key)]
        return found[0], leaves

    def _made_for(self, key) -> list[Call | None]:
        made = self.calls.get(key, ())
        return [call for guards, call in made if guards.hold()][:1]

    def _structure_of(self, owner: nn.Module) -> Structure:
        if self.structure is None or not self.structure.is_current():
            self.structure = Structure(owner)
            self.calls.clear()  # made for other submodules
            self.is_full = False
        return self.structure

    def _run_eagerly(self, owner, args, kwargs):
        with _traced():
            return self.forward(owner, *args, **kwargs)

    def _prepare(self, owner, args, kwargs, leaves, key) -> Call | None:
        name = type(owner).__name__
        n_programs = sum(call is not None for made in self.calls.values() for _, call in made)
        if n_programs >= self.options.max_programs:
            if not self.is_full:
                self.is_full = True
                self._say(
                    f"{name} already has {n_programs} programs for other shapes, modes or "
                    f"attributes; this call ({_describe(leaves)}) and others like it run through "
                    f"PyTorch. Pad the inputs to fewer shapes, or raise max_programs.",
                )
            return None
        if n_programs:
            before = _describe_key(next(reversed(self.calls)))
            message = (
                f"{name} is compiled again ({n_programs + 1} of {self.options.max_programs}) "
                f"for {_describe(leaves)}"
            )
            if key in self.calls:
                self._say(f"{message}, because an attribute that forward reads has changed")
            elif before != _describe_key(key):
                self._say(f"{message}; before, it was called with {before}")
            else:
                log.info("%s in another mode", message)
        guards, call = Guards(), None
        try:
            guards, call = self._compile(owner, args, kwargs, leaves)
        except (Unsupported, CaptureError, CompileError, InputError) as error:
            if self.options.fallback != "eager":
                raise
            self._say(f"{name} runs through PyTorch: {error}")
        self.calls.setdefault(key, []).append((guards, call))
        return call

    def _say(self, message: str) -> None:
        warnings.warn(message, RecompileWarning, stacklevel=7)

    def _compile(self, owner, args, kwargs, leaves) -> tuple[Guards, Call]:
        place = place_of(named_tensors(leaves, self.structure.slots), self.options.backend)
        if _autocast.requested(place.device) and not place.runs_cuda_text:
            raise CompileError(
                "autocast is not supported yet on the CPU; leave the `torch.autocast` region "
                "around this module"
            )
        place.refuse_capture(type(owner).__name__)
        if any(isinstance(leaf, torch.Tensor) and not leaf.numel() for leaf in leaves):
            self._say(f"{type(owner).__name__} runs through PyTorch where an input is empty")
            return Guards(), None
        supported = _supported()
        try:
            return self._compile_within(supported, place, owner, args, kwargs, leaves)
        except Unsupported as error:
            # A rule that refuses a case of its operator leaves it to PyTorch's decomposition.
            refused = {target.split(" ")[0] for target, _ in error.operators} & supported
            if not refused:
                raise
            try:
                return self._compile_within(supported - refused, place, owner, args, kwargs, leaves)
            except (Unsupported, CaptureError):
                raise error from None

    def _compile_within(self, supported, place, owner, args, kwargs, leaves) -> tuple[Guards, Call]:
        captured, guards = self._capture(supported, place, owner, args, kwargs, leaves)
        grad = torch.is_grad_enabled()
        inputs = [self.structure.tensor(spec, leaves) for spec in captured.inputs]
        requires_grad = [grad and tensor.requires_grad for tensor in inputs]
        for output in captured.outputs:
            if output.kind == "user_input" and grad and leaves[output.user_idx].requires_grad:
                raise CaptureError(
                    f"forward writes input {output.user_idx} in place, and that input requires "
                    f"a gradient; write to a copy"
                )
        program = compile_program(captured, requires_grad, place)
        return guards, Call(captured, program, any(requires_grad))

    def _capture(self, supported, place, owner, args, kwargs, leaves) -> tuple[Captured, Guards]:
        bare = _bare(owner, _autocast.casting(self.forward, place.device))
        try:
            with (
                _traced(),
                _autocast.suspended(place.device),
                self.structure.parameters_as_such(),
                watching(bare, owner) as guards,
            ):
                captured = capture(bare, args, kwargs, supported=supported)
        except CaptureError as error:
            if not self.calls:
                raise
            before = _describe_key(next(reversed(self.calls)))
            raise InputError(
                f"{error} This call was given {_describe(leaves)}; before, "
                f"{type(owner).__name__} was called with {before}."
            ) from error.__cause__
        guards.forget_written(type(owner).__name__)
        return captured, guards


@functools.cache
def _supported() -> frozenset[str]:
    return frozenset(_native.supported_targets())


def _bare(owner: nn.Module, forward) -> nn.Module:
    """``owner`` with its Python forward and without its own hooks, which run outside it."""
    cls = type(owner)
    members = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    bare = object.__new__(type(cls.__name__, (cls,), members))
    hooks = {
        name: type(value)()
        for name, value in owner.__dict__.items()
        if name.endswith("_hooks") and value
    }
    object.__setattr__(bare, "__dict__", {**owner.__dict__, **hooks})
    return bare


class Structure:
    """Where a module's parameters and buffers live, looked up anew at every call.

    Slots are ``(dict, name)`` pairs of the modules' own dictionaries, so reassigned parameters
    and ``torch.func.functional_call`` are seen.
    """

    def __init__(self, owner: nn.Module):
        modules = list(owner.modules())
        #: Their dictionaries; the owner itself must not be held, or it would live for ever.
        self.states = [child.__dict__ for child in modules]
        self.children = [(child._modules, list(child._modules.values())) for child in modules]
        self.slots: dict[str, tuple[dict, str]] = {}
        for path, child in owner.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for tensors in (child._parameters, child._buffers):
                for name in tensors:  # also those that are None now and may be set later
                    self.slots[prefix + name] = (tensors, name)
        self.names = [list(child._parameters) + list(child._buffers) for child in modules]

    def is_current(self) -> bool:
        """Whether no submodule, parameter or buffer was added, removed or replaced by a module."""
        return all(list(children.values()) == known for children, known in self.children) and all(
            len(state["_parameters"]) + len(state["_buffers"]) == len(known)
            for state, known in zip(self.states, self.names, strict=True)
        )

    def key(self):
        """What a program is specific to on the module's side."""
        tensors = [tensors[name] for tensors, name in self.slots.values()]
        return (
            tuple([state["training"] for state in self.states]),
            tuple(
                [
                    None if t is None else (t.dtype, t.shape, t.requires_grad, t.device)
                    for t in tensors
                ]
            ),
            len({id(t) for t in tensors}),
        )

    @contextlib.contextmanager
    def parameters_as_such(self):
        """Inside, tensors that stand in for parameters (``functional_call``) are parameters."""
        replaced = []
        for state in self.states:
            parameters = state["_parameters"]
            for name, tensor in parameters.items():
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    replaced.append((parameters, name, tensor))
                    parameters[name] = nn.Parameter(tensor.detach(), tensor.requires_grad)
        try:
            yield
        finally:
            for tensors, name, tensor in replaced:
                tensors[name] = tensor

    def tensor(self, spec, leaves: list[Any]) -> torch.Tensor:
        """The tensor that an input of a captured graph stands for in this call."""
        if spec.kind == "user":
            return leaves[spec.user_idx]
        if spec.kind == "constant":
            return spec.constant
        tensors, name = self.slots[spec.target]
        return tensors[name]


class Call:
    """A program bound to the way its module is called."""

    def __init__(self, captured: Captured, program: Program, differentiable: bool):
        self.captured = captured
        self.program = program
        self.handle = _operators.register(program)
        self.differentiable = differentiable
        self.specs = [spec for spec in captured.inputs if spec.kind != "constant"]
        buffers = {output.target for output in captured.outputs if output.kind == "buffer"}
        users = {output.user_idx for output in captured.outputs if output.kind == "user_input"}
        #: Positions among the leaves of what the call writes.
        self.written = sorted(users)
        #: Outputs that no differentiated input reaches.
        self.constant_outputs = sorted(
            set(range(len(program.user_outputs))) - set(program.differentiable_user_outputs)
        )
        #: Inputs that the call writes when the forward pass is over, though the backward pass
        #: reads their old value.
        self.kept = [
            i
            for i, spec in enumerate(self.specs)
            if i in program.backward_reads
            and (
                spec.target in buffers
                if spec.kind == "buffer"
                else spec.kind == "user" and spec.user_idx in users
            )
        ]

    def __call__(self, structure: Structure, leaves: list[Any]):
        tensors = [structure.tensor(spec, leaves) for spec in self.specs]
        if self.written:
            _refuse_overlap(leaves, self.written)
        place = self.program.place
        if place.runs_cuda_text:
            inputs = [place.aligned(tensor) for tensor in tensors]
        else:
            inputs = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        for i in self.kept:
            inputs[i] = inputs[i].clone()
        if self.program.uses_seed:
            inputs.append(place.seed())
        *outputs, state, _saved = torch.ops.shorthaul.forward(inputs, self.handle)
        if self.program.state_bytes:
            self._write_state(structure, leaves, state)
        if self.differentiable:
            for i in self.constant_outputs:
                outputs[i] = outputs[i].detach()
        return self._returned(tensors, leaves, outputs, structure)

    def _write_state(self, structure: Structure, leaves: list[Any], state: torch.Tensor) -> None:
        """Gives the buffers that the module writes their new values, as eager would have."""
        targets = []
        for output in self.captured.outputs:
            if output.kind == "buffer":
                tensors, name = structure.slots[output.target]
                targets.append(tensors[name])
            elif output.kind == "user_input":
                targets.append(leaves[output.user_idx])
        with torch.no_grad():
            torch._foreach_copy_(targets, self.program.state_views(state))

    def _returned(self, tensors, leaves, outputs, structure):
        users = {}
        for i, output in enumerate(self.captured.outputs):
            if output.kind == "user":
                users[i] = outputs[len(users)]
        flat = []
        for kind, value in self.captured.returns:
            if kind == "output":
                flat.append(users[value])
            elif kind == "input":
                flat.append(structure.tensor(self.captured.inputs[value], leaves))
            else:
                flat.append(value)
        return pytree.tree_unflatten(flat, self.captured.out_spec)


def _refuse_overlap(leaves: list[Any], written: list[int]) -> None:
    """A program reads its inputs as they were; eager would read what was written through a twin."""
    spans = [_span(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    for i in written:
        for k, span in enumerate(spans):
            if k != i and span and span[0] < spans[i][1] and spans[i][0] < span[1]:
                raise InputError(
                    f"forward writes argument {i} in place, and argument {k} shares its memory; "
                    f"pass a copy"
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def _leaf_keys(leaves: list[Any]) -> tuple:
    keys = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            keys.append((leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            keys.append((type(leaf), leaf))
        else:
            raise InputError(
                f"argument {i} is a {type(leaf).__module__}.{type(leaf).__name__}; a compiled "
                f"module takes tensors, "
                "numbers, strings and None, in tuples, lists and dicts (torch.from_numpy for "
                "arrays)"
            )
    return tuple(keys)


def _describe(leaves: list[Any]) -> str:
    return _describe_leaf_keys(_leaf_keys(leaves))


def _describe_key(key) -> str:
    return _describe_leaf_keys(key[2])


def _describe_leaf_keys(keys: tuple) -> str:
    parts = []
    for first, second, *_ in keys:
        if isinstance(first, torch.dtype):
            parts.append(f"{str(first).removeprefix('torch.')}{list(second)}")
        else:
            parts.append(repr(second))
    return ", ".join(parts) or "no arguments"


__all__ = ["Options", "ShorthaulError", "module"]
