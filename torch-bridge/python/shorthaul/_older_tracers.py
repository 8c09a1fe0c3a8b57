"""Differences of the tracers of older versions of PyTorch, changed where Shorthaul needs it.

Owns changes of Dynamo's own classes that make PyTorch before 2.14 behave as newer versions do. Each
is made only where the version lacks what a newer one has, and acts only on graphs of Shorthaul's.
``_dynamo_mends`` holds the changes that all versions need.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable

import torch
from torch import fx
from torch._dynamo import config, eval_frame
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, TypeSource
from torch._dynamo.symbolic_convert import (
    InliningInstructionTranslator,
    InstructionTranslator,
    InstructionTranslatorBase,
)
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing, get_fake_value
from torch._dynamo.variables import dicts, functions, lazy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import (
    UserDefinedClassVariable,
    UserDefinedObjectVariable,
)
from torch._guards import Source

from ._draws import is_idle_dropout
from ._nodes import storage_of
from ._pytorch_names import REPLACED, WRAPS_ERRORS, PassingError, unimplemented
from ._pytorch_version import VERSION

IsOurs = Callable[[object], bool]


def call_backend_init(is_ours: IsOurs, init: Callable[[], None]) -> None:
    """Lets ``torch.compile`` call ``init`` before it traces anything, as newer versions do."""
    if hasattr(torch._TorchCompileWrapper, "_dynamo_backend_init"):
        return
    original = eval_frame.get_compiler_fn

    @functools.wraps(original)
    def get_compiler_fn(*args, **kwargs):
        found = original(*args, **kwargs)
        if is_ours(found):
            init()
        return found

    eval_frame.get_compiler_fn = get_compiler_fn


def let_errors_pass(is_ours: IsOurs) -> None:
    """before  ``BackendCompilerFailed`` around an error   after  the error, if it asks for it"""
    original = OutputGraph.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, PassingError):
                raise failure.inner_exception from failure.inner_exception.__cause__
            raise

    OutputGraph.call_user_compiler = call_user_compiler


def guard_inlined_functions(is_ours: IsOurs) -> None:
    """A function or method that is replaced by another one is another graph."""
    original = InliningInstructionTranslator.inline_call_

    def inline_call_(parent, func, args, kwargs):
        source = source_of_function(func)
        if source is not None and is_ours(parent.output.compiler_fn):
            _guard_code(func, source)
        return original(parent, func, args, kwargs)

    InliningInstructionTranslator.inline_call_ = staticmethod(inline_call_)


def source_of_function(func) -> Source | None:
    """Where a guard finds a function, or that of a method, of Dynamo's ``func``."""
    inner = getattr(func, "im_func", func)
    # In PyTorch 2.15 a method holds its function, in 2.9 to 2.14 the source of its function.
    source = getattr(func, "source_fn", None)
    if source is None:
        source = getattr(inner, "source", None)
        if source is None or not isinstance(inner, functions.UserMethodVariable):
            return source
        source = AttrSource(source, "__func__")
    owner = getattr(source, "base", None)
    is_method = getattr(source, "member", "") == "__func__"
    return owner if is_method and _is_function(owner, func) else source


def _is_function(source: Source | None, func) -> bool:
    """Whether a source gives the function itself, as a class and a property do."""
    owner, member = getattr(source, "base", None), getattr(source, "member", "")
    is_class = isinstance(owner, TypeSource) or getattr(owner, "member", "") == "__class__"
    is_classmethod = isinstance(getattr(func, "obj", None), UserDefinedClassVariable)
    return member == "fget" or (is_class and not is_classmethod)


def _guard_code(func, source) -> None:
    try:
        function = func.get_function()
    except NotImplementedError:  # functions that Dynamo itself runs
        return
    is_plain = isinstance(function, types.FunctionType)
    if not is_plain or (function.__module__ or "").startswith("torch"):
        return
    install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))


def guard_identity(is_ours: IsOurs) -> None:
    """What ``a is b`` decides holds for these two objects."""
    original = BuiltinVariable.call_function

    def call_function(self, tx, args, kwargs):
        result = original(self, tx, args, kwargs)
        if self.fn in (operator.is_, operator.is_not) and is_ours(tx.output.compiler_fn):
            for side in args:
                side = getattr(side, "realize", lambda side=side: side)()
                is_object = isinstance(side, UserDefinedObjectVariable)
                is_object = is_object or type(side).__name__ == "ObjectVariable"
                if is_object and side.source is not None:
                    install_guard(side.source.make_guard(GuardBuilder.ID_MATCH))
        return result

    BuiltinVariable.call_function = call_function


def follow_writes(is_ours: IsOurs) -> None:
    """``y[i] = x`` is run on Dynamo's tensors, so that it sees where gradients flow."""
    original = TensorVariable.method___setitem__
    original_flag = TensorVariable.method_attr_requires_grad

    def method___setitem__(self, *args):
        tx = InstructionTranslator.current_tx()
        result = original(self, *args)
        if is_ours(tx.output.compiler_fn):
            node = next(iter(reversed(tx.output.graph.nodes)))
            with _disable_saved_tensors_hooks_during_tracing():
                get_fake_value(node, tx)
        return result

    def method_attr_requires_grad(self, tx):
        if is_ours(tx.output.compiler_fn):
            self.requires_grad = self.as_proxy().node.meta["example_value"].requires_grad
        return original_flag(self, tx)

    TensorVariable.method___setitem__ = method___setitem__
    TensorVariable.method_attr_requires_grad = method_attr_requires_grad


def check_tensors_each_time(is_ours: IsOurs) -> None:
    """Tensors are looked at in each call, even if the dictionary that holds them did not change.

    before  guards on a tensor are skipped where its dictionary has the same version as before
    after   Dynamo's guards are not told that the value is a tensor, so none of them is skipped
    """
    original = GuardBuilder.get_guard_manager_from_source

    def get_guard_manager_from_source(self, source):
        graph = self.check_fn_manager.output_graph
        if graph is None or "get" in vars(self) or not is_ours(graph.compiler_fn):
            return original(self, source)
        get = self.get

        def get_without_tensors(*args):
            value = get(*args)
            return _TENSOR if isinstance(value, torch.Tensor) else value

        self.get = get_without_tensors
        try:
            return original(self, source)
        finally:
            del self.get

    GuardBuilder.get_guard_manager_from_source = get_guard_manager_from_source
    for name in ("guard_on_dict_keys_and_order", "guard_on_dict_keys_and_ignore_order"):
        setattr(GuardBuilder, name, _without_tensors(getattr(GuardBuilder, name), is_ours))


def _without_tensors(original: Callable, is_ours: IsOurs) -> Callable:
    """A guard builder's method for dictionaries, which sees stand-ins in place of tensors."""

    @functools.wraps(original)
    def guard_keys(self, value, guard):
        graph = self.check_fn_manager.output_graph
        if graph is not None and is_ours(graph.compiler_fn):
            items = value.items()
            value = {k: _TENSOR if isinstance(v, torch.Tensor) else v for k, v in items}
        return original(self, value, guard)

    return guard_keys


#: Stands for a tensor where Dynamo asks what kind of object it guards.
_TENSOR = object()


def drop_idle_dropouts(graph: fx.Graph) -> None:
    """before  dropout(x, training=False)   after  x, as eager gives

    Some versions of Dynamo take the result for a copy.
    """
    for node in list(graph.nodes):
        if node.target not in (torch.nn.functional.dropout, torch.dropout) or not node.args:
            continue
        operand = node.args[0]
        if is_idle_dropout(node) and storage_of(node) != storage_of(operand):
            node.replace_all_uses_with(operand)
            graph.erase_node(node)


def break_at_default_dictionaries(is_ours: IsOurs) -> None:
    """A dictionary with defaults that a function returns stays one: Python runs the function."""
    original = dicts.DefaultDictVariable.reconstruct

    def reconstruct(self, codegen):
        if is_ours(codegen.tx.output.compiler_fn):
            unimplemented("defaultdict", "Python runs it: a graph would give a plain dictionary")
        return original(self, codegen)

    dicts.DefaultDictVariable.reconstruct = reconstruct


def break_at_setters(is_ours: IsOurs) -> None:
    """A write that a property or another descriptor handles is Python's.

    A graph would keep what the setter was given in place of what it made of it.
    """
    original = UserDefinedObjectVariable.method_setattr_standard

    def method_setattr_standard(self, tx, name, *more, **kwargs):
        if is_ours(tx.output.compiler_fn) and name.is_python_constant():
            owned = inspect.getattr_static(type(self.value), name.as_python_constant(), None)
            write = getattr(type(owned), "__set__", None)
            if isinstance(owned, property) or isinstance(write, types.FunctionType):
                unimplemented("setter of a property", "Python runs it")
        return original(self, tx, name, *more, **kwargs)

    UserDefinedObjectVariable.method_setattr_standard = method_setattr_standard


def guard_bound_methods(is_ours: IsOurs) -> None:
    """An attribute that holds another object's method is that method of that object."""
    for variable in (UserDefinedObjectVariable, UnspecializedNNModuleVariable):
        if "var_getattr" in vars(variable):
            _guard_methods_that(variable, is_ours)


def _guard_methods_that(variable: type, is_ours: IsOurs) -> None:
    original = variable.var_getattr

    def var_getattr(self, tx, name):
        found = getattr(self.value, "__dict__", {}).get(name)
        if isinstance(found, types.MethodType) and self.source is not None:
            if is_ours(tx.output.compiler_fn):
                for part in ("__func__", "__self__"):
                    source = AttrSource(AttrSource(self.source, name), part)
                    install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        return original(self, tx, name)

    variable.var_getattr = var_getattr


def format_symbolic_numbers(is_ours: IsOurs) -> None:
    """before  where a graph breaks, a number in place of its text   after  its text, formatted"""
    original = InstructionTranslatorBase._format_value

    def _format_value(self, spec, *flags):
        number = self.stack[-1]
        if not isinstance(number, SymNodeVariable) or not is_ours(self.output.compiler_fn):
            return original(self, spec, *flags)
        text = lazy.LazySymNodeFormatString(self.pop(), spec)
        # With a source, the number would be looked up there in place of its text.
        return self.push(lazy.LazyVariableTracker.create(text, source=None))

    InstructionTranslatorBase._format_value = _format_value


def mends() -> tuple[Callable[[IsOurs], None], ...]:
    """The mends that this version needs, unless ``_dynamo_mends`` has another form of them."""
    found: list[Callable[[IsOurs], None]] = []
    if WRAPS_ERRORS:
        found.append(let_errors_pass)
    if "get_fake_value" not in TensorVariable.method___setitem__.__code__.co_names:
        found.append(follow_writes)
    if not all(hasattr(config, name) for name in REPLACED):
        found.append(check_tensors_each_time)
    with_defaults = getattr(dicts, "DefaultDictVariable", None)
    if with_defaults is not None and "reconstruct" not in vars(with_defaults):
        found.append(break_at_default_dictionaries)
    if VERSION < (2, 13):
        found.append(break_at_setters)
    if VERSION < (2, 12):
        found.append(guard_bound_methods)
    if VERSION >= (2, 11):
        found.append(format_symbolic_numbers)
    return tuple(found)


__all__ = ["drop_idle_dropouts", "guard_identity", "guard_inlined_functions", "mends"]
