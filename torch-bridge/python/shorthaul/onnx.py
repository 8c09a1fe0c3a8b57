"""Optimizes ONNX files, and turns ONNX models into training steps.

These functions do the same as ``shorthaul optimize`` and ``shorthaul grad`` on the command line,
and take the same options.
Import this module with ``import shorthaul.onnx``.
"""

from __future__ import annotations

import io
import json
import operator
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from . import _native
from ._errors import ShorthaulError


class OnnxError(ShorthaulError):
    """An ONNX file cannot be read or written; the message says why and what to do."""


def grad(
    model: Any,
    *,
    loss: str,
    output: str | None = None,
    optimizer: Literal["sgd", "momentum", "adam", "adamw"] | None = None,
    optimizer_state: Literal["outside", "inside"] = "outside",
    gradients: bool = True,
    wrt: Sequence[str] | None = None,
    mode: Literal["file", "train", "eval"] = "file",
    label_smoothing: float = 0.0,
    sizes: Mapping[str, int] | None = None,
    out: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> bytes | None:
    """Returns the training step of an ONNX model as an ONNX file of standard operators.

    - ``model``: a path, the bytes of a file, or an ``onnx.ModelProto``. If it is not a path,
      external data is read from the current folder.
    - ``loss``: ``"cross-entropy"`` (adds an input ``labels``), ``"mse"`` (adds ``target``), or the
      name of an output with one element.
    - ``output``: the output from which cross-entropy or the squared difference is computed, if the
      model has several.
    - ``optimizer``: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``. Adds the inputs ``lr``,
      the optimizer's state and, for Adam, ``step``.
    - ``optimizer_state``: who provides the optimizer's first state. With ``"outside"``, the
      training loop gives the state to every step: zeros to the first step, with 1.0 as ``step``.
      With ``"inside"``, the file holds these values as defaults, so the first step may leave them
      out.
    - ``gradients``: with an optimizer, ``False`` leaves out the outputs ``NAME.grad``. Writing them
      takes time.
    - ``wrt``: names of the initializers, constants and inputs with respect to which the loss is
      differentiated. By default, these are the initializers that PyTorch's exporter marked as
      parameters. An initializer without a mark counts as a parameter too, unless it is a running
      statistic, a limit or scale of an operator, a frequency of a position embedding, a table of
      sines, a mask or a constant of an exporter; a warning names those that were recognized by
      their values or names. Some exporters write weights as ``Constant`` nodes: if no initializer
      is a parameter, the values of such nodes with more than one real number are trained.
    - ``mode``: the form of BatchNormalization and Dropout. ``"file"`` keeps the form of each node,
      ``"train"`` uses statistics of the batch and drops values, ``"eval"`` does neither. PyTorch
      exports BatchNormalization in evaluation form even from a model in training mode.
    - ``label_smoothing``: the fraction of each label that cross-entropy spreads over all classes.
    - ``sizes``: values of dynamic sizes by name. Others stay dynamic. If the shapes fit together
      only for some sizes, sizes with which the model runs are used, and a warning says so.
    - ``out``: the path to write to; the function then returns ``None``, otherwise the bytes.
    - ``verify``: compute the loss again from the model's own outputs, and compare the gradients
      with finite differences of the loss, in float64. If that is not possible, a warning says why.

    The file's outputs are ``loss``, ``NAME.grad`` for each parameter and, with an optimizer,
    ``NAME.next``, the new value of each parameter and of its state. With BatchNormalization in
    training form, the running statistics have ``NAME.next`` too. For parameters in half precision,
    the optimizer's state is stored in single precision.

    Export from PyTorch with ``torch.onnx.export(…, dynamo=True, optimize=False)``. Otherwise the
    exporter merges parameters that have equal values, and folds batch normalization into
    convolutions. A warning names a parameter that several nodes of the file read.

    Raises :class:`OnnxError` on failure, and leaves ``out`` as it was.
    """
    if optimizer is None and optimizer_state != "outside":
        raise ValueError("optimizer_state needs an optimizer")
    bound = [(name, operator.index(size)) for name, size in (sizes or {}).items()]
    for name, size in bound:
        if size < 1:
            raise ValueError(f"sizes gives {name} the size {size}, but a size is at least 1")
    path, data = _source(model)
    request = _GradRequest(
        path=path,
        bytes=data,
        out=None if out is None else os.fspath(out),
        loss=loss,
        output=output,
        optimizer=optimizer,
        optimizer_state=optimizer_state,
        gradients=gradients,
        wrt=None if wrt is None else list(wrt),
        mode=mode,
        label_smoothing=label_smoothing,
        sizes=bound,
        verify=verify,
    )
    try:
        made, noted = _native.training_graph(request)
    except _native.OnnxFailure as error:
        raise OnnxError(str(error)) from None
    for text in noted:
        warnings.warn(text, stacklevel=2)
    return made


@dataclass(frozen=True)
class Optimized:
    """An optimized ONNX file: ``model`` has its bytes, or is ``None`` if it is at ``path``.

    ``summary`` is what the program prints with ``--json``: ``fired`` (the rewrites used),
    ``dropped`` (rewrites that made a difference), ``kept`` (operators that Shorthaul does not
    know), ``runs`` (of the verification), ``half`` (the error of 16-bit floats), and under
    ``before`` and ``after`` the numbers of operators, multiply-adds and bytes.
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
    out: str | os.PathLike[str] | None = None,
    target: Literal["standard", "ort-cpu", "ort-cuda"] = "standard",
    verify: bool = True,
    sizes: Mapping[str, int | str] | None = None,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    seeds: int = 2,
    tolerance: float = 0.0,
    time_limit: float | None = None,
    rules: Sequence[str] | None = None,
    without: Sequence[str] = (),
    from_: Sequence[str] = (),
    to: Sequence[str] = (),
    free_shape: Mapping[str, Sequence[str | None]] | None = None,
    rename: Mapping[str, str] | None = None,
    opset: int | None = None,
    half: Literal["f16", "bf16"] | None = None,
    keep_f32: Sequence[str] = (),
    strip: bool = False,
    infer_shapes: bool = False,
    fold_limit: int = 16 << 10,
    max_growth: float | None = None,
    oracle: Literal["ort"] | None = None,
    measure: bool = False,
) -> Optimized:
    """Returns an ONNX file that computes the same as ``model`` with less work.

    - ``model``: a path, the bytes of a file, or an ``onnx.ModelProto``. If it is not a path,
      external data is read from the current folder.
    - ``out``: the path to write to. Without it, the result holds the bytes.
    - ``target``: ``"standard"`` for standard operators only; ``"ort-cpu"`` or ``"ort-cuda"`` to
      also use operators that only ONNX Runtime has.
    - ``verify``: run both files on ``seeds`` sets of made-up inputs, and with NaN and infinities,
      and compare the results.
    - ``sizes``: dynamic sizes by name, for verification and for the summary: numbers, or sums of
      other sizes such as ``{"total": "past+new"}``.
    - ``shapes``: sizes of inputs to fix in the file; ``None`` keeps a size as it is.
    - ``inputs``: arrays by name, to verify with instead of made-up inputs.
    - ``tolerance``: accept this difference in addition to rounding, as a fraction of the output's
      largest element, for example ``1e-4``.
    - ``time_limit``: stop verifying after this many seconds. The file gets the rewrites that are
      verified by then.
    - ``rules``: names of the only rewrites to use; an empty list for no rewrite. ``rewrites()``
      lists them.
    - ``without``: names of rewrites not to use.
    - ``from_``, ``to``: take only the part of the file between these values.
    - ``free_shape``: names for fixed sizes of inputs, which makes them dynamic, for example
      ``{"x": ["batch", None]}``; ``None`` keeps a size as it is.
    - ``rename``: other names for inputs and outputs, by their present names.
    - ``opset``: convert the file to this version of the standard's operators.
    - ``half``: compute in ``"f16"`` or ``"bf16"``. Outputs may then differ by ``tolerance``;
      without it, by 0.01 (f16) or 0.05 (bf16).
    - ``keep_f32``: operators or nodes that stay in f32 with ``half``, in addition to those that
      always do.
    - ``strip``: remove documentation, metadata, names of nodes and types of inner values.
    - ``infer_shapes``: write the known types and sizes of inner values into the file.
    - ``fold_limit``: the most bytes of constants that folding one node may add to the file.
    - ``max_growth``: raise an error if file size, peak memory or bytes moved grow by more than this
      factor.
    - ``oracle``: with ``"ort"``, also compare both files in ONNX Runtime, without its
      optimizations.
    - ``measure``: time both files in ONNX Runtime, with all its optimizations. The summary then has
      ``milliseconds`` under ``before`` and ``after``.

    ``oracle`` and ``measure`` need the package ``onnxruntime``. If a rewrite makes a difference, it
    is dropped and named in the summary.

    Raises :class:`OnnxError`, and leaves ``out`` as it was, if the model cannot be read, verified
    or written.
    """
    if oracle not in (None, "ort"):
        raise ValueError(f"oracle is None or 'ort', not {oracle!r}")
    if not verify:
        asked = {
            "oracle": oracle,
            "tolerance": tolerance,
            "time_limit": time_limit,
            "free_shape": free_shape,
            "half": half,
        }
        _refuse(asked, "needs verification: leave out verify=False")
    if measure:
        asked = {
            "from_": from_,
            "to": to,
            "free_shape": free_shape,
            "rename": rename,
            "opset": opset,
            "half": half,
        }
        _refuse(asked, "gives another file than measure compares: leave out measure")
    if not half:
        _refuse({"keep_f32": keep_f32}, "needs half")
    if strip:
        _refuse({"infer_shapes": infer_shapes}, "writes what strip removes: leave out one")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is a number from 0 to below 1, not {tolerance}")
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit is a number of seconds above 0, not {time_limit}")
    if opset is not None and opset < 7:
        raise ValueError(f"opset is at least 7, not {opset}")
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
        rules=None if rules is None else list(rules),
        without=list(without),
        free_shape=[(name, list(names)) for name, names in (free_shape or {}).items()],
        rename=list((rename or {}).items()),
        half=half,
        keep_f32=list(keep_f32),
        tolerance=tolerance,
        time_limit=time_limit,
        from_=list(from_),
        to=list(to),
        opset=opset,
        strip=strip,
        infer_shapes=infer_shapes,
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


def rewrites() -> dict[str, str]:
    """Returns the rewrites that :func:`optimize` knows, by name, and what each does."""
    return dict(_native.rewrites())


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raises an error about the first option that is given."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name} {why}")


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
    rules: list[str] | None
    without: list[str]
    free_shape: list[tuple[str, list[str | None]]]
    rename: list[tuple[str, str]]
    half: str | None
    keep_f32: list[str]
    tolerance: float
    time_limit: float | None
    from_: list[str]
    to: list[str]
    opset: int | None
    strip: bool
    infer_shapes: bool
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
    output: str | None
    optimizer: str | None
    optimizer_state: str
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


__all__ = ["OnnxError", "Optimized", "grad", "optimize", "rewrites"]
