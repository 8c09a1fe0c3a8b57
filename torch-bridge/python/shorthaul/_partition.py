"""Splits a graph that Dynamo gives into regions for Shorthaul and parts for PyTorch.

Owns the rules of that split. The order of the graph is kept, so PyTorch's parts mean what they mean
in eager: custom autograd functions, higher-order operators, in-place writes to tensors that need a
gradient, operators without an implementation here. A region returns only new tensors. If an output
is a view of an input or of another value, PyTorch makes the view again from its base after the
region. Never traces or compiles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from . import _recurrent
from ._autocast import AUTOCAST, ENTER
from ._draws import Seed, may_draw
from ._nodes import (
    TORCH_REASON,
    classes_of,
    has_backward_of_its_own,
    is_empty,
    is_in_place,
    is_number,
    is_transform,
    is_view,
    memory_reason,
    name_of,
    needs_gradient,
    overlaps,
    results_reason,
    storage_of,
    tensor_reason,
    tensors_of,
    value_of,
)
from ._older_gradients import has_own_gradient
from ._sizes import expression
from ._visible import Visible, is_item
from ._writes import written_operands

#: Methods that change what a tensor is, not only its elements: PyTorch then runs the whole graph.
METADATA_WRITES = frozenset(
    "as_strided_ detach_ rename_ requires_grad_ resize_ resize_as_ set_ set_data "
    "shallow_copy_data_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)

#: Methods that concern autograd or Python, not elements.
TORCH_ONLY = frozenset(
    "_get_data_attr backward data_ptr grad item numpy register_hook "
    "register_post_accumulate_grad_hook retain_grad share_memory_ storage tolist "
    "untyped_storage".split()
)

#: Functions whose gradient with respect to the first operand PyTorch refuses to compute.
_HALF_DIFFERENTIABLE = "igamma igammac special_gammainc special_gammaincc special_zeta".split()

#: Functions without any gradient in PyTorch: the backward pass raises an error.
_NOT_DIFFERENTIABLE = frozenset(
    "floor_divide floor_divide_ floordiv ifloordiv __rfloordiv__ heaviside heaviside_ histogram "
    "histogramdd".split()
)

#: Operators that are worth a region of their own.
_HEAVY = tuple(
    "conv linear matmul mm bmm einsum attention norm lstm gru rnn embedding softmax "
    "cross_entropy".split()
)

#: Operators whose gradients do not need their operands' elements.
_UNSAVING = frozenset(
    "add cat clone concat double eq float gather ge getitem gt iadd index_select le lt ne neg "
    "stack sub".split()
)

#: Prefixes of functions that return nothing and change no state on which others depend.
_CHECKS = ("_check", "_assert", "_foreach", "_linalg_check", "_log_api_usage", "sym_constrain")
_NO_VALUE = "it returns no value"

_SET_GRAD = torch._C._set_grad_enabled
_INFERENCE = (
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)


@dataclass(frozen=True)
class Ambient:
    """PyTorch's state at the beginning of a region."""

    #: Arguments of the ``torch.autocast`` regions around it that ``forward`` itself entered.
    autocasts: tuple[tuple, ...] = ()
    #: The gradient mode that ``forward`` itself set before it, or ``None`` if it set none.
    grad: bool | None = None


@dataclass
class RegionPlan:
    """A run of nodes that becomes one region."""

    name: str
    nodes: list[fx.Node]
    ambient: Ambient
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    #: Inputs that are written in place after the region.
    written_later: list[fx.Node] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies it among the regions of the same graph."""
        return tuple(node.name for node in (*self.nodes, *self.outputs))


class NotSplit(Exception):
    """Names of nodes that PyTorch must run, with the reasons."""

    def __init__(self, reasons: dict[str, str]):
        self.reasons = reasons
        super().__init__(str(reasons))


def whole_graph_reason(graph: fx.Graph) -> str | None:
    """Why no part of a graph can be a region; ``None`` if parts can be."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        if name_of(node) in METADATA_WRITES:
            return f"`{name_of(node)}` changes a tensor's metadata"
        if is_transform(node):
            return "it uses a torch.func transform"
    return None


def torch_reason(node: fx.Node) -> str | None:
    """Why PyTorch must run a single node; ``None`` if a region may hold it."""
    if node.op == "call_module":
        return f"sub-module `{node.target}`"
    if TORCH_REASON in node.meta:
        return node.meta[TORCH_REASON]
    if has_backward_of_its_own(node):
        return f"`{node.target}` has a backward pass of its own"
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"higher-order operator `{node.target}`"
    if name_of(node) in TORCH_ONLY:
        return f"`{name_of(node)}` works on autograd or Python objects"
    if node.target is _SET_GRAD:
        return None
    if name_of(node) == "one_hot":
        if classes_of(node) is None:
            return "`one_hot` without a number of classes depends on its values"
        if value_of(node.all_input_nodes[0]).dtype != torch.int64:
            return "PyTorch refuses `one_hot` of this type"
    if (reason := _recurrent.reason(name_of(node), node, value_of)) is not None:
        return reason
    if node.target is torch.autograd.grad:
        return "`torch.autograd.grad` inside forward"
    if node.kwargs.get("generator") is not None:
        return "it draws random numbers from a `generator`"
    if "out" in node.kwargs:
        return "it writes to `out=`"
    operands = node.all_input_nodes
    without_elements = any(is_empty(n) and needs_gradient(n) for n in operands)
    if without_elements and name_of(node) not in _recurrent.NAMES:
        return "it uses a tensor without elements that needs a gradient"
    if has_own_gradient(name_of(node), len(operands)) and any(map(needs_gradient, operands)):
        return "this version of PyTorch has a gradient of its own for it"
    if name_of(node) in _HALF_DIFFERENTIABLE and any(map(needs_gradient, operands[:1])):
        return "it has no gradient with respect to its first operand"
    if name_of(node) in _NOT_DIFFERENTIABLE and any(map(needs_gradient, operands)):
        return "PyTorch has no gradient of it"
    if (reason := memory_reason(node) or results_reason(node)) is not None:
        return reason
    if _writes_overlapping(node):
        return "it writes to a tensor whose elements share memory"
    values = list(tensors_of(value_of(node)))
    if value_of(node) is None and name_of(node) not in ("setitem", "_log_api_usage_once"):
        return "it only checks a condition" if name_of(node).startswith(_CHECKS) else _NO_VALUE
    for tensor in (
        *values,
        *(t for arg in node.all_input_nodes for t in tensors_of(value_of(arg))),
    ):
        if (problem := tensor_reason(tensor)) is not None:
            return problem
    return None


def _writes_overlapping(node: fx.Node) -> bool:
    """Whether a node writes to elements that share memory, maybe through a view of them."""
    written = node.all_input_nodes[0] if node.all_input_nodes and is_in_place(node) else None
    while written is not None and (memory := storage_of(written)) is not None:
        if overlaps(value_of(written)):
            return True
        source = next(iter(written.all_input_nodes), None)
        written = source if source is not None and storage_of(source) == memory else None
    return False


class Split:
    """A graph with its regions: ``parts`` in order, each a node for PyTorch or a ``RegionPlan``."""

    def __init__(self, graph: fx.Graph, refused: Mapping[str, str]):
        self.graph = graph
        self.refused = refused
        #: Storages with a tensor that needs a gradient.
        self.with_history = {storage_of(node) for node in graph.nodes if needs_gradient(node)}
        #: Nodes that PyTorch runs, with the reason.
        self.torch_nodes: dict[fx.Node, str] = {}
        self.parts: list[fx.Node | RegionPlan] = []
        self._segment()
        self._cut_behind_visible()
        self._drop_small()
        self._set_boundaries()

    @property
    def regions(self) -> list[RegionPlan]:
        """The regions, in order."""
        return [part for part in self.parts if isinstance(part, RegionPlan)]

    def _segment(self) -> None:
        open_nodes: dict[fx.Node, None] = {}
        ambient = started = Ambient((), None if torch.is_grad_enabled() else False)

        def close():
            if open_nodes:
                self.parts.append(RegionPlan("", list(open_nodes), started))
                open_nodes.clear()

        depth = 0
        outside: list[Ambient] = []
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            is_inside = any(arg in open_nodes for arg in node.all_input_nodes)
            is_inside = is_inside or (is_number(node) and _reads_written(node, open_nodes))
            is_apart = is_item(node) or (is_empty(node) and not is_in_place(node))
            # A view that costs nothing; no region has its base, a complex tensor.
            is_apart = is_apart or node.target is torch.view_as_real
            if is_number(node) or (is_apart and not is_inside):
                if is_inside:
                    close()
                self.parts.append(node)
                continue
            if node.target in _INFERENCE:
                # Operators inside have no history, and return tensors of that mode.
                if node.target is _INFERENCE[0]:
                    outside.append(ambient)
                    ambient = Ambient(ambient.autocasts, False if node.args[0] else ambient.grad)
                else:
                    ambient = outside.pop()
                close()
                self.parts.append(node)
                continue
            reason = self.refused.get(node.name)
            if node.target in AUTOCAST:
                ambient = _autocast_after(ambient, node)
                reason = "a torch.autocast region begins or ends"
            elif reason is None:
                reason = torch_reason(node)
                if reason == _NO_VALUE:
                    # PyTorch is in an unknown state from here on, so it runs what follows.
                    depth += 1
            if reason is None and self._writes_beside_autograd(node, ambient):
                reason = "it writes, outside of autograd, to a tensor with an autograd history"
            if reason is None and depth:
                reason = "an operator before it changes PyTorch's global state"
            if node.target is _SET_GRAD:
                ambient = Ambient(ambient.autocasts, node.args[0])
                # A program has one gradient mode: that at its beginning.
                if not open_nodes or started.grad is False:
                    close()
                    self.parts.append(node)
                    continue
            if reason is not None:
                close()
                self.torch_nodes[node] = reason
                self.parts.append(node)
            else:
                if not open_nodes:
                    started = ambient
                open_nodes[node] = None
        close()

    def _writes_beside_autograd(self, node: fx.Node, ambient: Ambient) -> bool:
        """Whether a write changes elements of a tensor while its gradient ignores the write."""
        operand = node.all_input_nodes[0] if node.all_input_nodes else None
        if operand is None or not is_in_place(node):
            return False
        if storage_of(operand) not in self.with_history:
            return False
        return ambient.grad is False or not needs_gradient(operand)

    def _cut_behind_visible(self) -> None:
        """Ends a region after a value that the caller sees and on which later results depend."""
        visible = Visible(self.graph)
        parts: list[fx.Node | RegionPlan] = []
        for part in self.parts:
            if isinstance(part, RegionPlan):
                pieces = visible.cut(part.nodes)
                parts.extend(RegionPlan("", piece, part.ambient) for piece in pieces)
            else:
                parts.append(part)
        self.parts = parts

    def _drop_small(self) -> None:
        """Leaves to PyTorch the regions for which a call of kernels costs more than it saves."""
        alone = len(self.regions) == 1 and not self.torch_nodes
        parts: list[fx.Node | RegionPlan] = []
        for part in self.parts:
            if isinstance(part, RegionPlan):
                working = [node for node in part.nodes if not is_view(node) and not is_item(node)]
                working = [node for node in working if node.target is not _SET_GRAD]
                heavy = any(word in name_of(node) for node in working for word in _HEAVY)
                # A checkpoint's two passes may be cut in two ways, and have to draw the same.
                draws = any(map(may_draw, working))
                if len(working) < (1 if alone or heavy or draws else 2):
                    parts.extend(part.nodes)
                    continue
            parts.append(part)
        self.parts = parts
        for i, region in enumerate(self.regions):
            region.name = f"region_{i}"

    def _set_boundaries(self) -> None:
        for region in self.regions:
            inside = set(region.nodes)
            inputs: dict[fx.Node, None] = {}
            for node in region.nodes:
                for arg in node.all_input_nodes:
                    if arg not in inside:
                        inputs[arg] = None
            region.inputs = list(inputs)
            _refuse_writes_with_history(region)
            region.written_later = [
                *self._written_behind(region),
                *(node for node in region.inputs if _is_unsaved_buffer(node, region)),
            ]
            _Exposed(region).choose_outputs()

    def _written_behind(self, region: RegionPlan) -> list[fx.Node]:
        last = region.nodes[-1]
        behind = False
        written = set()
        for node in self.graph.nodes:
            if behind:
                written |= {storage_of(operand) for operand in written_operands(node)}
            behind = behind or node is last
        return [node for node in region.inputs if storage_of(node) in written - {None}]


def _reads_written(node: fx.Node, before: Iterable[fx.Node]) -> bool:
    """Whether a number is read from memory that one of some nodes writes, as by ``item``."""
    read = {storage_of(operand) for operand in node.all_input_nodes} - {None}
    return bool(read) and any(storage_of(n) in read for b in before for n in written_operands(b))


def _refuse_writes_with_history(region: RegionPlan) -> None:
    """Refuses writes to values from outside that need a gradient: autograd must see them."""
    memory = {storage_of(node) for node in region.inputs if needs_gradient(node)} - {None}
    writers = [n for n in region.nodes if is_in_place(n)]
    found = [n for n in writers if n.all_input_nodes and storage_of(n.all_input_nodes[0]) in memory]
    if found:
        reason = "it writes in place to a tensor that needs a gradient"
        raise NotSplit(dict.fromkeys((node.name for node in found), reason))


def _is_unsaved_buffer(node: fx.Node, region: RegionPlan) -> bool:
    """Whether eager keeps copies of a module's buffer for the backward pass, not the buffer.

    Then the module may write the buffer before that pass, in another graph. Examples are queues of
    negative samples, and centres.
    """
    if node.op != "placeholder" or "_buffers_" not in node.name or needs_gradient(node):
        return False
    inside = set(region.nodes)
    names = [node]
    for name in names:
        for user in name.users:
            if user in inside and is_view(user):
                names.append(user)
            elif user in inside and name_of(user) not in _UNSAVING:
                return False
    return True


def _autocast_after(ambient: Ambient, node: fx.Node) -> Ambient:
    if node.target is ENTER:
        entered = (*ambient.autocasts, tuple(node.args))
        return Ambient(entered, ambient.grad)
    return Ambient(ambient.autocasts[:-1], ambient.grad)


class _Exposed:
    """Which values a region returns, and how other values that are used outside follow."""

    def __init__(self, region: RegionPlan):
        self.region = region
        self.inside = set(region.nodes)
        self.by_storage: dict[int, fx.Node] = {}
        for node in (*region.inputs, *region.nodes):
            key = storage_of(node)
            if key is not None:
                self.by_storage.setdefault(key, node)
        self.seen = [
            node for node in region.nodes if any(user not in self.inside for user in node.users)
        ]

    def choose_outputs(self) -> None:
        outputs: dict[fx.Node, None] = {}
        reasons = {}
        for node in self.seen:
            if node.target is _SET_GRAD:
                continue
            try:
                for base in self._bases(node):
                    outputs[base] = None
            except NotSplit as refusal:
                reasons |= refusal.reasons
        if reasons:
            raise NotSplit(reasons)
        self.region.outputs = list(outputs)

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        """The region's own values from which ``node`` is made outside."""
        if node not in self.inside:
            return []
        step = step_outside(node, self)
        if step == "output":
            return [node]
        operands = node.all_input_nodes if step == "view" else node.all_input_nodes[:1]
        return [base for operand in operands for base in self._bases(operand)]

    def is_only_name(self, node: fx.Node) -> bool:
        """Whether no other value outside shares the storage of ``node``."""
        key = storage_of(node)
        return not any(other is not node and storage_of(other) == key for other in self.seen)


def step_outside(node: fx.Node, exposed: _Exposed) -> str:
    """How a region's value reaches the outside.

    ``output``: the region returns it. ``view``: PyTorch makes it again from its operands.
    ``same``: it is its first operand, which was written in place or passed through.
    """
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        if is_view(node):
            return "view"
        raise NotSplit({node.name: "its result is a list of tensors that is used elsewhere"})
    first = exposed.by_storage[storage_of(node)]
    if first is node:
        return "output"
    if is_view(node):
        base = value_of(first)
        if value.requires_grad != base.requires_grad and name_of(node) != "detach":
            raise NotSplit({node.name: "it makes a view while gradients are off"})
        is_whole = (
            name_of(node) != "detach"
            and first in exposed.inside
            and value.is_contiguous()
            and base.is_contiguous()
            # A comparison of the numbers themselves would be a guard.
            and expression(value.numel()) == expression(base.numel())
            and value.dtype == base.dtype
        )
        return "output" if is_whole and exposed.is_only_name(node) else "view"
    operand = node.all_input_nodes[0] if node.all_input_nodes else None
    if operand is not None and storage_of(operand) == storage_of(node):
        # The tracer keeps the object of what is passed through; a new tensor may look the same.
        if is_in_place(node) or value_of(operand) is value:
            return "same"
    raise NotSplit({node.name: f"the result of `{name_of(node)}` shares memory with another value"})


def emit(split: Split, graph_module: fx.GraphModule, runs: Mapping[str, Any]) -> fx.GraphModule:
    """The graph that calls ``runs[region.name]`` for each region and PyTorch for the rest.

    ``runs`` may also hold replacements of single PyTorch nodes, by node name.
    """
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in split.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            made[node] = graph.node_copy(node, lambda n: made[n])
    seed = graph.call_function(Seed)
    for part in split.parts:
        if isinstance(part, RegionPlan):
            _emit_region(graph, part, made, seed)
        elif part.name in runs:
            args = [made[arg] for arg in part.all_input_nodes if arg.op != "get_attr"]
            made[part] = graph.create_node("call_module", f"of_{part.name}", tuple(args))
        else:
            made[part] = graph.node_copy(part, lambda n: made[n])
    output = next(iter(reversed(split.graph.nodes)))
    graph.output(fx.node.map_arg(output.args[0], lambda n: made[n]))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    targets = {node.target for node in graph.nodes if node.op == "call_module"}
    callables = {f"of_{name}": run for name, run in runs.items()}
    own = {name: callables[name] for name in targets if name in callables}
    root = {
        node.target: _attribute(graph_module, node.target)
        for node in graph.nodes
        if node.op in ("get_attr", "call_module") and node.target not in own
    }
    emitted = fx.GraphModule({**root, **dict.fromkeys(own)}, graph, "Split")
    for name, run in own.items():
        # Plain attributes: hooks of modules must not see them.
        emitted.__dict__[name] = run
    return emitted


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _emit_region(
    graph: fx.Graph, region: RegionPlan, made: dict[fx.Node, fx.Node], seed: fx.Node
) -> None:
    inputs = tuple(made[node] for node in region.inputs)
    call = graph.create_node("call_module", f"of_{region.name}", inputs, {"seed": seed})
    for i, node in enumerate(region.outputs):
        made[node] = graph.call_function(operator.getitem, (call, i))
    exposed = _Exposed(region)
    needed: set[fx.Node] = set()
    for node in exposed.seen:
        _collect(node, exposed, made, needed)
    # In the region's order: a view has a history only where gradients are on as it is made.
    for node in region.nodes:
        if node.target is _SET_GRAD:
            made[node] = graph.node_copy(node)
        elif node in needed and step_outside(node, exposed) == "same":
            # What is written in place is its first operand; what was written, the region's work.
            made[node] = made[node.all_input_nodes[0]]
        elif node in needed:
            made[node] = graph.node_copy(node, lambda n: made[n])


def _collect(node: fx.Node, exposed: _Exposed, made: Mapping, needed: set[fx.Node]) -> None:
    """Adds the nodes that must be made again outside of the region to have ``node`` there."""
    if node in made or node in needed or node.target is _SET_GRAD:
        return
    needed.add(node)
    is_same = step_outside(node, exposed) == "same"
    for operand in node.all_input_nodes[: 1 if is_same else None]:
        _collect(operand, exposed, made, needed)


__all__ = [
    "METADATA_WRITES",
    "TORCH_ONLY",
    "Ambient",
    "NotSplit",
    "RegionPlan",
    "Split",
    "emit",
]
