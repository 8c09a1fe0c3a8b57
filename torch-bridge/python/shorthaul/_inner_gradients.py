"""Gradients that ``forward`` itself asks for (``torch.autograd.grad``), as operators of its graph.

Owns the rewrite: before  y = f(x); g = grad(y, x)   after  the operators of f, and those of its
backward pass, which are operators like any other: kernels compute them, and their gradients are
symbolic too. PyTorch's autograd gives them, traced below itself. A value that has no history in
eager is detached where it is made. A graph in which that cannot be done (autocast, loops)
is PyTorch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ._custom_functions import CustomFunction, CustomResult
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
from ._span import COPIED, CUT, SpanRewrite, Stays, mode_at

#: Calls that PyTorch puts around transforms. They forbid hooks on saved tensors; a region has no
#: such hooks.
_AROUND = frozenset({"_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"})

_SET_GRAD = torch._C._set_grad_enabled


def write_out_gradients(graph_module: fx.GraphModule) -> str:
    """Writes every gradient of a graph of Dynamo's as operators.

    Returns the reason if some of them cannot be written so. Then PyTorch has to run all of the
    graph: programs are differentiated once.
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
            raise Stays("torch.autograd.grad is called beside it")
        if gradients:
            _GradientSpan(graph, _gradient_span(graph, gradients)).replace()
        else:
            _TransformSpan(graph, _transform_span(graph, transforms)).replace()
    except Stays as why:
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
    before, behind = _leading_to(nodes, outputs), _coming_from(nodes, operands)
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


def _leading_to(nodes: Sequence[fx.Node], outputs: set[fx.Node]) -> set[fx.Node]:
    """The nodes that compute ``outputs``, and those that write what these read."""
    before, memory = set(outputs), {storage_of(node) for node in outputs} - {None}
    for node in reversed(nodes):
        if node in before or _memory_written(node) & memory:
            before |= {node, *node.all_input_nodes}
            memory |= {storage_of(operand) for operand in node.all_input_nodes} - {None}
    return before


def _coming_from(nodes: Sequence[fx.Node], operands: set[fx.Node]) -> set[fx.Node]:
    """The nodes that read ``operands``, what comes from these, or memory where that is written."""
    behind, memory = set(operands), set()
    for node in nodes:
        read = node.all_input_nodes
        if behind & set(read) or memory & {storage_of(operand) for operand in read}:
            behind.add(node)
            memory |= _memory_written(node)
    return behind


def _memory_written(node: fx.Node) -> set[int]:
    if node.op not in ("call_function", "call_method") or not is_in_place(node):
        return set()
    return {storage_of(operand) for operand in node.all_input_nodes[:1]} - {None}


class _Gradients(SpanRewrite):
    """A span in which gradients are taken."""

    def __init__(self, graph: fx.Graph, span: Sequence[fx.Node]):
        inside = set(span)
        operands = (operand for n in span for operand in n.all_input_nodes if operand not in inside)
        outputs = [n for n in span if any(user not in inside for user in n.users)]
        super().__init__(graph, span, list(dict.fromkeys(operands)), outputs)

    def refuse(self) -> None:
        self.refuse_nodes(self.span)
        if mode_at(self.graph, self.span[-1].next) != self.grad:
            raise Stays("the gradient mode changes")
        super().refuse()

    def function(self) -> Callable[..., list]:
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in self.inputs}
        for node in self.span:
            copied = made[node] = graph.node_copy(node, made.__getitem__)
            copied.meta = {k: v for k, v in node.meta.items() if k in COPIED}
            if isinstance(node.target, CustomFunction | CustomResult):
                copied.target = node.target.recorded
            if self.loses_history(node):
                made[node] = graph.call_function(CUT, (copied,))
                made[node].meta = copied.meta
        graph.output([made[node] for node in self.outputs])
        return fx.Interpreter(fx.GraphModule({}, graph, "Gradients")).run

    def loses_history(self, node: fx.Node) -> bool:
        """Whether eager's value has no history though it comes from values that have some."""
        raise NotImplementedError

    def writers(self) -> list[fx.Node]:
        """The nodes that write a tensor."""
        return [n for n in self.span if is_in_place(n)]


class _TransformSpan(_Gradients):
    """A span of transforms, inside of which histories are not the graph's."""

    def refuse(self) -> None:
        if self.grad and any(node.target is _SET_GRAD for node in self.span):
            raise Stays("it changes the gradient mode")
        if self.writers() and any(map(self.loses_history, self.span)):
            raise Stays("a detached value shares memory that is written")
        super().refuse()

    def loses_history(self, node: fx.Node) -> bool:
        return name_of(node) == "detach"


class _GradientSpan(_Gradients):
    """A span of calls of ``torch.autograd.grad``, and of what they differentiate."""

    def refuse(self) -> None:
        super().refuse()
        self._refuse_writes_beside_autograd()

    def _refuse_writes_beside_autograd(self) -> None:
        """A write that autograd does not see, or to what was detached, has no place in a graph."""
        writers = self.writers()
        if not writers:
            return
        if any(self.loses_history(node) and is_view(node) for node in self.span):
            raise Stays("a detached value shares memory that is written")
        with_history = {storage_of(node) for node in self.graph.nodes if needs_gradient(node)}
        for node in writers:
            operand = node.all_input_nodes[0] if node.all_input_nodes else None
            if operand is None or storage_of(operand) not in with_history:
                continue
            if not mode_at(self.graph, node) or not needs_gradient(operand):
                raise Stays("it writes, outside of autograd, to a value with a history")

    def loses_history(self, node: fx.Node) -> bool:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            return False
        sources = node.all_input_nodes
        if node.target is operator.getitem and not isinstance(value_of(sources[0]), torch.Tensor):
            sources = sources[0].all_input_nodes
        is_number = value.is_floating_point() or value.is_complex()
        return is_number and any(_needs_gradient(value_of(source)) for source in sources)


__all__ = ["unless_hooked", "with_gradients_inside", "write_out_gradients"]
