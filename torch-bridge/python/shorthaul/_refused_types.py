"""Operators that eager refuses for truth values, or for all integers, though kernels could do them.

Owns the list. PyTorch runs such an operator in place of a kernel, and raises its own error.
"""

from __future__ import annotations

import torch
from torch import fx

from ._errors import CaptureError, Refused
from ._origins import source_node

#: Operators without a kernel of eager's on CPUs for truth values.
_NO_TRUTH_VALUES = frozenset(
    {
        "abs",
        "absolute",
        "addbmm",
        "addcmul",
        "addmm",
        "addmv",
        "argmax",
        "argmin",
        "baddbmm",
        "bmm",
        "ceil",
        "chain_matmul",
        "dot",
        "fix",
        "floor",
        "inner",
        "linear",
        "matmul",
        "mm",
        "mv",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "round",
        "threshold",
        "topk",
        "trunc",
        "vdot",
    }
)

#: Operators without one for integers and truth values.
_NO_INTEGERS = frozenset(
    {
        "binary_cross_entropy",
        "celu",
        "frac",
        "glu",
        "grid_sampler",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "huber_loss",
        "lerp",
        "log_sigmoid",
        "logaddexp",
        "logaddexp2",
        "mish",
        "silu",
        "smooth_l1_loss",
        "softplus",
        "softshrink",
    }
)

#: Operators without one for integers of more than 8 bits, and for truth values.
_BYTES_ONLY = frozenset({"upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"})


def leave_to_eager(graph: fx.Graph) -> None:
    """Raises ``Refused`` for operators of a traced graph that eager refuses for their types."""
    reasons = {}
    for node in graph.nodes:
        name, dtype = _name_of(node), _dtype_of_operands(node)
        if dtype is None or dtype.is_floating_point or dtype.is_complex:
            continue
        refused = name in _NO_INTEGERS
        refused |= name in _BYTES_ONLY and dtype != torch.uint8
        refused |= name in _NO_TRUTH_VALUES and dtype == torch.bool
        if refused:
            error = CaptureError(f"PyTorch has no {name} of {str(dtype).removeprefix('torch.')}")
            if not source_node(node):
                raise error
            reasons[source_node(node)] = str(error)
    if reasons:
        raise Refused(reasons)


def _name_of(node: fx.Node) -> str:
    """An operator's name without its overload; reflecting and repeating pads have one name."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = node.target._schema.name.removeprefix("aten::")
    if name == "pad" and node.args[2:3] in (("reflect",), ("replicate",)):
        return "reflection_pad1d"
    return name


def _dtype_of_operands(node: fx.Node) -> torch.dtype | None:
    """The type of an operator's tensors, if they have one; that of the image for a sampled one."""
    operands = node.all_input_nodes
    if _name_of(node).startswith("grid_sampler"):
        operands = operands[:1]
    values = (operand.meta.get("val") for operand in operands)
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return dtypes.pop() if len(dtypes) == 1 else None
