"""Small rewrites of Dynamo's graphs, after which more nodes fit into one region.

Owns rewrites that need no other part of the compiler. Each is legal for all values and leaves
results, their memory and their histories as they were. Never decides who runs a node
(``_partition``).
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.nn import _reduction as _Reduction
from torch.nn import attention, functional

from ._autocast import AUTOCAST
from ._nodes import (
    is_empty,
    is_in_place,
    name_of,
    needs_gradient,
    overlaps,
    run_again,
    storage_of,
    tensors_of,
    value_of,
)
from ._sizes import expression


def drop_empty_operands(graph: fx.Graph) -> None:
    """before  cat([empty, x])   after  cat([x]), where ``empty`` decides neither type nor gradient.

    Caches of keys and values begin empty, and rotary embeddings of whole heads have nothing on
    either side; a region that takes an empty tensor runs in PyTorch. Legal because the gradient of
    an empty tensor adds nothing to that of what it is made from, all of which ``x`` is made from
    too: nothing loses its only, empty gradient.
    """
    for node in graph.nodes:
        if node.target not in (torch.cat, torch.concat) or not node.args:
            continue
        operands = node.args[0]
        if not isinstance(operands, (list, tuple)) or value_of(node) is None:
            continue
        dtype = value_of(node).dtype
        origins = _origins([one for one in operands if not is_empty(one)])
        kept = [one for one in operands if not is_empty(one) or not _origins([one]) <= origins]
        if kept and all(value_of(one).dtype == dtype for one in kept):
            node.args = (kept, *node.args[1:])
            for one in set(operands).difference(kept):
                _erase_unused(graph, one)


def _origins(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The inputs that get a gradient through any of the nodes."""
    found, seen, ahead = set(), set(), list(nodes)
    while ahead:
        node = ahead.pop()
        if node in seen or not needs_gradient(node):
            continue
        seen.add(node)
        if not node.all_input_nodes:
            found.add(node)
        ahead += node.all_input_nodes
    return found


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erases an empty result that nothing uses, and so on for what it used."""
    is_kept = node.users or node.op in ("placeholder", "output") or node.is_impure()
    # What has elements may have been written in place, which others see.
    if is_kept or is_in_place(node) or not is_empty(node):
        return
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        _erase_unused(graph, operand)


def copy_into_results(graph: fx.Graph) -> None:
    """before  y = f(x, out=v)   after  y = v.copy_(f(x)), where ``v`` has the result's look.

    Legal because ``out=`` refuses tensors with a history. Spectral norms write their vectors so.
    ``out=None``, as generated code has it, is left out.
    """
    for node in list(graph.nodes):
        target = node.kwargs.get("out")
        if target is None and "out" in node.kwargs:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        if node.op != "call_function" or not isinstance(target, fx.Node):
            continue
        # An operator that is named itself may have no other form.
        if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            continue
        written = value_of(target)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        values, named = fx.node.map_arg((node.args, kwargs), value_of)
        if not isinstance(written, FakeTensor) or value_of(node) is not written:
            continue
        operands: list[fx.Node] = []
        fx.node.map_arg((node.args, kwargs), operands.append)
        # Eager refuses operands that overlap with the result; `empty` leaves it as it was.
        if storage_of(target) in map(storage_of, operands) or name_of(node).startswith("empty"):
            continue
        with written.fake_mode, torch.no_grad():
            result = node.target(*values, **named)
        if not isinstance(result, torch.Tensor) or _metadata(result) != _metadata(written):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(node.target, node.args, kwargs)
            copied = graph.call_method("copy_", (target, made))
        made.meta = node.meta | {"example_value": result}
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)


def fill_where(graph: fx.Graph) -> None:
    """before  x[mask] = c   after  x.masked_fill_(mask, c), for a number c and a mask of booleans.

    The mask covers the first dimensions of x, and has their sizes.
    """
    for node in list(graph.nodes):
        if node.target is not operator.setitem or node.users:
            continue
        target, mask, number = node.args
        x, where = value_of(target), value_of(mask) if isinstance(mask, fx.Node) else None
        if not isinstance(x, torch.Tensor) or not isinstance(where, torch.Tensor):
            continue
        kept = x.is_floating_point() or (isinstance(number, int) and x.dtype == torch.int64)
        covers = tuple(map(expression, where.shape)) == tuple(
            map(expression, x.shape[: where.ndim])
        )
        if where.dtype != torch.bool or not where.ndim or not covers or not kept:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or overlaps(x):
            continue
        with graph.inserting_before(node):
            for _ in range(x.ndim - where.ndim):
                with where.fake_mode:
                    where = where.unsqueeze(-1)
                mask = graph.call_method("unsqueeze", (mask, -1))
                mask.meta = node.meta | {"example_value": where}
            filled = graph.call_method("masked_fill_", (target, mask, number))
        filled.meta = node.meta | {"example_value": x}
        graph.erase_node(node)


def drop_unread_shapes(graph: fx.Graph) -> None:
    """before  broadcast_shapes(s, t)   after  nothing, where no node uses the result."""
    for node in list(graph.nodes):
        if name_of(node) == "broadcast_shapes" and not node.users:
            graph.erase_node(node)


def drop_choices_of_attention(graph: fx.Graph) -> None:
    """before  _sdpa_kernel([MATH]), nodes, _sdpa_kernel(as before)   after  nodes

    Legal on the CPU: the choice is one of speed, which kernels do not need. Left where the graph
    ends with another choice than it begins with.
    """
    choices = [node for node in graph.nodes if name_of(node) == "_sdpa_kernel"]
    if not choices:
        return
    values = [value_of(node) for node in graph.nodes]
    on_cpu = all(t.device.type == "cpu" for value in values for t in tensors_of(value))
    named, in_order = (*choices[-1].args, *choices[-1].kwargs.values(), False)[:2]
    chosen = {node.args[0] for node in named if isinstance(node, fx.Node)}
    now = {backend.name for backend in attention._cur_sdpa_kernel_backends()}
    if not on_cpu or in_order is not False or chosen != now:
        return
    for node in reversed(graph.nodes):
        is_name = name_of(node) == "_backend_from_string" and not node.users
        if node in choices or is_name:
            graph.erase_node(node)


def expand_one_by_one(graph: fx.Graph) -> None:
    """before  broadcast_tensors(x, y)[0]   after  x.expand_as(y), where y has the sizes of both.

    A region has no lists of tensors of several memories.
    """
    for node in list(graph.nodes):
        if name_of(node) != "broadcast_tensors" or node.kwargs:
            continue
        listed = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
        for item in list(node.users):
            if item.target is not operator.getitem or not isinstance(item.args[1], int):
                continue
            sizes = _metadata(value_of(item))[0]
            like = [one for one in listed if _metadata(value_of(one))[0] == sizes]
            if like:
                item.op, item.target = "call_method", "expand_as"
                item.args = (listed[item.args[1]], like[0])
        if not node.users:
            graph.erase_node(node)


def sum_bags_of_one_length(graph: fx.Graph) -> None:
    """before  embedding_bag(x, w), where x is [n, k]   after  embedding(x, w).sum(1), or .mean(1)

    PyTorch writes such bags as bags of any length, which are joined row by row on one thread. Left
    as they are: bags with padding or weights, the largest of a bag, sparse and scaled gradients.
    """
    for node in list(graph.nodes):
        if node.target is not functional.embedding_bag:
            continue
        given = _BAGS.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        x, weight, mode = (given.arguments.pop(name) for name in ("input", "weight", "mode"))
        given.arguments.pop("norm_type")  # says nothing without `max_norm`
        # The number 0 is a padding.
        is_plain = all(value is None or value is False for value in given.arguments.values())
        values = table, indices, _ = [value_of(one) for one in (weight, x, node)]
        if not is_plain or mode not in ("sum", "mean"):
            continue
        # Inside of a transform, tensors are of other classes.
        if not all(isinstance(value, FakeTensor) for value in values):
            continue
        if indices.ndim != 2 or is_empty(x) or not table.is_floating_point():
            continue
        with graph.inserting_before(node):
            rows = graph.call_function(functional.embedding, (x, weight))
            joined = graph.call_method(mode, (rows, 1))
        with torch.set_grad_enabled(needs_gradient(node)):
            rows.meta = node.meta | {"example_value": run_again(rows, table.fake_mode)}
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)


_BAGS = inspect.signature(functional.embedding_bag)

#: Losses of a linear layer's scores, a few rows at a time.
_CHUNKED = "torch_nn._linear_cross_entropy_batch_chunked.default"
_CHUNKED_ROWS = "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default"

#: Scores that a loss may hold at once.
_MOST_SCORES = 1 << 24


def join_chunks_of_losses(graph: fx.Graph) -> None:
    """before  chunked_loss(x, w, t, b)[0]   after  cross_entropy(linear(x, w, b), t)

    The chunked form saves memory, but PyTorch alone has its gradients. Left as they are: losses of
    more than ``_MOST_SCORES`` scores and of half precision, and all in autocast.
    """
    if any(node.target in AUTOCAST for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if str(node.target) not in (_CHUNKED, _CHUNKED_ROWS):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        # The other results are parts of the gradients.
        items = list(node.users) if str(node.target) == _CHUNKED else []
        used = [item for item in items if item.users] if items else [node]
        if len(used) != 1 or (items and used[0].args[1] != 0) or not _is_small_loss(given):
            continue
        with graph.inserting_before(node):
            operands = tuple(given[name] for name in ("input", "linear_weight", "linear_bias"))
            scores = graph.call_function(functional.linear, operands)
            options = {
                "reduction": given.get("reduction", "none"),
                "ignore_index": given["ignore_index"],
                "label_smoothing": given.get("label_smoothing", 0.0),
            }
            operands = (scores, given["target"], given["weight"])
            loss = graph.call_function(functional.cross_entropy, operands, options)
        with torch.set_grad_enabled(needs_gradient(used[0])):
            fakes = value_of(used[0]).fake_mode
            scores.meta = node.meta | {"example_value": run_again(scores, fakes)}
        loss.meta = dict(used[0].meta)
        used[0].replace_all_uses_with(loss)
        for item in (*items, node):
            graph.erase_node(item)


def _is_small_loss(given: dict[str, object]) -> bool:
    x, table = value_of(given["input"]), value_of(given["linear_weight"])
    # A symbolic size counts as it is in this call; `None` is a size that depends on values.
    sizes = [n if isinstance(n, int) else n.node.hint for n in (x.shape[0], table.shape[0])]
    if None in sizes or math.prod(sizes) > _MOST_SCORES:
        return False
    is_single = x.dtype == table.dtype and x.dtype in (torch.float32, torch.float64)
    return is_single and isinstance(x, FakeTensor) and not torch.is_autocast_enabled(x.device.type)


_L1_LOSS = inspect.signature(functional.l1_loss)


def weigh_absolute_errors(graph: fx.Graph) -> None:
    """before  l1_loss(x, y, weight=w)   after  (|x - y| * w).sum() / w.sum()

    Without the division for ``"sum"``, without the sum too for ``"none"``. PyTorch 2.15 drops the
    weight where a torch-function mode is active, as one is while graphs are captured.
    """
    if "weight" not in _L1_LOSS.parameters:
        return
    for node in list(graph.nodes):
        if node.target is not functional.l1_loss:
            continue
        given = _L1_LOSS.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        x, y, average, reduces, reduction, weight = given.arguments.values()
        values = [value_of(one) for one in (x, y, weight)] if weight is not None else [None]
        if not all(isinstance(value, FakeTensor) for value in values):
            continue
        if values[0].shape != values[2].shape:
            raise ValueError("Weights and input must have the same size.")
        if average is not None or reduces is not None:
            reduction = _Reduction.legacy_get_string(average, reduces)
        made: list[fx.Node] = []
        with graph.inserting_before(node), torch.set_grad_enabled(needs_gradient(node)):

            def call(function, *operands, _at=node, _fakes=values[0].fake_mode, _made=made):
                new = graph.call_function(function, operands)
                new.meta = _at.meta | {"example_value": run_again(new, _fakes)}
                _made.append(new)
                return new

            call(functional.l1_loss, x, y, None, None, "none")
            call(operator.mul, made[-1], weight)
            if reduction != "none":
                total = call(torch.sum, made[-1])
            if reduction == "mean":
                call(operator.truediv, total, call(torch.sum, weight))
        node.replace_all_uses_with(made[-1])
        graph.erase_node(node)


#: Methods that turn a tensor into a view of itself, by the method that gives the view.
_INTO_VIEWS = {
    f"{name}_": name for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
}


def take_views(graph: fx.Graph) -> None:
    """before  x.squeeze_(), y = f(x)   after  v = x.squeeze(), y = f(v)

    Legal where the graph made x: nobody else sees what x is. The traced value of x is the tensor
    that it has become, so earlier nodes get a value in the same memory that looks as x did before.
    """
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in _INTO_VIEWS or node.kwargs:
            continue
        changed = value_of(node.args[0])
        names = [one for one in graph.nodes if value_of(one) is changed]
        if not isinstance(changed, FakeTensor) or names[0].op in ("placeholder", "get_attr"):
            continue
        # PyTorch refuses to detach a view in place.
        if any(user.target == "detach_" for name in names for user in name.users):
            continue
        at = names.index(node)
        with torch.set_grad_enabled(changed.requires_grad):
            was = run_again(names[0], changed.fake_mode)
            if was is changed:
                continue
            with changed.fake_mode:
                was = changed.as_strided(was.shape, was.stride(), changed.storage_offset())
            for name in names[:at]:
                name.meta["example_value"] = was
            with graph.inserting_before(node):
                view = graph.call_method(_INTO_VIEWS[node.target], node.args)
            view.meta = node.meta | {"example_value": run_again(view, changed.fake_mode)}
        for name in names[at + 1 :]:
            name.meta["example_value"] = value_of(view)
        nodes = list(graph.nodes)
        behind = set(nodes[nodes.index(node) + 1 :])
        for name in names[:at]:
            for user in behind.intersection(name.users):
                user.replace_input_with(name, view)
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def read_data(graph: fx.Graph) -> None:
    """before  f(x.data)   after  f(x.detach())

    A write to one of the two counts as a write to the other after ``detach`` only. So they are the
    same where nothing behind writes to their memory, and where the graph returns no view of it.
    """
    nodes = list(graph.nodes)
    for at, node in enumerate(nodes):
        if name_of(node) != "_get_data_attr" or storage_of(node) is None:
            continue
        memory = storage_of(node)
        if any(_may_write(one, memory) for one in nodes[at + 1 :]):
            continue
        views = {node}
        for one in nodes[at + 1 :]:
            is_result = one.op == "output" or any(
                t.untyped_storage()._cdata == memory for t in _strided(value_of(one))
            )
            if is_result and not views.isdisjoint(one.all_input_nodes):
                views.add(one)
        if nodes[-1] in views:
            continue
        if node.users:
            with graph.inserting_before(node):
                detached = graph.call_method("detach", node.args)
            detached.meta = dict(node.meta)
            node.replace_all_uses_with(detached)
        graph.erase_node(node)


def _may_write(node: fx.Node, memory: int) -> bool:
    """Whether a node may write to a memory that it is given."""
    given = [one for one in node.all_input_nodes if storage_of(one) == memory]
    schema = getattr(node.target, "_schema", None)
    if is_in_place(node) or "out" in node.kwargs or (schema is not None and schema.is_mutable):
        return bool(given)
    # Norms write their statistics, embeddings may shorten rows of their table.
    writes = name_of(node) in ("batch_norm", "instance_norm", "embedding", "embedding_bag")
    return writes and any(one is not node.all_input_nodes[0] for one in given)


def _strided(value: object) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(value) if tensor.layout == torch.strided]


def _metadata(tensor: torch.Tensor) -> tuple:
    return tuple(map(expression, tensor.shape)), tensor.dtype, tensor.device


def simplify(graph: fx.Graph) -> None:
    """All of these rewrites but ``take_views``, which comes before all others."""
    drop_unread_shapes(graph)
    read_data(graph)
    drop_choices_of_attention(graph)
    expand_one_by_one(graph)
    drop_empty_operands(graph)
    copy_into_results(graph)
    fill_where(graph)
    sum_bags_of_one_length(graph)
    join_chunks_of_losses(graph)
    weigh_absolute_errors(graph)


__all__ = ["fill_where", "simplify", "take_views"]
