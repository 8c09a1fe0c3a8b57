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
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shorthaul.onnx

from .options import OPTIMIZERS, Setting

if TYPE_CHECKING:
    import numpy as np

#: What :func:`shorthaul.onnx.grad` calls the optimizers: SGD has momentum.
_OPTIMIZERS = {"sgd": "momentum", "adamw": "adamw"}


def stepper(setting: Setting, model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable:
    """One step: loss and gradients by their names in the file, or what an optimizer makes of them.

    For inference, one step gives the outputs alone.

    Raises ``RuntimeError`` where ONNX Runtime is missing, or for a setting that it cannot measure.
    """
    if setting.dtype != "f32":
        raise RuntimeError("the ONNX Runtime peer computes in f32")
    onnxruntime = _onnxruntime()
    if setting.mode == "forward":
        made, target = _exported(model, inputs), ()
    else:
        loss, target = _loss(setting, model, inputs)
        made = _exported(_Rows(model), inputs)
        updated = {}
        if setting.mode == "step":
            updated = {"optimizer": _OPTIMIZERS[setting.optimizer], "gradients": False}
        made = shorthaul.onnx.grad(made, loss=loss, mode="train", verify=False, **updated)
    session = _session(onnxruntime, made, setting.threads)
    if setting.mode == "step":
        first = [x.detach().numpy() for x in (*inputs, *target)]
        return _updates(onnxruntime, session, model, first, OPTIMIZERS[setting.optimizer])
    names = [given.name for given in session.get_inputs()]
    fed = {name: x.detach().numpy() for name, x in zip(names, (*inputs, *target), strict=True)}
    outputs = [given.name for given in session.get_outputs()]
    return lambda: dict(zip(outputs, session.run(outputs, fed), strict=True))


def _updates(
    onnxruntime: Any, session: Any, model: nn.Module, first: list[np.ndarray], rate: float
) -> Callable:
    """One step: what the step before left in ``NAME.next`` is the ``NAME`` of the next.

    Parameters and state stay in ONNX Runtime's memory.
    """
    import numpy as np

    own = {f"model.{name}": x.detach().numpy() for name, x in model.state_dict().items()}
    given, batch = {}, []
    for place in session.get_inputs():
        if place.name == "lr":
            value = np.full(place.shape, rate, np.float32)
        elif place.name == "step":
            value = np.ones(place.shape, np.float32)
        elif place.name in own:
            value = own[place.name]
        elif place.name.rpartition(".")[0] in own:
            value = np.zeros(place.shape, np.float32)
        else:
            batch.append(place.name)
            continue
        given[place.name] = value
    given |= dict(zip(batch, first, strict=True))
    given = {n: onnxruntime.OrtValue.ortvalue_from_numpy(value) for n, value in given.items()}
    outputs = [place.name for place in session.get_outputs()]

    def step() -> dict[str, Any]:
        found = dict(zip(outputs, session.run_with_ort_values(outputs, given), strict=True))
        given.update({n.removesuffix(".next"): x for n, x in found.items() if n != "loss"})
        if "step" in given:
            following = np.asarray(given["step"].numpy() + 1)
            given["step"] = onnxruntime.OrtValue.ortvalue_from_numpy(following)
        return found

    return step


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
        raise RuntimeError("the ONNX Runtime peer cannot compute a network's own loss")
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
        import numpy  # noqa: F401 - ONNX Runtime needs it, PyTorch does not
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
