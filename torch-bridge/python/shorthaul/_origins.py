"""Where a traced node comes from: Dynamo's node, the module's path, the line of code."""

from __future__ import annotations

import re
import types

from torch import fx

#: Where a traced node's metadata names the node of Dynamo's that it comes from, under "custom".
SOURCE = "shorthaul_source"

#: Where a node's metadata says that it is a part of one of PyTorch's backward operators; a traced
#: node has it under "custom".
OF_GRADIENT = "shorthaul_of_gradient"


def source_node(node: fx.Node) -> str:
    """The name of that node, or nothing."""
    return (node.meta.get("custom") or {}).get(SOURCE, "")


def module_path(path: str) -> str:
    """``L['self'].layers[0]._modules['fc']``, as Dynamo says it, as ``layers.0.fc``."""
    path = re.sub(r"^L(\['\w+'\]|__\w+?___?)(\.__self__)?", "", path)
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", path).strip(".")


def source_of(stack_trace: str | None) -> str:
    """``file:line`` of the innermost frame outside PyTorch's own modules, else of the innermost.

    Frames of our wrapper say nothing about the model: where there are no others, this is empty.
    """
    places = []
    for line in (stack_trace or "").splitlines():
        line = line.strip()
        if line.startswith('File "'):
            filename, rest = line[6:].split('"', 1)
            number = rest.split("line ", 1)[1].split(",", 1)[0]
            places.append((filename, number))
    places = [p for p in places if not p[0].replace("\\", "/").endswith("/shorthaul/module.py")]
    own = [p for p in places if "/torch/nn/" not in p[0].replace("\\", "/")]
    if not places:
        return ""
    filename, number = (own or places)[-1]
    return f"{short_path(filename)}:{number}"


def refused_at(refusal: Exception) -> str:
    """``file:line`` of the user's code that Dynamo refused; empty if it does not say."""
    stack = getattr(refusal, "real_stack", None)
    return f"{short_path(stack[-1].filename)}:{stack[-1].lineno}" if stack else ""


def line_of(code: types.CodeType) -> str:
    """``file:line`` where a function begins."""
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(filename: str) -> str:
    """A file with its folder."""
    return "/".join(filename.replace("\\", "/").split("/")[-2:])
