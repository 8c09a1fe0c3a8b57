"""Parts of ``forward`` under ``torch.no_grad`` or autocast, as ``torch.export`` gives them.

Owns putting sub-graphs without gradients back where they are called, with a mark on each operator
whose results no gradient may pass; the mark survives PyTorch's decompositions. Those with autocast
stay for PyTorch to decompose into casts, and are run so that their operators keep their origins.
Never detaches or casts anything itself.
"""

from __future__ import annotations

from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

#: Where the mark stands in a node's metadata; PyTorch carries what is under "custom" along.
_MARK = "shorthaul_gradient"


def stops_gradient(node: fx.Node) -> bool:
    """Whether the operator ran where gradients were off."""
    return not (node.meta.get("custom") or {}).get(_MARK, True)


def keep_origins(module: fx.GraphModule) -> None:
    """Lets the bodies of autocast regions run node by node, each under its own metadata.

    Called as a function, a body is traced anew with the lines of its generated code for origins.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is wrap_with_autocast:
            body = getattr(module, node.args[4].target)
            keep_origins(body)
            body.forward = fx.Interpreter(body).run


def inline_regions(module: fx.GraphModule) -> None:
    """Replaces every call of a sub-graph that only sets the gradient mode.

    before  y = wrap_with_set_grad_enabled(False, body, x)[0]
    after   the operators of body applied to x, marked
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is wrap_with_set_grad_enabled:
            enabled, body, *operands = node.args
            inner = getattr(module, body.target)
            inline_regions(inner)
            _inline(graph, node, (inner.graph, operands), enabled)
            if not body.users:
                graph.erase_node(body)
    module.recompile()


def _inline(graph: fx.Graph, call: fx.Node, body: tuple[fx.Graph, list], enabled: bool) -> None:
    inner, operands = body
    operands = iter(operands)
    made: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(call):
        for node in inner.nodes:
            if node.op == "placeholder":
                made[node] = next(operands)
            elif node.op != "output":
                copied = made[node] = graph.node_copy(node, lambda n: made[n])
                copied.meta = dict(node.meta)
                custom = dict(copied.meta.get("custom") or {})
                custom.setdefault(_MARK, enabled)
                copied.meta["custom"] = custom
            else:
                results = node.args[0]
    for item in list(call.users):
        value = made[results[item.args[1]]]
        item.replace_all_uses_with(value)
        name = item.name
        graph.erase_node(item)
        if value.op != "placeholder" and value in made.values():
            value._rename(name)  # the signature knows results by name
    graph.erase_node(call)
