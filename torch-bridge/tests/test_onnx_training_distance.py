"""50 steps of AdamW in ONNX Runtime stay as near to float64 as PyTorch's in single precision."""

import copy
import functools

import numpy as np
import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
from shorthaul.models import DigitsConvNet, DigitsTransformer
from sklearn.datasets import load_digits
from torch import nn
from training_graphs import exported, session

STEPS, ROWS, RATE = 50, 32, 1e-3


class Smooth(nn.Module):
    """The network of the demo without kinks, at which a rounding may choose another gradient."""

    def __init__(self):
        super().__init__()
        self.network = DigitsConvNet()
        for n, layer in enumerate(self.network.features):
            if isinstance(layer, nn.ReLU):
                self.network.features[n] = nn.SiLU()
            elif isinstance(layer, nn.MaxPool2d):
                self.network.features[n] = nn.AvgPool2d(2)

    def forward(self, x):
        return self.network(x)


class Rows(nn.Module):
    """Products of rows, with a layer normalization and a smooth activation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 96), nn.LayerNorm(96)
        self.second, self.head = nn.Linear(96, 96), nn.Linear(96, 10)

    def forward(self, x):
        x = F.gelu(self.norm(self.first(x.flatten(1))))
        return self.head(x + torch.tanh(self.second(x)))


class Groups(nn.Module):
    """Convolutions with group normalization, one of them depthwise."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x):
        x = F.silu(self.norm(self.first(x)))
        return self.head(F.avg_pool2d(self.depthwise(x), 2).flatten(1))


class Gated(nn.Module):
    """A gated product over the rows of an image, without biases."""

    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        rows = x.squeeze(1)
        gated = torch.sigmoid(self.gate(rows)) * self.value(rows)
        return self.head(gated.mean(1))


@functools.cache
def digits():
    """Images `[n, 1, 8, 8]` and their classes."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target)


def batches():
    """Images and labels of every step, from the beginning again where they end."""
    images, labels = digits()
    for step in range(STEPS):
        rows = torch.arange(step * ROWS, (step + 1) * ROWS) % len(labels)
        yield images[rows], labels[rows]


def by_pytorch(model, dtype):
    """Parameters after all steps, as float64."""
    model = copy.deepcopy(model).to(dtype)
    stepper = torch.optim.AdamW(model.parameters(), RATE)
    for images, labels in batches():
        stepper.zero_grad()
        F.cross_entropy(model(images.to(dtype)), labels).backward()
        stepper.step()
    return {name: p.detach().double().numpy() for name, p in model.named_parameters()}


def by_onnx_runtime(model):
    """Parameters after all steps of the training graph, as float64."""
    file = exported(copy.deepcopy(model), digits()[0][:ROWS])
    opened = session(shorthaul.onnx.grad(file, loss="cross-entropy", optimizer="adamw"))
    names, state = [output.name for output in opened.get_outputs()], {}
    for step, (images, labels) in enumerate(batches()):
        given = {"x0": images.numpy(), "labels": labels.numpy(), "lr": np.float32(RATE)}
        feeds = {**given, "step": np.float32(step + 1), **state}
        for port in opened.get_inputs():
            if port.name not in feeds:
                feeds[port.name] = np.zeros(port.shape, np.float32)
        feeds = {port.name: np.asarray(feeds[port.name]) for port in opened.get_inputs()}
        found = dict(zip(names, opened.run(None, feeds | state), strict=True))
        state = {n.removesuffix(".next"): v for n, v in found.items() if n.endswith(".next")}
    return {name: state[name].astype(np.float64) for name, _ in model.named_parameters()}


def distance(found, expected):
    """The norm of all differences."""
    return np.sqrt(sum(((found[n] - expected[n]) ** 2).sum() for n in expected))


@pytest.mark.parametrize("network", [Smooth, DigitsTransformer, Rows, Groups, Gated])
def test_50_steps_stay_near_float64(network):
    torch.manual_seed(0)
    model = network().eval()
    exact = by_pytorch(model, torch.float64)
    theirs = distance(by_pytorch(model, torch.float32), exact)
    start = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    assert 0 < theirs < 0.1 * distance(start, exact)
    assert distance(by_onnx_runtime(model), exact) <= 2 * theirs
