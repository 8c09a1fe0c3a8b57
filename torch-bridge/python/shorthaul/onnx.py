"""ONNX files: the training graph of a model.

Owns the Python face of what the ``shorthaul`` program does with ONNX files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import _native
from ._errors import ShorthaulError


class OnnxError(ShorthaulError):
    """An ONNX file cannot be read or made; the message says why and what to do."""


def grad(
    model: str | os.PathLike | bytes,
    *,
    loss: str,
    optimizer: str | None = None,
    wrt: Sequence[str] | None = None,
    mode: str = "file",
    label_smoothing: float = 0.0,
) -> bytes:
    """The training graph of an ONNX model: the bytes of another ONNX file, of standard operators.

    ``model`` is a path or the bytes of a file. ``loss``: ``"cross-entropy"`` (adds an input
    ``labels``), ``"mse"`` (adds ``target``) or the name of an output of one element.
    ``optimizer``: ``"sgd"``, ``"momentum"``, ``"adam"`` or ``"adamw"``; adds the inputs ``lr``,
    the state and, for Adam, ``step``. ``wrt``: what is differentiated, by name; every trainable
    initializer if not given. ``mode``: the form of BatchNormalization and Dropout: ``"file"``
    (each node's own), ``"train"`` (statistics of the batch, values dropped) or ``"eval"``; PyTorch
    exports BatchNormalization in evaluation form even from a model in training mode.
    ``label_smoothing``: how much of each label cross-entropy spreads over all classes.

    Export from PyTorch with ``torch.onnx.export(…, dynamo=True, optimize=False)``: the exporter's
    own optimizer stores parameters that are equal at first as one, and folds batch normalization
    into convolutions.

    The file gives ``loss``, ``NAME.grad``, with BatchNormalization in training form ``NAME.next``
    of its running statistics, and, with an optimizer, ``NAME.next`` of parameters and its state.
    Raises :class:`OnnxError`.
    """
    if isinstance(model, bytes):
        with tempfile.TemporaryDirectory(prefix="shorthaul-") as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(model)
            return grad(
                path,
                loss=loss,
                optimizer=optimizer,
                wrt=wrt,
                mode=mode,
                label_smoothing=label_smoothing,
            )
    try:
        names = list(wrt) if wrt else None
        return _native.training_graph(
            os.fspath(model), loss, optimizer, names, mode, label_smoothing
        )
    except _native.OnnxFailure as error:
        raise OnnxError(str(error)) from None
