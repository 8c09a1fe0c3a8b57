"""ONNX Runtime as a peer: the training graph that Shorthaul makes of a network's ONNX file.

Owns the way from a network to a session of ONNX Runtime: PyTorch's exporter, then
:func:`shorthaul.onnx.grad`. ONNX Runtime itself has no training of its own any more, so its kernels
are measured on our graph. Dropout draws ONNX Runtime's numbers.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shorthaul.onnx

from .options import Setting


def stepper(setting: Setting, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable:
    """One step: loss and gradients by their names in the file; for inference the outputs alone.

    Raises ``RuntimeError`` where ONNX Runtime is missing, or for a setting that it cannot measure.
    """
    if setting.mode == "step":
        raise RuntimeError("the peer in ONNX Runtime has no optimizers: use --mode train")
    if setting.dtype != "f32":
        raise RuntimeError("the peer in ONNX Runtime computes in f32")
    onnxruntime = _onnxruntime()
    if setting.mode == "forward":
        made, target = _exported(model, inputs), ()
    else:
        loss, target = _loss(setting, model, inputs)
        made = _exported(_Rows(model), inputs)
        made = shorthaul.onnx.grad(made, loss=loss, mode="train", verify=False)
    session = _session(onnxruntime, made, setting.threads)
    names = [given.name for given in session.get_inputs()]
    fed = {name: x.detach().numpy() for name, x in zip(names, (*inputs, *target), strict=True)}
    outputs = [given.name for given in session.get_outputs()]
    return lambda: dict(zip(outputs, session.run(outputs, fed), strict=True))


class _Rows(nn.Module):
    """``model`` with its scores as rows, as the losses of ONNX files take them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        scores = self.model(*inputs)
        return scores.flatten(0, -2) if scores.dim() == 3 else scores


def _loss(
    setting: Setting, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> tuple[str, tuple[torch.Tensor]]:
    """The name of the example's loss in a training graph, and what it is compared with."""
    example = setting.example
    if example.loss_of is not None:
        raise RuntimeError("the peer in ONNX Runtime cannot compute a network's own loss")
    with torch.no_grad():
        rows = _Rows(model)(*inputs)
    if example.n_classes is None:
        return "mse", (torch.zeros_like(rows),)
    return "cross-entropy", (torch.arange(rows.shape[0]) % example.n_classes,)


def _exported(model: nn.Module, inputs: Sequence[torch.Tensor]) -> bytes:
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        # Exporting in training mode is meant: it keeps dropout.
        warnings.simplefilter("ignore")
        written = Path(folder) / "model.onnx"
        options = {"dynamo": True, "optimize": False, "external_data": False, "verbose": False}
        torch.onnx.export(model, tuple(inputs), written, **options)
        return written.read_bytes()


def _onnxruntime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error.name} is not installed: pip install {error.name}") from None
    return onnxruntime


def _session(onnxruntime: Any, model: bytes, n_threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
