"""What the widget's page draws, from a profile's data.

Owns the joins: which kernels write and read a container, and which decisions concern a kernel.
"""

from __future__ import annotations

from typing import Any

from .._profile import sentences_of

_NUMBERS = (
    "seconds",
    "bytes_moved",
    "bytes_read",
    "bytes_written",
    "bytes_least",
    "operations",
    "roofline_seconds",
    "distance",
    "gb_s",
    "gflop_s",
    "launches",
    "calls",
)


def view(data: dict[str, Any], title: str) -> dict[str, Any]:
    """A profile's data by position: kernels, containers, decisions point to one another.

    A decision concerns the kernels of its program and pass that have its operator.
    """
    containers = [
        {key: container[key] for key in ("title", "dtype", "shape", "bytes", "role")}
        | {"writers": [], "readers": []}
        for container in data["containers"]
    ]
    position = {(c["program"], c["name"]): i for i, c in enumerate(data["containers"])}
    by_operator: dict[tuple, list[int]] = {}
    for i, decision in enumerate(data["decisions"]):
        at = (decision["program"], decision["stage"], decision["node"], decision["module"] or "")
        by_operator.setdefault(at, []).append(i)
    kernels = []
    for i, kernel in enumerate(data["kernels"]):
        program = kernel["program"]
        reads, writes = (
            [position[program, name] for name in kernel[key]] for key in ("reads", "writes")
        )
        for containers_of, role in ((reads, "readers"), (writes, "writers")):
            for at in containers_of:
                containers[at][role].append(i)
        operators = dict.fromkeys(
            (program, kernel["stage"], operator["node"], operator["module"])
            for operator in kernel["operators"]
        )
        kernels.append(
            {key: kernel[key] for key in (*_NUMBERS, "name", "origin", "stage", "path")}
            | {"operators": kernel["operators"], "reads": reads, "writes": writes}
            | {"decisions": [at for one in operators for at in by_operator.get(one, ())]}
        )
    keys = ("kind", "stage", "node", "sentence", "applied", "take", "may_change", "bytes")
    return {
        "title": title,
        "kernels": kernels,
        "containers": containers,
        "decisions": [{key: decision[key] for key in keys} for decision in data["decisions"]],
        "sentences": sentences_of(data),
    }
