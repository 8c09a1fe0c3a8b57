"""Operators that eager refuses for the types of their operands, though kernels could do them.

Owns the lists: truth values, all integers, and operands of different types. PyTorch runs such an
operator in place of a kernel, and raises its own error.
"""

from __future__ import annotations

from typing import Any

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


#: Operands that eager does not promote to a common type; export does not check.
_OF_ONE_TYPE = {
    "binary_cross_entropy": ("self", "target"),
    "cdist": ("x1", "x2"),
    "grid_sampler": ("input", "grid"),
    "grid_sampler_2d": ("input", "grid"),
    "grid_sampler_3d": ("input", "grid"),
    "index_add": ("self", "source"),
    "index_put": ("self", "values"),
    "linalg_cross": ("self", "other"),
    "mv": ("self", "vec"),
}

#: Norms. An operand in bf16 or f16 may have parameters in float32, if all of them are.
_NORMS = {
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
    "group_norm": ("input", "weight", "bias"),
    "instance_norm": ("input", "weight", "bias", "running_mean", "running_var"),
    "layer_norm": ("input", "weight", "bias"),
    "native_group_norm": ("input", "weight", "bias"),
    "native_layer_norm": ("input", "weight", "bias"),
}


def leave_to_eager(graph: fx.Graph) -> None:
    """Raises ``Refused`` for operators of a traced graph that eager refuses for their types."""
    reasons = {}
    for node in graph.nodes:
        name, dtype = _name_of(node), _dtype_of_operands(node)
        if _is_mixed(node, name.removesuffix("_")):
            error = CaptureError(f"PyTorch has no {name} of operands of different types")
            if not source_node(node):
                raise error
            reasons[source_node(node)] = str(error)
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


def _is_mixed(node: fx.Node, name: str) -> bool:
    """Whether eager refuses an operator because its operands have different types."""
    operands = _OF_ONE_TYPE.get(name) or _NORMS.get(name)
    if operands is None:
        return False
    given = _arguments(node)
    values = [_value_of(given.get(operand)) for operand in operands]
    dtypes = [value.dtype for value in values if isinstance(value, torch.Tensor)]
    if name == "index_put" and isinstance(values[1], torch.Tensor) and not values[1].dim():
        # With a mask, eager fills.
        indices = [_value_of(index) for index in given["indices"]]
        return len(set(dtypes)) > 1 and not any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices
        )
    if name in _NORMS and dtypes[:1] in ([torch.bfloat16], [torch.float16]):
        return set(dtypes[1:]) not in (set(), {dtypes[0]}, {torch.float32})
    return len(set(dtypes)) > 1


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _value_of(operand: Any) -> Any:
    return operand.meta.get("val") if isinstance(operand, fx.Node) else operand


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
