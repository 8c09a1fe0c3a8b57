"""Gradients that ``forward`` itself asks for (``torch.autograd.grad``), as operators of its graph.

Owns the rewrite: before  y = f(x); g = grad(y, x)   after  the operators of f, and those of its
backward pass, which are operators like any other: kernels compute them, and their gradients are
symbolic too. PyTorch's autograd gives them, traced below itself. A value that has no history in
eager is detached where it is made. A graph in which that cannot be done (autocast, loops)
is PyTorch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ._autocast import AUTOCAST
from ._decomposed_gradients import table
from ._nodes import (
    is_in_place,
    is_transform,
    is_view,
    name_of,
    needs_gradient,
    storage_of,
    tensors_of,
    value_of,
)
from ._partition import METADATA_WRITES, TORCH_ONLY
from ._sizes import expression

aten = torch.ops.aten

#: Marks where gradients stop. No other rule makes this operator.
_CUT = aten.detach_copy.default

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

#: Calls that PyTorch puts around transforms. They forbid hooks on saved tensors; a region has no
#: such hooks.
_AROUND = frozenset({"_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"})

_SET_GRAD = torch._C._set_grad_enabled

_COPIED = ("nn_module_stack", "stack_trace")


class _Stays(Exception):
    """Why gradients are left to PyTorch."""


def write_out_gradients(graph_module: fx.GraphModule) -> str:
    """Writes every gradient of a graph of Dynamo's as operators.

    Gives the reason if there are some that cannot be written so. Then PyTorch has to run all of
    the graph: programs are differentiated once.
    """
    graph = graph_module.graph
    gradients = [node for node in graph.nodes if node.target is torch.autograd.grad]
    transforms = [node for node in graph.nodes if is_transform(node)]
    if not gradients and not transforms:
        return ""
    if transforms:
        transforms = [n for n in graph.nodes if is_transform(n) or name_of(n) in _AROUND]
    what = "it uses a torch.func transform" if transforms else "`torch.autograd.grad` in forward"
    try:
        if gradients and transforms:
            raise _Stays("torch.autograd.grad is called beside it")
        span = _gradient_span(graph, gradients) if gradients else _transform_span(graph, transforms)
        _SpanRewrite(graph_module, span, bool(transforms)).replace()
    except _Stays as why:
        return f"{what}: {why}"
    return ""


def with_gradients_inside(graph_module: fx.GraphModule) -> Callable | None:
    """PyTorch's way to run a graph with gradients inside; ``None`` for a graph without."""
    nodes = graph_module.graph.nodes
    if not any(node.target is torch.autograd.grad or is_transform(node) for node in nodes):
        return None
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    return fx.GraphModule(graph_module, graph).forward


def unless_hooked(run: Callable, original: Callable) -> Callable:
    """Runs ``original`` where an input has hooks, which gradients inside would call."""

    def choose(*inputs):
        for value in inputs:
            if isinstance(value, torch.Tensor) and value._backward_hooks:
                return original(*inputs)
        return run(*inputs)

    return choose


def _needs_gradient(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(value))


def _transform_span(graph: fx.Graph, transforms: list[fx.Node]) -> list[fx.Node]:
    """The nodes from the first step of a transform to the last."""
    nodes = list(graph.nodes)
    first, last = nodes.index(transforms[0]), nodes.index(transforms[-1])
    for i, node in enumerate(nodes[last:], last):
        is_item = node.target is operator.getitem and node.args[0] in nodes[first : last + 1]
        if is_item and isinstance(value_of(node.args[0]), list | tuple):
            last = i
    return [n for n in nodes[first : last + 1] if n.op not in ("placeholder", "get_attr")]


def _gradient_span(graph: fx.Graph, gradients: list[fx.Node]) -> list[fx.Node]:
    """The nodes from the first one that depends on an operand and leads to a result, up to the last
    item of a gradient.
    """
    outputs, operands = set(), set()
    for node in gradients:
        arguments = dict(zip(("outputs", "inputs"), node.args, strict=False)) | node.kwargs
        outputs |= {n for n in pytree.tree_leaves(arguments["outputs"]) if isinstance(n, fx.Node)}
        operands |= {n for n in pytree.tree_leaves(arguments["inputs"]) if isinstance(n, fx.Node)}
    nodes = list(graph.nodes)
    before = set(outputs)
    for node in reversed(nodes):
        if node in before:
            before |= set(node.all_input_nodes)
    behind = set(operands)
    for node in nodes:
        if behind & set(node.all_input_nodes):
            behind.add(node)
    last = max(
        i
        for i, node in enumerate(nodes)
        if node in gradients or (node.target is operator.getitem and node.args[0] in gradients)
    )
    is_on_way = [
        node.op not in ("placeholder", "get_attr") and node in before & behind for node in nodes
    ]
    first = min(is_on_way.index(True) if any(is_on_way) else last, nodes.index(gradients[0]))
    return [n for n in nodes[first : last + 1] if n.op not in ("placeholder", "get_attr")]


def _mode_at(graph: fx.Graph, place: fx.Node) -> bool:
    """Whether gradients are on where ``place`` runs."""
    mode = torch.is_grad_enabled()
    for node in graph.nodes:
        if node is place:
            break
        if node.target is _SET_GRAD:
            mode = node.args[0]
    return mode


class _SpanRewrite:
    """A span of nodes as operators. Raises ``_Stays`` if they would not be the same."""

    def __init__(self, graph_module: fx.GraphModule, span: list[fx.Node], transforms: bool):
        self.graph = graph_module.graph
        #: Whether the span holds transforms, inside of which histories are not the graph's.
        self.transforms = transforms
        self.span = span
        inside = set(span)
        self.inputs = list(
            dict.fromkeys(arg for n in span for arg in n.all_input_nodes if arg not in inside)
        )
        self.outputs = [n for n in span if any(user not in inside for user in n.users)]
        modes = [v.fake_mode for v in map(value_of, self.inputs) if isinstance(v, FakeTensor)]
        if not modes:
            raise _Stays("they have no tensors")
        self.fakes = modes[0]
        self.grad = _mode_at(self.graph, span[0])
        self._refuse_side_effects()
        self.traced = self._trace()

    def _refuse_side_effects(self) -> None:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise _Stays("autocast is on")
        if any(node.target in AUTOCAST for node in self.graph.nodes):
            raise _Stays("a torch.autocast region begins or ends")
        for node in self.span:
            if node.op not in ("call_function", "call_method"):
                raise _Stays(f"`{node.target}` is a module")
            is_gradient = node.target is torch.autograd.grad
            if not is_gradient and name_of(node) in TORCH_ONLY | METADATA_WRITES:
                raise _Stays(f"`{name_of(node)}` works on autograd or Python objects")
            if self.transforms and self.grad and node.target is _SET_GRAD:
                raise _Stays("it changes the gradient mode")
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise _Stays(f"`{node.target}` holds a part of the graph")
        if _mode_at(self.graph, self.span[-1].next) != self.grad:
            raise _Stays("the gradient mode changes")
        if any(not isinstance(value_of(n), torch.Tensor | torch.SymInt) for n in self.inputs):
            raise _Stays("a value of the graph is no tensor")
        if any(not isinstance(value_of(n), torch.Tensor | torch.SymInt) for n in self.outputs):
            raise _Stays("a list of tensors is used elsewhere")
        self._refuse_writes_beside_autograd()
        if self._shares_memory():
            raise _Stays("results share memory, which is seen")

    def _refuse_writes_beside_autograd(self) -> None:
        """A write that autograd does not see, or to what was detached, has no place in a graph."""
        writers = [n for n in self.span if is_in_place(n) or name_of(n) in ("setitem", "copy_")]
        if not writers:
            return
        detached = [node for node in self.span if self._loses_history(node)]
        if self.transforms and detached or any(map(is_view, detached)):
            raise _Stays("a detached value shares memory that is written")
        if self.transforms:
            return
        with_history = {storage_of(node) for node in self.graph.nodes if needs_gradient(node)}
        for node in writers:
            operand = node.all_input_nodes[0] if node.all_input_nodes else None
            if operand is None or storage_of(operand) not in with_history:
                continue
            if not _mode_at(self.graph, node) or not needs_gradient(operand):
                raise _Stays("it writes, outside of autograd, to a value with a history")

    def _shares_memory(self) -> bool:
        """Whether a write to one result, by the graph or its caller, changes another value."""
        memory = [storage_of(node) for node in (*self.inputs, *self.outputs)]
        shared = {key for key in memory if key is not None and memory.count(key) > 1}
        last = next(iter(reversed(self.graph.nodes)))
        seen = {storage_of(node) for node in last.all_input_nodes}
        inside = set(self.span)
        for node in self.graph.nodes:
            if node not in inside and (is_in_place(node) or name_of(node) == "setitem"):
                seen |= {storage_of(operand) for operand in node.all_input_nodes[:1]}
        return bool(shared & seen & {storage_of(node) for node in self.outputs})

    def _trace(self) -> fx.GraphModule:
        """The operators that PyTorch runs, below autograd."""
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.span:
            copied = made[node] = graph.node_copy(node, made.__getitem__)
            copied.meta = {k: v for k, v in node.meta.items() if k in _COPIED}
            if self._loses_history(node):
                made[node] = graph.call_function(_CUT, (copied,))
                made[node].meta = copied.meta
        graph.output([made[node] for node in self.outputs])
        run = fx.Interpreter(fx.GraphModule({}, graph, "Gradients")).run
        leaves = [_leaf(value_of(node)) for node in self.inputs]
        trace = make_fx(lambda *given: run(*given), decomposition_table=table())
        try:
            with self.fakes, torch.set_grad_enabled(self.grad), fx.traceback.preserve_node_meta():
                traced = trace(*leaves)
        except Exception as error:
            raise _Stays(f"PyTorch cannot trace them: {error}") from error
        placeholders = traced.graph.find_nodes(op="placeholder")
        for node in traced.graph.nodes:
            if _writes(node, placeholders):
                raise _Stays(f"`{node.target}` writes a value from outside")
        if any(_is_mutable(node) for node in traced.graph.nodes):
            run = torch.func.functionalize(fx.Interpreter(traced).run, remove="mutations")
            with self.fakes, torch.no_grad(), fx.traceback.preserve_node_meta():
                traced = make_fx(lambda *given: run(*given))(*leaves)
        for node in traced.graph.nodes:
            is_check = node.op == "call_function" and not node.users and node.is_impure()
            if _is_mutable(node) or is_check or node.target in _NOT_TWICE:
                raise _Stays(f"`{node.target}` is more than a value")
        return traced

    def _loses_history(self, node: fx.Node) -> bool:
        """Whether eager's value has no history though it comes from values that have some."""
        if self.transforms:
            return name_of(node) == "detach"
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return False
        sources = node.all_input_nodes
        if node.target is operator.getitem and not isinstance(value_of(sources[0]), torch.Tensor):
            sources = sources[0].all_input_nodes
        is_number = value.is_floating_point() or value.is_complex()
        return is_number and any(_needs_gradient(value_of(source)) for source in sources)

    def replace(self) -> None:
        """Puts the operators in the place of the span."""
        made: dict[fx.Node, Any] = {}
        placeholders = self.traced.graph.find_nodes(op="placeholder")
        made.update(zip(placeholders, self.inputs, strict=True))
        results = next(iter(reversed(self.traced.graph.nodes))).args[0]
        results = [_without_aliases(result) for result in results]
        given = dict(zip(results, self.outputs, strict=True))
        new: list[fx.Node] = []
        sizes = {expression(value_of(n)): n for n in self.inputs if _is_size(value_of(n))}
        try:
            with self.graph.inserting_before(self.span[0]):
                for node in self.traced.graph.nodes:
                    if node.op in ("placeholder", "output"):
                        continue
                    copied = self._constant(node, sizes, new)
                    made[node] = copied = copied or self._copy(node, made, new)
                    self._set_value(copied, given.get(node))
                    if isinstance(copied, fx.Node) and _is_size(value_of(copied)):
                        # Sizes come from inputs where they can: a region has no sizes inside.
                        made[node] = sizes.setdefault(expression(value_of(copied)), copied)
        except BaseException:
            for node in reversed(new):
                self.graph.erase_node(node)
            raise
        inside = set(self.span)
        for node, result in zip(self.outputs, results, strict=True):
            node.replace_all_uses_with(made[result], lambda user: user not in inside)
        for node in reversed([*new, *self.span]):
            if not node.users or node in inside:
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
        made.meta = {k: v for k, v in node.meta.items() if k in _COPIED}
        new.append(made)
        return made

    def _copy(self, node: fx.Node, made: Mapping[fx.Node, Any], new: list[fx.Node]) -> Any:
        if _without_aliases(node) is not node:
            return made[node.args[0]]
        if node.op == "get_attr":
            raise _Stays("a constant is made while it is traced")
        copied = self.graph.node_copy(node, made.__getitem__)
        copied.meta = {k: v for k, v in node.meta.items() if k in _COPIED}
        new.append(copied)
        if node.target is _CUT:
            copied.target = aten.detach
        elif isinstance(node.target, torch._ops.OpOverload) and any(
            True for _ in tensors_of(node.meta.get("val"))
        ):
            packet = node.target.overloadpacket
            copied.target = _VIEWS.get(packet, packet)
            if copied.target is aten.reshape:
                copied.args = copied.args[:2]
        return copied

    def _set_value(self, node: Any, given: fx.Node | None) -> None:
        """Traces one node with its history; ``given`` has the value that eager's trace had."""
        if not isinstance(node, fx.Node) or "example_value" in node.meta:
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        with self.fakes, torch.set_grad_enabled(self.grad):
            value = node.target(*args, **kwargs)
        if given is not None:
            if _metadata(value) != _metadata(value_of(given)):
                raise _Stays(
                    f"`{given.name}` would be {_metadata(value)}; in eager it is "
                    f"{_metadata(value_of(given))}"
                )
            # Values behind the span are views of the old one.
            value = value_of(given)
        node.meta["example_value"] = value


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


def _metadata(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return expression(value)
    sizes = _sizes(value.shape), _sizes(value.stride())
    return *sizes, value.dtype, value.device, value.requires_grad


def _sizes(sizes: Sequence[Any]) -> tuple:
    return tuple(map(expression, sizes))


__all__ = ["unless_hooked", "with_gradients_inside", "write_out_gradients"]
