"""``torch.compile(model, backend="shorthaul")``: PyTorch's own capture in front of Shorthaul.

Owns the backend function that the ``torch_dynamo_backends`` entry point names. A graph that
Dynamo hands over is an ``nn.Module``, and is compiled like any other.
"""

from __future__ import annotations

from torch import fx

from .module import module


def shorthaul(graph_module: fx.GraphModule, example_inputs):
    """A callable that runs ``graph_module``; it compiles at its first call."""
    return module(_no_instance_forward(graph_module), fallback="eager")


def _no_instance_forward(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph_module.__dict__.pop("forward", None)
    return graph_module
