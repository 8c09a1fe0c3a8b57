"""Captured documents mean what the module means."""

import pytest
import shorthaul
import torch
import torchvision
from document_interpreter import evaluate
from shorthaul._capture import capture
from torch import nn


def run(captured, module, *args):
    """The document's outputs for a module's own tensors."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    inputs = {}
    for spec in captured.inputs:
        if spec.kind == "user":
            inputs[spec.name] = args[spec.user_idx]
        else:
            inputs[spec.name] = spec.constant if spec.kind == "constant" else tensors[spec.target]
    with torch.no_grad():
        return evaluate(captured.document, {name: value.clone() for name, value in inputs.items()})


def assert_means(module, *args):
    """Document outputs equal eager's outputs and the buffers eager leaves behind."""
    captured = capture(module, args)
    found = run(captured, module, *args)
    with torch.no_grad():
        expected = module(*args)
    buffers = dict(module.named_buffers())
    for output, value in zip(captured.outputs, found, strict=True):
        if output.kind == "buffer":
            torch.testing.assert_close(value, buffers[output.target])
        elif output.kind == "user":
            torch.testing.assert_close(value, expected)
    return captured


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_b0"])
@pytest.mark.parametrize("train", [True, False])
def test_networks(name, train):
    model = getattr(torchvision.models, name)(num_classes=10).train(train)
    for child in model.modules():  # random numbers would differ
        if "Dropout" in type(child).__name__ or "StochasticDepth" in type(child).__name__:
            child.p = 0.0
    captured = assert_means(model, torch.randn(2, 3, 64, 64))
    origins = [node["origin"] for node in captured.document["nodes"]]
    assert all(origin["source"] for origin in origins)
    assert origins[0]["module"] in ("conv1", "features.0.0")


def test_transformer_layer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    captured = assert_means(layer, torch.randn(2, 5, 32))
    assert "aten.scaled_dot_product_attention.default" in {
        n["target"] for n in captured.document["nodes"]
    }


def test_in_place_through_views():
    class Net(nn.Module):
        def forward(self, x):
            y = x * 1
            y[:, 0] = 5.0
            y[:, 1].add_(1.0)
            z = y.view(-1)
            y.mul_(2.0)
            return z + 1

    assert_means(Net(), torch.randn(3, 4))


def test_in_place_chain_on_one_tensor():
    class Net(nn.Module):
        def forward(self, x):
            y = x + 1
            w = y * 3
            y.add_(1).mul_(2)
            y.clamp_(min=0)
            return y + w

    assert_means(Net(), torch.randn(3, 4))


def test_constants_travel_as_bytes():
    class Net(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 2.0, 3.0])

    captured = assert_means(Net(), torch.randn(2, 3))
    assert torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes() in captured.constants


def test_missing_operators_are_decomposed():
    class Net(nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(x)

    targets = {
        n["target"]
        for n in capture(Net(), (torch.randn(3),), supported=frozenset()).document["nodes"]
    }
    assert "aten.silu.default" not in targets and "aten.sigmoid.default" in targets


def test_the_same_module_gives_the_same_bytes():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    assert capture(model, (x,)).json == capture(model, (x,)).json


def test_dynamic_batch_is_a_symbol():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    batch = torch.export.Dim("batch", min=2, max=64)
    captured = capture(model, (torch.randn(3, 3, 4),), dynamic_shapes=({0: batch},))
    (symbol,) = captured.document["symbols"]
    assert symbol["hint"] == 3
    assert captured.document["nodes"][-1]["outputs"][0]["shape"] == [symbol["name"], 4]


@pytest.mark.parametrize("function", [torch.linalg.cholesky, torch.linalg.inv])
def test_an_operator_that_checks_its_result_costs_itself(function):
    class Kernel(nn.Module):
        """A Gaussian process's matrix between layers."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            """A function of the matrix of the layer's results."""
            z = self.fc(x).tanh()
            return function(z.T @ z + 8 * torch.eye(8)).sum() + z.sum()

    model = Kernel()
    with pytest.warns(shorthaul.FallbackWarning, match=f"`{function.__name__}` raises an error"):
        report = shorthaul.report(model, torch.randn(16, 8)).data
    assert any(k["path"] == "gemm" for k in report["kernels"])


#: Views that PyTorch's tracer records by names of their own.
_VIEWS = {
    "T": lambda y: y.T,
    "adjoint": lambda y: y.adjoint(),
    "atleast_3d": torch.atleast_3d,
    "linalg.diagonal": torch.linalg.diagonal,
    "meshgrid": lambda y: torch.meshgrid(y[0], y[:, 0], indexing="ij")[1],
    "reshape_as": lambda y: y.reshape_as(torch.zeros(4, 3)),
}


@pytest.mark.parametrize("name", _VIEWS)
def test_views_that_leave_a_region_are_compiled(name):
    class Views(nn.Module):
        def forward(self, x):
            y = x * 2
            return _VIEWS[name](y), y * 3

    x = torch.randn(3, 4, requires_grad=True)
    view, other = shorthaul.module(Views(), fallback="error")(x)
    expected, _ = Views()(x)
    torch.testing.assert_close(view, expected, rtol=0, atol=0)
    assert view.stride() == expected.stride()
    (gradient,) = torch.autograd.grad((view * view).sum() + other.sum(), x)
    (wanted,) = torch.autograd.grad((expected * expected).sum() + 6 * x.sum(), x)
    torch.testing.assert_close(gradient, wanted)
