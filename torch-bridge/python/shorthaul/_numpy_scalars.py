"""NumPy's scalars beside tensors are numbers, as in eager.

Dynamo takes ``np.float64(2)`` for a tensor without dimensions, whose type then decides that of
``loss * np.sqrt(2)``: float64 in place of float32. Owns which values of a trace are such scalars,
and the conversion in front of an operator. Arrays of NumPy stay tensors, as in eager.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._dynamo import utils
from torch._dynamo.variables import builder

#: Marks a graph's input that is a scalar of NumPy's.
_SCALAR = "shorthaul_numpy_scalar"

#: Operators whose operands decide in which type they compute.
_NAMES = (
    "add sub mul div truediv floordiv mod pow rsub subtract multiply divide true_divide "
    "floor_divide remainder fmod clamp clamp_min clamp_max clip where xlogy copysign lt le gt ge "
    "eq ne and_ or_ xor lshift rshift bitwise_and bitwise_or bitwise_xor"
).split()
_METHODS = frozenset(_NAMES)
_FUNCTIONS = frozenset(
    getattr(module, name)
    for module in (operator, torch)
    for name in _NAMES
    if hasattr(module, name)
)

#: NumPy's functions whose result is an array even without dimensions.
_ARRAYS = frozenset(
    "array asarray asanyarray ascontiguousarray zeros ones empty full zeros_like ones_like "
    "empty_like full_like reshape squeeze view transpose ravel broadcast_to where cov".split()
)

#: Those whose result is a scalar if the first operand is one; attributes are such functions too.
_AS_OPERAND = frozenset(
    "astype copy iadd isub imul itruediv ifloordiv imod ipow iand ior ixor".split()
)

_NUMPY = (utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper)


def count_as_numbers(is_ours: Callable[[object], bool]) -> None:
    """before  mul(x, sqrt(2): f64)   after  mul(x, to(sqrt(2), f32)), where x has the type f32"""
    value_of_call, variable_of = builder.get_fake_value, builder.VariableBuilder._wrap

    @functools.wraps(value_of_call)
    def get_fake_value(node, tx, *args, **kwargs):
        if is_ours(tx.output.compiler_fn):
            _convert_scalars(node)
        return value_of_call(node, tx, *args, **kwargs)

    @functools.wraps(variable_of)
    def _wrap(self, value):
        variable = variable_of(self, value)
        # NumPy may be missing; its arrays have `__array_finalize__`.
        if type(value).__module__ == "numpy" and not hasattr(value, "__array_finalize__"):
            proxy = getattr(variable, "proxy", None)
            if proxy is not None:
                proxy.node.meta[_SCALAR] = True
        return variable

    builder.get_fake_value = get_fake_value
    builder.VariableBuilder._wrap = _wrap


def _convert_scalars(node: fx.Node) -> None:
    """Gives each scalar that ``node`` reads the type that the result has in eager."""
    known = _METHODS if node.op == "call_method" else _FUNCTIONS
    if node.target not in known or "example_value" in node.meta:
        return
    scalars = [operand for operand in node.all_input_nodes if _is_scalar(operand)]
    values = (
        operand.meta.get("example_value")
        for operand in node.all_input_nodes
        if operand not in scalars
    )
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # A condition decides nothing.
    tensors = [t for t in tensors if t.dtype != torch.bool] or tensors
    tensors = [t for t in tensors if t.dim() > 0] or tensors
    if not scalars or not tensors:
        return
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors])
    like = torch.empty((1,) * min(1, tensors[0].dim()), dtype=dtype, device="meta")
    for scalar in scalars:
        value = scalar.meta["example_value"]
        wanted = torch.result_type(like, _number(value.dtype))
        if wanted == torch.result_type(like, torch.empty((), dtype=value.dtype, device="meta")):
            continue
        with node.graph.inserting_before(node):
            converted = node.graph.call_method("to", (scalar, wanted))
        converted.meta["example_value"] = value.to(wanted)
        node.replace_input_with(scalar, converted)


def _number(dtype: torch.dtype) -> bool | int | float | complex:
    """A Python number of the same kind."""
    if dtype.is_complex:
        return 1j
    return 1.0 if dtype.is_floating_point else True if dtype == torch.bool else 1


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.dim() > 0:
        return False
    if node.meta.get(_SCALAR, False):
        return True
    if node.target is operator.getitem:
        return _is_numpys(node.args[0])
    if not _is_numpys(node):
        return False
    name = getattr(node.target, "__name__", "").removeprefix("wrapped_")
    if name in _AS_OPERAND or node.target is utils.numpy_attr_wrapper:
        return isinstance(node.args[0], fx.Node) and _is_scalar(node.args[0])
    return name not in _ARRAYS


def _is_numpys(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_numpys(node.args[0])
    return isinstance(node.target, _NUMPY) or node.target is utils.numpy_attr_wrapper


__all__ = ["count_as_numbers"]
