"""What Dynamo says, in plain words: what changed since the last call, and what it cannot trace.

Dynamo's guards say which of their conditions failed, each in a form of its own; the patterns below
are those forms in PyTorch 2.6 to 2.15. A reason of another form is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch


def what_changed(reason: str) -> str:
    """A guard's reason as a clause: ``size 0 of `x` is 5 instead of 3``."""
    reason = re.sub(r"^\d+/\d+: ", "", reason)
    for pattern, clause in _CLAUSES:
        found = re.match(pattern, reason)
        if found is not None:
            return clause(found)
    return reason


def why_broken(reason: str) -> str:
    """The reason of a graph break as a clause: ``a tensor's value becomes a Python number``."""
    said = reason.lower()
    return next((clause for start, clause in _BREAKS.items() if said.startswith(start)), reason)


def _readable(name: str) -> str:
    """The name of a value as its owner writes it: ``self.inner.weight``."""
    name = re.sub(r"\bL\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name)
    return f"`{name}`"


def _size(found: re.Match) -> str:
    name = _readable(found["name"])
    return f"size {found['index']} of {name} is {found['actual']} instead of {found['expected']}"


def _rank(found: re.Match) -> str:
    name = _readable(found["name"])
    return f"{name} has {found['actual']} dimensions instead of {found['expected']}"


def _type(found: re.Match) -> str:
    name = _readable(found["name"])
    return f"{name} has the type {found['actual']} instead of {found['expected']}"


def _requires_grad(found: re.Match) -> str:
    verb = (
        "requires no gradient any more" if found["expected"] == "1" else "requires a gradient now"
    )
    return f"{_readable(found['name'])} {verb}"


def _strides(found: re.Match) -> str:
    return f"{_readable(found['name'])} has its elements in another order in memory"


def _state(found: re.Match) -> str:
    state = found["state"]
    if "grad_mode" in state:
        now = "on" if torch.is_grad_enabled() else "off (`torch.no_grad`)"
        return f"gradients are switched {now}"
    switched = re.search(r"autocast\((\w+)\)_enabled", state)
    if switched is not None:
        now = "on" if torch.is_autocast_enabled(switched[1]) else "off"
        return f"autocast is switched {now}"
    if "num_threads" in state:
        return f"PyTorch's number of threads is {torch.get_num_threads()} now"
    return f"a setting of PyTorch changed: {state}"


def _class(found: re.Match) -> str:
    kind = found["kind"].rsplit(".", 1)[-1]
    return f"{_readable(found['name'])} is no `{kind}` any more{_at(found)}"


def _object(found: re.Match) -> str:
    return f"{_readable(found['name'])} is another object{_at(found)}"


def _at(found: re.Match) -> str:
    return f" ({found['place']})" if found["place"] else ""


def _condition(found: re.Match) -> str:
    condition = _readable(found["condition"].strip())
    return f"{condition} does not hold any more ({found['place']})"


_TENSOR = r"tensor '(?P<name>.+)' "
_EXPECTED = r"expected (?P<expected>\w+), actual (?P<actual>\w+)"

_PLACE = r"[^#]*(?:# .*  # (?P<place>\S+:\d+ in \w+))?"

_CLAUSES: tuple[tuple[str, Callable[[re.Match], str]], ...] = (
    (_TENSOR + r"size mismatch at index (?P<index>\d+)\. " + _EXPECTED, _size),
    (_TENSOR + r"rank mismatch\. " + _EXPECTED, _rank),
    (_TENSOR + r"dtype mismatch\. " + _EXPECTED, _type),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=(?P<expected>\d)", _requires_grad),
    (_TENSOR + r"stride mismatch", _strides),
    (r"GLOBAL_STATE changed: (?P<state>.+)", _state),
    (r"___check_type_id\((?P<name>.+?), \d+\), type=<class '(?P<kind>.+?)'>" + _PLACE, _class),
    (r"___check_obj_id\((?P<name>.+?), \d+\)" + _PLACE, _object),
    (r"(?P<condition>[^#]+?)\s+# .*  # (?P<place>\S+:\d+ in \w+)", _condition),
)


#: How the reasons of common graph breaks start, in small letters, and what they mean.
_BREAKS = {
    "generic_jump": "a branch depends on a tensor's values",
    "data-dependent branching": "a branch depends on a tensor's values",
    "unsupported tensor.item() call": "a tensor's value becomes a Python number",
    "tensor.item": "a tensor's value becomes a Python number",
    "data dependent operator": "the result of an operator depends on a tensor's values",
    "dynamic shape operator": "the size of a result depends on a tensor's values",
}
