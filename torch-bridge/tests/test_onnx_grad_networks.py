"""Gradients of whole networks in training graphs, in double precision, are those of PyTorch."""

import copy

import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
import torchvision
from shorthaul.models import DigitsConvNet, DigitsTransformer
from torch import nn
from training_graphs import exported, run

#: A part of a gradient's largest element, or of a ten-thousandth of the largest in the network: a
#: bias before batch normalization has a gradient of zero, but for rounding.
TOLERANCE = 1e-9


def perceptron():
    return nn.Sequential(
        nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
    )


NETWORKS = {
    "perceptron": (perceptron, (6, 12)),
    "convolutional": (DigitsConvNet, (6, 1, 8, 8)),
    "transformer": (DigitsTransformer, (6, 1, 8, 8)),
    "MobileNetV2": (lambda: torchvision.models.mobilenet_v2(dropout=0.0), (4, 3, 32, 32)),
    "ResNet-18": (torchvision.models.resnet18, (4, 3, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_network(name):
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x = make().double().train(), torch.randn(shape, dtype=torch.float64)
    labels = torch.randint(5, shape[:1])
    data = shorthaul.onnx.grad(exported(model, x), loss="cross-entropy", mode="train")
    found = run(data, {"x0": x, "labels": labels})
    wanted = copy.deepcopy(model)
    loss = F.cross_entropy(wanted(x), labels)
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=TOLERANCE, atol=0)
    gradients = {f"{n}.grad": p.grad for n, p in wanted.named_parameters()}
    statistics = {f"{n}.next": b for n, b in wanted.named_buffers() if b.is_floating_point()}
    assert found.keys() == {"loss", *gradients, *statistics}
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for key, value in {**gradients, **statistics}.items():
        scale = max(value.abs().max(), 1e-4 * largest)
        error = (found[key] - value).abs().max() / scale
        assert error <= TOLERANCE, (key, error)
