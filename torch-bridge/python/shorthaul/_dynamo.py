"""Turns a graph that Dynamo captured into a function: PyTorch's parts and our regions.

Owns the backend of ``torch.compile(model, backend="shorthaul")`` and of ``shorthaul.module``, the
loop that leaves to PyTorch what no region can hold, and the settings with which Dynamo guards
everything that eager would notice. Never looks at modules or Python: Dynamo does that.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._guards import CompileContext
from torch._subclasses import FakeTensorMode

from . import _dynamo_mends
from ._autocast import AUTOCAST, drop_idle_regions
from ._changes import Changes, why_broken
from ._checkpoint import checkpointed, is_checkpoint, written_by
from ._complex import write_out_complex_numbers
from ._custom_functions import adopt as adopt_functions
from ._custom_functions import write_out_functions
from ._draws import DRAW, number_draws
from ._errors import (
    CaptureError,
    CompileError,
    FallbackWarning,
    InputError,
    InternalError,
    InternalErrorWarning,
    RecipeWarning,
    RecompileWarning,
    ShorthaulError,
    ToolchainError,
    Unsupported,
    first_line,
)
from ._errors import Refused as RefusedNodes
from ._inner_gradients import unless_hooked, with_gradients_inside, write_out_gradients
from ._nodes import is_operand_itself, value_of
from ._older_tracers import call_backend_init, drop_idle_dropouts
from ._origins import OF_GRADIENT, SOURCE, module_path, source_of
from ._partition import (
    Ambient,
    NotSplit,
    RegionPlan,
    Split,
    emit,
    whole_graph_reason,
)
from ._place import BACKENDS
from ._pytorch_names import ABSENT, REPLACED, PassingError, dict_keys_guard, wrapped_by
from ._recipe import check_budget, text_of
from ._region import Region
from ._rewrites import simplify, take_views
from ._sizes import expression, is_factor, write_out_sizes

log = logging.getLogger("shorthaul")

_FALLBACKS = ("eager", "error")
_WARMUPS = ("wait", "background")
_MOST_THREADS = 1024
_TORCH_COMPILE_OPTIONS = {
    "fallback",
    "max_programs",
    "backend",
    "warmup",
    "recipe",
    "memory_budget",
    "planned_threads",
}

#: This many further sizes of a trace count as one program.
_SIZES_AS_ONE = 8

#: Settings for guards that Dynamo leaves out for speed; without them, it misses changes.
_SETTINGS = {
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_numpy_random_stream": True,
    "use_recursive_dict_tags_for_guards": False,
    "skip_guards_on_constant_func_defaults": False,
    "rewrite_assert_with_torch_assert": False,
}

#: Dictionaries of hooks that run around every module.
_GLOBAL_HOOKS = sorted(
    name
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
)


@dataclass(frozen=True)
class Options:
    """How a module is compiled; see :func:`shorthaul.module`."""

    fallback: str = "eager"
    max_programs: int = 16
    backend: str = "auto"
    fullgraph: bool = False
    dynamic: bool | None = None
    warmup: str = "wait"
    #: The text of a recipe.
    recipe: str | None = None
    #: Bytes of intermediate results of each program; below 1, a fraction of the bytes without it.
    memory_budget: float | None = None
    #: How many threads programs are planned for; ``None``: PyTorch's number.
    planned_threads: int | None = None

    def __post_init__(self):
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, not {self.backend!r}")
        if self.fallback not in _FALLBACKS:
            raise ValueError(f"fallback must be one of {_FALLBACKS}, not {self.fallback!r}")
        if self.warmup not in _WARMUPS:
            raise ValueError(f"warmup must be one of {_WARMUPS}, not {self.warmup!r}")
        check_budget(self.memory_budget)
        if not isinstance(self.max_programs, int) or self.max_programs < 1:
            raise ValueError(
                f"max_programs must be a whole number of at least 1, not {self.max_programs!r}"
            )
        planned = self.planned_threads
        if planned is not None and not (isinstance(planned, int) and 1 <= planned <= _MOST_THREADS):
            raise ValueError(
                f"planned_threads must be a whole number from 1 to {_MOST_THREADS}, not {planned!r}"
            )


def shorthaul(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """The backend that the ``torch_dynamo_backends`` entry point names.

    ``options`` of ``torch.compile`` are those of :func:`shorthaul.module`: ``fallback``,
    ``max_programs``, ``backend``, ``warmup``, ``recipe``, ``memory_budget`` and
    ``planned_threads``.
    """
    try:
        compiler = GraphCompiler(_options_of(options or {}, mode, more), "the model")
        return compiler(graph_module, example_inputs)
    except (ShorthaulError, ValueError, TypeError, OSError) as error:
        raise _passing(error) from error.__cause__


def _options_of(given: dict[str, Any], mode: str | None, more: dict[str, Any]) -> Options:
    """The options of ``torch.compile``. Raises ``ValueError`` that names those that exist."""
    unknown = set(given) - _TORCH_COMPILE_OPTIONS | set(more)
    if unknown or mode:
        named = ", ".join(sorted(unknown)) or "mode"
        valid = ", ".join(sorted(_TORCH_COMPILE_OPTIONS))
        raise ValueError(f"backend='shorthaul' has no option {named}; its options are {valid}")
    known = dict(given)
    if known.get("recipe") is not None:
        known["recipe"] = text_of(known["recipe"])
    return Options(**known)


class _Passing(PassingError):
    """An error that Dynamo lets through, with the words it had before Dynamo added some."""

    said = ""

    def __str__(self) -> str:
        return self.said


@functools.cache
def _passing_kind(kind: type[Exception]) -> type[Exception]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Passing, kind), names)


def _passing(error: Exception) -> Exception:
    """The same error, of a class derived from its own that Dynamo does not wrap in another."""
    kind = _passing_kind(type(error))
    found = kind.__new__(kind, *error.args)
    found.__dict__.update(vars(error), said=str(error), first_useful_frame=None)
    return found.with_traceback(error.__traceback__)


def make_guards_complete() -> None:
    """Makes Dynamo guard what it leaves out by default, from here on in this process."""
    for name, value in _SETTINGS.items():
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, value)
        elif name not in REPLACED | ABSENT:
            _dynamo_mends.say_cannot_apply(f"torch._dynamo.config.{name}", "there is none")
    _dynamo_mends.apply(_is_ours)


shorthaul._dynamo_backend_init = make_guards_complete


def _is_ours(compiler) -> bool:
    """Whether a compiler of Dynamo's, in whatever wrappers, is Shorthaul's."""
    while compiler is not None and compiler is not shorthaul:
        if isinstance(compiler, GraphCompiler):
            return True
        compiler = wrapped_by(compiler)
    return compiler is shorthaul


call_backend_init(_is_ours, make_guards_complete)


def guard_global_hooks() -> None:
    """Lets the graph that is being captured hold only while no global hook comes or goes."""
    translator = InstructionTranslator.current_tx()
    source = translator.import_source("torch.nn.modules.module")
    for name in _GLOBAL_HOOKS:
        install_guard(AttrSource(source, name).make_guard(dict_keys_guard))


class _Left(threading.local):
    """What Dynamo leaves to Python, as clauses."""

    def __init__(self) -> None:
        self.to_python: list[str] = []


class GraphCompiler:
    """Compiles the graphs of one module, and says what it could not."""

    def __init__(self, options: Options, name: str):
        self.options = options
        self.name = name
        self.said: set[str] = set()
        #: What PyTorch or Python runs of the module, in sentences.
        self.outside: dict[str, None] = {}
        #: How many programs each part has: a part is a region of one piece of the user's Python.
        self.n_programs: Counter[tuple] = Counter()
        #: Why programs do not serve a call.
        self.changes = Changes(self.say_compiles_again)
        #: How many graphs Dynamo found.
        self.n_graphs = 0
        #: What Dynamo left to Python in the calls that a thread is in.
        self.left = _Left()
        #: How often the tracer failed on what eager ran, by code and reason.
        self.failures: Counter[tuple] = Counter()
        #: How many more programs of each part were made for further sizes of a trace.
        self.n_sizes: Counter[tuple] = Counter()
        #: Kernels that sizes share, by the operators of a graph and its mode.
        self.templates: dict[tuple, object] = {}

    def __call__(self, graph_module: fx.GraphModule, example_inputs):
        """Turns a graph into a function of its inputs; Dynamo calls this with each graph."""
        self.n_graphs += 1
        self.changes.say_pending()
        make_guards_complete()
        guard_global_hooks()
        self._say_graph_break(graph_module)
        return self.compile(graph_module, example_inputs)

    def compile(self, graph_module: fx.GraphModule, example_inputs, frame: Any = None):
        """Turns a graph into a function of its inputs; ``frame`` is the code it comes from."""
        # No backward pass reads what tracing saves.
        with _disable_saved_tensors_hooks_during_tracing():
            return self._compile(graph_module, example_inputs, frame)

    def _compile(self, graph_module: fx.GraphModule, example_inputs, frame: Any):
        adopt_functions(graph_module)
        take_views(graph_module.graph)
        original = with_gradients_inside(graph_module)
        reason = write_out_gradients(graph_module) or whole_graph_reason(graph_module.graph)
        if reason:
            self.say_falls_back(reason)
            return graph_module.forward
        write_out_functions(graph_module.graph)
        drop_idle_dropouts(graph_module.graph)
        simplify(graph_module.graph)
        write_out_complex_numbers(graph_module.graph)
        drop_idle_regions(graph_module.graph)
        write_out_sizes(graph_module.graph)
        number_draws(graph_module.graph)
        run = _Attempt(self, graph_module, example_inputs, frame).run()
        return run if original is None else unless_hooked(run, original)

    def say_falls_back(self, what: str) -> None:
        """Says, once for each sentence, that PyTorch runs something."""
        self._say_or_refuse(f"PyTorch runs a part of {self.name}: {what}")

    def say_falls_back_after(self, error: Exception) -> None:
        """Says, once for each error, that PyTorch runs a part that could not be compiled."""
        if isinstance(error, InternalError):
            self.say_internal_error(self.name, error, "PyTorch runs a part of it")
        self.say_falls_back(str(error))

    def note_break(self, reason: str) -> None:
        """Notes what Dynamo left to Python, perhaps before it had a graph that could say so."""
        kind = why_broken(reason.split(" Explanation: ")[0])
        if not any(kind in sentence for sentence in self.outside):
            self.outside[f"Python runs a part of {self.name}: {why_broken(reason)}"] = None

    def say_runs_nothing(self, left: list[str], breaks: list[str]) -> None:
        """Says once that PyTorch runs everything; ``left`` and ``breaks``: what Python runs."""
        why = "its tracer finds nothing there to compile, as in a recurrent layer with projections"
        if left:
            why = left[0]
        elif breaks:
            why = f"its tracer has to leave it to Python ({why_broken(breaks[0])})"
        self._say_or_refuse(f"PyTorch runs all of {self.name}: {why}")

    def say_takes_subclass(self, kind: type) -> None:
        """Says, once for each class of tensors, that PyTorch runs calls with them."""
        self._say_or_refuse(
            f"PyTorch runs all of {self.name}: an argument is of `{kind.__name__}`, a class of "
            f"tensors that may have operators of its own"
        )

    def may_compile(self, part: tuple) -> bool:
        """Whether one more program of a part is allowed; says once that it is not."""
        n_programs, n_sizes = self.n_programs[part], self.n_sizes[part]
        if n_programs + n_sizes // _SIZES_AS_ONE < self.options.max_programs:
            return True
        self._say(
            f"a part of {self.name} already has {n_programs + n_sizes} programs for other sizes, "
            f"modes or attributes; PyTorch runs calls that need another one. Pad the inputs to "
            f"fewer sizes, or raise max_programs.",
            RecompileWarning,
        )
        return False

    def say_internal_error(self, part: str, error: InternalError, instead: str) -> None:
        """Says, once for each sentence, that there is a defect and what is done instead."""
        self._say(f"{part}: {instead}, after this error: {error}", InternalErrorWarning)

    def say_of_recipe(self, notes: list[str]) -> None:
        """Warns, once for each sentence, about a change of the recipe that was not possible."""
        for note in notes:
            self._say(f"{self.name}: {note}", RecipeWarning)

    def say_compiles_again(self, changed: str) -> None:
        """Says, once for each compilation, what changed since the last call."""
        self._say(f"{self.name} is compiled again, because {changed}", RecompileWarning)

    def _say_or_refuse(self, message: str) -> None:
        """Something runs outside of programs. Raises ``CaptureError`` if the options say so."""
        self.outside[message] = None
        if self.options.fallback == "error":
            raise CaptureError(f'{message}. This is an error because of `fallback="error"`')
        self._say(message, FallbackWarning)

    def _say(self, message: str, category: type[Warning]) -> None:
        if message not in self.said:
            self.said.add(message)
            log.info(message)
            warnings.warn(message, category, stacklevel=_outside_level())

    def _say_graph_break(self, graph_module: fx.GraphModule) -> None:
        why = getattr(graph_module, "compile_subgraph_reason", None)
        # PyTorch divides graphs within DDP, so that the gradients of one part can be sent early.
        if why is None or not why.graph_break or why.reason.startswith("DDPOptimizer"):
            return
        frame = why.user_stack[-1] if why.user_stack else None
        where = f" at {frame.filename}:{frame.lineno}: `{frame.line}`" if frame else ""
        reason = why_broken(first_line(why.reason), graph_module.graph)
        self._say_or_refuse(
            f"{self.name} is compiled in several parts: Python runs between them{where} ({reason})"
        )


def _outside_level() -> int:
    """How many frames above the caller the user's own code is."""
    import sys

    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and (
        "/torch/" in frame.f_code.co_filename or "/shorthaul/" in frame.f_code.co_filename
    ):
        frame, level = frame.f_back, level + 1
    return level


class _Attempt:
    """The search for a split of one graph all of whose regions compile."""

    def __init__(self, compiler: GraphCompiler, graph_module: fx.GraphModule, examples, frame):
        self.compiler = compiler
        #: The piece of Python that the graph was made of, whatever it was made for.
        self.frame = frame or getattr(CompileContext.current_compile_id(), "frame_id", None)
        self.graph_module = graph_module
        self.refused: dict[str, str] = {}
        self.regions: dict[tuple, Region] = {}
        #: The mode of all examples; one mode for each would take longer than the examples do.
        self.fakes = FakeTensorMode()
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        self.examples = dict(zip(placeholders, examples, strict=True))
        self.requires_grad = {
            node: value.requires_grad
            for node, value in self.examples.items()
            if isinstance(value, torch.Tensor)
        }

    def run(self):
        """Splits until nothing is refused any more; each round gives PyTorch at least one node."""
        while True:
            try:
                split = Split(self.graph_module.graph, self.refused)
                runs = {plan.name: self._region(plan) for plan in split.regions}
                break
            except (NotSplit, RefusedNodes) as refusal:
                new = refusal.reasons.keys() - self.refused.keys()
                if not new:
                    raise InternalError(
                        f"this model cannot be split into what Shorthaul compiles and what PyTorch "
                        f"runs: {refusal}; please report it"
                    ) from refusal
                self.refused |= refusal.reasons
        self._say_what_is_torchs(split)
        runs |= self._checkpoints(split)
        if not runs:
            return self.graph_module.forward
        return emit(split, self.graph_module, runs).forward

    def _region(self, plan: RegionPlan) -> Region:
        known = self.regions.get(plan.key)
        if known is not None:
            return known
        body, origins = _body_of(plan, self.graph_module)
        flags = [value_of(node).requires_grad for node in plan.outputs]
        names = [_readable(node.name) for node in plan.inputs]
        history = [getattr(value_of(node), "requires_grad", False) for node in plan.inputs]
        is_open = [_are_symbolic(value_of(node)) for node in plan.inputs]
        factors = [
            i for i, n in enumerate(plan.inputs) if is_open[i] is True and is_factor(n, plan.nodes)
        ]
        for i in factors:
            is_open[i] = ()
        part = (self.frame, plan.name)
        region = Region(body, origins, flags, names, history, self.compiler, part, is_open, factors)
        region.written_later = {i for i, n in enumerate(plan.inputs) if n in plan.written_later}
        with _entered(plan.ambient):
            inputs = [self._example(node) for node in plan.inputs]
            try:
                region.prepare_for(inputs)
            except (RefusedNodes, ToolchainError):
                raise
            except Unsupported as error:
                if self.compiler.options.fallback == "error" or not error.nodes:
                    raise
                raise RefusedNodes(error.nodes) from error
            except (CaptureError, CompileError, InputError) as error:
                if self.compiler.options.fallback == "error":
                    raise
                if isinstance(error, InternalError):
                    instead = "PyTorch runs a part of it"
                    self.compiler.say_internal_error(self.compiler.name, error, instead)
                reason = str(error)
                raise RefusedNodes({node.name: reason for node in plan.nodes}) from error
        self.regions[plan.key] = region
        return region

    def _example(self, node: fx.Node) -> Any:
        """A region's input in the call that is compiled."""
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            requires_grad = self.requires_grad.get(node, value.requires_grad)
            return _look_of(value, requires_grad, self.fakes)
        return _hint(value)

    def _say_what_is_torchs(self, split: Split) -> None:
        reasons: dict[str, list[str]] = {}
        is_refused = self.compiler.options.fallback == "error"
        for node, reason in split.torch_nodes.items():
            if is_refused and (node.target in AUTOCAST or is_checkpoint(node)):
                continue  # A region begins there, or is inside.
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            module = module_path(stack[-1][0]) if stack else ""
            source = source_of(node.meta.get("stack_trace"))
            place = (module or "the model itself") + (f" ({source})" if source else "")
            reasons.setdefault(reason, []).append(place)
        found = []
        for reason, places in reasons.items():
            first = ", ".join(dict.fromkeys(places[:3]))
            more = f" and {len(places) - 3} more" if len(places) > 3 else ""
            found.append(f"{reason}, at {first}{more}")
        for sentence in ["; ".join(found)] if is_refused and found else found:
            self.compiler.say_falls_back(sentence)

    def _checkpoints(self, split: Split) -> dict[str, Any]:
        """What replaces calls of ``torch.utils.checkpoint``: the same around a compiled body."""
        found = {}
        for node in split.torch_nodes:
            if not is_checkpoint(node):
                continue
            body = getattr(self.graph_module, node.args[0].target)
            operands = node.args[1:]
            if body.meta.get("_checkpoint_context_fn") or not all(
                isinstance(operand, fx.Node) for operand in operands
            ):
                continue
            examples = [self.examples.get(operand, value_of(operand)) for operand in operands]
            looks = [
                _look_of(v, False, self.fakes) if isinstance(v, torch.Tensor) else _hint(v)
                for v in examples
            ]
            written = written_by(body, looks, self.fakes)
            run = body if written else self.compiler.compile(body, examples)
            found[node.name] = checkpointed(node, run, written)
        return found


def _readable(name: str) -> str:
    """``l_tokens_``, as Dynamo calls the argument ``tokens``, and parameters by their path."""
    name = re.sub(r"^l_(.*?)_$", r"\1", name.lower())
    name = re.sub(r"^\w+?_modules_", "", name)
    return re.sub(r"_(modules|parameters|buffers)_", ".", name)


def _look_of(value: torch.Tensor, requires_grad: bool, fakes: FakeTensorMode) -> torch.Tensor:
    """A tensor like ``value`` without memory, with sizes that are known."""
    shape, stride = tuple(map(_hint, value.shape)), tuple(map(_hint, value.stride()))
    with fakes:
        look = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return look.requires_grad_(requires_grad)


def _are_symbolic(value: Any) -> Any:
    """Whether Dynamo made a number symbolic; for a tensor, one flag for each size."""
    if isinstance(value, torch.Tensor):
        return tuple(not isinstance(expression(size), int) for size in value.shape)
    is_symbol = isinstance(value, (torch.SymInt, torch.SymFloat))
    return is_symbol and not isinstance(expression(value), (int, float))


def _hint(value: Any) -> Any:
    """The number that a symbolic one is in this call."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


@contextlib.contextmanager
def _entered(ambient: Ambient) -> Iterator[None]:
    """PyTorch's state as it is where a region begins."""
    with contextlib.ExitStack() as stack:
        for kind, dtype, enabled, cache in ambient.autocasts:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
            )
        if ambient.grad is not None:
            stack.enter_context(torch.set_grad_enabled(ambient.grad))
        yield


def _body_of(
    plan: RegionPlan, graph_module: fx.GraphModule
) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """A region as a graph of its own, and Dynamo's nodes by the names they have in it."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    origins: dict[str, fx.Node] = {}
    for i, node in enumerate(plan.inputs):
        made[node] = graph.placeholder(f"in_{i}")
    for node in plan.nodes:
        if is_operand_itself(node):
            made[node] = made[node.args[0]]
            continue
        copied = made[node] = graph.node_copy(node, lambda n: made[n])
        copied.name = node.name
        number = node.meta.get(DRAW)
        custom = {SOURCE: node.name, DRAW: number, OF_GRADIENT: node.meta.get(OF_GRADIENT, False)}
        copied.meta = {DRAW: number, "custom": custom, "stack_trace": node.meta.get("stack_trace")}
        origins[node.name] = node
    graph.output([made[node] for node in plan.outputs])
    root = {
        node.target: functools.reduce(getattr, node.target.split("."), graph_module)
        for node in graph.nodes
        if node.op == "get_attr"
    }
    return fx.GraphModule(root, graph, "Region"), origins
