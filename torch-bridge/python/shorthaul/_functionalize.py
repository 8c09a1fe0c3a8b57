"""Rewrites an exported ATen graph so that no operator writes its operands.

Owns the fast path from the graph that ``torch.export`` traces to a functional one, without
tracing it again (PyTorch's own way costs 2 s for ResNet-50). It covers in-place operators on
whole tensors and BatchNorm's running statistics; where an in-place write could be seen through
another view it gives up, and the caller asks PyTorch to functionalize. Never changes the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.effects import with_effects
from torch.utils import _pytree as pytree

from ._errors import Refused
from ._origins import source_node

#: Operators in place whose form out of place has another name, with the same arguments.
_OUT_OF_PLACE = {
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
}


def out_of_place(operator: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator of PyTorch's that gives what ``operator`` writes into its first operand."""
    if torch.Tag.inplace_view in operator.tags:  # It writes shapes, no elements.
        return None
    if operator in _OUT_OF_PLACE:
        return _OUT_OF_PLACE[operator]
    name = operator._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    return getattr(packet, operator._overloadname, None)


#: Operators that compute in the type to which their operands promote.
_PROMOTING = frozenset(
    "add sub mul div floor_divide remainder fmod pow atan2 hypot xlogy copysign lerp addcmul "
    "addcdiv eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor bitwise_left_shift bitwise_right_shift gcd lcm clamp clamp_min clamp_max".split()
)


def computes_in_another_type(node: fx.Node) -> bool:
    """Whether an in-place operator computes in another type than that of what it writes.

    Its out-of-place form in the type of the result would round the operands first.
    """
    name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
    if name not in _PROMOTING:
        return False
    own, *others = (
        operand.meta.get("val") if isinstance(operand, fx.Node) else operand
        for operand in (*node.args, *node.kwargs.values())
    )
    if not isinstance(own, torch.Tensor):
        return False
    like = _without_elements(own)
    return any(
        torch.result_type(like, _without_elements(other)) != own.dtype
        for other in others
        if isinstance(other, (torch.Tensor, int, float))
    )


def _without_elements(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty([1] * bool(value.dim()), dtype=value.dtype, device="meta")


@dataclass(frozen=True)
class Ref:
    """The ``idx``-th tensor that ``node`` gives."""

    node: fx.Node
    idx: int = 0

    @property
    def value(self) -> Any:
        """The traced tensor: its shape and dtype."""
        value = self.node.meta.get("val")
        return value[self.idx] if isinstance(value, (list, tuple)) else value


@dataclass
class FunctionalNode:
    """One operator: its functional target, arguments by schema name, and output tensors."""

    node: fx.Node
    target: str
    args: dict[str, Any]
    outputs: list[Any]
    #: False for checks and for integer arithmetic beside the tensors.
    is_tensor_op: bool


@dataclass
class Functional:
    """A functional reading of an exported graph; ``current`` maps a value to what it became."""

    nodes: list[FunctionalNode] = field(default_factory=list)
    #: Placeholders that the graph writes, with their last value.
    mutated: dict[fx.Node, Ref] = field(default_factory=dict)
    current: dict[Ref, Ref] = field(default_factory=dict)

    def resolve(self, node: fx.Node) -> Ref:
        """The value that ``node`` stands for at this point of the walk."""
        ref = Ref(node)
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            source, idx = node.args
            ref = Ref(source, idx)
        return self.current.get(ref, ref)


def refuse_effects(graph: fx.Graph, origins: Mapping[str, fx.Node]) -> None:
    """Raises ``Refused`` with the operators that raise errors which depend on values."""
    reasons = {}
    for node in graph.nodes:
        origin = origins.get(source_node(node))
        if node.target is with_effects and origin is not None:
            called = getattr(origin.target, "__name__", origin.target)
            reasons[origin.name] = f"`{called}` raises an error for some values"
    if reasons:
        raise Refused(reasons)


def functionalize(graph: fx.Graph) -> Functional | None:
    """Reads ``graph`` functionally, or gives ``None`` where views make that unsafe."""
    functional = Functional()
    aliases = _Aliases(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            return None
        if node.op != "call_function" or getattr(node.target, "__name__", "") == "getitem":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            functional.nodes.append(FunctionalNode(node, str(node.target), {}, [], False))
            continue
        if node.target._schema.name == "aten::batch_norm":
            if not _append_batch_norm(functional, node, aliases):
                return None
        elif node.target._schema.is_mutable:
            if not _append_in_place(functional, node, aliases):
                return None
        else:
            target, args = _without_empty_slices(str(node.target), _bind(functional, node))
            functional.nodes.append(
                FunctionalNode(node, target, args, _values(node), _is_tensor_op(node))
            )
    return functional


def _without_empty_slices(target: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A slice ``x[4:2]`` ends where it starts, and a write to a slice without elements copies."""
    if target not in ("aten.slice.Tensor", "aten.slice_scatter.default"):
        return target, args
    n, start, end = args["self"].value.shape[args["dim"]], args["start"], args["end"]
    if type(n) is not int or not all(bound is None or type(bound) is int for bound in (start, end)):
        return target, args
    first, last, _ = slice(start, end).indices(n)
    if last > first:
        return target, args
    if target == "aten.slice_scatter.default":
        return "aten.clone.default", {"self": args["self"], "memory_format": None}
    return target, args | {"start": first, "end": first}


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _is_tensor_op(node: fx.Node) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))


def _bind(functional: Functional, node: fx.Node) -> dict[str, Any]:
    """All arguments by schema name, defaults filled in, nodes resolved to what they are now."""
    bound = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args) and not argument.kwarg_only:
            value = node.args[i]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            value = argument.default_value
        bound[argument.name] = fx.node.map_arg(value, functional.resolve)
    return bound


def _append_batch_norm(functional: Functional, node: fx.Node, aliases: _Aliases) -> bool:
    """Gives ``aten.batch_norm`` the functional form that matches its mode.

    ``False`` where another name of the statistics that it writes is read, as a row's tensor.

    before  y = batch_norm(x, w, b, mean, var, training=True)   (writes mean and var)
    after   y, batch_mean, batch_rstd, mean', var' = _native_batch_norm_legit_functional(...)
    """
    args = _bind(functional, node)
    args.pop("cudnn_enabled")
    value = node.meta["val"]
    if not args["training"]:
        del args["training"]
        target, outputs = "aten._native_batch_norm_legit_no_training.default", [value, None, None]
    elif args["running_mean"] is None:
        del args["running_mean"], args["running_var"]
        target, outputs = "aten._native_batch_norm_legit.no_stats", [value, None, None]
    else:
        stats = node.args[3:5]
        if not all(aliases.is_private(stat, node) for stat in stats):
            return False
        target = "aten._native_batch_norm_legit_functional.default"
        outputs = [value, None, None, *(stat.meta["val"] for stat in stats)]
        for i, stat in enumerate(stats):
            _write(functional, stat, Ref(node, 3 + i))
    functional.nodes.append(FunctionalNode(node, target, args, outputs, True))
    return True


def _append_in_place(functional: Functional, node: fx.Node, aliases: _Aliases) -> bool:
    """before  y = relu_(x)   after  y = relu(x), and x means y from here on."""
    written = [i for i, argument in enumerate(node.target._schema.arguments) if argument.is_write]
    operator = out_of_place(node.target)
    if written != [0] or operator is None or not aliases.is_private(node.args[0], node):
        return False
    if computes_in_another_type(node):
        return False
    args = _bind(functional, node)
    functional.nodes.append(FunctionalNode(node, str(operator), args, _values(node), True))
    _write(functional, node.args[0], Ref(node))
    return True


def _write(functional: Functional, written: fx.Node, value: Ref) -> None:
    """Lets every name of the tensor that ``written`` stands for mean ``value`` from here on."""
    root = functional.resolve(written)
    for ref, now in functional.current.items():
        if now == root:
            functional.current[ref] = value
    functional.current[root] = value
    for placeholder, now in functional.mutated.items():
        if now == root:
            functional.mutated[placeholder] = value
    if root.node.op == "placeholder":
        functional.mutated[root.node] = value


class _Aliases:
    """Which nodes of a graph share storage, told from the traced tensors."""

    def __init__(self, graph: fx.Graph):
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.sharing: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for leaf in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(leaf, torch.Tensor):
                    self.sharing.setdefault(leaf.untyped_storage()._cdata, []).append(node)

    def is_private(self, written: Any, writer: fx.Node) -> bool:
        """No name of the written storage but the tensor itself is used once ``writer`` has run."""
        # What is written may be a list, as that of `_foreach_add_`.
        if not isinstance(written, fx.Node) or not isinstance(
            written.meta.get("val"), torch.Tensor
        ):
            return False
        names = self._names_of(written)
        for other in self.sharing[written.meta["val"].untyped_storage()._cdata]:
            if other in names or self.position[other] >= self.position[writer]:
                continue
            if other.op == "placeholder" or any(
                self.position[user] > self.position[writer] for user in other.users
            ):
                return False
        return True

    def _names_of(self, node: fx.Node) -> set[fx.Node]:
        """``node`` and the results of the in-place chain that it stands at the end of."""
        names = {node}
        while (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and node.target._schema.is_mutable
            and isinstance(node.args[0], fx.Node)
        ):
            node = node.args[0]
            names.add(node)
        return names
