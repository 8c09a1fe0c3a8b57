"""The compiler behind the package: the types of what ``torch-bridge/src`` gives to Python.

``tests/test_typing.py`` compares the names and arguments here with the module itself.
"""

import builtins
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias, final

__all__ = [
    "BackwardPart",
    "BudgetFailure",
    "CompileFailure",
    "CpuStep",
    "InternalFailure",
    "Kernels",
    "OnnxFailure",
    "PooledStep",
    "Program",
    "RecipeFailure",
    "Templates",
    "ToolchainFailure",
    "Traced",
    "UnsupportedOperators",
    "assumed_machine",
    "cache_clear",
    "cache_info",
    "cublaslt_version",
    "cuda_devices",
    "cuda_table",
    "cudnn_version",
    "machine_key",
    "nvrtc_version",
    "optimize",
    "plan_program",
    "recipe_parsed",
    "recipe_text",
    "rewrites",
    "search_program",
    "share_threads",
    "supported_targets",
    "time_kernels",
    "training_graph",
]

#: A path as the compiler takes it.
_Path: TypeAlias = str | os.PathLike[str]
#: Called with the sources that are ready, all sources, and the name of one.
_Progress: TypeAlias = Callable[[int, int, str], object]
#: Name, shape and dtype (PyTorch's name) of a tensor at the boundary.
_Spec: TypeAlias = tuple[str, list[int], str]
#: Launches with the seconds they took.
_Times: TypeAlias = list[tuple[str, float]]
#: Name, origin and text of a kernel.
_KernelText: TypeAlias = tuple[str, str, str]
#: Map, number of maps, product, rest, kind and rank of what computes it, origin.
_Product: TypeAlias = tuple[int, int, str, str, str, int | None, str]
#: Role, block, its number or bytes from the block's start, dtype, first element, sizes, strides.
_Operand: TypeAlias = tuple[str, str, int, str, int, list[int], list[int]]
#: Kind, whether it is a gradient, whether causal, scale, operands.
_Call: TypeAlias = tuple[str, bool, bool, float, list[_Operand]]
#: Product, rest, kind, reason, origin.
_Attention: TypeAlias = tuple[str | None, str | None, str, str, str]
#: Kind, rank and bytes of workspace of what computes every product.
_Every: TypeAlias = tuple[str, int, int]
#: Number, name, compute capability, memory in bytes, architecture of kernels.
_Device: TypeAlias = tuple[int, str, tuple[int, int], int, str | None]

class CompileFailure(Exception):
    """No kernels could be made; the message says why."""

class InternalFailure(CompileFailure):
    """A defect of Shorthaul; the message asks for a report."""

class ToolchainFailure(CompileFailure):
    """The machine cannot compile any kernel: no compiler, no cache folder, a bad table."""

class UnsupportedOperators(Exception):
    """Operators without an implementation: ``args[1]`` lists ``(target, places)``."""

class BudgetFailure(Exception):
    """A memory budget cannot be kept; the message says what can be."""

class RecipeFailure(Exception):
    """The text is not a recipe; the message says why."""

class OnnxFailure(Exception):
    """An ONNX file cannot be read or made; the message says why."""

@final
class BackwardPart:
    @property
    def touched(self) -> list[int]: ...
    @property
    def n_launches(self) -> tuple[int, int]: ...

@final
class Templates:
    """What the sizes of one graph compiled, for the sizes after them."""

    def __new__(cls) -> Templates: ...
    @property
    def has_foreseen(self) -> bool: ...

@final
class Traced:
    """An imported graph whose sizes are symbols, for programs of several sizes."""

    def __new__(cls, graph_json: str, constants: Sequence[bytes]) -> Traced: ...

@final
class Program:
    """Kernels for the forward and, where gradients are wanted, the backward pass."""

    @staticmethod
    def compile(
        graph_json: str,
        constants: Sequence[bytes],
        requires_grad: Sequence[int],
        threads: int,
        progress: _Progress | None = None,
        recipe: str | None = None,
        budget: float | None = None,
        templates: Templates | None = None,
        machine: str | None = None,
    ) -> Program: ...
    @staticmethod
    def compile_for(
        traced: Traced,
        sizes: dict[str, int],
        expected: Sequence[dict[str, int]],
        requires_grad: Sequence[int],
        threads: int,
        progress: _Progress | None = None,
        recipe: str | None = None,
        budget: float | None = None,
        templates: Templates | None = None,
        machine: str | None = None,
    ) -> Program: ...
    @staticmethod
    def compile_cuda(
        graph_json: str,
        constants: Sequence[bytes],
        requires_grad: Sequence[int],
        device: int | None,
        nvrtc: Sequence[_Path],
        progress: _Progress | None = None,
        table: _Path | None = None,
        every: _Every | None = None,
        recipe: str | None = None,
        budget: float | None = None,
    ) -> Program: ...
    @property
    def inputs(self) -> list[_Spec]: ...
    @property
    def outputs(self) -> list[_Spec]: ...
    @property
    def uses_seed(self) -> bool: ...
    @property
    def differentiable_outputs(self) -> list[int]: ...
    @property
    def grad_inputs(self) -> list[int]: ...
    @property
    def backward_reads(self) -> list[int]: ...
    @property
    def backward_output_reads(self) -> list[int]: ...
    @property
    def threads(self) -> int: ...
    @property
    def predicted_us(self) -> float: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def forward_scratch_bytes(self) -> int: ...
    @property
    def backward_scratch_bytes(self) -> int: ...
    @property
    def notes(self) -> list[str]: ...
    def cuda_kernels(self) -> list[_KernelText]: ...
    def cuda_products(self) -> list[_Product]: ...
    def cuda_calls(self, backward: bool) -> list[_Call]: ...
    def cuda_attentions(self) -> list[_Attention]: ...
    def launch_kernels(self, backward: bool) -> list[int]: ...
    def use_threads(self, n: int) -> None: ...
    def forward(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        saved: int,
        scratch: int,
        timed: bool = False,
        stream: int = 0,
        operators: Callable[[int], object] | None = None,
    ) -> _Times: ...
    def part_of_backward(self, wanted: Sequence[int]) -> BackwardPart | None: ...
    def backward(
        self,
        grad_outputs: Sequence[int],
        reads: Sequence[int],
        output_reads: Sequence[int],
        saved: int,
        grads: Sequence[int],
        scratch: int,
        timed: bool = False,
        stream: int = 0,
        operators: Callable[[int], object] | None = None,
        part: BackwardPart | None = None,
    ) -> _Times: ...
    def decisions(self) -> str: ...
    def report(self) -> str: ...

class _Rule(Protocol):
    """An update rule, as ``shorthaul.optim`` has it."""

    @property
    def kind(self) -> str: ...
    @property
    def momentum(self) -> bool: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def decay(self) -> bool: ...
    @property
    def maximize(self) -> bool: ...

@final
class CpuStep:
    """A step of an optimizer over parameters of one type in the CPU's memory."""

    @staticmethod
    def compile(rule: _Rule, dtype: str, progress: _Progress | None = None) -> CpuStep: ...
    @property
    def constants(self) -> list[str]: ...
    def run(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        numbers: Sequence[float],
        threads: int,
    ) -> None: ...

@final
class PooledStep:
    """A step of an optimizer over parameters of one type and given sizes on a CUDA device."""

    @staticmethod
    def compile(
        rule: _Rule,
        dtype: str,
        sizes: Sequence[int],
        aligned: bool,
        device: int | None,
        nvrtc: Sequence[_Path],
        progress: _Progress | None = None,
    ) -> PooledStep: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def state(self) -> list[str]: ...
    @property
    def constants(self) -> list[str]: ...
    def run(self, addresses: Sequence[int], stream: int) -> None: ...
    def cuda_kernels(self) -> list[_KernelText]: ...

@final
class Kernels:
    """The kernels of a captured graph under a recipe."""

    def __new__(
        cls,
        graph_json: str,
        constants: Sequence[bytes],
        requires_grad: Sequence[int],
        threads: int,
        recipe: str | None = None,
        budget: float | None = None,
        machine: str | None = None,
        n_others: int = 0,
    ) -> Kernels: ...
    def rows(self) -> str: ...
    def key(self, kernel: int, blocking: str | None = None) -> str | None: ...

def time_kernels(
    items: Sequence[tuple[Kernels, int, str | None]], seconds: float
) -> list[list[float]]: ...
def supported_targets() -> list[str]: ...
def cache_info() -> tuple[str, int, int, int, bool]: ...
def cache_clear() -> tuple[int, int]: ...
def machine_key() -> str: ...
def cuda_devices() -> tuple[str, list[_Device]]: ...
def nvrtc_version(folders: Sequence[_Path]) -> tuple[str, Path]: ...
def cublaslt_version(folders: Sequence[_Path]) -> tuple[str, Path]: ...
def cudnn_version(folders: Sequence[_Path]) -> tuple[str, Path] | None: ...
def cuda_table(path: _Path) -> tuple[str, str, str, int, int]: ...
def plan_program(
    graph_json: str,
    constants: Sequence[bytes],
    requires_grad: Sequence[int],
    threads: int,
    recipe: str | None = None,
    budget: float | None = None,
    machine: str | None = None,
) -> str: ...
def assumed_machine() -> str: ...
def search_program(
    graph_json: str,
    constants: Sequence[bytes],
    requires_grad: Sequence[int],
    threads: int,
    recipe: str | None = None,
    budget: float | None = None,
    machine: str | None = None,
    plans: int | None = None,
) -> str: ...
def recipe_text(model: str, programs: str) -> str: ...
def recipe_parsed(text: str) -> str: ...

class _TrainingRequest(Protocol):
    """What ``shorthaul.onnx.grad`` asks for."""

    @property
    def path(self) -> str | None: ...
    @property
    def bytes(self) -> builtins.bytes | None: ...
    @property
    def out(self) -> str | None: ...
    @property
    def loss(self) -> str: ...
    @property
    def output(self) -> str | None: ...
    @property
    def optimizer(self) -> str | None: ...
    @property
    def optimizer_state(self) -> str: ...
    @property
    def gradients(self) -> bool: ...
    @property
    def wrt(self) -> list[str] | None: ...
    @property
    def mode(self) -> str: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def sizes(self) -> list[tuple[str, int]]: ...
    @property
    def verify(self) -> bool: ...

def training_graph(request: _TrainingRequest) -> tuple[bytes | None, list[str]]: ...

class _OptimizingRequest(Protocol):
    """What ``shorthaul.onnx.optimize`` asks for."""

    @property
    def path(self) -> str | None: ...
    @property
    def bytes(self) -> builtins.bytes | None: ...
    @property
    def out(self) -> str | None: ...
    @property
    def target(self) -> str: ...
    @property
    def verify(self) -> bool: ...
    @property
    def sizes(self) -> list[tuple[str, str]]: ...
    @property
    def shapes(self) -> list[tuple[str, list[int | None]]]: ...
    @property
    def inputs(self) -> builtins.bytes | None: ...
    @property
    def seeds(self) -> int: ...
    @property
    def rules(self) -> list[str] | None: ...
    @property
    def without(self) -> list[str]: ...
    @property
    def free_shape(self) -> list[tuple[str, list[str | None]]]: ...
    @property
    def rename(self) -> list[tuple[str, str]]: ...
    @property
    def half(self) -> str | None: ...
    @property
    def keep_f32(self) -> list[str]: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def time_limit(self) -> float | None: ...
    @property
    def from_(self) -> list[str]: ...
    @property
    def to(self) -> list[str]: ...
    @property
    def opset(self) -> int | None: ...
    @property
    def strip(self) -> bool: ...
    @property
    def infer_shapes(self) -> bool: ...
    @property
    def fold_limit(self) -> int: ...
    @property
    def max_growth(self) -> float | None: ...
    @property
    def ask_runtime(self) -> bool: ...
    @property
    def measure(self) -> bool: ...
    @property
    def python(self) -> str: ...

def optimize(request: _OptimizingRequest) -> tuple[bytes | None, str]: ...
def rewrites() -> list[tuple[str, str]]: ...
def share_threads(folders: Sequence[_Path]) -> bool: ...
