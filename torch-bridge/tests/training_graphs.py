"""Training graphs for tests: models exported, their gradients run in ONNX Runtime.

ONNX Runtime has no kernels in double precision for some operators; those graphs run in the
reference evaluator of the ``onnx`` package, with some operators by PyTorch, as its own
are not exact or know no groups.
"""

import copy
import io
import re
import warnings

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

#: Operators of which ONNX Runtime's CPU provider has no kernel for double precision.
WITHOUT_DOUBLE = {
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "AveragePool",
    "Conv",
    "ConvTranspose",
    "Cosh",
    "Erf",
    "GlobalAveragePool",
    "Sinh",
    "Tan",
}


class Erf(OpRun):
    """The standard's operator, by PyTorch: the evaluator's own is exact to single precision."""

    def _run(self, x):
        return (torch.erf(torch.from_numpy(np.asarray(x))).numpy(),)


class Conv(OpRun):
    """The standard's operator, by PyTorch."""

    def _run(self, x, w, b=None, dilations=None, group=1, pads=None, strides=None, **_):
        rank = x.ndim - 2
        pads = pads or [0] * 2 * rank
        # PyTorch pads the last dimension first.
        around = [pads[d + side * rank] for d in reversed(range(rank)) for side in (0, 1)]
        x = F.pad(torch.from_numpy(x), around)
        b = None if b is None else torch.from_numpy(b)
        function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        y = function(x, torch.from_numpy(w), b, strides or 1, 0, dilations or 1, group)
        return (y.numpy(),)


class ConvTranspose(OpRun):
    """The standard's operator, by PyTorch."""

    def _run(
        self,
        x,
        w,
        b=None,
        dilations=None,
        group=1,
        output_padding=None,
        pads=None,
        strides=None,
        **_,
    ):
        rank = x.ndim - 2
        pads = pads or [0] * 2 * rank
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        x, w = torch.from_numpy(x), torch.from_numpy(w)
        y = w.new_zeros(
            (x.shape[0], w.shape[1] * group)
            + tuple(
                (x.shape[2 + d] - 1) * strides[d]
                + dilations[d] * (w.shape[2 + d] - 1)
                + 1
                + (output_padding or [0] * rank)[d]
                for d in range(rank)
            )
        )
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        part = function(x, w, None, strides, 0, 0, group, dilations)
        y[(..., *(slice(0, n) for n in part.shape[2:]))] = part
        if b is not None:
            y += torch.from_numpy(b).reshape(-1, *[1] * rank)
        return (
            y[(..., *(slice(pads[d], y.shape[2 + d] - pads[d + rank]) for d in range(rank)))]
            .contiguous()
            .numpy(),
        )


def exported(model, *inputs, dynamic=True, names=None, outputs=None):
    """The bytes of the model as ONNX, with a dynamic first dimension, or those that are named."""
    buffer = io.BytesIO()
    if dynamic is True:
        dynamic = {0: torch.export.Dim("batch")}
    shapes = tuple(dynamic or None for _ in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            copy.deepcopy(model),
            inputs,
            dynamo=True,
            input_names=names or [f"x{i}" for i in range(len(inputs))],
            output_names=outputs,
            dynamic_shapes=shapes,
            optimize=False,
            verbose=False,
        )
    onnx.save(program.model_proto, buffer)
    return buffer.getvalue()


def session(data):
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    if any(v.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for v in model.graph.output):
        # Beyond the basic ones, an optimization makes a factor of a product an attribute of
        # single precision, whatever the type of the product.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    # Threads that wait for work busily would slow down whatever else runs.
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(data, feeds):
    """The outputs of a file by name, as tensors."""
    feeds = {name: np.asarray(value.detach()) for name, value in feeds.items()}
    try:
        opened = session(data)
        names = [output.name for output in opened.get_outputs()]
        results = opened.run(None, feeds)
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented as error:
        operator = re.search(r"an implementation for (\w+)\(", str(error)).group(1)
        assert operator in WITHOUT_DOUBLE, str(error)
        evaluator = ReferenceEvaluator(
            onnx.load_from_string(data), new_ops=[Conv, ConvTranspose, Erf]
        )
        names, results = evaluator.output_names, evaluator.run(None, feeds)
    return dict(zip(names, (torch.from_numpy(np.asarray(r)) for r in results), strict=True))
