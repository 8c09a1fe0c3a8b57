"""ONNX files: better ones, and the training graph of a model.

Owns the Python face of what the ``shorthaul`` program does with ONNX files.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _native
from ._errors import ShorthaulError


class OnnxError(ShorthaulError):
    """An ONNX file cannot be read or made; the message says why and what to do."""


def grad(
    model: Any,
    *,
    loss: str,
    optimizer: str | None = None,
    gradients: bool = True,
    wrt: Sequence[str] | None = None,
    mode: str = "file",
    label_smoothing: float = 0.0,
    sizes: Mapping[str, int] | None = None,
    out: str | os.PathLike | None = None,
    verify: bool = True,
) -> bytes | None:
    """The training graph of an ONNX model: the bytes of another ONNX file, of standard operators.

    ``model`` is a path, the bytes of a file, or an ``onnx.ModelProto``; external data of the last
    two is looked for in the current folder. ``out``: where to write; the result then is ``None``.
    ``sizes``: values of dynamic dimensions by name. ``loss``: ``"cross-entropy"`` (adds an input
    ``labels``), ``"mse"`` (adds ``target``) or the name of an output of one element.
    ``optimizer``: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``; adds the inputs ``lr``,
    the state and, for Adam, ``step``. ``gradients=False``: with an optimizer, without the outputs
    ``NAME.grad``, which cost passes over memory. ``wrt``: what is differentiated, by name; every
    trainable initializer if not given. ``mode``: the form of BatchNormalization and Dropout:
    ``"file"`` (each node's own), ``"train"`` (statistics of the batch, values dropped) or
    ``"eval"``; PyTorch exports BatchNormalization in evaluation form even from a model in training
    mode.
    ``label_smoothing``: how much of each label cross-entropy spreads over all classes.

    Export from PyTorch with ``torch.onnx.export(…, dynamo=True, optimize=False)``: the exporter's
    own optimizer stores parameters that are equal at first as one, and folds batch normalization
    into convolutions.

    The file gives ``loss``, ``NAME.grad``, with BatchNormalization in training form ``NAME.next``
    of its running statistics, and, with an optimizer, ``NAME.next`` of parameters and its state;
    the state of parameters in half precision is in single precision. ``verify``: compute the loss
    again from the model's own outputs, and hold gradients against differences of the loss, in
    float64; where that cannot be done, a warning says why. Raises :class:`OnnxError`, and leaves
    ``out`` as it was.
    """
    path, data = _source(model)
    request = _GradRequest(
        path=path,
        bytes=data,
        out=None if out is None else os.fspath(out),
        loss=loss,
        optimizer=optimizer,
        gradients=gradients,
        wrt=None if wrt is None else list(wrt),
        mode=mode,
        label_smoothing=label_smoothing,
        sizes=list((sizes or {}).items()),
        verify=verify,
    )
    try:
        made, untried = _native.training_graph(request)
    except _native.OnnxFailure as error:
        raise OnnxError(str(error)) from None
    if untried is not None:
        warnings.warn(f"the training graph is not verified: {untried}", stacklevel=2)
    return made


@dataclass(frozen=True)
class Optimized:
    """A better ONNX file: ``model`` is its bytes, or ``None`` if it was written to ``path``.

    ``summary`` has what the program's ``--json`` has: ``fired``, ``dropped``, ``kept``, ``runs``,
    and under ``before`` and ``after`` the numbers of operators, multiply-adds and bytes.
    """

    model: bytes | None
    path: Path | None
    summary: dict[str, Any]

    def __str__(self) -> str:
        before, after = self.summary["before"], self.summary["after"]
        rows = ["operators", "multiply_adds", "bytes_moved", "peak_bytes", "file_bytes"]
        lines = [f"{row.replace('_', ' '):<14}{before[row]} → {after[row]}" for row in rows]
        if self.summary["runs"]:
            runs = len(self.summary["runs"])
            error = f"{before['worst_error']:.1e} → {after['worst_error']:.1e}"
            lines.append(f"{'worst error':<14}{error}, in {runs} runs")
        else:
            lines.append("not verified")
        if after["milliseconds"] is not None:
            times = f"{before['milliseconds']:.3g} → {after['milliseconds']:.3g} ms"
            lines.append(f"{'ONNX Runtime':<14}{times}")
        for dropped in self.summary["dropped"]:
            lines.append(f"dropped {dropped['rule']} at {dropped['node']}: {dropped['difference']}")
        if self.summary["kept"]:
            kept = ", ".join(f"{k['operator']} ×{k['n']}" for k in self.summary["kept"])
            lines.append(f"kept as they are: {kept}")
        return "\n".join(lines + self.summary["grows"])


def optimize(
    model: Any,
    *,
    out: str | os.PathLike | None = None,
    target: str = "standard",
    verify: bool = True,
    sizes: Mapping[str, int | str] | None = None,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    seeds: int = 2,
    without: Sequence[str] = (),
    fold_limit: int = 16 << 10,
    max_growth: float | None = None,
    oracle: str | None = None,
    measure: bool = False,
) -> Optimized:
    """A better ONNX file that was shown to give what ``model`` gives.

    ``model`` is a path, the bytes of a file, or an ``onnx.ModelProto``; external data of the last
    two is looked for in the current folder. ``out``: where to write; without it the result has the
    bytes. ``target``: ``"standard"``, or ``"ort-cpu"`` or
    ``"ort-cuda"`` for operators that only ONNX Runtime has. ``verify``: run both on ``seeds`` sets
    of made-up inputs, and with NaN and infinities, at ``sizes`` of dynamic dimensions by name
    (numbers, or sums such as ``{"total": "past+new"}``), or on ``inputs``, arrays by name.
    ``shapes``: sizes of inputs to fix in the file, ``None`` for one that stays as it is.
    ``without``: rules not to use. ``fold_limit``: bytes of constants
    that one folding may add. ``max_growth``: the factor of the original's beyond which the file,
    the peak memory or the bytes moved are an error. ``oracle="ort"``: ONNX Runtime runs both files
    besides, without its own optimizations. ``measure``: it times both, with all of them;
    ``milliseconds`` under ``before`` and ``after`` of the summary. Both need the package
    ``onnxruntime``.

    A rewrite that makes a difference is dropped and named in the summary. Raises
    :class:`OnnxError` and leaves ``out`` as it was if the model cannot be read, verified or
    written.
    """
    if oracle not in (None, "ort"):
        raise ValueError(f"oracle is None or 'ort', not {oracle!r}")
    if oracle and not verify:
        raise ValueError("an oracle is asked when verifying: leave out verify=False")
    path, data = _source(model)
    request = _Request(
        path=path,
        bytes=data,
        out=None if out is None else os.fspath(out),
        target=target,
        verify=verify,
        sizes=[(name, str(size)) for name, size in (sizes or {}).items()],
        shapes=[(name, list(shape)) for name, shape in (shapes or {}).items()],
        inputs=_archive(inputs) if inputs else None,
        seeds=seeds,
        without=list(without),
        fold_limit=fold_limit,
        max_growth=max_growth,
        ask_runtime=oracle is not None,
        measure=measure,
        python=sys.executable,
    )
    try:
        made, summary = _native.optimize(request)
    except _native.OnnxFailure as error:
        raise OnnxError(str(error)) from None
    return Optimized(made, None if out is None else Path(out), json.loads(summary))


@dataclass
class _Request:
    path: str | None
    bytes: bytes | None
    out: str | None
    target: str
    verify: bool
    sizes: list[tuple[str, str]]
    shapes: list[tuple[str, list[int | None]]]
    inputs: bytes | None
    seeds: int
    without: list[str]
    fold_limit: int
    max_growth: float | None
    ask_runtime: bool
    measure: bool
    python: str


@dataclass
class _GradRequest:
    path: str | None
    bytes: bytes | None
    out: str | None
    loss: str
    optimizer: str | None
    gradients: bool
    wrt: list[str] | None
    mode: str
    label_smoothing: float
    sizes: list[tuple[str, int]]
    verify: bool


def _source(model: Any) -> tuple[str | None, bytes | None]:
    """The path of a model, or its bytes."""
    if isinstance(model, bytes):
        return None, model
    if hasattr(model, "SerializeToString"):
        return None, model.SerializeToString()
    return os.fspath(model), None


def _archive(arrays: Mapping[str, Any]) -> bytes:
    """The bytes of an ``.npz`` file."""
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, **{name: np.asarray(value) for name, value in arrays.items()})
    return buffer.getvalue()
