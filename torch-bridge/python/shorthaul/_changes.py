"""What Dynamo says, in plain words: what changed since the last call, and what it cannot trace.

Dynamo's guards say which of their conditions failed, each in a form of its own; the patterns below
are those forms in PyTorch 2.6 to 2.15. Owns the sentences; the names in them are ``_guard_names``'.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext

from ._guard_names import as_written, of_wrapper, place_of
from ._settings_changed import which_settings

#: Most characters that are passed on of a reason whose form is not known.
_MOST_CHARACTERS = 120


class Changes:
    """What changed since the programs of a module were made; one sentence for each compilation.

    Dynamo says of each program why it does not serve a call, beginning with the last one. A program
    that fits the modes of the call is the one to compare with.
    """

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        #: The names of what ``forward`` takes by position, where a wrapper of ours passes it on.
        self.arguments: tuple[str, ...] = ()
        self.pending: Any = None
        self.explained: Callable[[], CompileContext | None] = lambda: None

    def note(self, failure) -> None:
        """Dynamo's ``guard_fail_fn``: a program does not serve a call."""
        if "BACKEND_MATCH" in failure.reason:
            # The program is another module's: this one compiles the function for the first time.
            return
        compilation = CompileContext.try_get()
        if compilation is not None and self.explained() is compilation:
            return
        if re.search(r"GLOBAL_STATE|_mode_stack|\.training [!=]=", failure.reason):
            self.pending = self.pending or failure
        else:
            self._explain(failure)

    def say_pending(self) -> None:
        """Says what mode changed, if nothing else did; to be called during the compilation."""
        if self.pending is not None:
            self._explain(self.pending)

    def _explain(self, failure) -> None:
        self.pending = None
        compilation = CompileContext.try_get()
        if compilation is not None:
            self.explained = weakref.ref(compilation)
        self.say(what_changed(failure.reason, failure.orig_code, self.arguments))


def what_changed(
    reason: str, code: types.CodeType | None = None, arguments: Sequence[str] = ()
) -> str:
    """A guard's reason as a clause, with a line: ``size 0 of `x` is 5 instead of 3 (a.py:7 in f)``.

    ``code`` is what was traced. ``arguments`` are the names of what a wrapper of ours passes on.
    """
    reason = re.sub(r"^\d+/\d+(_\d+)?: ", "", reason)
    place = place_of(reason, code)
    said = reason.splitlines()[0] if reason else ""
    # Dynamo's own remarks begin behind two spaces.
    said, _, remark = said.partition("  #")
    hint = re.search(r"guard on \"([^\"]+)\"", remark or said)
    said = re.sub(r" \(HINT: .*\)$", "", said).strip()
    if code is not None:
        said = of_wrapper(said, code, arguments)
    clause = _clause_of(said, hint[1] if hint else "")
    return f"{clause} ({place})" if place else clause


def _clause_of(said: str, closed_over: str) -> str:
    if closed_over:
        said = re.sub(r"[^\s()]*cell_contents[^\s(),]*", closed_over, said, count=1)
    for pattern, clause in _CLAUSES:
        found = re.match(pattern, said)
        if found is not None:
            return clause(found)
    return _unknown(said)


def why_broken(reason: str, graph: fx.Graph | None = None) -> str:
    """The reason of a graph break as a clause: ``a tensor's value becomes a Python number``.

    ``graph`` is what was traced before the break.
    """
    said = reason.lower()
    if said.startswith("generic_jump") and graph is not None and _returns_random_number(graph):
        return "a branch depends on a random number"
    return next((clause for start, clause in _BREAKS.items() if said.startswith(start)), reason)


def _returns_random_number(graph: fx.Graph) -> bool:
    """Whether a result is made of numbers that Python drew (``random.random()``) alone."""
    results = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    drawn: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            drawn[node] = node.name.startswith("random_value_")
        else:
            inputs = node.all_input_nodes
            drawn[node] = bool(inputs) and all(drawn[i] for i in inputs)
    return any(drawn[n] for n in results)


def _unknown(said: str) -> str:
    """For a guard of a form that is not known: what it is about, or what PyTorch says."""
    about = re.match(r"(?:not )?_*\w+\((?P<name>[A-Za-z_][\w.\[\]'\"]*)", said)
    if not said or "__" in said or re.search(r"\d{9,}", said):
        # Only PyTorch's tracer understands such a text.
        if about is None or about["name"].startswith("__"):
            return "something that its compiled form depends on changed"
        return f"{as_written(about['name'])} changed"
    said = as_written(said[:_MOST_CHARACTERS]).strip("`")
    return f"something that its compiled form depends on changed (PyTorch says: {said})"


def _readable(found: re.Match) -> str:
    return as_written(found["name"])


def _size(found: re.Match) -> str:
    name = _readable(found)
    return f"size {found['index']} of {name} is {found['actual']} instead of {found['expected']}"


def _stride(found: re.Match) -> str:
    numbers = f"is {found['actual']} instead of {found['expected']}"
    return (
        f"stride {found['index']} of {_readable(found)} {numbers}: its elements lie in memory in "
        f"another order, or with other gaps"
    )


def _strides(found: re.Match) -> str:
    owner = re.search(r"([\w.\[\]'\"]+)\.(?:stride|storage_offset)\(\)", found[0])
    name = as_written(owner[1]) if owner else "a tensor"
    return f"{name} has another stride: its elements lie elsewhere in memory"


def _rank(found: re.Match) -> str:
    plural = "" if found["actual"] == "1" else "s"
    numbers = f"{found['actual']} dimension{plural} instead of {found['expected']}"
    return f"{_readable(found)} has {numbers}"


def _type(found: re.Match) -> str:
    actual, expected = (_TYPES.get(found[key], found[key]) for key in ("actual", "expected"))
    return f"{_readable(found)} has the type {actual} instead of {expected}"


def _requires_grad(found: re.Match) -> str:
    verb = (
        "requires no gradient any more" if found["expected"] == "1" else "requires a gradient now"
    )
    return f"{_readable(found)} {verb}"


def _device_index(found: re.Match) -> str:
    return f"{_readable(found)} is on device {found['actual']} instead of {found['expected']}"


def _keys(found: re.Match) -> str:
    """A tensor's dispatch keys: its kind of device, its layout, and whether autograd sees it."""
    name = _readable(found)
    expected, actual = (found[key].split(", ") for key in ("expected", "actual"))
    if expected[0] != actual[0]:
        return f"{name} is on another device, or of another layout ({actual[0]})"
    had, has = (any(key.startswith("Autograd") for key in keys) for keys in (expected, actual))
    if torch.is_inference_mode_enabled() and _INFERENCE & {*expected} - {*actual}:
        return "inference mode is switched on"
    if had == has:
        return f"{name} is another kind of tensor"
    return f"{name} was {'made' if had else 'not made'} in inference mode"


def _class_found(found: re.Match) -> str:
    actual = _last_word(found["actual"])
    actual = "None" if actual == "NoneType" else _with_article(actual)
    return (
        f"{_readable(found)} is {actual} instead of {_with_article(_last_word(found['expected']))}"
    )


def _class(found: re.Match) -> str:
    kind = found["kind"]
    if not kind:
        return f"{_readable(found)} is of another class"
    return f"{_readable(found)} is no longer {_with_article(_last_word(kind))}"


def _with_article(kind: str) -> str:
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} `{kind}`"


def _last_word(kind: str) -> str:
    return kind.rsplit(".", 1)[-1]


def _object(found: re.Match) -> str:
    name, kind = found["name"], found["kind"] or ""
    known = {id(value): str(value) for value in (True, False, None)}.get(int(found["id"]))
    if known is not None:
        return f"{as_written(name)} is no longer {known}"
    if name.endswith(".__code__") or "function" in kind or "method" in kind:
        return f"{as_written(name.removesuffix('.__code__'))} is another function"
    return f"{as_written(name)} is another {'class' if kind == 'type' else 'object'}"


def _same_tensors(found: re.Match) -> str:
    names = re.findall(r'"([^"]+)"|\'([^\']+)\'', found["names"])
    written = [as_written(double or single) for double, single in names]
    return f"{' and '.join(written[:4])} are one tensor now"


def _no_longer_one(found: re.Match) -> str:
    return f"{as_written(found['name'])} and {as_written(found['other'])} are no longer one object"


def _contains(found: re.Match) -> str:
    owner, key, is_absent = found["name"], found["key"], found["not"]
    if owner.endswith(".__dict__"):
        attribute = key.strip("'")
        name = as_written(f"{owner.removesuffix('.__dict__')}.{attribute}")
        what = "was set on the object itself" if is_absent else "is no longer set on the object"
        return f"{name} {what}"
    verb = "has the key" if is_absent else "no longer has the key"
    return f"{as_written(owner)} {verb} {key}"


def _item(found: re.Match) -> str:
    verb = "contains" if found["not"] else "no longer contains"
    return f"{_readable(found)} {verb} {found['key']}"


def _attribute(found: re.Match) -> str:
    if found["attribute"].startswith(("_dynamo", "_has_dynamo")):
        return _marked(found)
    name = as_written(f"{found['name']}.{found['attribute']}")
    return f"{name} {'exists now' if found['not'] else 'does not exist any more'}"


def _marked(_found: re.Match) -> str:
    return "`torch._dynamo.mark_dynamic` or the like marks other sizes of a tensor"


def _gone(found: re.Match) -> str:
    return f"{_readable(found)} does not exist any more"


def _hooks(found: re.Match) -> str:
    kind = found["kind"].strip("_").replace("_", " ")
    if kind.startswith("global "):
        return f"the {kind.removeprefix('global ')} of all modules changed"
    return f"the {kind} of {_readable(found)} changed"


def _length(found: re.Match) -> str:
    name = found["name"]
    if name in ("args", "kwargs"):
        return "the call has other arguments"
    if name.endswith("._modules"):
        return f"the number of modules in {as_written(name.removesuffix('._modules'))} changed"
    return f"the length of {as_written(name)} is no longer {found['n']}"


def _empty(found: re.Match) -> str:
    if found["name"] in ("args", "kwargs"):
        return "the call has other arguments"
    return f"{_readable(found)} is no longer empty"


def _keys_of(found: re.Match) -> str:
    return f"the keys of {_readable(found)} changed, or their order did"


def _other(found: re.Match) -> str:
    return f"{_readable(found)} is another object"


def _value(found: re.Match) -> str:
    return f"{_readable(found)} is no longer {found['value']}"


def _equal(found: re.Match) -> str:
    return f"{_readable(found)} and {as_written(found['other'])} are no longer equal"


def _is_now(found: re.Match) -> str:
    return f"{_readable(found)} is {found['value']} now"


def _below(found: re.Match) -> str:
    return f"{_readable(found)} is less than {found['least']} now"


def _above(found: re.Match) -> str:
    return f"{_readable(found)} is more than {found['most']} now"


def _between(found: re.Match) -> str:
    return f"{_readable(found)} is not between {found['least']} and {found['most']} any more"


def _condition(found: re.Match) -> str:
    return f"{as_written(found[0])} does not hold any more"


def _fixed(clause: str) -> Callable[[re.Match], str]:
    return lambda _found: clause


def _settings(found: re.Match) -> str:
    return which_settings(found["state"].split())


#: Keys that tensors lose where inference mode begins.
_INFERENCE = frozenset({"ADInplaceOrView", "AutogradCPU", "AutogradCUDA"})

#: Types as the user writes them.
_TYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}

_TENSOR = r"tensor '(?P<name>.+)' "
_EXPECTED = r"expected (?P<expected>\w+), actual (?P<actual>-?\w+)"
_KEYS = r"expected DispatchKeySet\((?P<expected>.+?)\), actual DispatchKeySet\((?P<actual>.+?)\)"
_FOUND = r"<class '(?P<expected>.+?)'>, but found <class '(?P<actual>.+?)'>"
_INDEX = r"Expected device index to be (?P<expected>-?\d+), but got (?P<actual>-?\d+)"
_KIND = r"(?:, type=<class '(?P<kind>.+?)'>)?"
_NOT = r"(?P<not>not )?"
#: A value as Dynamo writes it: a path of attributes and keys, with calls that have no arguments. A
#: word is taken as a whole: there are too many ways to cut a long one.
_NAME = (
    r"(?P<name>(?:[A-Za-z_]\w*+|\.|\[[^\[\]]*\]|\(\)|dict\(type\([^()]+\)[^()]*\)|type\([^()]+\))+)"
)
_LITERAL = (
    r"(?P<value>(?:-?[\d.]|'|\"|b'|True$|False$|None$|torch\.|device\(|<|\(|\[|\{|Ellipsis).*)"
)

_CLAUSES: tuple[tuple[str, Callable[[re.Match], str]], ...] = (
    (_TENSOR + r"size mismatch at index (?P<index>\d+)\. " + _EXPECTED, _size),
    (_TENSOR + r"stride mismatch at index (?P<index>\d+)\. " + _EXPECTED, _stride),
    (_TENSOR + r"rank mismatch\. " + _EXPECTED, _rank),
    (_TENSOR + r"dtype mismatch\. " + _EXPECTED, _type),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=(?P<expected>\d)", _requires_grad),
    (_TENSOR + r"dispatch key set mismatch\. " + _KEYS, _keys),
    (_TENSOR + r".*device index mismatch\. " + _INDEX, _device_index),
    (r"expected type of '(?P<name>.+)' to be (?:a tensor type, |)" + _FOUND, _class_found),
    (r"TYPE_MISMATCH\((?P<name>.+?)(?P<kind>)\)", _class),
    (r"GLOBAL_STATE changed: (?P<state>.+)", _settings),
    (r"___check_type_id\((?P<name>.+?), \d+\)" + _KIND, _class),
    (r"___check_obj_id\((?P<name>.+?), (?P<id>\d+)\)" + _KIND, _object),
    (r"Duplicate tensors? found: (?P<names>.+)", _same_tensors),
    (r"Duplicate tensor found|NO_TENSOR_ALIASING", _fixed("two tensors are one now")),
    (r"(?:Key|Index)Error on (?P<name>.+)", _gone),
    (r"\w+Accessor\b.* on (?P<name>.+)", _other),
    (_NOT + r"___dict_contains\((?P<key>'\w+'|[^,]+), (?P<name>.+)\)$", _contains),
    (_NOT + r"(?:frozen)?set\.__contains__\((?P<name>.+), (?P<key>[^,]+)\)$", _item),
    (_NOT + r"hasattr\((?P<name>.+), '(?P<attribute>\w+)'\)", _attribute),
    (r".*_dynamo_\w*(?:marking|indices|range|ids|bounds)", _marked),
    (r"(?:not |len\(|list\(dict\.keys\()?(?P<name>.+?)\.(?P<kind>_\w*hooks\w*)\b", _hooks),
    (r".*___check_torch_function_mode_stack", _fixed("another `TorchFunctionMode` is active")),
    (r"___check_metadata", _fixed("a tensor's own class describes it in another way")),
    (r".*(?:compare_functorch_state|forward_ad)", _fixed("a transform of `torch.func` is active")),
    (r".*saved_tensors_hooks", _fixed("other hooks for saved tensors are active")),
    (r".*CURRENT_DEVICE", _fixed("the default device changed")),
    (r".*(?:___check_global_state|are_deterministic)", _fixed("a setting of PyTorch changed")),
    (r".*\.(?:stride|storage_offset)\(\)", _strides),
    (r"not math\.isnan\((?P<name>.+?)(?P<value>)\)", lambda m: f"{_readable(m)} is NaN now"),
    (r".*isnan\((?P<name>[^()]+)\)", lambda m: f"{_readable(m)} is no longer NaN"),
    (r"list\((?:dict\.keys\((?P<name>.+?)\)|.+?\.keys\(\))\)", lambda m: _keys_of_any(m)),
    (r"(?:(?:frozen)?set\.__len__|len|___\w+_len)\((?P<name>.+)\) [!=]= (?P<n>\d+)$", _length),
    (r"___normalize_(?:range|count)_iter\((?P<name>.+?)\)", _other),
    (r"not " + _NAME + "$", _empty),
    (_NAME + r" is not None$", lambda m: f"{_readable(m)} is None now"),
    (_NAME + r" is (?P<value>None|True|False)$", _value),
    (_NAME + r" is (?P<other>[A-Za-z_].*)$", _no_longer_one),
    (_NAME + r" == " + _LITERAL + "$", _value),
    (_NAME + r" == (?P<other>[A-Za-z_][\w.\[\]()'\"]*)$", _equal),
    (_NAME + r" != (?P<value>-?[\d.]+)$", _is_now),
    (r"(?P<least>-?\d+) <= " + _NAME + "$", _below),
    (r"(?P<least>-?\d+) <= " + _NAME + r" <= (?P<most>-?\d+)$", _between),
    (_NAME + r" <= (?P<most>-?\d+)$", _above),
    (r"(?!.*__)[^#]+ (?:==|!=|<=?|>=?) [^#]+$", _condition),
)


def _keys_of_any(found: re.Match) -> str:
    if found["name"]:
        return _keys_of(found)
    name = found[0].removeprefix("list(").removesuffix(".keys())")
    return f"the keys of {as_written(name)} changed, or their order did"


#: How the reasons of common graph breaks start, in small letters, and what they mean.
_BREAKS = {
    "generic_jump": "a branch depends on a tensor's values",
    "data-dependent branching": "a branch depends on a tensor's values",
    "unsupported tensor.item() call": "a tensor's value becomes a Python number",
    "tensor.item": "a tensor's value becomes a Python number",
    "data dependent operator": "the result of an operator depends on a tensor's values",
    "dynamic shape operator": "the size of a result depends on a tensor's values",
    "requires_grad_() intermediate leaked": "it returns a tensor on which it called "
    "`requires_grad_()`",
}
