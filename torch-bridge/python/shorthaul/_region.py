"""A region of a graph at run time: its compiled programs, and the choice of one for a call.

Owns what a program is specific to (gradient mode, which inputs need a gradient, sizes, number of
threads) and the compilation of a region. A region is a function of tensors and numbers, because
Dynamo's guards watch modules, buffers and Python. Never splits graphs (``_partition``), and never
calls programs (``_call``).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._subclasses import FakeTensor, FakeTensorMode

from . import _autocast, _native, _random_numbers
from ._background import start_compiling
from ._call import Call, is_recorded
from ._capture import Captured, capture
from ._custom_functions import CustomResult, refused
from ._draws import Seed
from ._errors import (
    CaptureError,
    CompileError,
    InputError,
    InternalError,
    Refused,
    ToolchainError,
    Unsupported,
)
from ._nodes import classes_of, name_of
from ._place import place_of
from ._program import Program, compile_program, small_sentence
from ._pytorch_names import has_saved_tensors_hooks, in_backward_pass
from ._second_derivatives import Way
from ._sizes import Outside
from ._symbolic import Symbolic, capture_symbolic

#: Intermediate results from which on a program is not small; a prediction would cost time.
_LARGE_BYTES = 1 << 20

log = logging.getLogger("shorthaul")

#: A set of sizes after the first two of a region gets a program at this call with it.
_FREQUENT = 2

#: The largest number of traces with symbolic sizes, each for another range of sizes. Further sizes
#: are traced alone.
_MOST_TRACES = 4

#: Classes of tensors whose elements are at ``data_ptr``, and the class of their fakes.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


class Region:
    """A function of tensors and numbers, with a program for each kind of call."""

    def __init__(
        self,
        body: fx.GraphModule,
        origins: dict[str, fx.Node],
        requires_grad: Sequence[bool],
        input_names: Sequence[str],
        gains_history: Sequence[bool],
        owner: Any,
        part: tuple,
        is_open: Sequence[Any],
        factors: Sequence[int] = (),
    ):
        #: Which sizes of each input PyTorch took as symbols: a flag per size, or one for a number.
        self.is_open = is_open
        #: Positions of fractions that are computed from sizes and only used as operands beside
        #: tensors. Programs take them as tensors, so that one program serves all their values.
        self.factors = factors
        #: Traces with symbolic sizes, by everything else that they depend on.
        self.symbolic: dict[tuple, list[Symbolic]] = {}
        #: Errors because of which each set of sizes is traced separately, despite symbolic sizes.
        self.alone: list[Exception] = []
        #: Whether each input needs a gradient when the graph has run.
        self.gains_history = gains_history
        #: Positions of inputs that are written in place after the region.
        self.written_later: set[int] = set()
        #: Names of the inputs in messages.
        self.input_names = input_names
        #: The region's operators in PyTorch.
        self.body = body
        self.origins = origins
        #: Whether each output needs a gradient in eager if some input does.
        self.requires_grad = tuple(requires_grad)
        self.owner = owner
        #: The key under which the owner counts the programs.
        self.part = part
        #: The number of threads that all programs are planned for; ``None``: PyTorch's number.
        self.planned_threads = owner.options.planned_threads
        self.calls: dict[tuple, Call | None] = {}
        self.wanted: dict[tuple, int] = {}
        #: The operators of the graph, which do not depend on sizes.
        self.targets = tuple(
            str(node.target)
            for node in body.graph.nodes
            if isinstance(node.meta.get("example_value"), torch.Tensor)
        )
        #: Whether a program of the region draws random numbers.
        self.is_random = False
        self.lock = threading.RLock()

    def __call__(self, *inputs, seed: Seed):
        if FakeTensor in map(type, inputs):
            # An outer tool asks for shapes only; such inputs have no elements.
            return self.body.forward(*inputs)
        if self.factors:
            inputs = self._with_factors(inputs)
        key = self.key(inputs)
        try:
            call = self.calls[key]
        except KeyError:
            call = self._prepare(key, inputs)
        if call is None:
            return self.body.forward(*inputs)
        return call(self, inputs, seed)

    def _with_factors(self, inputs) -> list[Any]:
        inputs = list(inputs)
        devices = (value.device for value in inputs if isinstance(value, torch.Tensor))
        device = next(devices, torch.device("cpu"))
        for i in self.factors:
            inputs[i] = torch.full((), inputs[i], dtype=torch.float64, device=device)
        return inputs

    def key(self, inputs) -> tuple:
        """What a program is specific to."""
        looks = [_records_history(), self._n_threads(), _autocast.key()]
        for value in inputs:
            if type(value) in _PLAIN:
                looks.append(value.shape)
                looks.append(value.requires_grad)
            else:
                looks.append(type(value) if isinstance(value, torch.Tensor) else value)
        return tuple(looks)

    def _n_threads(self) -> int:
        """How many threads a program is planned for. PyTorch counts them for each Python thread."""
        return self.planned_threads or torch.get_num_threads()

    def _templates(self, requires_grad: Sequence[bool]) -> object | None:
        """Kernels shared by all sizes of this graph; ``None`` if every size has its own."""
        if self.owner.options.dynamic is False:
            return None
        mode = (self._n_threads(), _autocast.key(), sum(requires_grad))
        return self.owner.templates.setdefault((self.targets, mode), _native.Templates())

    def _prepare(self, key: tuple, inputs) -> Call | None:
        with self.lock:
            if key in self.calls:
                return self.calls[key]
            if not self._is_wanted(key):
                return None
            try:
                with _disable_saved_tensors_hooks_during_tracing():
                    call = self.compile(inputs)
            except ToolchainError:
                raise
            except (Unsupported, CaptureError, CompileError, InputError) as error:
                if self.owner.options.fallback == "error":
                    raise
                self.owner.say_falls_back_after(error)
                call = None
            self.calls[key] = call
            return call

    def _is_wanted(self, key: tuple) -> bool:
        """Whether new sizes get a program now. Otherwise PyTorch runs the call."""
        if len(self.calls) < 2 or self.owner.options.warmup == "background" or is_recorded():
            return True
        if self.may_run_again():
            return True
        self.wanted[key] = self.wanted.get(key, 0) + 1
        return self.wanted[key] >= _FREQUENT

    def may_run_again(self) -> bool:
        """Whether a checkpoint may run this call twice, so that both runs must agree."""
        if has_saved_tensors_hooks():
            return True  # The tensors that are saved have to be the same.
        # A reentrant checkpoint runs without gradients, then again in the backward pass: the random
        # numbers have to be the same.
        is_first = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return self.is_random and (is_first or in_backward_pass())

    def settle(self, pending: Pending) -> Call | None:
        """Replaces a pending call with what was compiled; ``None`` if PyTorch must run it.

        If a trace with symbolic sizes gave no program, the next call with these sizes is traced
        separately.
        """
        with self.lock:
            keys = [key for key, call in self.calls.items() if call is pending]
            try:
                call = pending.call_of(pending.program.result())
            except ToolchainError:
                raise
            except (Unsupported, CompileError) as error:
                if pending.captured.symbolic is not None:
                    self._give_up_symbols(pending.captured, error)
                    for key in keys:
                        del self.calls[key]
                    return None
                if self.owner.options.fallback == "error":
                    raise
                self.owner.say_falls_back_after(error)
                call = None
            for key in keys:
                self.calls[key] = call
            return call

    def prepare_for(self, inputs) -> None:
        """Compiles what calls like this one need. Raises as :meth:`compile` does."""
        inputs = self._with_factors(inputs) if self.factors else inputs
        self.calls[self.key(inputs)] = self.compile(inputs)

    def compile(self, inputs) -> Call | Pending | None:
        """A program for calls like this one, or ``None`` if PyTorch must run them.

        ``inputs`` may be fakes. Raises ``Refused`` with the nodes that no program can hold, or
        ``CompileError``.
        """
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if any(type(tensor) not in _PLAIN for tensor in tensors):
            return None  # The class of such a tensor decides what its operators do.
        if any(not tensor.numel() for tensor in tensors) or not self.owner.may_compile(self.part):
            return None
        named = [(f"input {i}", tensor) for i, tensor in enumerate(tensors)]
        place = place_of(named, self.owner.options.backend)
        place.refuse_capture(self.owner.name)
        supported = _supported()
        try:
            return self._compile_with(supported, place, inputs)
        except Unsupported as error:
            # A rule that refuses a case of its operator leaves it to PyTorch's decomposition.
            refused = {target.split(" ")[0] for target, _ in error.operators} & supported
            if not refused:
                raise
            try:
                return self._compile_with(supported - refused, place, inputs)
            except (Unsupported, CaptureError):
                raise error from None

    def _compile_with(self, supported: frozenset[str], place, inputs) -> Call:
        captured = self._symbolic_at(supported, place, inputs)
        if captured is not None:
            try:
                return self._compile_captured(captured, place, inputs)
            except ToolchainError:
                raise
            except (Unsupported, CompileError) as error:
                self._give_up_symbols(captured, error)
        captured = self._trace(capture, supported, place, fakes_of(inputs))
        return self._compile_captured(captured, place, inputs)

    def _symbolic_at(self, supported: frozenset[str], place, inputs) -> Captured | None:
        """The graph for these sizes from a trace with symbolic sizes, if one holds for them."""
        are_open = (any(flags) if isinstance(flags, tuple) else flags for flags in self.is_open)
        if not any(are_open) or self.alone:
            return None
        pairs = zip(self.is_open, inputs, strict=True)
        if any(flags is True and isinstance(value, float) for flags, value in pairs):
            self._trace_alone(Outside("a number that follows from a size has a fraction"))
            return None
        needs = [getattr(value, "requires_grad", None) for value in inputs]
        mode = (_records_history(), _autocast.key(), supported, *needs)
        traces = self.symbolic.setdefault(mode, [])
        for symbolic in traces:
            try:
                return symbolic.at(inputs)
            except Outside as why:
                log.info(f"a trace of {self.owner.name} does not hold for other sizes: {why}")
        if len(traces) == _MOST_TRACES:
            log.info(
                f"{self.owner.name} is traced separately for these sizes: none of its "
                f"{_MOST_TRACES} traces with symbolic sizes holds for them, and no more are made"
            )
            return None
        try:
            symbolic = self._trace(
                capture_symbolic, supported, place, fakes_of(inputs), self.is_open
            )
            if not symbolic.has_symbolic_sizes:
                raise Outside("PyTorch's tracer took every size as a number")
            captured = symbolic.at(inputs)
        except CaptureError as error:
            self._trace_alone(error)
            return None
        traces.append(symbolic)
        return captured

    def _give_up_symbols(self, captured: Captured, error: Exception) -> None:
        """Handles a trace with symbolic sizes that gave no program; warns if it is a defect."""
        if isinstance(error, InternalError):
            part = _title(self.owner.name, captured)
            self.owner.say_internal_error(part, error, "each set of sizes is traced separately")
        self._trace_alone(error)

    def _trace_alone(self, error: Exception) -> None:
        """Traces each set of sizes separately from now on."""
        self.alone.append(error)
        log.info(f"each set of sizes of {self.owner.name} is traced separately: {error}")

    def _trace(self, trace: Callable, supported: frozenset[str], place, *arguments):
        """Applies ``trace`` to the region as a function, outside of autocast."""
        function = _Function(self.body)
        function.call = _autocast.casting(function.call, place.device)
        with _autocast.suspended(place.device), refused():
            try:
                return trace(
                    function,
                    *arguments,
                    supported=supported,
                    origins=self.origins,
                    input_names=self.input_names,
                )
            except Refused:
                raise
            except CaptureError as error:
                raise Refused.of_node(function.interpreter.stopped_at, error) from error

    def _compile_captured(self, captured: Captured, place, inputs) -> Call | Pending:
        self.is_random = self.is_random or _random_numbers.draws(captured.document)
        grad = _records_history()
        requires_grad = []
        for spec in captured.inputs:
            tensor = spec.constant if spec.kind == "constant" else inputs[spec.user_idx]
            requires_grad.append(grad and tensor.requires_grad)
        for (kind, _), needs_gradient in zip(captured.returns, self.requires_grad, strict=True):
            if kind == "empty" and needs_gradient and any(requires_grad):
                raise CaptureError("a result without elements needs a gradient")
        for output in captured.outputs:
            if output.kind == "user_input" and grad:
                self._refuse_write(captured, output, inputs)
        recipe, budget = self.owner.options.recipe, self.owner.options.memory_budget
        in_background = self.owner.options.warmup == "background" and not place.runs_cuda_text
        templates, n_threads = self._templates(requires_grad), self._n_threads()
        try:
            if in_background:
                program = start_compiling(
                    captured, requires_grad, place, n_threads, recipe, budget, templates
                )
            else:
                program = compile_program(
                    captured,
                    requires_grad,
                    place,
                    n_threads,
                    recipe=recipe,
                    budget=budget,
                    templates=templates,
                )
        except Unsupported as error:
            error.nodes = _nodes_of(captured, error)
            raise
        self._count(captured)
        numbers = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        way = Way(
            self.body,
            numbers,
            _autocast.key(),
            self.owner.say_falls_back,
            functools.partial(self.owner.compile, frame=("second derivatives", self.part)),
            self.origins,
        )

        def call_of(program: Program) -> Call:
            self._log_seconds(captured, program)
            self.owner.say_of_recipe(program.native.notes)
            program.title = _title(self.owner.name, captured)
            users = [spec for spec in captured.inputs if spec.kind == "user"]
            program.input_titles = {
                spec.name: self.input_names[spec.user_idx]
                for spec in users
                if spec.user_idx < len(self.input_names)
            }
            call = Call(captured, program, self.requires_grad, any(requires_grad))
            call.keep(self.written_later)
            call.counts_threads = self.planned_threads is not None
            program.rerun = call.rerun_by(way)
            return call

        return Pending(captured, program, call_of) if in_background else call_of(program)

    def _count(self, captured: Captured) -> None:
        """Counts a program. Programs that share a trace count less towards the owner's limit."""
        symbolic = captured.symbolic
        if symbolic is not None and symbolic.is_used:
            self.owner.n_sizes[self.part] += 1
            return
        self.owner.n_programs[self.part] += 1
        if symbolic is not None:
            symbolic.is_used = True

    def _log_seconds(self, captured: Captured, program: Program) -> None:
        sizes = ", ".join(str(list(spec.shape)) for spec in program.inputs[:4])
        more = ", …" if len(program.inputs) > 4 else ""
        log.info(
            f"compiled a part of {self.owner.name} for inputs {sizes}{more}: "
            f"{captured.export_seconds:.1f} s of capture, {program.seconds:.1f} s of compilation"
        )
        if program.saved_bytes + program.forward_scratch_bytes < _LARGE_BYTES and (
            small := small_sentence(program.native.predicted_us, bool(program.wrt))
        ):
            log.info(f"a part of {self.owner.name} is small: {small}")

    def _refuse_write(self, captured: Captured, output, inputs) -> None:
        """Leaves to PyTorch a write that becomes part of autograd's graph."""
        if inputs[output.user_idx].requires_grad or self.gains_history[output.user_idx]:
            writers = [output.writer] if output.writer else self.origins
            reason = "it writes in place to a tensor that needs a gradient"
            raise Refused(dict.fromkeys(writers, reason))


class Pending:
    """A call whose kernels are being compiled; until they are ready, PyTorch's operators run."""

    def __init__(
        self, captured: Captured, program: Future[Program], call_of: Callable[[Program], Call]
    ):
        self.captured = captured
        self.program = program
        self.call_of = call_of

    def __call__(self, region: Region, inputs, seed: Seed):
        if not self.program.done() and not region.may_run_again():
            return region.body.forward(*inputs)
        call = region.settle(self)
        return region.body.forward(*inputs) if call is None else call(region, inputs, seed)


def _records_history() -> bool:
    """Whether autograd records now. Inference mode overrides ``enable_grad``."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


class _Function(torch.nn.Module):
    """A graph as the module that PyTorch's exporter takes; it runs node by node."""

    def __init__(self, body: fx.GraphModule):
        super().__init__()
        self.interpreter = _Interpreter(body)
        self.call = self.interpreter.run

    def forward(self, *inputs):
        return self.call(*inputs)


class _Interpreter(fx.Interpreter):
    """Remembers the node at which an error arose."""

    stopped_at = ""

    def run_node(self, node: fx.Node):
        try:
            if isinstance(node.target, CustomResult):
                with self._set_current_node(node):
                    return CustomResult.traced(*self.fetch_args_kwargs_from_env(node)[0])
            if name_of(node) == "one_hot":
                with self._set_current_node(node):
                    given, named = self.fetch_args_kwargs_from_env(node)
                    classes = given[0] if given else named.get("input", named.get("self"))
                    return _one_hot(classes, classes_of(node))
            return super().run_node(node)
        except Exception:
            self.stopped_at = self.stopped_at or node.name
            raise


def _nodes_of(captured: Captured, error: Unsupported) -> dict[str, str]:
    """The nodes of Dynamo's graph that need missing operators, with the reason."""
    found = {}
    for target, places in error.operators:
        for node in captured.document["nodes"]:
            origin = node["origin"]
            place = f"{origin['module'] or 'the model itself'} ({origin['source']})"
            if node["target"] == target.split(" ")[0] and place in places:
                source = captured.sources.get(node["name"].removesuffix(".live"), "")
                found[source] = f"no implementation of {target}"
    found.pop("", None)
    return found


def _title(name: str, captured: Captured) -> str:
    """A model's name, and the first and the last of its modules that a program computes."""
    paths = [node["origin"]["module"] for node in captured.document["nodes"]]
    paths = list(dict.fromkeys(path for path in paths if path))
    if not paths:
        return name
    return f"{name}, {paths[0]}" + (f" … {paths[-1]}" if len(paths) > 1 else "")


def fakes_of(inputs) -> tuple:
    """Tensors without memory that look like ``inputs``, and numbers as they are."""
    mode = FakeTensorMode()
    fakes = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            with mode:
                fake = torch.empty_strided(
                    tuple(map(int, value.shape)),
                    tuple(map(int, value.stride())),
                    dtype=value.dtype,
                    device=value.device,
                )
            fakes.append(fake.requires_grad_(value.requires_grad))
        else:
            fakes.append(value)
    return tuple(fakes)


@functools.cache
def _supported() -> frozenset[str]:
    return frozenset(_native.supported_targets())


def _one_hot(classes: torch.Tensor, n: int) -> torch.Tensor:
    """``one_hot`` without a check of the classes; the program checks them."""
    zeros = torch.zeros(*classes.shape, n, dtype=torch.int64, device=classes.device)
    return zeros.scatter(-1, classes.unsqueeze(-1), 1)


__all__ = ["Region", "fakes_of"]
