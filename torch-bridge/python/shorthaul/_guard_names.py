"""Names and lines in what Dynamo's guards say, as the user writes them.

Owns the way from ``L['self']._modules['fc'].weight`` to ``self.fc.weight``, and the choice of the
line that a warning names: the innermost of the user's own.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Sequence

import torch

from ._origins import line_of, short_path

_TORCH = os.path.dirname(torch.__file__)
_OURS = os.path.dirname(__file__)

#: How parts of a name that are Dynamo's become the user's, one after the other.
_REWRITES = (
    (r"\bG\[['\"]__builtins_dict__\w*['\"]\]\[['\"](\w+)['\"]\]", r"\1"),
    (r"\b[LG]\[['\"]([\w.]+)['\"]\]", r"\1"),
    (r"\b___\w+\(([^()]*)\)", r"\1"),
    (r"dict\(type\(([^()]+)\)(?:\.__mro__\[\d+\])?\.__dict__\)\['(\w+)'\]", r"type(\1).\2"),
    (r"type\(([^()]+)\)(?:\.__mro__\[\d+\])?\.__dict__\['(\w+)'\]", r"type(\1).\2"),
    (r"\.__dict__\['(\w+)'\]", r".\1"),
    (r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]"),
    (r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1"),
    (r"\.size\(\)\[(\d+)\]", r".shape[\1]"),
    (r"\.stride\(\)\[(\d+)\]", r".stride(\1)"),
    (r"\.__(?:func|self|wrapped)__\b", ""),
    (r"[\w.]+\.__closure__\[\d+\]\.cell_contents", "a variable of a function around it"),
    (r"\b___?stack\d+\b", "an intermediate value"),
)
#: Descriptions in those rewrites.
_UNNAMED = "a variable of a function around it|an intermediate value"


def as_written(name: str) -> str:
    """The name of a value as its owner writes it: ``self.inner.weight``, in backticks."""
    name = re.sub(r"__import_(\w+)", lambda m: m[1].replace("_dot_", "."), name.strip())
    before = None
    while before != name:
        before = name
        for pattern, replacement in _REWRITES:
            name = re.sub(pattern, replacement, name)
    # What is not a name stands without backticks, and so does what is a part of it.
    described = re.match(rf"({_UNNAMED})(.*)$", name, re.DOTALL)
    if described:
        part = described[2].lstrip(".")
        return f"`{part}` of {described[1]}" if part else described[1]
    return f"`{name}`"


def of_wrapper(said: str, code: types.CodeType, arguments: Sequence[str]) -> str:
    """A reason without the names that our wrapper has for what it passes on."""
    if not code.co_filename.startswith(_OURS + os.sep):
        return said

    def named(found: re.Match) -> str:
        i = int(found[1])
        return arguments[i] if i < len(arguments) else found[0]

    said = re.sub(r"\bargs\[(\d+)\]", named, said)
    said = re.sub(r"\bkwargs\['(\w+)'\]", r"\1", said)
    return re.sub(r"(?<![.'\w])module(?![\w])", "self", said)


def place_of(reason: str, code: types.CodeType | None) -> str:
    """``file:line in function`` of the innermost line of the user's that a guard comes from.

    Where there is none, it is the beginning of the user's function that was traced, or nothing.
    """
    frames = re.findall(r'^  File "(.+)", line (\d+), in (\S+)$', reason, re.MULTILINE)
    users = [frame for frame in frames if _is_users(frame[0])]
    if users:
        filename, line, function = users[-1]
        return f"{short_path(filename)}:{line} in {_function(function)}"
    remark = re.search(r"# (\S+):(\d+) in (\S+)", reason.splitlines()[0] if reason else "")
    if remark is not None and not frames and _is_users(remark[1]):
        return f"{short_path(remark[1])}:{remark[2]} in {_function(remark[3])}"
    if code is not None and _is_users(code.co_filename):
        return f"{line_of(code)} in {_function(code.co_name)}"
    return ""


def _is_users(filename: str) -> bool:
    """Whether a file is neither PyTorch's nor ours. Dynamo shortens names to those in PyTorch."""
    filename = filename.replace("\\", "/")
    if filename.startswith("<") or re.search(r"(^|/)shorthaul/\w+\.py$", filename):
        return False
    return not filename.startswith(_TORCH) and not (
        not os.path.isabs(filename) and os.path.exists(os.path.join(_TORCH, filename))
    )


def _function(name: str) -> str:
    """The user's function, where Dynamo goes on in the middle of it."""
    found = re.match(r"torch_dynamo_resume_in_(.+)_at_\d+$", name)
    return found[1] if found else name


__all__ = ["as_written", "of_wrapper", "place_of"]
