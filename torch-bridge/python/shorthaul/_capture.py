"""Captures a function of tensors, for one set of example inputs, as a functional graph.

Owns the way from ``torch.export`` to a JSON document that the importer reads, and the
document's schema. Never touches values: parameters stay where they are, and constants that
the graph closes over travel beside the document as raw bytes.

The document, version 1::

    {
      "version": 1,
      "symbols":  [{"name": "s0", "hint": 8}],
      "inputs":   [{"name", "kind": "parameter" | "buffer" | "constant" | "user",
                    "target": str | null,     # state_dict key, constant name; null for users
                    "constant": int | null,   # index into the constants given beside it
                    "shape", "dtype"}],
      "nodes":    [{"name", "target", "args": {schema name: Arg}, "outputs": [Value | null],
                    "draw": int | null,  # tells its random numbers from others
                    "origin": {"module", "kind", "source"}}],
      "outputs":  [{"kind": "user" | "buffer" | "user_input", "target": str | null,
                    "value": str}]
    }

``Value`` is ``{"name", "shape", "dtype"}``; a dimension is an integer or a symbolic size.
``Arg`` is null, a bool, an integer, a float, a string, a list of ``Arg``, or one of
``{"ref": value}``, ``{"sym": Size}``, ``{"dtype": name}``, ``{"float": "inf" | "-inf" | "nan"}``,
``{"device": str}``, ``{"memory_format": str}``, ``{"layout": str}``.
``Size`` is an integer, a symbol's name, or ``[op, Size, ...]`` with op one of ``add``, ``mul``,
``pow``, ``floordiv``, ``mod``, ``max``, ``min``. Arguments are given by their schema name, with
defaults filled in, so a reader needs no knowledge of PyTorch's calling conventions.

The graph is functional: a module that writes its buffers has the new values among its outputs.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ._bounds import Bound, DivisorBound, UnitBound, bounds_of
from ._draws import draw_of
from ._errors import CaptureError, Refused
from ._functional_graph import CHECKS, functional_graph, user_placeholders
from ._functionalize import Functional, FunctionalNode, Ref
from ._gradient_modes import stops_gradient
from ._origins import OF_GRADIENT, module_path, source_node, source_of
from ._pytorch_names import hints_of
from ._sizes import expression

#: Operators that give statistics behind their first result; eager has no gradient of these.
_WITH_STATISTICS = frozenset(
    {
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
        "native_batch_norm",
        "native_group_norm",
        "native_layer_norm",
    }
)

#: Operators whose operands eager refuses to promote; export does not check.
_UNIFORM = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
    }
)


#: Losses whose targets may be class labels; export does not check their types.
_CLASS_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward"})


@dataclass(frozen=True)
class InputSpec:
    """One tensor that the program reads: where it comes from at a call."""

    kind: str  # parameter, buffer, constant, user
    name: str
    target: str | None  # state_dict key of a parameter or buffer
    user_idx: int | None  # position among the flattened user inputs
    constant: torch.Tensor | None = None


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that the program writes, and what becomes of it."""

    kind: str  # user, buffer, user_input, check
    target: str | None  # state_dict key of a buffer
    user_idx: int | None  # position among the flattened user inputs (user_input only)
    #: What a value that the graph computes must satisfy (check only).
    bound: Bound | DivisorBound | None = None
    #: The node of Dynamo's that writes the input last (user_input only).
    writer: str = ""

    def check(self, value: torch.Tensor) -> None:
        """Raises what eager would have raised for this value."""
        self.bound.check(value)


@dataclass
class Captured:
    """A captured graph, and what is needed to call a program made from it."""

    document: dict[str, Any]
    constants: list[bytes]
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    #: What the call returns: per flattened position ``("output", i)`` (the i-th program output),
    #: ``("input", i)`` (the i-th program input, returned as it is), ``("value", constant)`` or
    #: ``("empty", (shape, dtype))`` (a tensor without elements, which no kernel makes).
    returns: list[tuple[str, Any]]
    #: What operators demand of inputs.
    bounds: list[Bound | DivisorBound | UnitBound]
    #: How eager's result lies in memory, for each of ``returns`` that is not contiguous there.
    strides: list[tuple[int, ...] | None] = field(default_factory=list)
    #: The node of Dynamo's behind each node of the document, where they are known.
    sources: dict[str, str] = field(default_factory=dict)
    #: Nodes of the document that are parts of PyTorch's backward operators.
    of_gradients: set[str] = field(default_factory=set)
    out_spec: pytree.TreeSpec = field(repr=False, default=None)
    #: Seconds that PyTorch took to export the module.
    export_seconds: float = 0.0
    #: The trace with symbolic sizes from which this was made, for one set of sizes.
    symbolic: Any = None
    #: Gives values of the document's symbols that may come later.
    expected: Callable[[], list[dict[str, int]]] = list

    @property
    def sizes(self) -> dict[str, int]:
        """The values of the document's symbols."""
        return {symbol["name"]: symbol["hint"] for symbol in self.document["symbols"]}

    @property
    def json(self) -> str:
        """The document as text, the same bytes for the same graph."""
        return json.dumps(self.document, separators=(",", ":"))


def capture(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    supported: frozenset[str] | None = None,
    dynamic_shapes: Any = None,
    origins: dict[str, fx.Node] | None = None,
    input_names: Sequence[str] = (),
    traced: list[torch.export.ExportedProgram] | None = None,
) -> Captured:
    """Captures ``module(*args, **kwargs)`` in the module's present train/eval mode.

    ``origins`` are nodes of Dynamo's by the name that ``_SOURCE`` in a traced node's metadata
    gives; they know the user's modules and lines. ``input_names`` are what messages call inputs.
    ``supported`` names the operators that the importer knows (``aten.conv2d.default``): a graph
    made of them alone is taken as exported; otherwise PyTorch's decompositions are applied to
    the rest. ``None`` keeps every operator. ``traced`` receives PyTorch's graphs.
    Raises ``CaptureError``.
    """
    exported, functional, looks, export_seconds = functional_graph(
        module,
        args,
        kwargs or {},
        supported=supported,
        dynamic_shapes=dynamic_shapes,
        origins=origins or {},
        traced=traced,
    )
    if functional is None:
        raise CaptureError(
            "`forward` uses a sub-graph (torch.cond or a loop operator), or writes in place "
            "through a view, which Shorthaul cannot compile; move that part out of the module."
        )
    captured = _Writer(exported, functional, looks, origins or {}, input_names).write()
    captured.export_seconds = export_seconds
    return captured


class _Writer:
    """Writes one exported program as a document."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        functional: Functional,
        looks: list[Any],
        origins: dict[str, fx.Node],
        input_names: Sequence[str],
    ):
        #: The results as the caller's own operators gave them.
        self.looks = looks
        self.origins = origins
        self.input_names = input_names
        self.sources: dict[str, str] = {}
        self.of_gradients: set[str] = set()
        self.strides: list[tuple[int, ...] | None] = []
        self.exported = exported
        self.functional = functional
        self.constants: list[bytes] = []
        self.inputs: list[InputSpec] = []
        self.symbols: dict[str, int] = {}
        self.n_users = 0
        self.value_names: dict[Ref, str] = {}
        #: Values that operators read, as opposed to those that the graph only returns.
        self.read = {
            leaf
            for node in functional.nodes
            for leaf in pytree.tree_leaves(node.args)
            if isinstance(leaf, Ref)
        }

    def write(self) -> Captured:
        signature = self.exported.graph_signature
        placeholders = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        input_docs = [
            self._input(spec, node)
            for spec, node in zip(signature.input_specs, placeholders, strict=True)
        ]
        input_docs = [doc for doc in input_docs if doc is not None]
        nodes = [doc for node in self.functional.nodes for doc in self._nodes(node)]
        self.bounds, computed = bounds_of(
            self.functional.nodes, self._place_of, self._given_names()
        )
        outputs, output_docs, returns = self._outputs(computed)
        document = {
            "version": 1,
            "symbols": [
                {"name": name, "hint": hint} for name, hint in sorted(self.symbols.items())
            ],
            "inputs": input_docs,
            "nodes": nodes,
            "outputs": output_docs,
        }
        return Captured(
            document,
            self.constants,
            self.inputs,
            outputs,
            returns,
            self.bounds,
            self.strides,
            self.sources,
            self.of_gradients,
            self.exported.call_spec.out_spec,
        )

    def _input(self, spec, node: fx.Node) -> dict | None:
        value = node.meta.get("val")
        user_idx = None
        if spec.kind == InputKind.USER_INPUT:
            user_idx = self.n_users
            self.n_users += 1
        if not isinstance(value, torch.Tensor):
            return None  # a number or None: its value is part of the key of the program
        kind = {
            InputKind.PARAMETER: "parameter",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
            InputKind.USER_INPUT: "user",
        }.get(spec.kind)
        if kind is None:
            raise CaptureError(
                f"input `{node.name}` of kind {spec.kind.name} cannot be compiled; pass it as a "
                f"tensor"
            )
        constant = None
        if kind == "constant":
            constant = self.exported.constants[spec.target].detach().contiguous()
        self.inputs.append(InputSpec(kind, node.name, spec.target, user_idx, constant))
        self.value_names[Ref(node)] = node.name
        index = None
        if constant is not None:
            index = len(self.constants)
            self.constants.append(_bytes_of(constant.cpu()))
        return {
            "name": node.name,
            "kind": kind,
            "target": spec.target if kind != "user" else None,
            "constant": index,
            **self._meta(value),
        }

    def _nodes(self, functional: FunctionalNode) -> list[dict]:
        """The operator and, if it ran without gradients, nodes after it that stop them."""
        if functional.target in CHECKS or not functional.is_tensor_op:
            return []
        if len(functional.outputs) == 1 and _is_empty(functional.outputs[0]):
            if all(user.op == "output" for user in functional.node.users):
                return []  # The call makes it.
        node = functional.node
        self.sources[node.name] = source_node(node)
        if (node.meta.get("custom") or {}).get(OF_GRADIENT):
            self.of_gradients.add(node.name)
        self._check_dtypes(functional)
        outputs = []
        for i, value in enumerate(functional.outputs):
            if not isinstance(value, torch.Tensor):
                outputs.append(None)
                continue
            name = node.name if len(functional.outputs) == 1 else f"{node.name}.{i}"
            self.value_names[Ref(node, i)] = name
            outputs.append({"name": name, **self._meta(value)})
        origin = self._origin(node)
        stops = []
        is_norm = functional.target.split(".")[1] in _WITH_STATISTICS
        for i, output in enumerate(outputs):
            is_statistic = is_norm and i > 0 and Ref(node, i) in self.read
            if output is not None and (is_statistic or stops_gradient(node)):
                stopped = dict(output)
                output["name"] += ".live"
                stops.append(
                    {
                        "name": stopped["name"],
                        "target": "aten.detach.default",
                        "args": {"self": {"ref": output["name"]}},
                        "outputs": [stopped],
                        "origin": origin,
                    }
                )
        doc = {
            "name": node.name,
            "target": functional.target,
            "draw": draw_of(node, functional.target),
            "args": self._args(functional),
            "outputs": outputs,
            "origin": origin,
        }
        return [doc, *stops]

    def _args(self, functional: FunctionalNode) -> dict[str, Any]:
        try:
            return {name: self._arg(value) for name, value in functional.args.items()}
        except CaptureError as error:
            raise Refused.of_node(source_node(functional.node), error) from error

    def _check_dtypes(self, functional: FunctionalNode) -> None:
        target = functional.args.get("target")
        if functional.target.split(".")[1] in _CLASS_LOSSES and isinstance(target, Ref):
            dtype = target.value.dtype
            if not (dtype in (torch.int64, torch.uint8) or dtype.is_floating_point):
                error = CaptureError(f"{functional.target} accepts no targets of type {dtype}")
                raise Refused.of_node(source_node(functional.node), error)
        if functional.target.split(".")[1] not in _UNIFORM:
            return
        refs = [ref for ref in functional.args.values() if isinstance(ref, Ref)]
        tensors = [ref.value for ref in refs if isinstance(ref.value, torch.Tensor)]
        dtypes = [_dtype_name(tensor.dtype) for tensor in tensors]
        if len(set(dtypes)) > 1:
            origin = self._origin(functional.node)
            error = CaptureError(
                f"{functional.target} in `{origin['module']}` at {origin['source']} has "
                f"operands of different dtypes ({', '.join(dtypes)}); convert the input to the "
                f"parameters' dtype."
            )
            raise Refused.of_node(source_node(functional.node), error)

    def _outputs(self, computed: list[tuple[Ref, Bound | DivisorBound]]):
        specs, docs, returns = [], [], []
        seen: dict[str, int] = {}
        output = next(node for node in self.exported.graph.nodes if node.op == "output")
        inputs = {spec.name: i for i, spec in enumerate(self.inputs)}

        def emit(kind, target, user_idx, name, **more):
            specs.append(OutputSpec(kind, target, user_idx, **more))
            known = "user" if kind == "check" else kind
            docs.append({"kind": known, "target": target, "value": name})
            return len(specs) - 1

        looks = iter(self.looks)
        users = {node.name: i for i, node in enumerate(user_placeholders(self.exported))}
        for kind, target, node in self._mutations(output):
            if kind == "buffer":
                emit("buffer", target, None, self._name_of(node))
            else:
                last = node.node if isinstance(node, Ref) else node
                user_idx, name = users[target], self._name_of(node)
                emit("user_input", target, user_idx, name, writer=source_node(last))
        for spec, arg in zip(
            self.exported.graph_signature.output_specs, output.args[0], strict=True
        ):
            if spec.kind != OutputKind.USER_OUTPUT:
                continue
            look = next(looks)
            if not isinstance(arg, fx.Node) or not isinstance(arg.meta.get("val"), torch.Tensor):
                returns.append(("value", self._scalar(arg)))
                self.strides.append(None)
                continue
            value = arg.meta["val"]
            if _is_empty(value):
                returns.append(("empty", (tuple(value.shape), value.dtype)))
                self.strides.append(None)
                continue
            stride = tuple(map(expression, look.stride()))
            self.strides.append(None if look.is_contiguous() else stride)
            name = self._name_of(arg)
            if name in inputs:
                returns.append(("input", inputs[name]))
            else:
                if name not in seen:
                    seen[name] = emit("user", None, None, name)
                returns.append(("output", seen[name]))
        for ref, bound in computed:
            emit("check", None, None, self.value_names[ref], bound=bound)
        return specs, docs, returns

    def _given_names(self) -> dict[str, str]:
        names = [node.name for node in user_placeholders(self.exported)]
        return dict(zip(names, self.input_names, strict=False))

    def _place_of(self, node: fx.Node) -> str:
        origin = self._origin(node)
        module = f" in `{origin['module']}`" if origin["module"] else ""
        return module + (f" ({origin['source']})" if origin["source"] else "")

    def _mutations(self, output: fx.Node):
        """Every input that the graph writes, with the node that holds its last value."""
        for spec, arg in zip(
            self.exported.graph_signature.output_specs, output.args[0], strict=True
        ):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                yield "buffer", spec.target, arg
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                yield "user_input", spec.target, arg
        by_name = {spec.name: spec for spec in self.inputs}
        for placeholder, ref in self.functional.mutated.items():
            spec = by_name[placeholder.name]
            if spec.kind == "buffer":
                yield "buffer", spec.target, ref
            elif spec.kind == "user":
                yield "user_input", placeholder.name, ref
            else:
                raise CaptureError(
                    f"`forward` writes {spec.kind} `{spec.target}` in place; only buffers and "
                    f"inputs may be written."
                )

    def _scalar(self, arg):
        if isinstance(arg, fx.Node):
            return expression(arg.meta.get("val"))
        return arg

    def _name_of(self, ref: fx.Node | Ref) -> str:
        return self.value_names[self.functional.resolve(ref) if isinstance(ref, fx.Node) else ref]

    def _arg(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._ref_arg(value)
        if isinstance(value, (list, tuple)):
            return [self._arg(item) for item in value]
        if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return {"sym": self._size(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": _dtype_name(value)}
        for kind in ("device", "memory_format", "layout"):
            if isinstance(value, getattr(torch, kind)):
                return {kind: str(value).removeprefix("torch.")}
        if isinstance(value, torch.SymBool):
            raise CaptureError("a condition depends on a symbolic size")
        if isinstance(value, complex):
            raise CaptureError("complex numbers are not supported")
        return {"other": str(value)}

    def _ref_arg(self, ref: Ref) -> Any:
        if ref in self.value_names:
            return {"ref": self.value_names[ref]}
        value = ref.node.meta["val"]
        if isinstance(value, (list, tuple)):  # a list of tensors, as from split
            return [{"ref": self.value_names[Ref(ref.node, k)]} for k in range(len(value))]
        return self._arg(value)

    def _meta(self, value: torch.Tensor) -> dict:
        return {
            "shape": [self._size(size) for size in value.shape],
            "dtype": _dtype_name(value.dtype),
        }

    def _size(self, size: int | torch.SymInt) -> Any:
        if isinstance(size, int):
            return size
        return self._expression(size.node.expr, size)

    def _expression(self, expr, size) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            hint = hints_of(size.node.shape_env).get(expr)
            self.symbols[expr.name] = int(hint) if hint is not None else 0
            return expr.name
        ops = {
            "Add": "add",
            "Mul": "mul",
            "Pow": "pow",
            "FloorDiv": "floordiv",
            "CleanDiv": "floordiv",
            "Mod": "mod",
            "PythonMod": "mod",
            "Max": "max",
            "Min": "min",
        }
        op = ops.get(type(expr).__name__)
        if op is None:
            raise CaptureError(f"Shorthaul cannot compute the size `{expr}`")
        return [op, *(self._expression(arg, size) for arg in expr.args)]

    def _origin(self, node: fx.Node) -> dict:
        node = self.origins.get(source_node(node), node)
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        module, kind = stack[-1] if stack else ("", "")
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        return {
            "module": module_path(module),
            "kind": kind.rsplit(".", 1)[-1],
            "source": source_of(node.meta.get("stack_trace")),
        }


def _is_empty(value: Any) -> bool:
    """Whether a value is a tensor of known sizes without elements."""
    if not isinstance(value, torch.Tensor) or any(type(n) is not int for n in value.shape):
        return False
    return 0 in value.shape


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The numbers of a contiguous tensor on the CPU as they lie in memory, without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
