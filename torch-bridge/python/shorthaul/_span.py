"""A run of nodes of Dynamo's graph, traced below autograd and put back as operators.

Owns how a span of nodes becomes the operators that PyTorch runs for it: the trace, what may not be
in it, and the copies in the graph, each with the history that eager's value has. Which spans, and
why, others decide (``_inner_gradients``, ``_custom_functions``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _functorch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ._autocast import AUTOCAST
from ._decomposed_gradients import table
from ._errors import first_line
from ._nodes import (
    is_in_place,
    name_of,
    run_again,
    storage_of,
    tensors_of,
    value_of,
)
from ._origins import OF_GRADIENT
from ._partition import METADATA_WRITES, TORCH_ONLY
from ._pytorch_names import tracing_apart
from ._sizes import expression

aten = torch.ops.aten

#: Marks where gradients stop. No other rule makes this operator.
CUT = aten.detach_copy.default

#: What autograd makes of a value that it keeps: the same value, with the same history.
_KEPT = (aten.detach.default, aten.alias.default)

#: View operators. ``reshape`` also holds for inputs with other strides.
_VIEWS = dict.fromkeys((aten.view, aten._unsafe_view, aten._reshape_alias), aten.reshape)

#: Operators that fill a tensor with one number: the number, or the name of its argument.
_CONSTANTS = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.full_like.default: "fill_value",
    aten.new_full.default: "fill_value",
}

#: Operators of writes to slices, for whose gradient PyTorch has no gradient, or a wrong one.
_NOT_TWICE = (aten.as_strided_scatter.default, aten.copy.default)

#: Operators without results that stay in a span: they raise the errors of linear algebra.
_CHECKS = (aten._linalg_check_errors.default,)

#: Constants of at most this many elements become lists in the graph.
_MOST_ELEMENTS = 1024

_SET_GRAD = torch._C._set_grad_enabled

#: What a node keeps of its metadata when it is copied.
COPIED = ("nn_module_stack", "stack_trace", OF_GRADIENT)


class Stays(Exception):
    """Why a span is left to PyTorch."""


def mode_at(graph: fx.Graph, place: fx.Node) -> bool:
    """Whether gradients are on where ``place`` runs."""
    mode = torch.is_grad_enabled()
    for node in graph.nodes:
        if node is place:
            break
        if node.target is _SET_GRAD:
            mode = node.args[0]
    return mode


#: What ends each transform.
_LEAVE = {
    _functorch.TransformType.Vmap: _functorch._vmap_decrement_nesting,
    _functorch.TransformType.Grad: _functorch._grad_decrement_nesting,
    _functorch.TransformType.Jvp: _functorch._jvp_decrement_nesting,
    _functorch.TransformType.Functionalize: _functorch._func_decrement_nesting,
}


class SpanRewrite:
    """A span of nodes as operators. Raises ``Stays`` if they would not be the same."""

    def __init__(
        self,
        graph: fx.Graph,
        span: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
    ):
        self.graph = graph
        self.span = span
        self.inside = set(span)
        self.inputs = inputs
        self.outputs = outputs
        modes = [v.fake_mode for v in map(value_of, self.inputs) if isinstance(v, FakeTensor)]
        if not modes:
            raise Stays("they have no tensors")
        self.fakes = modes[0]
        self.grad = mode_at(graph, span[0])
        self.refuse()
        self.traced = self.trace()

    def refuse(self) -> None:
        """Raises ``Stays`` for what no span may hold or touch."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise Stays("autocast is on")
        if any(node.target in AUTOCAST for node in self.graph.nodes):
            raise Stays("a torch.autocast region begins or ends")
        if any(not isinstance(value_of(n), torch.Tensor | torch.SymInt) for n in self.inputs):
            raise Stays("an input is not a tensor")
        if any(not isinstance(value_of(n), torch.Tensor | torch.SymInt) for n in self.outputs):
            raise Stays("a result that is used elsewhere is not a tensor")
        if self._shares_memory():
            raise Stays("a result shares memory with another value, and is written or returned")

    def refuse_nodes(self, nodes: Sequence[fx.Node]) -> None:
        """Raises ``Stays`` for nodes that are more than operators."""
        for node in nodes:
            if node.op not in ("call_function", "call_method"):
                raise Stays(f"`{node.target}` is a module")
            is_gradient = node.target is torch.autograd.grad
            if not is_gradient and name_of(node) in TORCH_ONLY | METADATA_WRITES:
                raise Stays(f"`{name_of(node)}` works on autograd or Python objects")
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise Stays(f"`{node.target}` holds a part of the graph")

    def function(self) -> Callable[..., list]:
        """The span as a function from values of ``inputs`` to those of ``outputs``."""
        raise NotImplementedError

    def _shares_memory(self) -> bool:
        """Whether a write to one result, by the graph or its caller, changes another value."""
        memory = [storage_of(node) for node in (*self.inputs, *self.outputs)]
        shared = {key for key in memory if key is not None and memory.count(key) > 1}
        last = next(iter(reversed(self.graph.nodes)))
        seen = {storage_of(node) for node in last.all_input_nodes}
        for node in self.graph.nodes:
            if node not in self.inside and is_in_place(node):
                seen |= {storage_of(operand) for operand in node.all_input_nodes[:1]}
        return bool(shared & seen & {storage_of(node) for node in self.outputs})

    def trace(self) -> fx.GraphModule:
        """The operators that PyTorch runs, below autograd."""
        run = self.function()
        leaves = [_leaf(value_of(node)) for node in self.inputs]
        try:
            with torch.set_grad_enabled(self.grad):
                traced = trace(run, leaves, self.fakes)
        except Stays:
            raise
        except Exception as error:
            raise Stays(f"PyTorch cannot trace them: {first_line(error)}") from error
        _write_out_copies(traced.graph)
        for node in traced.graph.nodes:
            is_check = node.op == "call_function" and not node.users and node.is_impure()
            is_check = is_check and node.target not in _CHECKS
            if _is_mutable(node) or is_check or node.target in _NOT_TWICE:
                raise Stays(f"`{node.target}` is more than a value")
        return traced

    def results(self) -> list[fx.Node]:
        """The traced value of each of ``outputs``."""
        return list(next(iter(reversed(self.traced.graph.nodes))).args[0])

    def replace(self) -> None:
        """Puts the operators in the place of the span."""
        made: dict[fx.Node, Any] = {}
        placeholders = self.traced.graph.find_nodes(op="placeholder")
        made.update(zip(placeholders, self.inputs, strict=True))
        results = [_without_aliases(result) for result in self.results()]
        given = dict(zip(results, self.outputs, strict=True))
        new: list[fx.Node] = []
        sizes = {expression(value_of(n)): n for n in self.inputs if _is_size(value_of(n))}
        try:
            with self.graph.inserting_before(self.span[0]):
                for node in self.traced.graph.nodes:
                    if node.op in ("placeholder", "output"):
                        continue
                    copied = self._constant(node, sizes, new)
                    made[node] = copied = copied or self.copy(node, made, new)
                    self.set_value(copied, given.get(node))
                    if isinstance(copied, fx.Node) and _is_size(value_of(copied)):
                        # Sizes come from inputs where they can: a region has no sizes inside.
                        made[node] = sizes.setdefault(expression(value_of(copied)), copied)
        except BaseException as error:
            for node in reversed(new):
                self.graph.erase_node(node)
            if isinstance(error, Stays) or not isinstance(error, Exception):
                raise
            raise Stays(f"PyTorch cannot run them again: {first_line(error)}") from error
        for node, result in zip(self.outputs, results, strict=True):
            node.replace_all_uses_with(made[result], lambda user: user not in self.inside)
        for node in reversed([*new, *self.span]):
            if (not node.users and node.target not in _CHECKS) or node in self.inside:
                self.graph.erase_node(node)

    def _constant(self, node: fx.Node, sizes: Mapping[Any, fx.Node], new: list) -> fx.Node | None:
        """before  ones_like(x)   after  full(sizes of x, 1): what x depends on does not matter."""
        number = _fill_value(node)
        if number is None:
            return None
        value = node.meta["val"]
        shape = [size if isinstance(size, int) else sizes.get(size) for size in _sizes(value.shape)]
        if None in shape:
            return None
        made = self.graph.call_function(
            aten.full, (shape, number), {"dtype": value.dtype, "device": value.device}
        )
        made.meta = {k: v for k, v in node.meta.items() if k in COPIED}
        new.append(made)
        return made

    def copy(self, node: fx.Node, made: Mapping[fx.Node, Any], new: list[fx.Node]) -> Any:
        """An operator of the trace as a node of the graph, which is added to ``new``."""
        if _without_aliases(node) is not node:
            return made[node.args[0]]
        if node.op == "get_attr":
            return self._listed(node, new)
        copied = self.graph.node_copy(node, made.__getitem__)
        copied.meta = {k: v for k, v in node.meta.items() if k in COPIED}
        new.append(copied)
        if node.target is CUT:
            copied.target = aten.detach
        elif isinstance(node.target, torch._ops.OpOverload) and any(
            True for _ in tensors_of(node.meta.get("val"))
        ):
            packet = node.target.overloadpacket
            copied.target = _VIEWS.get(packet, packet)
            if copied.target is aten.reshape:
                copied.args = copied.args[:2]
        return copied

    def _listed(self, node: fx.Node, new: list[fx.Node]) -> fx.Node:
        """before  a constant that the trace keeps   after  torch.tensor([its elements])."""
        constant = getattr(self.traced, node.target)
        constant = getattr(constant, "constant", None) if is_fake(constant) else constant
        if not isinstance(constant, torch.Tensor) or constant.numel() > _MOST_ELEMENTS:
            raise Stays("a constant is made while it is traced")
        with tracing_apart():
            elements = constant.tolist()
        kinds = {"dtype": constant.dtype, "device": constant.device}
        made = self.graph.call_function(torch.tensor, (elements,), kinds)
        made.meta = {k: v for k, v in node.meta.items() if k in COPIED}
        new.append(made)
        return made

    def set_value(self, node: Any, given: fx.Node | None) -> None:
        """Traces one node with its history; ``given`` has the value that eager's trace had."""
        if not isinstance(node, fx.Node) or "example_value" in node.meta:
            return
        with torch.set_grad_enabled(self.grad):
            value = run_again(node, self.fakes)
        if given is not None:
            if metadata(value) != metadata(value_of(given)):
                raise Stays(
                    f"`{given.name}` would differ from eager's in size, stride, type, device or "
                    f"`requires_grad`: {metadata(value)} instead of {metadata(value_of(given))}"
                )
            # Values after the span are views of the old one.
            value = value_of(given)
        node.meta["example_value"] = value


def trace(run: Callable[..., list], leaves: Sequence[Any], fakes) -> fx.GraphModule:
    """``run`` of ``leaves`` as operators that write nothing, below autograd.

    Raises ``Stays`` where it writes a value from outside, and whatever ``run`` raises.
    """
    tracer = make_fx(lambda *given: run(*given), decomposition_table=table())
    with _untold(), _whole_transforms(), tracing_apart(), fakes, fx.traceback.preserve_node_meta():
        traced = tracer(*leaves)
    for node in traced.graph.nodes:
        if "backward" in str(node.meta.get("original_aten")):
            node.meta["custom"] = (node.meta.get("custom") or {}) | {OF_GRADIENT: True}
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node in traced.graph.nodes:
        if _writes(node, placeholders):
            raise Stays(f"`{node.target}` writes a value from outside")
    if any(_is_mutable(node) for node in traced.graph.nodes):
        run = torch.func.functionalize(fx.Interpreter(traced).run, remove="mutations")
        with tracing_apart(), fakes, torch.no_grad(), fx.traceback.preserve_node_meta():
            traced = make_fx(lambda *given: run(*given))(*leaves)
    for node in traced.graph.nodes:
        node.meta[OF_GRADIENT] = (node.meta.get("custom") or {}).get(OF_GRADIENT, False)
    return traced


@contextlib.contextmanager
def _whole_transforms() -> Iterator[None]:
    """A trace that fails inside of a ``torch.func`` transform leaves it."""
    depth = _functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        # PyTorch's own function for this fails in older versions.
        while _functorch.get_dynamic_layer_stack_depth() > depth:
            _LEAVE[_functorch.peek_interpreter_stack().key()]()


@contextlib.contextmanager
def _untold() -> Iterator[None]:
    """Silences PyTorch's own record of an operator that fails in a trace: the caller says why."""
    of_fakes = logging.getLogger("torch._subclasses.fake_tensor")
    before, of_fakes.disabled = of_fakes.disabled, True
    try:
        yield
    finally:
        of_fakes.disabled = before


def _write_out_copies(graph: fx.Graph) -> None:
    """before  copy(x, y)   after  clone(y), for values of the same sizes, type and device."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        written, read = (one.meta.get("val") for one in node.args[:2])
        if metadata(written)[2:4] != metadata(read)[2:4]:
            continue
        if _sizes(written.shape) != _sizes(read.shape):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(aten.clone.default, (node.args[1],))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _writes(node: fx.Node, placeholders: Sequence[fx.Node]) -> bool:
    """Whether an operator writes one of its operands that is, or is a view of, a placeholder."""
    if not _is_mutable(node):
        return False
    memory = {_storage(p) for p in placeholders} - {None}
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    written = [given.get(a.name) for a in node.target._schema.arguments if a.is_write]
    return any(
        isinstance(leaf, fx.Node) and _storage(leaf) in memory
        for leaf in pytree.tree_leaves(written)
    )


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _fill_value(node: fx.Node) -> Any:
    """The one number that a tensor holds whatever the operands' elements are, or ``None``."""
    number = _CONSTANTS.get(node.target)
    if isinstance(number, str):
        names = [argument.name for argument in node.target._schema.arguments]
        number = (dict(zip(names, node.args, strict=False)) | node.kwargs).get(number)
    return number if isinstance(number, int | float) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _without_aliases(node: Any) -> Any:
    """The value that autograd keeps under this name."""
    while isinstance(node, fx.Node) and node.target in _KEPT:
        node = node.args[0]
    return node


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def metadata(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return expression(value)
    sizes = _sizes(value.shape), _sizes(value.stride())
    return *sizes, value.dtype, value.device, value.requires_grad


def _sizes(sizes: Sequence[Any]) -> tuple:
    return tuple(map(expression, sizes))


__all__ = ["COPIED", "CUT", "SpanRewrite", "Stays", "metadata", "mode_at", "trace"]
