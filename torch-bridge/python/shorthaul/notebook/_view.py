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

    A decision concerns the kernels that have an operator of its origin in its program; it does not
    say in which pass.
    """
    containers = [
        {key: container[key] for key in ("title", "dtype", "shape", "bytes", "role")}
        | {"writers": [], "readers": []}
        for container in data["containers"]
    ]
    position = {(c["program"], c["name"]): i for i, c in enumerate(data["containers"])}
    by_origin: dict[tuple[int, str], list[int]] = {}
    for i, decision in enumerate(data["decisions"]):
        by_origin.setdefault((decision["program"], decision["origin"]), []).append(i)
    kernels = []
    for i, kernel in enumerate(data["kernels"]):
        program = kernel["program"]
        reads, writes = (
            [position[program, name] for name in kernel[key]] for key in ("reads", "writes")
        )
        for containers_of, role in ((reads, "readers"), (writes, "writers")):
            for at in containers_of:
                containers[at][role].append(i)
        origins = dict.fromkeys((program, label(operator)) for operator in kernel["operators"])
        kernels.append(
            {key: kernel[key] for key in (*_NUMBERS, "name", "origin", "stage", "path")}
            | {"operators": kernel["operators"], "reads": reads, "writes": writes}
            | {"decisions": [at for origin in origins for at in by_origin.get(origin, ())]}
        )
    keys = ("rewrite", "origin", "sentence", "applied", "bytes")
    return {
        "title": title,
        "kernels": kernels,
        "containers": containers,
        "decisions": [{key: decision[key] for key in keys} for decision in data["decisions"]],
        "sentences": sentences_of(data),
    }


def label(operator: dict[str, str]) -> str:
    """An operator's origin in the words of decisions."""
    module, source = operator["module"], operator["source"]
    return (
        (operator["node"] or "<unnamed>")
        + (f" in {module}" if module else "")
        + (f" ({source})" if source else "")
    )
