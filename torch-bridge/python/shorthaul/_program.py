"""One compiled program: a captured graph with the kernels made from it.

Owns the agreement with the native half: which tensors go in, in which order, and where results
are put. Never looks at a module; that is ``module.py``'s part.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from . import _machine, _native, cuda, products
from ._attention import Call, calls_of
from ._bounds import Bound
from ._capture import Captured
from ._errors import (
    BudgetError,
    CompileError,
    InternalError,
    RecipeError,
    ToolchainError,
    Unsupported,
)
from ._memory import Blocks
from ._place import Place
from ._second_derivatives import Rerun

#: Microseconds that Shorthaul adds to a training step and to a call without gradients, see
#: docs/src/results.md.
_ADDED_US, _ADDED_US_WITHOUT_GRADIENTS = 40, 4

#: Plans of backward passes that a program keeps; random choices of gradients could make many.
_MOST_PLANS = 256

_ALIGNMENT = 64  # bytes; a cache line, and the widest vector


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor at the boundary of a program looks like; tensors there are contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @functools.cached_property
    def n_bytes(self) -> int:
        """The bytes of its elements."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class GradientPlan:
    """What a backward pass does when some outputs have a gradient and others have none."""

    #: Positions among the outputs whose gradients the kernels take, and whether any has one.
    given: list[int]
    has_given: bool
    #: Inputs whose gradient is zero.
    zeros: list[int]
    #: Two positions of each gradient that autograd gets: in the program and in the result.
    computed: list[tuple[int, int]]
    #: The part of the native pass that computes these; ``None``: all of it.
    part: _native.BackwardPart | None = None


@dataclass(eq=False)
class Program:
    """A native program and its boundary.

    ``inputs`` has one entry per captured input that is not a constant, then the seed if the
    program draws random numbers. ``state_offsets`` has one entry per program output: the byte
    offset in the state blob, or ``None`` for an output that the caller receives.
    """

    captured: Captured
    native: object
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    uses_seed: bool
    place: Place
    #: Seconds that compiling it took.
    seconds: float = 0.0
    #: Its name in profiles: the model, and the modules that it computes.
    title: str = ""
    #: Names of its captured inputs in messages, by their names in the program.
    input_titles: dict[str, str] = field(default_factory=dict)
    #: Positions among the inputs whose gradient was asked for, and the threads it was made for.
    wrt: list[int] = field(default_factory=list)
    n_threads: int = 1
    user_outputs: list[TensorSpec] = field(default_factory=list)
    state_offsets: list[int | None] = field(default_factory=list)
    state_bytes: int = 0
    blocks: Blocks = field(default_factory=Blocks)
    backward_reads: list[int] = field(default_factory=list)
    #: Outputs that the backward pass reads: position, state offset, position among the user's.
    backward_output_reads: list[tuple[int, int | None, int | None]] = field(default_factory=list)
    grad_inputs: list[int] = field(default_factory=list)
    #: Positions among the user's outputs whose gradients the backward pass takes.
    differentiable_user_outputs: list[int] = field(default_factory=list)
    #: Inputs whose gradient is zero everywhere, for which eager gives zeros rather than ``None``.
    zero_inputs: list[int] = field(default_factory=list)
    #: The inputs from which eager's autograd reaches each of the user's outputs.
    reaches: list[set[int]] = field(default_factory=list)
    #: Positions of inputs that operators bound (indices, divisors, probabilities), with the bounds.
    bounds: list[tuple[int, Bound]] = field(default_factory=list)
    #: Computes in PyTorch the gradients that kernels do not; ``None`` outside of a module.
    rerun: Rerun | None = None
    #: Operators of PyTorch that a pass calls between its launches.
    forward_calls: list[Call] = field(default_factory=list)
    backward_calls: list[Call] = field(default_factory=list)
    #: Plans of backward passes; the key says which outputs have a gradient, and which are wanted.
    _gradient_plans: dict[tuple, GradientPlan] = field(default_factory=dict)

    def __post_init__(self):
        for spec, output in zip(self.outputs, self.captured.outputs, strict=True):
            if output.kind == "user":
                self.user_outputs.append(spec)
                self.state_offsets.append(None)
            else:
                self.state_offsets.append(self.state_bytes)
                self.state_bytes += -(-spec.n_bytes // _ALIGNMENT) * _ALIGNMENT
        fed = [spec.name for spec in self.captured.inputs if spec.kind != "constant"]
        self.bounds = [
            (fed.index(bound.placeholder), bound)
            for bound in self.captured.bounds
            if bound.placeholder in fed
        ]
        # Every step reads these, and `place` would compute them each time.
        self.is_on_device, self.runs_cuda_text = self.place.is_cuda, self.place.runs_cuda_text
        self.saved_bytes = self.native.saved_bytes
        self.forward_scratch_bytes = self.native.forward_scratch_bytes
        self.backward_scratch_bytes = self.native.backward_scratch_bytes
        self.backward_reads = list(self.native.backward_reads)
        self.grad_inputs = list(self.native.grad_inputs)
        grad_specs = [self.inputs[i] for i in self.grad_inputs]
        #: What the user's outputs and the gradients look like; these tensors have no memory.
        self.output_looks = [_look(spec, self.place) for spec in self.user_outputs]
        self.grad_looks = [_look(spec, self.place) for spec in grad_specs]
        #: Bytes of each input, and of one of its elements.
        self.input_sizes = [(spec.n_bytes, spec.dtype.itemsize) for spec in self.inputs]
        if self.runs_cuda_text:
            self.forward_calls = calls_of(self.native.cuda_calls(False))
            self.backward_calls = calls_of(self.native.cuda_calls(True))
        user_idx = {i: n for n, i in enumerate(self._user_output_idxs())}
        self.backward_output_reads = [
            (i, self.state_offsets[i], user_idx.get(i)) for i in self.native.backward_output_reads
        ]
        #: Tensors that are kept for the backward pass beside its block.
        self.n_kept = len(self.backward_reads) + len(self.backward_output_reads)
        self.differentiable_user_outputs = [user_idx[i] for i in self.native.differentiable_outputs]
        self.differentiable_outputs = [
            self.user_outputs[i] for i in self.differentiable_user_outputs
        ]

    def lend(self, n_bytes: int) -> torch.Tensor:
        """A block of ``n_bytes`` bytes with arbitrary contents, where kernels can use it.

        On a device it comes from PyTorch's allocator. If it is freed early, only later work on the
        same stream uses it again.
        """
        if self.is_on_device:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.place.device)
        return self.blocks.lend(n_bytes)

    def lend_briefly(self, n_bytes: int) -> torch.Tensor:
        """Like :meth:`lend`, for one pass; see :meth:`give_back`."""
        return self.lend(n_bytes) if self.is_on_device else self.blocks.lend_briefly(n_bytes)

    def give_back(self, block: torch.Tensor | None) -> None:
        """Lets the next pass on the CPU use a block that was lent briefly."""
        if block is not None:
            self.blocks.give_back(block)

    def gradients_of(
        self, are_given: tuple[bool, ...], are_wanted: tuple[bool, ...] | None = None
    ) -> GradientPlan:
        """The plan of a backward pass in which these outputs have a gradient.

        As in eager, inputs on which none of them depends get ``None``, not zeros. ``are_wanted``
        has an entry for each of ``grad_inputs``; ``None``: all of them are.
        """
        key = are_given, are_wanted
        plan = self._gradient_plans.get(key)
        if plan is None:
            if len(self._gradient_plans) >= _MOST_PLANS:
                self._gradient_plans.clear()
            plan = self._gradient_plans[key] = self._gradient_plan(are_given, are_wanted)
        return plan

    def _gradient_plan(
        self, are_given: tuple[bool, ...], are_wanted: tuple[bool, ...] | None
    ) -> GradientPlan:
        pairs = zip(self.reaches, are_given, strict=False)
        reached = set().union(*(inputs for inputs, is_given in pairs if is_given))
        given = self.differentiable_user_outputs
        wanted = are_wanted or [True] * len(self.grad_inputs)
        computed = [
            (k, i + 1) for k, i in enumerate(self.grad_inputs) if i in reached and wanted[k]
        ]
        return GradientPlan(
            given,
            bool(computed) and any(are_given[i] for i in given),
            [i for i in self.zero_inputs if i in reached],
            computed,
            None if all(wanted) else self.native.part_of_backward([k for k, _ in computed]),
        )

    def planned(self, recipe: str | None, budget: float | None = None) -> str:
        """The same graph planned for the CPU under a recipe's text and a budget, not compiled.

        Gives the compiler's description as JSON. Raises ``RecipeError`` or ``BudgetError``.
        """
        captured = self.captured
        try:
            return _native.plan_program(
                captured.json,
                captured.constants,
                self.wrt,
                self.n_threads,
                recipe,
                budget,
                _machine.kept_text(),
            )
        except _native.BudgetFailure as error:
            raise BudgetError(str(error)) from None
        except _native.RecipeFailure as error:
            raise RecipeError(str(error)) from None

    def _user_output_idxs(self) -> list[int]:
        return [i for i, output in enumerate(self.captured.outputs) if output.kind == "user"]

    def state_view(self, state: torch.Tensor, position: int) -> torch.Tensor:
        """The program output at ``position``, which lies in the state blob, as a tensor."""
        spec, offset = self.outputs[position], self.state_offsets[position]
        return state[offset : offset + spec.n_bytes].view(spec.dtype).view(spec.shape)

    def state_views(self, state: torch.Tensor) -> list[torch.Tensor]:
        """The new values of the buffers, in the order of the outputs that are not the user's."""
        positions = enumerate(self.state_offsets)
        return [self.state_view(state, i) for i, offset in positions if offset is not None]


def small_sentence(predicted_us: float, is_training: bool) -> str | None:
    """Why eager may be faster, if the kernels are predicted to take less than their call adds."""
    added = _ADDED_US if is_training else _ADDED_US_WITHOUT_GRADIENTS
    if not 0 < predicted_us < added:
        return None
    return (
        f"its kernels are predicted to take {predicted_us:.0f} microseconds, and calling them adds "
        f"about {added}, so eager PyTorch may be as fast or faster"
    )


def _look(spec: TensorSpec, place: Place) -> torch.Tensor:
    """A tensor without memory to make others like it, which is faster than from sizes and type."""
    look = torch.empty(spec.shape, dtype=spec.dtype, device=place.device)
    look.untyped_storage().resize_(0)
    return look


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raises errors of the native half as errors of this package."""
    try:
        yield
    except _native.UnsupportedOperators as error:
        raise Unsupported([(target, list(places)) for target, places in error.args[1]]) from None
    except _native.ToolchainFailure as error:
        raise ToolchainError(str(error)) from None
    except _native.InternalFailure as error:
        raise InternalError(str(error)) from None
    except _native.CompileFailure as error:
        raise CompileError(str(error)) from None
    except _native.BudgetFailure as error:
        raise BudgetError(str(error)) from None
    except _native.RecipeFailure as error:
        raise RecipeError(str(error)) from None


def import_symbolic(captured: Captured) -> None:
    """Imports the trace with symbolic sizes of ``captured``, if it is not imported yet.

    Raises ``Unsupported`` with every missing operator, or ``CompileError``.
    """
    with own_errors():
        _ = captured.symbolic.imported


def compile_program(
    captured: Captured,
    requires_grad: list[bool],
    place: Place,
    n_threads: int | None = None,
    listener: Callable[[int, int, str], None] | None = None,
    recipe: str | None = None,
    budget: float | None = None,
    templates: object | None = None,
) -> Program:
    """Makes a program for ``place``; ``requires_grad`` has one entry per captured input.

    ``n_threads``: how many threads it is made for; ``None``: PyTorch's number on this thread.
    ``listener(done, total, name)`` is called when all C text is written (``done`` is 0), and as
    each file of it is compiled; ``None``: a line on a terminal. ``recipe``: the text of one;
    ``budget``: a memory budget. ``templates``: what earlier sizes of the same graph compiled, to
    be shared.

    Raises ``Unsupported`` with every missing operator, or ``CompileError``.
    """
    started = time.perf_counter()
    n_threads = torch.get_num_threads() if n_threads is None else n_threads
    listener = progress() if listener is None else listener
    fed = [
        w for spec, w in zip(captured.inputs, requires_grad, strict=True) if spec.kind != "constant"
    ]
    wrt = [i for i, wanted in enumerate(fed) if wanted]
    with own_errors():
        if place.runs_cuda_text:
            native = _native.Program.compile_cuda(
                captured.json,
                captured.constants,
                wrt,
                place.device.index if place.is_cuda else None,
                cuda.nvrtc_folders(),
                listener,
                **products.arguments(),
                recipe=recipe,
                budget=budget,
            )
        elif captured.symbolic is not None:
            must_foresee = templates is not None and not templates.has_foreseen
            native = _native.Program.compile_for(
                captured.symbolic.imported,
                captured.sizes,
                captured.expected() if must_foresee else [],
                wrt,
                n_threads,
                listener,
                recipe,
                budget,
                templates,
                _machine.kept_text(),
            )
        else:
            native = _native.Program.compile(
                captured.json,
                captured.constants,
                wrt,
                n_threads,
                listener,
                recipe,
                budget,
                templates,
                _machine.kept_text(),
            )
    inputs = [
        TensorSpec(name, tuple(shape), getattr(torch, dtype))
        for name, shape, dtype in native.inputs
    ]
    outputs = [
        TensorSpec(name, tuple(shape), getattr(torch, dtype))
        for name, shape, dtype in native.outputs
    ]
    program = Program(captured, native, inputs, outputs, native.uses_seed, place)
    program.wrt, program.n_threads = wrt, n_threads
    reached = [
        _differentiably_read(captured, document_output["value"])
        for document_output, output in zip(
            captured.document["outputs"], captured.outputs, strict=True
        )
        if output.kind == "user"
    ]
    names = [spec.name for spec in captured.inputs if spec.kind != "constant"]
    program.reaches = [{i for i, name in enumerate(names) if name in read} for read in reached]
    program.seconds = time.perf_counter() - started
    every = set().union(*program.reaches)
    program.zero_inputs = [
        i for i, wanted in enumerate(fed) if wanted and i in every and i not in program.grad_inputs
    ]
    return program


#: Operators whose results have no history, whatever their operands have.
_WITHOUT_HISTORY = frozenset(
    "detach empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like "
    "rand_like randint_like randn_like zeros_like".split()
)

#: Operands, by operator, that no gradient goes to.
_WITHOUT_GRADIENT = dict.fromkeys("expand_as reshape_as type_as view_as".split(), "other")
_WITHOUT_GRADIENT["straight_through"] = "y"


#: Operators of windows: their gradient reads where maxima are, and has a slope of zero.
_WITH_PLACES = ("max_pool", "adaptive_max_pool", "fractional_max_pool")


def _differentiably_read(captured: Captured, output: str) -> set[str]:
    """Inputs from which eager's autograd reaches an output, though the slope may be zero.

    Eager's backward operators have derivatives by all of their operands, as ReLU's by the
    operand that it only compares with zero.
    """
    reached, compared = {output}, set()
    for node in reversed(captured.document["nodes"]):
        name = node["target"].split(".")[-2:][0]
        of_gradient = node["name"] in captured.of_gradients
        passes = name not in _WITHOUT_HISTORY and any(
            value
            and (
                (value["name"] in reached and "float" in value["dtype"])
                or (value["name"] in compared and (of_gradient or name.startswith(_WITH_PLACES)))
            )
            for value in node["outputs"]
        )
        if passes:
            unread = _WITHOUT_GRADIENT.get(name)
            pending = [arg for key, arg in node["args"].items() if key != unread]
            while pending:
                arg = pending.pop()
                if isinstance(arg, list):
                    pending.extend(arg)
                elif isinstance(arg, dict) and "ref" in arg:
                    reached.add(arg["ref"])
                    if of_gradient:
                        compared.add(arg["ref"])
    return reached


def progress():
    """A callback that keeps one line on a terminal or in a notebook; nothing for a file."""
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    if not (is_notebook or sys.stderr.isatty()):
        return None

    def write(text: str) -> None:
        print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)

    def show(done: int, total: int, what: str) -> None:
        write(f"shorthaul: {done} of {total} files compiled" if done < total else "")

    write("shorthaul: planning kernels")
    return show
