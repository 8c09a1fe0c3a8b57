"""How a case of unusual values is written down: `edge` for one node, `Edge` for several."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

INF, NAN = float("inf"), float("nan")


def f32(*values) -> np.ndarray:
    """A vector of single precision."""
    return np.array(values, np.float32)


def i64(*values) -> np.ndarray:
    """A vector of 64-bit integers."""
    return np.array(values, np.int64)


def ramp(*shape: int) -> np.ndarray:
    """Different numbers of both signs, single precision."""
    n = int(np.prod(shape))
    return ((np.arange(n) * 7 % 11 - 5) / 4).astype(np.float32).reshape(shape)


@dataclass(frozen=True)
class Edge:
    """A small model: `inputs` are arrays by name, those in `known` are constants of the file."""

    name: str
    nodes: list[onnx.NodeProto]
    inputs: dict[str, np.ndarray]
    outputs: list[str]
    known: tuple[str, ...] = ()
    opset: int = 18
    by_reference: bool = False


def edge(name: str, op: str, *inputs, known=(), opset=18, outputs=1, by=None, domain="", **attrs):
    """A node; an input that is `None` is absent. `known` are positions of constants."""
    arrays = {f"x{n}": np.asarray(a) for n, a in enumerate(inputs) if a is not None}
    reads = [f"x{n}" if a is not None else "" for n, a in enumerate(inputs)]
    writes = [f"y{n}" for n in range(outputs)]
    node = helper.make_node(op, reads, writes, domain=domain, **attrs)
    constants = tuple(f"x{n}" for n in known)
    title = f"{op}: {name}"
    return Edge(title, [node], arrays, writes, constants, opset, by == "reference")
