"""Runs a captured document through PyTorch's own operators.

Owns an independent reading of the document's schema, so that capture and wrapper are tested
apart from the compiler. Used by tests only: ``Program`` here stands where the native one stands.
"""

from __future__ import annotations

import ctypes
import json
from concurrent.futures import ThreadPoolExecutor

import torch

_thread = ThreadPoolExecutor(1)
_RANDOM = ("dropout", "bernoulli", "rand")


def evaluate(document: dict, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The document's outputs, in order; ``inputs`` by name, constants included."""
    values = dict(inputs)
    for node in document["nodes"]:
        namespace, packet, overload = node["target"].split(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        args = {name: _argument(arg, values) for name, arg in node["args"].items()}
        names = {argument.name for argument in operator._schema.arguments}
        result = operator(
            **{
                ("input" if "input" in names and name == "self" else name): arg
                for name, arg in args.items()
            }
        )
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        for spec, value in zip(node["outputs"], results, strict=True):
            if spec is not None:
                assert list(value.shape) == spec["shape"], (node["name"], value.shape, spec)
                assert str(value.dtype) == f"torch.{spec['dtype']}", (
                    node["name"],
                    value.dtype,
                    spec,
                )
                values[spec["name"]] = value
    return [values[output["value"]] for output in document["outputs"]]


def _argument(arg, values):
    if isinstance(arg, list):
        return [_argument(item, values) for item in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, value),) = arg.items()
    if kind == "ref":
        return values[value]
    if kind == "float":
        return float(value)
    if kind == "device":
        return torch.device(value)
    if kind in ("dtype", "memory_format", "layout"):
        return getattr(torch, value)
    raise AssertionError(f"unexpected argument {arg}")


def _at(pointer: int, shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that somebody else owns."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * n_bytes).from_address(pointer), dtype=dtype).view(
        shape
    )


class UnsupportedOperators(Exception):
    """As the native half raises it."""


class CompileFailure(Exception):
    """As the native half raises it."""


def supported_targets() -> list[str]:
    """Every operator: PyTorch has them all."""
    return _Everything()


class _Everything(list):
    def __iter__(self):
        for name in torch._C._dispatch_get_all_op_names():
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if name.startswith("aten::"):
                yield f"aten.{packet}.{overload or 'default'}"


class Program:
    """Stands in for the native program: evaluates forward, and again in backward."""

    def __init__(self, document, constants, requires_grad):
        self.document = document
        specs = document["inputs"]
        fed = [spec["name"] for spec in specs if spec["kind"] != "constant"]
        self.requires_grad = {fed[i] for i in requires_grad}
        self.constants = {
            spec["name"]: torch.frombuffer(
                bytearray(constants[spec["constant"]]), dtype=getattr(torch, spec["dtype"])
            ).view(spec["shape"])
            for spec in specs
            if spec["kind"] == "constant"
        }
        self.inputs = [
            (s["name"], s["shape"], s["dtype"]) for s in specs if s["kind"] != "constant"
        ]
        self.uses_seed = any(
            word in node["target"] for node in document["nodes"] for word in _RANDOM
        )
        if self.uses_seed:
            self.inputs.append(("seed", [], "int64"))
        values = {value["name"]: value for value in specs}
        values |= {v["name"]: v for node in document["nodes"] for v in node["outputs"] if v}
        self.outputs = [
            (o["value"], values[o["value"]]["shape"], values[o["value"]]["dtype"])
            for o in document["outputs"]
        ]
        self.saved_bytes = self.forward_scratch_bytes = self.backward_scratch_bytes = 0
        self.backward_reads = list(range(len(self.inputs)))
        self.backward_output_reads = []
        self.grad_inputs = [
            i for i, (name, *_) in enumerate(self.inputs) if name in self.requires_grad
        ]
        self.differentiable_outputs = [
            i
            for i, output in enumerate(document["outputs"])
            if output["kind"] == "user" and "float" in self.outputs[i][2]
        ]

    @staticmethod
    def compile(graph_json, constants, requires_grad, threads, progress):
        """As the native half."""
        return Program(json.loads(graph_json), constants, requires_grad)

    def _evaluate(self, pointers):
        values = dict(self.constants)
        for (name, shape, dtype), pointer in zip(self.inputs, pointers, strict=True):
            values[name] = _at(pointer, shape, getattr(torch, dtype))
            if name in self.requires_grad:
                values[name] = values[name].detach().requires_grad_()
        state = torch.get_rng_state()
        if self.uses_seed:
            torch.manual_seed(values["seed"].item())
        with torch.enable_grad():
            outputs = evaluate(self.document, values)
        torch.set_rng_state(state)
        return values, outputs

    def forward(self, *pointers):
        """As the native half; on a thread of its own, outside of the dispatcher's state."""
        return _thread.submit(self._forward, *pointers).result() or []

    def backward(self, *pointers):
        """As the native half."""
        return _thread.submit(self._backward, *pointers).result() or []

    def _forward(self, inputs, outputs, saved, scratch, timed, _stream, _calls):
        _, results = self._evaluate(inputs)
        for (_, shape, dtype), pointer, result in zip(self.outputs, outputs, results, strict=True):
            _at(pointer, shape, getattr(torch, dtype)).copy_(result.detach())

    def _backward(
        self, grad_outputs, reads, output_reads, saved, grads, scratch, timed, _stream, _calls
    ):
        values, results = self._evaluate(reads)
        differentiable = [results[i] for i in self.differentiable_outputs]
        given = [
            _at(pointer, r.shape, r.dtype)
            for pointer, r in zip(grad_outputs, differentiable, strict=True)
        ]
        pairs = [(r, g) for r, g in zip(differentiable, given, strict=True) if r.requires_grad]
        names = [self.inputs[i][0] for i in self.grad_inputs]
        computed = torch.autograd.grad(
            [r for r, _ in pairs],
            [values[n] for n in names],
            [g for _, g in pairs],
            allow_unused=True,
        )
        for pointer, name, grad in zip(grads, names, computed, strict=True):
            out = _at(pointer, values[name].shape, values[name].dtype)
            out.zero_() if grad is None else out.copy_(grad)
