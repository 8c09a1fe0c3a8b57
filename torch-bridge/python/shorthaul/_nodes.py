"""What a node of Dynamo's graph is: a name, a value, a view, a write.

Owns the questions that the rooms which split and rewrite graphs ask of single nodes. Never changes
a graph, and never decides who runs a node (``_partition``).
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

#: Types of elements that kernels hold.
DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

#: Functions and methods whose result is a view of their first operand, if it shares its storage.
_VIEWS = frozenset(
    "T H mT mH adjoint alias atleast_1d atleast_2d atleast_3d broadcast_to chunk contiguous detach "
    "diagonal dsplit expand expand_as flatten float double half bfloat16 to type type_as "
    "getitem hsplit linalg_diagonal matrix_H moveaxis movedim narrow numpy_T permute real ravel "
    "reshape reshape_as select slice "
    "split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten "
    "unfold unsqueeze view view_as vsplit".split()
)

#: Where a node's metadata says why PyTorch runs it.
TORCH_REASON = "torch_reason"

#: Methods that give their operand itself if it is of the type and form that they make.
_CONVERSIONS = frozenset("bfloat16 contiguous cpu double float half to type type_as".split())


def value_of(node: fx.Node) -> Any:
    """The traced value of a node of Dynamo's."""
    return node.meta.get("example_value")


def run_again(node: fx.Node, fakes: Any) -> Any:
    """What a node gives for the traced values of its operands; ``fakes`` is their mode."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    with fakes:
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def name_of(node: fx.Node) -> str:
    """The last word of the function or method that a node calls, without an overload's name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def is_number(node: fx.Node) -> bool:
    """Whether a node computes sizes or other Python numbers, one or several."""
    value = value_of(node)
    values = value if isinstance(value, (list, tuple)) and value else [value]
    return all(isinstance(v, _NUMBERS) for v in values)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def tensors_of(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in a value, which may be a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def tensor_reason(tensor: torch.Tensor) -> str | None:
    """Why kernels cannot use a tensor; ``None`` if they can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor):
        return f"it uses a tensor of class {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"it uses a {tensor.layout} tensor"
    if tensor.dtype not in DTYPES:
        return f"it uses a tensor of type {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "it uses a quantized or lazily conjugated tensor"
    return None


def classes_of(node: fx.Node) -> int | None:
    """How many classes a call of ``one_hot`` names; ``None`` if it does not."""
    n = node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes", -1)
    return n if isinstance(n, int) and n > 0 else None


def is_empty(node: fx.Node) -> bool:
    """Whether a node gives a tensor without elements, whatever the symbolic sizes are."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and any(n == 0 for n in value.shape if type(n) is int)


def needs_gradient(node: fx.Node) -> bool:
    """Whether a node gives a tensor with a history."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_transform(node: fx.Node) -> bool:
    """Whether a node enters, leaves or works inside of a transform of ``torch.func``."""
    if node.op not in ("call_function", "call_method"):
        return False
    module = getattr(node.target, "__module__", "") or ""
    return "functorch" in module or name_of(node).startswith("_vmap_")


def storage_of(node: fx.Node) -> int | None:
    """The memory that a node's tensor lies in."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def is_view(node: fx.Node) -> bool:
    """Whether a node gives views of its first operand, and nothing writes it in between.

    Of all operands, if it is a ``meshgrid``.
    """
    name = name_of(node)
    if name not in _VIEWS and name not in ("getattr", "meshgrid"):
        return False
    results = list(tensors_of(value_of(node)))
    operands = node.all_input_nodes if name == "meshgrid" else node.args[:1]
    if not results or not all(isinstance(operand, fx.Node) for operand in operands):
        return False
    sources = {
        t.untyped_storage()._cdata for operand in operands for t in tensors_of(value_of(operand))
    }
    return all(t.untyped_storage()._cdata in sources for t in results)


#: Operators of PyTorch itself, and of ours.
_NAMESPACES = frozenset("aten prim prims profiler shorthaul".split())

_AUTOGRAD = ("Autograd", "AutogradCPU", "AutogradCUDA")


def has_backward_of_its_own(node: fx.Node) -> bool:
    """Whether a node calls an operator of another library that is registered for autograd."""
    if isinstance(node.target, torch._ops.OpOverload):
        operators = [node.target]
    elif isinstance(node.target, torch._ops.OpOverloadPacket):
        operators = [getattr(node.target, name) for name in node.target.overloads()]
    else:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(
        one.namespace not in _NAMESPACES and any(has_kernel(one.name(), key) for key in _AUTOGRAD)
        for one in operators
    )


def is_operand_itself(node: fx.Node) -> bool:
    """Whether a node gives the tensor that it is given, history included, as ``float`` may.

    The tracer would take both for the result of this call, which no gradient passes where
    gradients are off.
    """
    if name_of(node) not in _CONVERSIONS or not isinstance(node.args[0], fx.Node):
        return False
    memory = storage_of(node)
    return memory is not None and memory == storage_of(node.args[0])


#: Where operators get an offset in the memory of their first operand.
_OFFSET_AT = {"as_strided": 3, "as_strided_copy": 3, "as_strided_scatter": 4}


def memory_reason(node: fx.Node) -> str | None:
    """Why a region does not have the memory that a node reads; ``None`` if it has it."""
    at = _OFFSET_AT.get(name_of(node))
    if at is None or not isinstance(value_of(node.args[0]), torch.Tensor):
        return None
    if not value_of(node.args[0]).is_contiguous():
        return "it reads the memory of a tensor that is not contiguous"
    offset = node.args[at] if at < len(node.args) else node.kwargs.get("storage_offset")
    is_other = node.args[0].op in ("placeholder", "get_attr") or is_view(node.args[0])
    if offset is not None and is_other:
        return "its offset counts from where the memory of another tensor begins"
    found = value_of(node)
    steps = [step for n, step in zip(found.shape, found.stride(), strict=True) if n != 1]
    # Behind other strides, `reshape` may give a copy where a region has a view that is written.
    is_written = any(map(is_in_place, node.graph.nodes))
    if not found.is_contiguous() and (is_written or steps != sorted(steps, reverse=True)):
        return "the elements of its result are in another order in memory"
    return None


def results_reason(node: fx.Node) -> str | None:
    """Why kernels cannot give what a node gives; ``None`` if they can."""
    if node.kwargs.get("sparse_grad") is True and needs_gradient(node):
        return "its gradient is a sparse tensor"
    if name_of(node).removeprefix("_") == "embedding_bag":
        items = [user for user in node.users if isinstance(value_of(node), (list, tuple))]
        if any(user.target is not operator.getitem or user.args[1] != 0 for user in items):
            return "it gives where its bags are, which depends on how PyTorch sums them"
    return None


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor are one place in memory, as behind ``expand``."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(type(step) is int and step == 0 and size != 1 for size, step in pairs)


def is_in_place(node: fx.Node) -> bool:
    """Whether a node writes its first operand."""
    name = name_of(node)
    if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS:
        return True
    if "inplace" in node.kwargs or node.op != "call_function":
        return node.kwargs.get("inplace") is True
    at = _inplace_position(node.target)
    return at is not None and at < len(node.args) and node.args[at] is True


@functools.cache
def _inplace_position(function: Any) -> int | None:
    """Where a function takes ``inplace``: modules such as ``LeakyReLU`` pass it by position."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


_IN_PLACE_OPERATORS = frozenset(
    form.format(name)
    for name in "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
    for form in ("i{}", "__i{}__")
) | {"setitem"}
