"""Functions with a backward pass of their own (``torch.autograd.Function``), as operators.

Owns the rewrite: before  y = F.apply(x), where ``F.backward`` gives dx = Bᵀ·dy   after  the
operators of ``F.forward``, those of v = B·x, and straight_through(y, v): its value is y, and its
gradient goes to v. Legal where ``F.backward`` is linear in dy: then the gradient of v by x is what
``F.backward`` gives. What was saved for it counts as a constant in v. In this way, estimators of
rounding and of spikes, reversed gradients and fused activations run in kernels. If ``F.backward``
is not linear, the graph ends in front of the function, or PyTorch runs it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

from ._errors import CaptureError, first_line
from ._linear import Kind, NotLinear, kinds_of
from ._nodes import TORCH_REASON, is_in_place, needs_gradient, run_again, storage_of, value_of
from ._rewrites import fill_where
from ._sizes import expression
from ._span import COPIED, CUT, SpanRewrite, Stays, mode_at, trace
from ._straight_through import straight_through

_NAME = "autograd_function_apply"
#: Where a node keeps the ``CustomFunction`` that has been made of it.
_KNOWN = "shorthaul_function"

_SET_GRAD = torch._C._set_grad_enabled

_OfPyTorch = torch.autograd.Function


class CustomFunction:
    """A custom function as the tracer saw it: its two passes as graphs.

    A call gives a tuple of results. It is PyTorch's way to run the function: gradients of any order
    are those of the function that it was traced from.
    """

    __name__ = "custom_function"

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, named: Mapping[str, Any]):
        self.forward = _without_modes(forward)
        self.backward = _without_modes(backward)
        self.constant_results = frozenset(named["non_differentiable_idx"])
        self.writes = bool(named.get("dirty_idx"))
        #: The backward pass as operators that write nothing, for the operands it was traced with.
        self.written_out: fx.GraphModule | None = None
        #: Both passes as operators, and the mode and the traced operands that they hold for.
        self.traced: tuple[Sequence[Any], fx.GraphModule | None] = ((), None)
        #: Which of what is saved are tensors that a later write makes invalid.
        self.checked = frozenset(named["saved_for_backward_idx"])

    def __call__(self, *operands):
        return _Passes.apply(self, *operands)

    def recorded(self, *operands):
        """The same, for a trace below autograd whose operators are differentiated once more.

        In the trace, each result is a ``straight_through``, so that its gradient is the user's.
        """
        return _Recorded.apply(self, *operands)

    def run(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The results, and what is saved for the backward pass."""
        return fx.Interpreter(self.forward).run(*operands)

    def gradients(self, grads: Sequence[torch.Tensor], saved: Sequence[Any]) -> list[Any]:
        """A gradient, or ``None``, for each operand."""
        found = fx.Interpreter(self.backward).run(*grads, *saved)
        return list(found) if isinstance(found, (tuple, list)) else [found]


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: CustomFunction, *operands):
        results, saved = function.run(operands)
        results = _Passes.keep(ctx, function, results, saved)
        ctx.mark_non_differentiable(*(results[i] for i in function.constant_results))
        return results

    @staticmethod
    def keep(ctx, function: CustomFunction, results: Sequence[Any], saved: Sequence[Any]) -> tuple:
        ctx.function = function
        ctx.kept = [None if i in function.checked else one for i, one in enumerate(saved)]
        ctx.save_for_backward(*(saved[i] for i in sorted(function.checked)))
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        saved = list(ctx.kept)
        for i, tensor in zip(sorted(ctx.function.checked), ctx.saved_tensors, strict=True):
            saved[i] = tensor
        return None, *ctx.function.gradients(grads, saved)


class _Recorded(_Passes):
    @staticmethod
    def forward(ctx, function: CustomFunction, *operands):
        results, saved = function.run(operands)
        if any(_is_tensor(one) and one.requires_grad for one in operands):
            made = _with_ways_back(function, operands, results, saved)
            saved = [_as_saved(value, operands, results, made) for value in saved]
            results = made
        results = _Passes.keep(ctx, function, results, saved)
        ctx.mark_non_differentiable(*(results[i] for i in function.constant_results))
        return results


def _as_saved(value: Any, operands, results, made) -> Any:
    """What is saved, with eager's history: that of an operand or of a result, or none."""
    if not _is_tensor(value) or any(value is operand for operand in operands):
        return value
    for result, known in zip(results, made, strict=True):
        if value is result:
            return known
    return CUT(value)


class CustomResult:
    """One result of a function in a graph, called with its value, v and the function's operands.

    Kernels compute straight_through of the first two. PyTorch calls the function.
    """

    __name__ = "custom_function_result"

    def __init__(self, function: CustomFunction, position: int):
        self.function = function
        self.position = position

    def __call__(self, y: torch.Tensor, v: torch.Tensor, *operands):
        return self.function(*operands)[self.position]

    def recorded(self, y: torch.Tensor, v: torch.Tensor, *operands):
        """The result, as ``CustomFunction.recorded`` gives it."""
        return self.function.recorded(*operands)[self.position]

    @staticmethod
    def traced(y: torch.Tensor, v: torch.Tensor, *_) -> torch.Tensor:
        """The operator that stands for it in a graph of operators."""
        return straight_through(y, v)


class _Tracing(threading.local):
    """How many traces of operators run in this thread, one inside of the other."""

    depth = 0


_tracing = _Tracing()
_lock = threading.Lock()
#: How many traces run in all threads, and what ``apply`` is if none does.
_n_tracing = 0
_apply = _OfPyTorch.__dict__["apply"]
_register_hook = torch.Tensor.register_hook

#: How PyTorch names the backward pass of our operator.
_OWN = "GeneratedBackwardFor_shorthaul_straight_through_default"


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Raises ``CaptureError`` where this thread applies a custom function or hooks a gradient.

    Operators would be traced, and the function's backward pass or the hook would be lost: in a
    kernel that a library registers for autograd, or in what ``allow_in_graph`` hides.
    """
    global _n_tracing, _apply, _register_hook
    with _lock:
        if not _n_tracing:
            _apply = _OfPyTorch.__dict__["apply"]
            _OfPyTorch.apply = classmethod(_apply_unless_traced)
            _register_hook = torch.Tensor.register_hook
            torch.Tensor.register_hook = _register_hook_unless_traced
        _n_tracing += 1
    _tracing.depth += 1
    try:
        yield
    finally:
        _tracing.depth -= 1
        with _lock:
            _n_tracing -= 1
            if not _n_tracing:
                _OfPyTorch.apply = _apply
                torch.Tensor.register_hook = _register_hook


def _register_hook_unless_traced(self, hook):
    if _tracing.depth:
        raise CaptureError("it registers a hook for a tensor's gradient")
    return _register_hook(self, hook)


def _apply_unless_traced(cls, *args, **kwargs):
    if _tracing.depth and cls.__name__ != _OWN:
        raise CaptureError(f"it applies a custom autograd.Function, `{cls.__name__}`")
    return _apply.__get__(None, cls)(*args, **kwargs)


def adopt(graph_module: fx.GraphModule) -> None:
    """Makes every custom function of a graph a call of a ``CustomFunction``."""
    for node in list(graph_module.graph.nodes):
        if is_custom_function(node):
            adopt_node(node, lambda name: getattr(graph_module, name))


def is_custom_function(node: fx.Node) -> bool:
    """Whether a node is a custom function as the tracer writes it."""
    is_operator = isinstance(node.target, torch._ops.HigherOrderOperator)
    return is_operator and node.target.name() == _NAME


def adopt_node(node: fx.Node, module: Callable[[str], fx.GraphModule]) -> None:
    """Lets a node call a ``CustomFunction`` of its operands."""
    forward, backward, *operands = node.args
    known = node.meta.get(_KNOWN)
    node.target = known or CustomFunction(
        module(forward.target), module(backward.target), node.kwargs
    )
    node.args, node.kwargs = tuple(operands), {}
    for body in (forward, backward):
        if not body.users:
            node.graph.erase_node(body)


def refusal(node: fx.Node, module: Callable[[str], fx.GraphModule]) -> str:
    """Why a function, as the tracer wrote it, cannot be written as operators; empty if it can."""
    forward, backward, *operands = node.args
    function = CustomFunction(module(forward.target), module(backward.target), node.kwargs)
    node.meta[_KNOWN] = function
    try:
        # What tracing saves is for no backward pass that runs.
        with _disable_saved_tensors_hooks_during_tracing():
            _FunctionSpan(node, function, operands)
    except Stays as why:
        return str(why)
    return ""


def write_out_functions(graph: fx.Graph) -> None:
    """Writes the custom functions of a graph as operators, where they can be written so."""
    for node in list(graph.nodes):
        if isinstance(node.target, CustomFunction):
            try:
                _FunctionSpan(node, node.target, node.args).replace()
            except Stays as why:
                node.meta[TORCH_REASON] = f"custom autograd.Function: {why}"


class _FunctionSpan(SpanRewrite):
    """A custom function and its results."""

    def __init__(self, node: fx.Node, called: CustomFunction, operands: Sequence[fx.Node]):
        self.called = called
        self.items = list(node.users)
        if any(item.target is not operator.getitem for item in self.items):
            raise Stays("its results are used as one tuple")
        #: Results that were views of operands, with the memory that they had.
        self.renewed: list[tuple[fx.Node, int | None]] = []
        super().__init__(node.graph, [node, *self.items], operands, self.items)

    def refuse(self) -> None:
        if self.called.writes:
            raise Stays("it writes an operand (mark_dirty)")
        for body in (self.called.forward, self.called.backward):
            inner = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
            self.refuse_nodes(inner)
            if any(node.target is _SET_GRAD for node in inner):
                raise Stays("it changes the gradient mode")
        super().refuse()

    def trace(self) -> fx.GraphModule:
        # Called twice: the tracer asks whether it is refused, the compiler for the operators.
        holds_for = [self.grad, *map(value_of, self.inputs)]
        known, traced = self.called.traced
        if len(known) != len(holds_for) or any(map(operator.is_not, known, holds_for)):
            if self.has_history:
                self._refuse_unless_linear()
            traced = super().trace()
            self.called.traced = (holds_for, traced)
        return traced

    def results(self) -> list[fx.Node]:
        results = super().results()
        return [results[item.args[1]] for item in self.items]

    @property
    def has_history(self) -> bool:
        """Whether a result has a history."""
        return any(needs_gradient(item) for item in self.items)

    def _refuse_unless_linear(self) -> None:
        given = [value_of(node) for node in self.inputs]
        try:
            with torch.no_grad():
                with self.fakes:
                    results, saved = self.called.run(given)
                self._refuse_unsaved(given, results, saved)
                n, leaves = len(results), (*results, *saved)
                traced = trace(
                    lambda *given: self.called.gradients(given[:n], given[n:]),
                    [value.detach() if _is_tensor(value) else value for value in leaves],
                    self.fakes,
                )
                kinds = kinds_of(traced, range(n))
        except NotLinear as why:
            raise Stays(f"its backward pass is not linear in the gradient (`{why}`)") from None
        except Stays:
            raise
        except Exception as error:
            raise Stays(f"PyTorch cannot trace its backward pass: {first_line(error)}") from error
        if any(kind not in (Kind.LINEAR, None) for kind in kinds):
            raise Stays("a result of its backward pass is not linear in the gradient")
        self.called.written_out = traced

    def _refuse_unsaved(self, given, results, saved) -> None:
        """Refuses values kept without ``save_for_backward``: eager reads them later, unchecked."""
        kept = [value for i, value in enumerate(saved) if i not in self.called.checked]
        if _memory_of(kept) & (_memory_of(given) | _memory_of(results)):
            raise Stays("it keeps an operand or a result without `save_for_backward`")

    def function(self) -> Callable[..., list]:
        return self._with_history if self.has_history else self._results

    def _results(self, *given) -> list[torch.Tensor]:
        """The results, each with memory of its own."""
        with torch.no_grad():
            results, _ = self.called.run(given)
        return [_apart(result, given) for result in results]

    def _with_history(self, *given) -> list[torch.Tensor]:
        with torch.no_grad():
            # What has no history may be written through any view.
            plain = [value.detach() if _is_tensor(value) else value for value in given]
            results, saved = self.called.run(plain)
        return _with_ways_back(self.called, given, results, saved)

    def copy(self, node: fx.Node, made: Mapping[fx.Node, Any], new: list[fx.Node]) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Stays("it draws random numbers")
        if node.target is not straight_through.default:
            return super().copy(node, made, new)
        target = CustomResult(self.called, super().results().index(node))
        operands = [made[operand] for operand in node.args]
        copied = self.graph.call_function(target, (*operands, *self.inputs))
        copied.meta = {k: v for k, v in self.span[0].meta.items() if k in COPIED}
        new.append(copied)
        return copied

    def set_value(self, node: Any, given: fx.Node | None) -> None:
        super().set_value(node, given)
        memory = {storage_of(operand) for operand in self.inputs}
        if given is not None and storage_of(given) in memory:
            with self.fakes, torch.set_grad_enabled(self.grad):
                node.meta["example_value"] = value_of(given).clone()
            self.renewed.append((node, storage_of(given)))

    def replace(self) -> None:
        super().replace()
        for node, memory in self.renewed:
            self._renew_views(node, memory)

    def _renew_views(self, node: fx.Node, memory: int | None) -> None:
        """Lets views of a result have its memory, no longer that of an operand."""
        for user in node.users:
            if storage_of(user) != memory or is_in_place(user):
                continue
            with torch.set_grad_enabled(mode_at(self.graph, user)):
                user.meta["example_value"] = run_again(user, self.fakes)
            self._renew_views(user, memory)


def _with_ways_back(function: CustomFunction, operands, results, saved) -> list[torch.Tensor]:
    """The results, each straight_through with its v. Raises ``Stays`` where there is none."""
    results = [_apart(result, operands) for result in results]
    saved = [CUT(value) if _is_tensor(value) else value for value in saved]
    differentiable = [k for k in range(len(results)) if k not in function.constant_results]
    grads = [torch.zeros_like(result) for result in results]
    for k in differentiable:
        grads[k].requires_grad_()
    backward = function.written_out or function.backward
    with torch.enable_grad():
        gradients = fx.Interpreter(backward).run(*grads, *saved)
    if len(gradients) != len(operands):
        raise Stays("its backward pass gives another number of gradients")
    pairs = [
        (operand, gradient)
        for operand, gradient in zip(operands, gradients, strict=True)
        if _is_tensor(operand) and operand.requires_grad and gradient is not None
    ]
    made = [CUT(result) for result in results]
    for k in differentiable:
        made[k] = straight_through(results[k], _transposed(pairs, grads[k]))
    return made


def _transposed(pairs: Sequence[tuple], grad: torch.Tensor) -> torch.Tensor:
    """B·x, where the backward pass gives Bᵀ·``grad`` for each operand x."""
    terms = []
    for operand, gradient in pairs:
        if tuple(map(expression, gradient.shape)) != tuple(map(expression, operand.shape)):
            raise Stays("a gradient has not the shape of its operand")
        found = None
        if gradient.requires_grad:
            along = operand.to(gradient.dtype)
            (found,) = torch.autograd.grad(
                gradient, grad, along, retain_graph=True, allow_unused=True
            )
        if found is None:
            raise Stays("a gradient does not depend on that of a result")
        terms.append(found)
    if not terms:
        raise Stays("no operand has a gradient")
    return functools.reduce(operator.add, terms)


def _apart(result: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
    """The same with memory of its own, where it is a view of an operand."""
    return result.clone() if _memory_of([result]) & _memory_of(operands) else result


def _memory_of(values: Iterable[Any]) -> set[int]:
    """The storages of tensors."""
    return {value.untyped_storage()._cdata for value in values if _is_tensor(value)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _without_modes(body: fx.GraphModule) -> fx.GraphModule:
    """The same without turning gradients off at its start and back at its end, as autograd does."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(body.graph, {}))
    modes = [node for node in graph.nodes if node.target is _SET_GRAD]
    if len(modes) == 2 and modes[0].args == (False,):
        for node in modes:
            graph.erase_node(node)
    fill_where(graph)
    return fx.GraphModule(body, graph)


__all__ = [
    "CustomFunction",
    "CustomResult",
    "adopt",
    "is_custom_function",
    "refusal",
    "refused",
    "write_out_functions",
]
