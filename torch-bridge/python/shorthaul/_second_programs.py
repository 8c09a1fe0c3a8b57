"""Second derivatives by kernels: a region's gradients, compiled as a graph.

Owns the graph of a region's gradients: before  y = f(x); dx = grad(y, x, dy)   after  the
operators of f and of its backward pass, with ``x`` and ``dy`` for inputs and ``dx`` for results.
Compiled as a graph of its own, its backward pass gives the second derivatives. Never keeps tensors
of a call: ``_second_derivatives`` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._subclasses import FakeTensorMode

from ._inner_gradients import write_out_gradients
from ._nodes import run_again, value_of

#: Gives gradients for tensors and gradients of results; ``None`` for inputs that get none.
Gradients = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor | None]]


class NotWritten(Exception):
    """Why gradients cannot be written as a graph."""


def compiled_gradients(
    body: fx.GraphModule,
    given: Sequence[Any],
    outputs: Sequence[int],
    wanted: Sequence[int],
    compile_graph: Callable,
    origins: dict[str, fx.Node],
) -> Gradients:
    """What computes gradients of ``outputs`` of ``body`` by those of ``given`` that are ``wanted``.

    ``given`` are tensors like those of later calls, and numbers. Raises ``NotWritten``.
    """
    graph, mode = fx.Graph(), FakeTensorMode()
    examples: list[torch.Tensor] = []

    def placeholder(name: str, like: torch.Tensor) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            fake = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
        node.meta["example_value"] = fake.requires_grad_(like.requires_grad)
        examples.append(like)
        return node

    with torch.enable_grad(), _disable_saved_tensors_hooks_during_tracing():
        made, results = _copied(body, given, graph, placeholder, mode, origins)
        used = [i for i, at in enumerate(outputs) if value_of(results[at]).requires_grad]
        sources = [made[i] for i in wanted]
        grads = []
        for i in used:
            with mode:
                like = torch.empty_like(value_of(results[outputs[i]]), requires_grad=True)
            grads.append(placeholder(f"grad_{i}", like))
        if not used or not sources:
            raise NotWritten("no result has a gradient")
        arguments = [results[outputs[i]] for i in used], sources, grads
        call = graph.call_function(torch.autograd.grad, arguments)
        call.kwargs = {"create_graph": True, "allow_unused": True}
        found = _run(call, mode)
        items = {}
        for k, value in enumerate(found):
            if value is not None:
                items[wanted[k]] = item = graph.call_function(operator.getitem, (call, k))
                item.meta["example_value"] = value
        graph.output(tuple(items.values()))
        gradients = fx.GraphModule(body, graph, "Gradients")
        reason = write_out_gradients(gradients)
        if reason:
            raise NotWritten(reason)
        run = compile_graph(gradients, examples)
    order, n = list(items), len(given)

    def compute(tensors: Sequence[Any], grads: Sequence[torch.Tensor | None]):
        operands = [value for value in tensors if isinstance(value, torch.Tensor)]
        gradients: list[torch.Tensor | None] = [None] * n
        for i, gradient in zip(order, run(*operands, *(grads[i] for i in used)), strict=True):
            gradients[i] = gradient
        return gradients

    return compute


def _copied(body: fx.GraphModule, given, graph: fx.Graph, placeholder, mode, origins):
    """The region's nodes in another graph, with values: its inputs by position, its results."""
    made: dict[fx.Node, Any] = {}
    inputs: list[Any] = []
    for node in body.graph.nodes:
        if node.op == "placeholder":
            value = given[len(inputs)]
            is_tensor = isinstance(value, torch.Tensor)
            made[node] = placeholder(node.name, value) if is_tensor else value
            inputs.append(made[node])
        elif node.op == "output":
            return inputs, fx.node.map_arg(list(node.args[0]), made.__getitem__)
        else:
            copied = made[node] = graph.node_copy(node, made.__getitem__)
            origin = origins.get(node.name, node)
            keys = ("nn_module_stack", "stack_trace")
            copied.meta = {key: origin.meta[key] for key in keys if key in origin.meta}
            if node.op == "get_attr":
                attribute = operator.attrgetter(node.target)(body)
                copied.meta["example_value"] = mode.from_tensor(attribute)
            else:
                _run(copied, mode)
    raise NotWritten("the region has no results")


def _run(node: fx.Node, mode: FakeTensorMode) -> Any:
    """Runs a node without memory, and notes its value."""
    try:
        value = run_again(node, mode)
    except Exception as error:
        raise NotWritten(f"PyTorch cannot trace `{node.name}`: {error}") from error
    node.meta["example_value"] = value
    return value


__all__ = ["NotWritten", "compiled_gradients"]
