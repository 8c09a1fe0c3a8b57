"""Operators that the importer lacks, written with operators that it has.

Owns the table that ``torch.export`` decomposes a graph by: PyTorch's own rules, those of its rules
that its default table leaves out, and ours (``_decomposed_*.py``). A guarded rule serves calls of
an operator that the importer knows in other cases. Never decides which operators the importer has.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.utils import _pytree as pytree

from . import (
    _decomposed_airy,
    _decomposed_bessel,
    _decomposed_elements,
    _decomposed_gamma,
    _decomposed_groups,
    _decomposed_images,
    _decomposed_indexing,
    _decomposed_nodes,
    _decomposed_polynomials,
    _decomposed_quantization,
    _decomposed_random,
    _decomposed_scans,
    _decomposed_transformer,
)
from ._functionalize import FunctionalNode, Ref
from ._straight_through import straight_through

aten = torch.ops.aten

_FAMILIES = (
    _decomposed_airy,
    _decomposed_bessel,
    _decomposed_elements,
    _decomposed_gamma,
    _decomposed_groups,
    _decomposed_images,
    _decomposed_indexing,
    _decomposed_polynomials,
    _decomposed_quantization,
    _decomposed_random,
    _decomposed_scans,
    _decomposed_transformer,
)

#: Operators that PyTorch's default table keeps, though it can write them with simpler ones.
_BY_TORCH = frozenset(
    {
        "aten._batch_norm_with_update_functional.default",
        "aten.exponential.default",
        "aten.ldexp.Tensor",
        "aten.narrow_copy.default",
        "aten.permute_copy.default",
        "aten.unbind_copy.int",
        "aten.upsample_linear1d.default",
        "aten.upsample_nearest1d.vec",
        "aten.upsample_nearest3d.vec",
        "aten.upsample_trilinear3d.default",
        "aten.view_copy.default",
    }
)

#: Operators along a dimension; a tensor without dimensions has one for them.
_ALONG_A_DIMENSION = (
    aten.all.dim,
    aten.all.dims,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.any.dims,
    aten.argmax.default,
    aten.argmin.default,
    aten.cumsum.default,
    aten.log_softmax.int,
    aten.logsumexp.default,
    aten.max.dim,
    aten.mean.dim,
    aten.min.dim,
    aten.norm.ScalarOpt_dim,
    aten.prod.dim_int,
    aten.softmax.int,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.sort.default,
    aten.sort.stable,
    aten.std.correction,
    aten.std.dim,
    aten.sum.dim_IntList,
    aten.topk.default,
    aten.var.correction,
    aten.var.dim,
)


def _whole_norm(operator):
    """before  f(x: [n], [n])   after  f(x as [1, n], [n]) as [n]: statistics have a dimension."""

    def rule(x, normalized_shape, *args, **kwargs):
        result = operator(x.unsqueeze(0), normalized_shape, *args, **kwargs)
        return pytree.tree_map(lambda value: value.squeeze(0), result)

    return rule


def _is_whole(arguments: Mapping[str, Any]) -> bool:
    return arguments["input"].dim() == len(arguments["normalized_shape"])


#: Norms over their last dimensions.
_NORMS = (aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default)


def _vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):  # noqa: A002  (schema)
    """A norm of unusual order, with the gradient 0 where an element is 0."""
    if x.dim() == 0:
        found = torch.linalg.vector_norm(x.reshape(1), ord, dim, keepdim, dtype=dtype)
        return found.reshape(())
    size = x.to(dtype or x.dtype).abs()
    is_zero = size == 0
    dims = list(range(x.dim())) if dim is None else dim
    if ord == 0:
        return (~is_zero).detach().to(size.dtype).sum(dims, keepdim)
    if ord == -math.inf:
        return size.amin(dims, keepdim)
    if ord < 0:
        total = (torch.where(is_zero, 1.0, size) ** ord).sum(dims, keepdim)
        return torch.where(is_zero.any(dims, keepdim), 0.0, total ** (1 / ord))
    powers = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, size) ** ord)
    total = powers.sum(dims, keepdim)
    nothing = total == 0
    root = torch.where(nothing, 1.0, total) ** (1 / ord)
    return torch.where(nothing, 0.0, root)


def _n_corrected(x, dim, correction) -> float:
    """The number by which a variance divides; 1 if sizes are symbolic."""
    sizes = [x.shape[d] for d in dim] if dim else list(x.shape)
    if any(type(n) is not int for n in sizes):
        return 1
    return math.prod(sizes) - (1 if correction is None else correction)


def _has_few(arguments: Mapping[str, Any]) -> bool:
    """Whether a variance is of fewer elements than its correction."""
    x, dim = arguments["self"], arguments.get("dim")
    n = _n_corrected(x, dim, arguments.get("correction"))
    return _is_scalar(arguments) or n < 0 or (n == 0 and dim is None)


def _var_of_few(x, dim=None, *, correction=None, keepdim=False):
    """Eager divides by 0, but its gradient is that of a division by the negative number.

    Without ``dim``, its slope is infinite, or no number where an element is the mean.
    """
    if x.dim() == 0:
        return _with_a_dimension(aten.var.correction)(
            x, dim, correction=correction, keepdim=keepdim
        )
    dims = list(dim) if dim else list(range(x.dim()))
    away = x - x.mean(dims, True)
    total = (away * away).sum(dims, keepdim)
    if dim is None:
        slope = torch.where(away.detach() == 0, math.nan, math.inf).to(x.dtype)
        return straight_through(total.detach() / 0.0, (slope * x).sum(dims, keepdim))
    return straight_through(total.detach() / 0.0, total / _n_corrected(x, dim, correction))


def _std_of_few(x, dim=None, *, correction=None, keepdim=False):
    if x.dim() == 0:
        return _with_a_dimension(aten.std.correction)(
            x, dim, correction=correction, keepdim=keepdim
        )
    return _var_of_few(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _flat_softplus(x, beta=1, threshold=20):
    """With ``beta = 0``, eager divides by it, but its slope is 1/2."""
    return straight_through(x.detach() * 0 + math.inf, x * 0.5)


def _is_flat(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("beta", 1) == 0


def _std_mean(x, dim=None, *, correction=None, keepdim=False):
    """Deviation and mean, computed apart: the deviation then has the gradient 0 where it is 0."""
    std = aten.std.correction(x, dim, correction=correction, keepdim=keepdim)
    return std, x.mean(list(range(x.dim())) if not dim else dim, keepdim)


def _is_unusual_norm(arguments: Mapping[str, Any]) -> bool:
    order = arguments.get("ord", 2)
    return _is_scalar(arguments) or order not in (1, 2, math.inf)


def _attention_with_sums(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    """Attention and the logarithms of its rows' sums."""
    if dropout_p:
        return NotImplemented
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.mT) * scale
    if is_causal:
        rows, columns = torch.arange(query.shape[-2]), torch.arange(key.shape[-2])
        scores = torch.where(columns > rows.unsqueeze(-1), -math.inf, scores)
    if attn_mask is not None:
        scores = scores + attn_mask
    result = torch.matmul(scores.softmax(-1), value)
    packed = result.transpose(1, 2).contiguous().transpose(1, 2)
    return packed, scores.detach().logsumexp(-1)


def _native_group_norm(x, weight, bias, n, n_channels, n_positions, n_groups, eps):
    """The norm, with the statistics of each group."""
    rows = x.reshape(n, n_groups, -1)
    mean, rstd = rows.mean(-1), (rows.var(-1, unbiased=False) + eps).rsqrt()
    result = torch.nn.functional.group_norm(x, n_groups, weight, bias, eps)
    return result, mean, rstd


def _batch_norm_in_eval(x, weight, bias, mean, variance, training, momentum, eps):
    """before  batch_norm(…, training=False)   after  the norm with given statistics, which stay."""
    found = aten._native_batch_norm_legit_no_training.default(
        x, weight, bias, mean, variance, momentum, eps
    )
    return *found, mean.clone(), variance.clone()


def _is_in_eval(arguments: Mapping[str, Any]) -> bool:
    return not arguments["training"]


def _prelu(x, weight):
    return torch.prelu(x.reshape(1), weight.reshape(1)).reshape(())


def _empty_strided(size, stride, *, dtype=None, **kwargs):
    """A tensor that nobody has written, permuted to lie in memory as asked."""
    order = sorted(range(len(size)), key=lambda d: -stride[d])
    dense = 1
    for d in reversed(order):
        if stride[d] != dense:
            return NotImplemented
        dense *= size[d]
    packed = torch.empty([size[d] for d in order], dtype=dtype)
    return packed.permute([order.index(d) for d in range(len(size))])


def _new_empty_strided(x, size, stride, *, dtype=None, **kwargs):
    return _empty_strided(size, stride, dtype=dtype or x.dtype)


def _empty_permuted(size, physical_layout, *, dtype=None, **kwargs):
    packed = torch.empty([size[d] for d in physical_layout], dtype=dtype)
    return packed.permute([physical_layout.index(d) for d in range(len(size))])


_EMPTY = {
    aten.empty_strided.default: _empty_strided,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.empty_permuted.default: _empty_permuted,
}


#: Whether a call with these arguments, by schema name, needs a rule.
Guard = Callable[[Mapping[str, Any]], bool]


def _is_scalar(arguments: Mapping[str, Any]) -> bool:
    first = next(iter(arguments.values()), None)
    return isinstance(first, torch.Tensor) and first.dim() == 0


def _with_a_dimension(operator):
    """before  f(x: [])   after  f(x as [1]) as []"""

    def rule(x, *args, **kwargs):
        if x.dim():
            return NotImplemented
        # No dimensions are all of them, which here is one.
        args = [[0] if isinstance(a, (list, tuple)) and not a else a for a in args]
        result = operator(x.reshape(1), *args, **kwargs)
        return pytree.tree_map(lambda value: value.reshape(()), result)

    return rule


@functools.cache
def _guarded() -> dict[Any, tuple[Guard, Callable]]:
    rules = {op: (_is_scalar, _with_a_dimension(op)) for op in _ALONG_A_DIMENSION}
    rules |= {op: (_is_whole, _whole_norm(op)) for op in _NORMS}
    rules[aten.linalg_vector_norm.default] = (_is_unusual_norm, _vector_norm)
    rules[aten.softplus.default] = (_is_flat, _flat_softplus)
    rules[aten.std.correction] = (_has_few, _std_of_few)
    rules[aten.var.correction] = (_has_few, _var_of_few)
    rules[aten.prelu.default] = (_is_scalar, _prelu)
    rules[aten._native_batch_norm_legit_functional.default] = (_is_in_eval, _batch_norm_in_eval)
    return rules | _decomposed_indexing.GUARDED


@functools.cache
def _rules() -> tuple[dict[Any, Callable], dict[Any, Callable]]:
    """PyTorch's rules and ours, but the guarded ones, materialized once a process."""
    theirs = dict(torch.export.default_decompositions().items())
    theirs |= {op: rule for op, rule in decomposition_table.items() if str(op) in _BY_TORCH}
    ours = dict(_EMPTY)
    ours[aten.native_group_norm.default] = _native_group_norm
    ours[aten.std_mean.correction] = _std_mean
    ours[aten._scaled_dot_product_flash_attention_for_cpu.default] = _attention_with_sums
    for family in _FAMILIES:
        ours |= family.RULES
    return theirs, ours


def rule_for(op) -> Callable | None:
    """What writes an operator with simpler ones, if anything does."""
    theirs, ours = _rules()
    return ours.get(op, theirs.get(op))


def decomposed(
    exported: torch.export.ExportedProgram, kept: frozenset[str]
) -> torch.export.ExportedProgram:
    """The graph by the rules; the operators ``kept`` stay, unless a guard wants a rule."""
    # With them, PyTorch writes and traces checks of all inputs, in time that grows with the square
    # of their number. Old versions insist on them.
    with contextlib.suppress(ValueError):
        exported.example_inputs = None
    return exported.run_decompositions(_table_for(exported, kept))


def decompose_alone(
    exported: torch.export.ExportedProgram, kept: frozenset[str], nodes: Sequence[FunctionalNode]
) -> bool:
    """Writes these nodes of the graph by the rules, if each can be traced alone; whether it did."""
    operators = {node.node: node.target for node in nodes}
    table = _table_for(exported, kept)
    return _decomposed_nodes.decompose(exported.graph_module, operators, table)


def _table_for(exported: torch.export.ExportedProgram, kept: frozenset[str]) -> dict[Any, Callable]:
    values = (node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder")
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    table = _table_without(kept, next(devices, torch.device("cpu")))
    if any(node.target is wrap_with_autocast for node in exported.graph.nodes):
        for op in _decomposed_transformer.WITHOUT_AUTOCAST:
            table.pop(op, None)
    return table


def _table_without(kept: frozenset[str], device: torch.device) -> dict[Any, Callable]:
    theirs, ours = _rules()
    table = theirs | {op: _on(device, rule) for op, rule in ours.items()}
    table = {op: rule for op, rule in table.items() if str(op) not in kept}
    for op, (guard, rule) in _guarded().items():
        table[op] = _guarded_rule(op, guard, _on(device, rule), table.get(op))
    return table


def _on(device: torch.device, rule: Callable) -> Callable:
    """The rule where tensors that it makes without naming a device (positions) are on this one."""

    @functools.wraps(rule)
    def run(*args, **kwargs):
        # Around a whole graph, PyTorch would suspend this context.
        with device:
            return rule(*args, **kwargs)

    return run


def _guarded_rule(op, guard: Guard, rule: Callable, otherwise: Callable | None) -> Callable:
    names = [argument.name for argument in op._schema.arguments]

    def run(*args, **kwargs):
        if guard({**dict(zip(names, args, strict=False)), **kwargs}):
            return rule(*args, **kwargs)
        return NotImplemented if otherwise is None else otherwise(*args, **kwargs)

    return run


def is_guarded(node: FunctionalNode) -> bool:
    """Whether a call of an operator that the importer has needs a rule all the same."""
    found = _guarded().get(node.node.target)
    if found is None:
        return False
    values = pytree.tree_map(lambda leaf: leaf.value if isinstance(leaf, Ref) else leaf, node.args)
    return found[0](values)


__all__ = ["decompose_alone", "decomposed", "is_guarded", "rule_for"]
