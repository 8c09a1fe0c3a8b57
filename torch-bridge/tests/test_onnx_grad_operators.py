"""Gradients of each operator in a training graph, in double precision, are those of PyTorch."""

import numpy as np
import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from training_graphs import run

#: A part of the largest element. Sums are ordered differently; some kernels and `eps` attributes
#: are exact to single precision only where a row says so.
TOLERANCE = 1e-9


def case(operator, function, *inputs, name="", tolerance=TOLERANCE, opset=20, **attributes):
    """A node of the operator, and what PyTorch calls the same.

    Inputs: a shape stands for random numbers, an array for itself. An array in a list is stored in
    the file; PyTorch's function gets it only if it is of real numbers in double precision.
    """
    label = f"{operator} {name}".strip()
    row = (operator, function, inputs, attributes, tolerance, opset)
    return pytest.param(*row, id=label)


def ints(*values):
    return np.array(values, np.int64)


CASES = [
    case("Abs", torch.abs, (3, 4)),
    case("Neg", torch.neg, (3, 4)),
    case("Exp", torch.exp, (3, 4)),
    case("Log", lambda x: torch.log(x), np.array([0.1, 1.0, 7.5])),
    case("Sqrt", torch.sqrt, np.array([0.1, 1.0, 7.5])),
    case("Reciprocal", torch.reciprocal, np.array([0.1, -1.0, 7.5])),
    case("Sin", torch.sin, (3, 4)),
    case("Cos", torch.cos, (3, 4)),
    case("Tan", torch.tan, np.array([0.1, -1.0, 1.2])),
    case("Tanh", torch.tanh, (3, 4)),
    case("Erf", torch.erf, (3, 4)),
    case("Sigmoid", torch.sigmoid, (3, 4)),
    case("Atan", torch.atan, (3, 4)),
    case("Relu", F.relu, (3, 4)),
    case("LeakyRelu", lambda x: F.leaky_relu(x, 0.125), (3, 4), alpha=0.125),
    case("Elu", F.elu, (3, 4)),
    case("Selu", F.selu, (3, 4), tolerance=1e-6),
    case("Celu", F.celu, (3, 4)),
    case("Softplus", F.softplus, np.array([-40.0, -1e-9, 0.3, 5.0])),
    case("Softsign", F.softsign, (3, 4)),
    case("HardSigmoid", F.hardsigmoid, (3, 4), alpha=1 / 6, beta=0.5, tolerance=1e-7),
    case("HardSwish", F.hardswish, (3, 4)),
    case("Mish", F.mish, (3, 4)),
    case("Gelu", F.gelu, (3, 4)),
    case("Gelu", lambda x: F.gelu(x, approximate="tanh"), (3, 4), name="tanh", approximate="tanh"),
    case("PRelu", F.prelu, (2, 3, 4), (1,)),
    case(
        "Clip", lambda x, low, high: x.clamp(-0.5, 0.5), (3, 4), [np.array(-0.5)], [np.array(0.5)]
    ),
    case("Add", torch.add, (2, 3, 4), (3, 1)),
    case("Sub", torch.sub, (2, 3, 4), (4,)),
    case("Mul", torch.mul, (2, 1, 4), (3, 1)),
    case("Div", torch.div, (3, 4), np.array([0.5, -2.0, 3.0, 1.0])),
    case("Pow", torch.pow, np.array([0.5, 2.0, 3.0]), np.array([2.0, -1.0, 0.5])),
    case("Max", torch.maximum, (3, 4), (4,)),
    case("Min", torch.minimum, (3, 4), (3, 1)),
    case("Where", lambda c, x, y: torch.where(c, x, y), np.array([True, False]), (3, 2), (2,)),
    case("MatMul", torch.matmul, (3, 4), (4, 5)),
    case("MatMul", torch.matmul, (2, 3, 4), (4, 5), name="batch and matrix"),
    case("MatMul", torch.matmul, (2, 1, 3, 4), (3, 4, 5), name="broadcast batches"),
    case("MatMul", torch.matmul, (4,), (2, 4, 5), name="vector"),
    case("Gemm", lambda a, b, c: 0.5 * a @ b.T + c, (3, 4), (5, 4), (5,), transB=1, alpha=0.5),
    case(
        "Einsum",
        lambda a, b: torch.einsum("bij,bkj->bik", a, b),
        (2, 3, 4),
        (2, 5, 4),
        equation="bij,bkj->bik",
    ),
    case("ReduceSum", lambda x: x.sum(1), (3, 4, 2), [ints(1)], keepdims=0),
    case("ReduceMean", lambda x: x.mean((0, 2)), (3, 4, 2), [ints(0, 2)], keepdims=0),
    case("ReduceMax", lambda x: x.amax(1), (3, 4), [ints(1)], keepdims=0),
    case("ReduceMin", lambda x: x.amin(1), (3, 4), [ints(1)], keepdims=0),
    case("ReduceProd", lambda x: x.prod(1), (3, 4), [ints(1)], keepdims=0),
    case("ReduceL1", lambda x: x.abs().sum(1), (3, 4), [ints(1)], keepdims=0),
    case("ReduceL2", lambda x: x.norm(dim=1), (3, 4), [ints(1)], keepdims=0),
    case("ReduceSumSquare", lambda x: (x * x).sum(1), (3, 4), [ints(1)], keepdims=0),
    case("ReduceLogSumExp", lambda x: x.logsumexp(1), (3, 4), [ints(1)], keepdims=0),
    case(
        "ReduceLogSum",
        lambda x: x.sum(1).log(),
        np.array([[0.5, 2.0], [3.0, 1.0]]),
        [ints(1)],
        keepdims=0,
    ),
    case("CumSum", lambda x: x.cumsum(1), (3, 4), [np.array(1, np.int64)]),
    case("Softmax", lambda x: x.softmax(1), (3, 4, 2), axis=1),
    case("LogSoftmax", lambda x: x.log_softmax(-1), (3, 4), axis=-1),
    case("Reshape", lambda x: x.reshape(2, 6), (3, 4), [ints(2, 6)]),
    case("Flatten", lambda x: x.flatten(1), (3, 4, 2), axis=1),
    case("Transpose", lambda x: x.permute(2, 0, 1), (3, 4, 2), perm=[2, 0, 1]),
    case("Unsqueeze", lambda x: x.unsqueeze(1), (3, 4), [ints(1)]),
    case("Squeeze", lambda x: x.squeeze(1), (3, 1, 4), [ints(1)]),
    case("Expand", lambda x: x.expand(2, 3, 4), (3, 1), [ints(2, 3, 4)]),
    case("Tile", lambda x: x.repeat(2, 3), (3, 2), [ints(2, 3)]),
    case("Concat", lambda x, y: torch.cat([x, y], 1), (2, 3), (2, 2), axis=1),
    case("Slice", lambda x: x[:, 1:3], (3, 5), [ints(1)], [ints(3)], [ints(1)]),
    case(
        "Slice",
        lambda x: x[:, 1:8:3],
        (3, 9),
        [ints(1)],
        [ints(8)],
        [ints(1)],
        [ints(3)],
        name="every third",
    ),
    case(
        "Slice",
        lambda x: x.flip(1),
        (3, 5),
        [ints(-1)],
        [ints(-99)],
        [ints(1)],
        [ints(-1)],
        name="backwards",
    ),
    case("Pad", lambda x: F.pad(x, (1, 2)), (3, 4), [ints(0, 1, 0, 2)]),
    case(
        "Pad",
        lambda x: F.pad(x[None], (1, 2), "reflect")[0],
        (3, 4),
        [ints(0, 1, 0, 2)],
        name="reflect",
        mode="reflect",
    ),
    case(
        "Pad",
        lambda x: F.pad(x[None], (1, 2), "replicate")[0],
        (3, 4),
        [ints(0, 1, 0, 2)],
        name="edge",
        mode="edge",
    ),
    case("Gather", lambda x, i: x[i], (5, 3), ints(0, 4, 4)),
    case("Gather", lambda x, i: x[:, i], (2, 5, 3), ints(0, 4, 4), name="second axis", axis=1),
    case("Gather", lambda x, i: x[i], (5, 3), ints(0, -1, -5, 4), name="from the end"),
    case(
        "GatherElements",
        lambda x, i: x.gather(1, i),
        (2, 5),
        ints(0, 4, 4, 1).reshape(2, 2),
        axis=1,
    ),
    case("DepthToSpace", lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 3), blocksize=2, mode="CRD"),
    case(
        "SpaceToDepth",
        lambda x: x.reshape(2, 3, 2, 2, 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(2, 12, 2, 2),
        (2, 3, 4, 4),
        blocksize=2,
    ),
    case(
        "Conv",
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        (2, 3, 6, 5),
        (4, 3, 3, 3),
        (4,),
        pads=[1] * 4,
    ),
    case(
        "Conv",
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        (2, 3, 8, 7),
        (4, 3, 3, 3),
        name="stride with a rest",
        pads=[1] * 4,
        strides=[2, 2],
    ),
    case(
        "Conv",
        lambda x, w: F.conv2d(x, w, padding=2, dilation=2, groups=2),
        (2, 4, 6, 5),
        (6, 2, 3, 3),
        name="groups and dilation",
        pads=[2] * 4,
        dilations=[2, 2],
        group=2,
    ),
    case(
        "Conv",
        lambda x, w: F.conv2d(x, w, padding=1, groups=4),
        (2, 4, 6, 5),
        (4, 1, 3, 3),
        name="depthwise",
        pads=[1] * 4,
        group=4,
    ),
    case(
        "Conv",
        lambda x, w: F.conv1d(x, w, stride=3),
        (2, 3, 11),
        (4, 3, 2),
        name="1-D",
        strides=[3],
    ),
    case(
        "ConvTranspose",
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
        (2, 3, 4, 5),
        (3, 2, 3, 3),
        strides=[2, 2],
        pads=[1] * 4,
        output_padding=[1, 1],
    ),
    case(
        "ConvTranspose",
        lambda x, w: F.conv_transpose2d(x, w, groups=2),
        (1, 4, 3, 3),
        (4, 3, 2, 2),
        name="groups",
        group=2,
    ),
    case(
        "MaxPool", lambda x: F.max_pool2d(x, 2), (2, 3, 4, 6), kernel_shape=[2, 2], strides=[2, 2]
    ),
    case(
        "MaxPool",
        lambda x: F.max_pool2d(x, 3, 2, 1),
        (2, 3, 7, 6),
        name="overlapping",
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1] * 4,
    ),
    case(
        "AveragePool",
        lambda x: F.avg_pool2d(x, 2),
        (2, 3, 4, 6),
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    case(
        "AveragePool",
        lambda x: F.avg_pool2d(x, 2),
        (2, 3, 5, 7),
        name="with a rest",
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    case(
        "AveragePool",
        lambda x: F.avg_pool2d(x, 3, 2, 1),
        (2, 3, 7, 6),
        name="padding counted",
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1] * 4,
        count_include_pad=1,
    ),
    case(
        "AveragePool",
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        (2, 3, 7, 6),
        name="padding not counted",
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[1] * 4,
    ),
    case(
        "AveragePool",
        lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
        (2, 3, 6, 8),
        name="rounded up",
        kernel_shape=[3, 3],
        strides=[2, 2],
        ceil_mode=1,
    ),
    case(
        "AveragePool",
        lambda x: F.avg_pool1d(x, 4, 3),
        (2, 3, 9),
        name="1-D",
        kernel_shape=[4],
        strides=[3],
    ),
    case("GlobalAveragePool", lambda x: x.mean((2, 3), keepdim=True), (2, 3, 4, 5)),
    case("GlobalMaxPool", lambda x: x.amax((2, 3), keepdim=True), (2, 3, 4, 5)),
    case(
        "BatchNormalization",
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
        (2, 3, 4),
        (3,),
        (3,),
        [np.array([0.5, 0.0, -1.0])],
        [np.array([0.5, 1.0, 2.0])],
    ),
    case(
        "BatchNormalization",
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True),
        (4, 3, 5),
        (3,),
        (3,),
        [np.array([0.5, 0.0, -1.0])],
        [np.array([0.5, 1.0, 2.0])],
        name="training",
        training_mode=1,
    ),
    case(
        "BatchNormalization",
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True),
        (6, 3),
        (3,),
        (3,),
        [np.zeros(3)],
        [np.ones(3)],
        name="training, rows",
        training_mode=1,
    ),
    case("LayerNormalization", lambda x, w, b: F.layer_norm(x, (5,), w, b), (2, 3, 5), (5,), (5,)),
    case(
        "LayerNormalization",
        lambda x, w: F.layer_norm(x, (3, 5), w),
        (2, 3, 5),
        (3, 5),
        name="two axes",
        axis=1,
    ),
    case(
        "InstanceNormalization",
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        (2, 3, 5, 4),
        (3,),
        (3,),
    ),
    case(
        "GroupNormalization",
        lambda x, w, b: F.group_norm(x, 2, w, b),
        (2, 4, 5, 3),
        (4,),
        (4,),
        num_groups=2,
        opset=21,
    ),
    case("RMSNormalization", lambda x, w: F.rms_norm(x, (5,), w, 1e-5), (2, 3, 5), (5,), opset=23),
    case("SoftmaxCrossEntropyLoss", lambda x, t: F.cross_entropy(x, t), (3, 5), ints(0, 4, 2)),
    case(
        "SoftmaxCrossEntropyLoss",
        lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=1),
        (3, 5, 2),
        ints(0, 1, 2, 1, 4, 4).reshape(3, 2),
        [np.array([1.0, 2.0, 0.5, 1.5, 3.0])],
        name="weights, ignored rows",
        ignore_index=1,
    ),
    case("NegativeLogLikelihoodLoss", lambda x, t: F.nll_loss(x, t), (3, 5), ints(0, 4, 2)),
    case(
        "Attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 2, 3, 4),
        (2, 2, 5, 4),
        (2, 2, 5, 4),
        opset=23,
    ),
    case(
        "Resize",
        lambda x: F.interpolate(x, scale_factor=2),
        (1, 2, 3, 4),
        [np.zeros(0)],
        [np.array([1, 1, 2, 2], np.float32)],
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    ),
    case("TopK", lambda x: x.topk(2).values, (3, 5), [ints(2)]),
    case(
        "ScatterElements",
        lambda x, i, u: x.scatter_add(1, i, u),
        (2, 4),
        ints(0, 3, 3, 1).reshape(2, 2),
        (2, 2),
        axis=1,
        reduction="add",
    ),
    case("Trilu", torch.triu, (4, 4)),
    case("LRN", lambda x: F.local_response_norm(x, 3), (2, 5, 3, 3), size=3, tolerance=1e-8),
    case("LpNormalization", lambda x: F.normalize(x), (3, 4), axis=1),
    case(
        "MeanVarianceNormalization",
        lambda x: (
            (x - x.mean((0, 2), keepdim=True)) / x.var((0, 2), keepdim=True, correction=0).sqrt()
        ),
        (3, 2, 4),
        axes=[0, 2],
        tolerance=1e-8,
    ),
]


TYPES = {
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}


@pytest.mark.parametrize(
    ("operator", "function", "inputs", "attributes", "tolerance", "opset"), CASES
)
def test_gradients_of_an_operator(operator, function, inputs, attributes, tolerance, opset):
    generator = np.random.default_rng(0)
    given, stored, arguments, names = {}, [], [], []
    for n, value in enumerate(inputs):
        name = f"x{n}"
        names.append(name)
        if isinstance(value, list):
            (value,) = value
            if value.size == 0:
                names[-1] = ""
                continue
            stored.append(numpy_helper.from_array(value, name))
            if value.dtype == np.float64:
                arguments.append(torch.from_numpy(value))
            continue
        if isinstance(value, tuple):
            value = generator.uniform(-2, 2, value)
        given[name] = torch.from_numpy(value)
        if value.dtype == np.float64:
            given[name].requires_grad_()
        arguments.append(given[name])
    wanted = function(*arguments)
    info = [helper.make_tensor_value_info(n, TYPES[t.dtype], t.shape) for n, t in given.items()]
    out = helper.make_tensor_value_info("y", TensorProto.DOUBLE, wanted.shape)
    node = helper.make_node(operator, names, ["y"], name="node", **attributes)
    graph = helper.make_graph([node], "one", info, [out], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    wrt = [n for n, t in given.items() if t.requires_grad]
    if wanted.dim() == 0:
        data, feeds, loss = (
            shorthaul.onnx.grad(model.SerializeToString(), loss="y", wrt=wrt),
            given,
            wanted,
        )
    else:
        target = torch.from_numpy(generator.uniform(-2, 2, wanted.shape))
        data = shorthaul.onnx.grad(model.SerializeToString(), loss="mse", wrt=wrt)
        feeds, loss = {**given, "target": target}, F.mse_loss(wanted, target)
    loss.backward()
    found = run(data, feeds)
    assert (found["loss"] - loss).abs() <= tolerance * loss.abs()
    for name in wrt:
        gradient = given[name].grad
        error = (found[f"{name}.grad"] - gradient).abs().max() / gradient.abs().max()
        assert error <= tolerance, (name, error)
