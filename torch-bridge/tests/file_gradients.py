"""Compares the gradients that the training graph of an ONNX model gives with those of PyTorch.

The loss is a sum of the model's outputs with random weights, so that each element of each output
counts. The reference computes the outputs in float64 with tensor operations of PyTorch.
"""

import numpy as np
import onnx.parser
import shorthaul.onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from training_graphs import run

#: A part of the largest element of a gradient: sums are ordered differently.
TOLERANCE = 1e-9

ELEMENTS = {torch.float64: TensorProto.DOUBLE, torch.float32: TensorProto.FLOAT}


def ints(*values):
    return np.array(values, np.int64)


def only(function):
    return lambda **given: {"y": function(*given.values())}


def named(function):
    """A function of positional inputs whose results are called y, z and so on."""
    return lambda **given: dict(zip("yzuv", function(*given.values()), strict=False))


def parsed(nodes, opset=20, **imports):
    """A model of nodes in ONNX's text form; it lacks inputs and outputs."""
    sets = "".join(f', "{domain.replace("_", ".")}": {n}' for domain, n in imports.items())
    header = f'<ir_version: 10, opset_import: ["": {opset}{sets}]>'
    return onnx.parser.parse_model(f"{header} model () => () {{ {nodes} }}")


def uniform(shape, seed=0, dtype=torch.float64):
    """Random numbers from -1 to 1, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=generator)


def with_inputs(model, given):
    """Gives the model these inputs, of the sizes and types of the tensors."""
    for name, value in given.items():
        element = helper.np_dtype_to_tensor_dtype(value.detach().numpy().dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, element, value.shape))


def with_total(model, outputs, dtype, seed=1):
    """Makes the only output `total`, the sum of the outputs times weights, which are returned."""
    weights = {}
    for n, (name, value) in enumerate(outputs.items()):
        weight = uniform(value.shape, seed + n, dtype)
        weights[name] = weight.double()
        model.graph.initializer.append(numpy_helper.from_array(weight.numpy(), f"{name}.weights"))
        model.graph.node.extend(
            [
                helper.make_node("Mul", [name, f"{name}.weights"], [f"{name}.weighted"]),
                helper.make_node("ReduceSum", [f"{name}.weighted"], [f"{name}.sum"], keepdims=0),
            ]
        )
    sums = [f"{name}.sum" for name in outputs]
    model.graph.node.append(helper.make_node("Sum", sums, ["total"]))
    del model.graph.output[:]
    total = helper.make_tensor_value_info("total", ELEMENTS[dtype], [])
    model.graph.output.append(total)
    return weights


def assert_gradients(
    model, function, given, dtype=torch.float64, tolerance=TOLERANCE, seed=1, **options
):
    """Compares the loss, and its gradients by all real numbers that are given.

    ``model`` has no outputs yet, and no inputs unless the caller needs certain ones. ``function``
    gets what is given by name and returns the outputs that count by name.
    """
    exact = {
        name: value.double().clone().requires_grad_() if value.is_floating_point() else value
        for name, value in given.items()
    }
    outputs = function(**exact)
    stored = {tensor.name for tensor in model.graph.initializer}
    if not model.graph.input:
        with_inputs(model, {name: v for name, v in given.items() if name not in stored})
    weights = with_total(model, outputs, dtype, seed)
    terms = [weights[name] * value for name, value in outputs.items()]
    loss = sum(term.sum() for term in terms)
    wrt = [name for name, value in given.items() if value.is_floating_point()]
    gradients = torch.autograd.grad(loss, [exact[name] for name in wrt], materialize_grads=True)
    options.setdefault("verify", False)
    data = shorthaul.onnx.grad(model, loss="total", wrt=wrt, **options)
    taken = {value.name for value in onnx.load_from_string(data).graph.input}
    found = run(data, {name: value for name, value in given.items() if name in taken})
    size = sum(term.abs().sum() for term in terms)
    assert (found["loss"].double() - loss).abs() <= tolerance * size, (found["loss"], loss)
    for name, gradient in zip(wrt, gradients, strict=True):
        result = found[f"{name}.grad"]
        assert result.dtype == given[name].dtype
        assert result.shape == gradient.shape
        error = (result.double() - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), (name, error, gradient.abs().max())


def stored(model, values):
    """Stores tensors or arrays in the model."""
    for name, value in values.items():
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
