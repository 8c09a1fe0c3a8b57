"""Constructs that Dynamo traces unsoundly, and how Shorthaul's graphs avoid them.

Owns changes of Dynamo's own classes, each for one construct: the graph breaks in front of it, a
guard is added, or a call that has no effect in later steps is made during capture. They act only
while a graph of Shorthaul's is captured; other compilers' graphs stay as they are. A version of
PyTorch without the place that a mend changes is named in a warning.
"""

from __future__ import annotations

import collections
import functools
import types
import typing
import warnings
from collections.abc import Callable

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslator
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    builder,
    builtin,
    functions,
    higher_order_ops,
    misc,
    nn_module,
    user_defined,
)
from torch._dynamo.variables import torch as torch_functions
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from . import _custom_functions, _dynamo_warnings, _numpy_scalars, _older_tracers, _recurrent
from ._errors import FallbackWarning
from ._pytorch_names import IDENTITY_MODULES, unimplemented
from ._pytorch_version import VERSION

#: Functions of ``random.Random`` whose results Dynamo would bake into the graph.
_BAKED = ("shuffle", "sample", "getstate", "setstate", "seed")
if VERSION < (2, 15):  # There a generator of the model's own draws the same number each time.
    _BAKED += ("random", "randint", "randrange", "uniform")


@functools.cache
def apply(is_ours: Callable[[object], bool]) -> None:
    """Makes every change once; ``is_ours`` tells whether a compiler of Dynamo's is Shorthaul's."""
    mends = (
        _break_at_baked_random_numbers,
        _break_at_values_that_are_not_put_back,
        _guard_inlined_functions,
        _trace_inner_gradients,
        _guard_identity,
        _log_once,
        _leave_breaks_to_warnings,
        _break_at_padding,
        _break_at_other_memory,
        _numpy_scalars.count_as_numbers,
        _trace_covariances,
        _trace_type_checks,
        _trace_masks_of_transformers,
    )
    if VERSION < (2, 14):
        mends += (*_older_tracers.mends(), _break_at_autograd_functions)
    else:
        mends += (_trace_counters, _break_at_nonlinear_functions)
    if VERSION >= (2, 13):  # Older tracers have wrong shapes of their states.
        mends += (_trace_recurrent_layers,)
    if VERSION < (2, 15):
        mends += (_break_at_drawn_random_numbers,)
    else:
        mends += (_dynamo_warnings.repeat_warnings,)
    for mend in mends:
        try:
            mend(is_ours)
        except (AttributeError, KeyError, TypeError) as error:
            say_cannot_apply(mend.__name__.lstrip("_"), str(error))


@functools.cache
def say_cannot_apply(what: str, why: str) -> None:
    """Warns, once for each change, that this PyTorch lacks the place that the change is for."""
    warnings.warn(
        f"Shorthaul cannot apply {what} to PyTorch {torch.__version__} ({why}): without it PyTorch "
        "may trace some Python code wrongly. Use a version that the guide names, and compare "
        "results with eager",
        FallbackWarning,
        stacklevel=2,
    )


def _is_capturing(is_ours, translator=None) -> bool:
    """Whether the graph that is being captured is Shorthaul's and may break."""
    translator = translator or InstructionTranslator.current_tx()
    return is_ours(translator.output.compiler_fn)


def _stop(what: str, why: str) -> None:
    unimplemented(what, f"Python runs it: {why}")


def _break_at_method(variable: type, name: str, is_ours, what: str, why: str) -> None:
    """The graph breaks in front of a call of ``name`` on what ``variable`` stands for."""

    def stop(tx):
        if _is_capturing(is_ours, tx) and not tx.one_graph:
            _stop(what, why)

    # In PyTorch 2.14 some classes have one function for all methods, in 2.15 each has a table.
    if "tp_methods" not in vars(variable):
        call_any = vars(variable)["call_method"]

        def call_method(self, tx, called, args, kwargs):
            if called == name:
                stop(tx)
            return call_any(self, tx, called, args, kwargs)

        variable.call_method = call_method
        return
    traced = variable.tp_methods[name]
    original = traced.handler

    def handler(self, tx, args, kwargs):
        stop(tx)
        return original(self, tx, args, kwargs)

    variable.tp_methods[name] = type(traced)(handler)


def _break_at_autograd_functions(is_ours) -> None:
    """Gradients that are ``None``, second derivatives and errors of such functions are eager's."""
    _break_at_method(
        misc.AutogradFunctionVariable,
        "apply",
        is_ours,
        "custom autograd.Function",
        "its backward pass is Python",
    )


#: Errors of the tracer's own code, which it has not foreseen.
_UNSPECIFIC = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


def _stop_at_function(why: str) -> None:
    unimplemented(f"custom autograd.Function: {why}", "Python runs it")


def _has_history(variable: VariableTracker) -> bool:
    return variable.is_tensor() and variable.requires_grad is True


def _break_at_nonlinear_functions(is_ours) -> None:
    """Breaks the graph at custom functions that do not become operators.

    PyTorch's own call of a traced function may be differentiated only once: its second derivative
    would be wrong.
    """
    variable = higher_order_ops.AutogradFunctionApplyVariable
    trace, trace_backward = variable.call_function, variable.trace_backward_graph
    rewire, apply = variable.rewire_bwd_graph_outputs, misc.AutogradFunctionVariable.call_apply
    around: list[None] = []
    n_nodes = 0

    def call_function(self, tx, args, kwargs):
        nonlocal n_nodes
        if not _is_capturing(is_ours, tx):
            return trace(self, tx, args, kwargs)
        code = getattr(self.bwd_fn, "__code__", None)
        if code is None or code.co_filename == torch.autograd.function.__file__:
            _stop_at_function("it is differentiable once (`once_differentiable`)")
        around.append(None)
        try:
            result = trace(self, tx, args, kwargs)
        except _UNSPECIFIC as error:
            _stop_at_function(f"PyTorch's tracer fails on it ({type(error).__name__})")
        finally:
            around.pop()
        nodes = reversed(tx.output.current_tracer.graph.nodes)
        node = next(node for node in nodes if _custom_functions.is_custom_function(node))
        n_nodes += 1
        if reason := _custom_functions.refusal(node, tx.output.nn_modules.__getitem__):
            _stop_at_function(reason)
        return result

    def call_apply(self, tx, args, kwargs):
        if _is_capturing(is_ours, tx):
            if around:
                _stop_at_function("it contains another custom function")
            if torch._C._are_functorch_transforms_active():
                _stop_at_function("it is inside a torch.func transform")
        before = n_nodes
        result = apply(self, tx, args, kwargs)
        if n_nodes == before and _is_capturing(is_ours, tx):
            # No operand needs a gradient: the tracer has entered `forward` with gradients on.
            found: list[bool] = []
            VariableTracker.visit(lambda one: found.append(_has_history(one)), result)
            if any(found):
                _stop_at_function("its result depends on a value that is not an operand")
        return result

    def trace_backward_graph(self, tx, context, *more):
        effects = tx.output.side_effects
        if _is_capturing(is_ours, tx) and effects.has_pending_mutation_of_attr(
            context, "materialize_grads"
        ):
            _stop_at_function("its backward pass may get `None`")
        return trace_backward(self, tx, context, *more)

    def rewire_outputs(self, operands, gradients, graph, outside, arguments):
        items = getattr(gradients, "items", [gradients])
        if _is_capturing(is_ours) and len(items) != len(arguments):
            _stop_at_function("its backward pass gives another number of gradients")
        return rewire(self, operands, gradients, graph, outside, arguments)

    variable.call_function = call_function
    variable.trace_backward_graph = trace_backward_graph
    variable.rewire_bwd_graph_outputs = rewire_outputs
    misc.AutogradFunctionVariable.call_apply = call_apply


def _break_at_baked_random_numbers(is_ours) -> None:
    for name in _BAKED:
        what = f"random.{name}"
        try:
            _break_at_method(misc.RandomVariable, name, is_ours, what, "a graph would repeat it")
        except KeyError:
            say_cannot_apply(f"a graph break at {what}", "its tracer has no such method")


def _break_at_drawn_random_numbers(is_ours) -> None:
    """PyTorch before 2.15 says that such a number is a float32, and passes a float64."""
    original = user_defined.call_random_fn

    def call_random_fn(tx, fn, args, kwargs):
        if _is_capturing(is_ours, tx):
            _stop("random number", "the graph would read it as another type")
        return original(tx, fn, args, kwargs)

    misc.call_random_fn = user_defined.call_random_fn = call_random_fn


def _break_at_values_that_are_not_put_back(is_ours) -> None:
    original = builder.VariableBuilder._wrap

    def wrap(self, value):
        if _is_capturing(is_ours):
            if isinstance(value, collections.deque) and value.maxlen is not None:
                _stop("deque with maxlen", "a graph would ignore its maxlen")
            if type(value) is types.GeneratorType:
                _stop("generator from outside", "its steps cannot be put back")
            if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
                _stop("dictionary with tensors as keys", "no guard sees its keys")
            if isinstance(value, torch.Tensor) and _is_view_of_sparse(value):
                _stop("values of a sparse tensor", "PyTorch's tracer fails on its views")
        return original(self, value)

    builder.VariableBuilder._wrap = wrap


def _is_view_of_sparse(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else None
    return base is not None and base.layout not in (torch.strided, torch.jagged)


def _guard_inlined_functions(is_ours) -> None:
    """A function or method that is replaced by another one is another graph."""
    if not hasattr(InliningInstructionTranslator, "build_inline_tracer"):
        _older_tracers.guard_inlined_functions(is_ours)
        return
    original = InliningInstructionTranslator.build_inline_tracer

    def build_inline_tracer(parent, func, *more, **kwargs):
        source = _older_tracers.source_of_function(func)
        if source is not None and _is_capturing(is_ours, parent):
            function = _function_of(getattr(func, "im_func", func))
            own = isinstance(function, types.FunctionType)
            if own and not (function.__module__ or "").startswith("torch"):
                install_guard(source.make_guard(GuardBuilder.CLOSURE_MATCH))
        return original(parent, func, *more, **kwargs)

    InliningInstructionTranslator.build_inline_tracer = staticmethod(build_inline_tracer)


def _function_of(inner) -> types.FunctionType | None:
    """The Python function behind a variable of Dynamo's, where it has one."""
    try:
        return inner.get_function() if hasattr(inner, "get_function") else None
    except NotImplementedError:  # functions that Dynamo itself runs, as of `contextlib`
        return None


def _guard_identity(is_ours) -> None:
    """What ``a is b`` decides holds for these two objects."""
    if not IDENTITY_MODULES:
        _older_tracers.guard_identity(is_ours)
        return
    original = IDENTITY_MODULES[0].vt_identity_compare

    def vt_identity_compare(left, right):
        result = original(left, right)
        both = (left, right)
        if result is not None and _is_capturing(is_ours):
            for side in both:
                is_object = isinstance(side, UserDefinedObjectVariable)
                is_object = is_object or type(side).__name__ == "ObjectVariable"
                if is_object and side.source is not None and not any(v.is_tensor() for v in both):
                    install_guard(side.source.make_guard(GuardBuilder.ID_MATCH))
        return result

    for module in IDENTITY_MODULES:
        module.vt_identity_compare = vt_identity_compare


def _log_once(is_ours) -> None:
    """Methods of loggers with a cache, as `warning_once` of transformers, are called right away.

    Their cache makes every later call with the same constants do nothing, so the graph leaves the
    call out, and the message appears once, as in eager.
    """
    original = misc.LoggingLoggerVariable.call_method

    def call_method(self, tx, name, args, kwargs):
        method = getattr(self.value, name, None)
        limits = getattr(getattr(method, "__func__", None), "cache_parameters", dict)()
        keeps_all = limits.get("maxsize", 0) is None
        values = (*args, *kwargs.values())
        if keeps_all and _is_capturing(is_ours, tx):
            if all(value.is_python_constant() for value in values):
                named = {key: value.as_python_constant() for key, value in kwargs.items()}
                if method(*(value.as_python_constant() for value in args), **named) is None:
                    return ConstantVariable.create(None)
        return original(self, tx, name, args, kwargs)

    misc.LoggingLoggerVariable.call_method = call_method


def _leave_breaks_to_warnings(is_ours) -> None:
    """No advice of Dynamo's about ``Tensor.item()``: Shorthaul's own warning names the line."""
    advise = TensorVariable._warn_capture_scalar_outputs

    def warn() -> None:
        if not _is_capturing(is_ours):
            advise()

    TensorVariable._warn_capture_scalar_outputs = staticmethod(warn)


def _trace_recurrent_layers(is_ours) -> None:
    """A recurrent layer is one node of the graph, where Dynamo would break the graph.

    Not within ``torch.autocast``: there the tracer would take its results for float32.
    """
    layers = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
    operators = [getattr(torch, name) for name in _recurrent.NAMES]
    wrap_any = builder.VariableBuilder._wrap
    call_torch = torch_functions.TorchInGraphFunctionVariable.call_function
    call_any = nn_module.UnspecializedNNModuleVariable.call_function

    def wrap(self, value):
        # The layer's own frame, after the break that `call_function` makes.
        is_own = torch.is_autocast_enabled("cpu") and isinstance(self.source, LocalSource)
        if isinstance(value, layers) and value.proj_size == 0 and not is_own:
            if _is_capturing(is_ours):
                with torch._dynamo.config.patch(allow_rnn=True):
                    return wrap_any(self, value)
        return wrap_any(self, value)

    def call_function(self, tx, args, kwargs):
        if isinstance(self.value, layers) and torch.is_autocast_enabled("cpu"):
            if _is_capturing(is_ours, tx):
                _stop("recurrent layer within torch.autocast", "it casts states and weights")
        return call_any(self, tx, args, kwargs)

    def call_operator(self, tx, args, kwargs):
        # A layer's `forward` that is called by its name, or within a region of its own.
        if self.value in operators and torch.is_autocast_enabled("cpu"):
            if _is_capturing(is_ours, tx):
                _stop("recurrent layer within torch.autocast", "it casts states and weights")
        return call_torch(self, tx, args, kwargs)

    builder.VariableBuilder._wrap = wrap
    nn_module.UnspecializedNNModuleVariable.call_function = call_function
    torch_functions.TorchInGraphFunctionVariable.call_function = call_operator


def _trace_inner_gradients(is_ours) -> None:
    """``torch.autograd.grad`` becomes a node of the graph; Dynamo would trace each call again."""
    call_any = torch_functions.TorchInGraphFunctionVariable.call_function
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        return

    def call_function(self, tx, args, kwargs):
        if self.value is torch.autograd.grad and _is_capturing(is_ours, tx):
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                return call_any(self, tx, args, kwargs)
        return call_any(self, tx, args, kwargs)

    torch_functions.TorchInGraphFunctionVariable.call_function = call_function


def _break_at_padding(is_ours) -> None:
    """In inference, ``nn.TransformerEncoder`` leaves padded positions out and gives zeros there.

    It does not where a tracer runs it, so the graph breaks where it asks.
    """
    forward = torch.nn.TransformerEncoder.forward.__code__
    call_any = torch_functions.TorchInGraphFunctionVariable.call_function

    def call_function(self, tx, args, kwargs):
        if self.value is torch.compiler.is_compiling and tx.f_code is forward:
            if _is_capturing(is_ours, tx) and _leaves_out_padding(tx.symbolic_locals):
                _stop("encoder with a padding mask in inference", "it leaves padded positions out")
        return call_any(self, tx, args, kwargs)

    torch_functions.TorchInGraphFunctionVariable.call_function = call_function


def _leaves_out_padding(local: dict[str, VariableTracker]) -> bool:
    """Whether an encoder that has a padding mask and is in inference would use nested tensors."""
    encoder = getattr(local["self"], "value", None)
    if encoder is None:  # PyTorch may have another variable for modules: breaking is always right.
        return True
    weights = encoder.layers[0].parameters()
    has_mask = isinstance(local["mask"].realize(), TensorVariable)
    trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return not (has_mask or trains or torch.is_autocast_enabled("cpu"))


def _break_at_other_memory(is_ours) -> None:
    """``x.data = y`` gives a tensor other memory: a graph that does this has no parts."""
    if hasattr(builtin, "SetAttrBuiltinVariable"):
        variable, name = builtin.SetAttrBuiltinVariable, "_call_setattr"
    else:  # Before PyTorch 2.15, one class traces all functions of Python.
        variable, name = builtin.BuiltinVariable, "call_setattr"
    original = vars(variable)[name]

    @functools.wraps(original)
    def call_setattr(self, tx, obj, name_var, val):
        if isinstance(obj, TensorVariable) and name_var.is_python_constant():
            is_data = name_var.as_python_constant() == "data"
            if is_data and _is_capturing(is_ours, tx) and not tx.one_graph:
                _stop("assignment to `.data`", "it gives a tensor other memory")
        return original(self, tx, obj, name_var, val)

    setattr(variable, name, call_setattr)


def _covariance(x, *, correction=1, fweights=None, aweights=None):
    """``torch.cov`` of more observations than ``correction``, without weights."""
    rows = x if x.dim() == 2 else x.view(1, -1)
    away = rows - (rows.sum(1) / rows.shape[1]).unsqueeze(1)
    return (torch.mm(away, away.t()) / (rows.shape[1] - correction)).squeeze()


def _correlation(x):
    """``torch.corrcoef``."""
    covariance = _covariance(x)
    if covariance.dim() == 0:
        # 1 or NaN, with the gradient 0 or NaN; that of a quotient may be off by a rounding.
        ratio = (covariance / covariance).detach()
        return ratio + (ratio - 1) * (covariance - covariance.detach())
    deviation = covariance.diag().sqrt()
    return (covariance / deviation.view(-1, 1) / deviation.view(1, -1)).clamp(-1, 1)


def _trace_covariances(is_ours) -> None:
    """``torch.cov`` and ``torch.corrcoef`` become their formulas.

    Their own code asks whether there are enough observations, by a tensor: the graph would break.
    Calls with weights and with too few observations, which give a warning, stay as they are.
    """
    formulas = {torch.cov: _covariance, torch.corrcoef: _correlation}
    methods = {operator.__name__: operator for operator in formulas}
    call_any = torch_functions.TorchInGraphFunctionVariable.call_function
    call_any_method = TensorVariable.call_method

    def formula_of(operator, tx, args, kwargs):
        """The variable of the formula that this call becomes; ``None`` where it stays."""
        if operator in formulas and _is_capturing(is_ours, tx):
            if _has_enough_observations(operator, args, kwargs):
                return VariableTracker.build(tx, formulas[operator])
        return None

    def call_function(self, tx, args, kwargs):
        formula = formula_of(self.value, tx, args, kwargs)
        if formula is None:
            return call_any(self, tx, args, kwargs)
        return tx.inline_user_function_return(formula, args, kwargs)

    def call_method(self, tx, name, args, kwargs):
        formula = formula_of(methods.get(name), tx, [self, *args], kwargs)
        if formula is None:
            return call_any_method(self, tx, name, args, kwargs)
        return tx.inline_user_function_return(formula, [self, *args], kwargs)

    torch_functions.TorchInGraphFunctionVariable.call_function = call_function
    TensorVariable.call_method = call_method


def _has_enough_observations(operator, args, kwargs) -> bool:
    """Whether a call has no weights, and more observations than it subtracts."""
    options = {"correction", "fweights", "aweights"} if operator is torch.cov else set()
    if len(args) != 1 or not set(kwargs) <= options:
        return False
    if not all(value.is_python_constant() for value in kwargs.values()):
        return False
    given = {name: value.as_python_constant() for name, value in kwargs.items()}
    x = args[0].realize()
    has_weights = any(given.get(name) is not None for name in ("fweights", "aweights"))
    if has_weights or type(x) is not TensorVariable:  # other classes may have a `cov` of their own
        return False
    x = x.as_proxy().node.meta["example_value"]
    enough = x.dim() in (1, 2) and x.shape[-1] > max(0, given.get("correction", 1))
    return bool(enough) and x.is_floating_point()


def _trace_type_checks(is_ours) -> None:
    """``torch.jit.isinstance`` of a plain class is ``isinstance``; Dynamo would break the graph."""
    call_any = functions.SkipFunctionVariable.call_function

    def call_function(self, tx, args, kwargs):
        if self.value is torch.jit.isinstance and _is_capturing(is_ours, tx):
            if len(args) == 2 and not kwargs and _is_plain_class(args[1]):
                return VariableTracker.build(tx, isinstance).call_function(tx, args, kwargs)
        return call_any(self, tx, args, kwargs)

    functions.SkipFunctionVariable.call_function = call_function


def _is_plain_class(variable: VariableTracker) -> bool:
    """Whether this is a class, but none whose items TorchScript wants to know the types of."""
    if not variable.is_python_constant():
        return False
    kind = variable.as_python_constant()
    is_class = isinstance(kind, type) and typing.get_origin(kind) is None
    return is_class and kind not in (list, dict, tuple)


def _trace_masks_of_transformers(is_ours) -> None:
    """``nn.Transformer`` does not ask whether a mask is causal: the graph would break.

    The answer is a hint, by which attention leaves the mask out; with the mask, results are equal.
    """
    detect = torch.nn.modules.transformer._detect_is_causal_mask
    call_any = functions.UserFunctionVariable.call_function

    def call_function(self, tx, args, kwargs):
        if getattr(self, "fn", None) is detect and _is_capturing(is_ours, tx):
            return tx.inline_user_function_return(VariableTracker.build(tx, _is_hint), args, kwargs)
        return call_any(self, tx, args, kwargs)

    functions.UserFunctionVariable.call_function = call_function


def _is_hint(mask, is_causal=None, size=None):
    """Whether the caller has said that the mask is causal."""
    return is_causal is True


#: Larger integers of modules are no counters, and may leave the range of 64 bits.
_LARGEST_COUNT = 1 << 40


def _trace_counters(is_ours) -> None:
    """An integer of a module that ``forward`` writes is a symbol once it has changed.

    Dynamo takes integers of modules for constants, which a counter of calls is not.
    """
    written: set[str] = set()
    initialize = InliningInstructionTranslator.__init__
    is_constant = builder.is_int_specialization_case

    def note(translator) -> None:
        if translator.f_code.co_name != "__init__":
            written.update(
                step.argval for step in translator.instructions if step.opname == "STORE_ATTR"
            )

    def initialize_and_note(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        if _is_capturing(is_ours, self):
            note(self)

    def is_specialized(value, source):
        if hasattr(source, "member") and _is_capturing(is_ours):
            note(InstructionTranslator.current_tx())
            is_counter = source.member in written and abs(value) < _LARGEST_COUNT
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=is_counter):
                return is_constant(value, source)
        return is_constant(value, source)

    InliningInstructionTranslator.__init__ = initialize_and_note
    builder.is_int_specialization_case = is_specialized


__all__ = ["apply"]
