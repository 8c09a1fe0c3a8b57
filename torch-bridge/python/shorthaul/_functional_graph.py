"""The functional graph of a function of tensors, as PyTorch traces it.

Owns the way from ``torch.export`` to a graph of operators that the importer has, with as little
tracing as that needs: as it was exported; with single operators written by others; or traced a
second time by PyTorch's decompositions. Never writes the document.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from ._bounds import check_numbers
from ._decompositions import decompose_alone, decomposed, is_guarded
from ._errors import CaptureError, first_line
from ._functionalize import Functional, FunctionalNode, functionalize, refuse_effects
from ._gradient_modes import inline_regions, keep_origins
from ._older_gradients import spell_out
from ._pytorch_names import tracing_apart
from ._refused_types import leave_to_eager
from ._refused_writes import leave_overlaps_to_eager
from ._sizes import go_on_noting
from ._slice_writes import spell_out_slice_writes

log = logging.getLogger("shorthaul")

#: Operators that only check things at run time; the shapes in the graph already promise them.
CHECKS = frozenset(
    {
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


def functional_graph(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    supported: frozenset[str] | None,
    dynamic_shapes: Any,
    origins: Mapping[str, fx.Node],
    traced: list[torch.export.ExportedProgram] | None,
) -> tuple[torch.export.ExportedProgram, Functional | None, list[Any], float]:
    """What PyTorch traced, its functional reading if there is one, and the seconds of the export.

    The third value holds the traced results. Their strides are eager's; decompositions may change
    them.

    The arguments are those of ``_capture.capture``. Raises ``CaptureError``.
    """
    start = time.perf_counter()
    exported = _export(module, args, kwargs, dynamic_shapes)
    inline_regions(exported.graph_module)
    keep_origins(exported.graph_module)
    spell_out(exported.graph)
    leave_to_eager(exported.graph)
    leave_overlaps_to_eager(exported.graph)
    looks = _results(exported)
    check_numbers(exported.graph)
    export_seconds = time.perf_counter() - start
    if traced is not None:
        traced.append(exported)
        go_on_noting(node.meta.get("val") for node in user_placeholders(exported))
    functional = functionalize(exported.graph)
    if functional is None and spell_out_slice_writes(exported.graph):
        functional = functionalize(exported.graph)
    if (
        traced is None
        and functional is not None
        and _decompose_alone(exported, functional, supported)
    ):
        functional = functionalize(exported.graph)
    if functional is None or _outside(functional, supported):
        exported = _decompose(exported, supported)
        refuse_effects(exported.graph, origins)
        functional = functionalize(exported.graph)
        if traced is not None:
            traced.append(exported)
    return exported, functional, looks, export_seconds


def _results(exported: torch.export.ExportedProgram) -> list[Any]:
    """The traced values that the caller gets, in order."""
    results = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    specs = exported.graph_signature.output_specs
    return [
        result.meta.get("val") if isinstance(result, fx.Node) else result
        for spec, result in zip(specs, results, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT
    ]


def _export(
    module: nn.Module, args: tuple, kwargs: dict, dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    try:
        with (
            tracing_apart(),
            fx.traceback.preserve_node_meta(),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            exported = torch.export.export(
                module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
    except CaptureError as error:
        raise CaptureError(first_line(error)) from error
    except Exception as error:
        raise CaptureError(f"PyTorch cannot trace it: {first_line(error)}") from error
    # A program's key says when it holds; guards with Dynamo's names for inputs cannot run here.
    exported._guards_code = []
    return exported


def _outside(functional: Functional, supported: frozenset[str] | None) -> list[FunctionalNode]:
    """The operators that the importer lacks, or that need a rule here."""
    if supported is None:
        return []
    return [
        node
        for node in functional.nodes
        if (node.target not in supported or is_guarded(node))
        and node.target not in CHECKS
        and node.is_tensor_op
    ]


def _decompose_alone(exported, functional: Functional, supported: frozenset[str] | None) -> bool:
    nodes = _outside(functional, supported)
    try:
        with tracing_apart():
            return bool(nodes) and decompose_alone(exported, supported or frozenset(), nodes)
    except Exception as error:
        log.debug(f"PyTorch decomposes the whole graph: {first_line(error)}")
        return False


def _decompose(exported, supported: frozenset[str] | None):
    try:
        _match_names(exported)
        with tracing_apart():
            return decomposed(exported, supported or frozenset())
    except Exception as error:
        raise CaptureError(
            f"PyTorch cannot decompose this module's graph: {first_line(error)}"
        ) from error


def _match_names(exported: torch.export.ExportedProgram) -> None:
    """Lets the signature know the results by the names that they have after rewrites."""
    results = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    for spec, result in zip(exported.graph_signature.output_specs, results, strict=True):
        if isinstance(result, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = result.name
    exported.graph_module.recompile()


def user_placeholders(exported: torch.export.ExportedProgram) -> list[fx.Node]:
    """What stands for the caller's inputs."""
    specs = exported.graph_signature.input_specs
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    return [
        node
        for spec, node in zip(specs, placeholders, strict=True)
        if spec.kind == InputKind.USER_INPUT
    ]


__all__ = ["CHECKS", "functional_graph", "user_placeholders"]
