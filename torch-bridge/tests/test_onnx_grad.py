"""Training graphs run in plain ONNX Runtime and train as PyTorch does."""

import copy
import io
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import shorthaul.onnx
import torch
import torch.nn.functional as F
from shorthaul.models import DigitsConvNet, DigitsTransformer
from torch import nn


def exported(model, *inputs, batch=True):
    """The bytes of the model as ONNX, with a dynamic batch size."""
    buffer = io.BytesIO()
    shapes = tuple({0: torch.export.Dim("batch")} if batch else None for _ in inputs)
    names = [f"x{i}" for i in range(len(inputs))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            copy.deepcopy(model).eval(),
            inputs,
            dynamo=True,
            input_names=names,
            dynamic_shapes=shapes,
            optimize=False,
            verbose=False,
        )
    onnx.save(program.model_proto, buffer)
    return buffer.getvalue()


def session(data):
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run(data, feeds):
    opened = session(data)
    names = [output.name for output in opened.get_outputs()]
    feeds = {name: value.detach().numpy() for name, value in feeds.items()}
    return dict(zip(names, map(torch.from_numpy, opened.run(None, feeds)), strict=True))


def assert_gradients(model, x, target, loss, function):
    model = model.eval()
    found = run(
        shorthaul.onnx.grad(exported(model, x), loss=loss),
        {"x0": x, "labels" if loss == "cross-entropy" else "target": target},
    )
    exact = copy.deepcopy(model).double()
    wanted = function(
        exact(x.double() if x.is_floating_point() else x),
        target.double() if target.is_floating_point() else target,
    )
    wanted.backward()
    torch.testing.assert_close(found["loss"].double(), wanted, rtol=1e-5, atol=1e-6)
    gradients = {n: p.grad for n, p in exact.named_parameters()}
    assert {n.removesuffix(".grad") for n in found if n.endswith(".grad")} == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        error = (found[f"{name}.grad"].double() - gradient).abs().max().item()
        assert error <= 2e-5 * scale + 1e-7, (name, error, scale)


class Convolutions(nn.Module):
    """Strides, groups, dilation, pooling, normalization."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.c = nn.Conv2d(8, 12, 3, dilation=2, padding=2)
        self.d = nn.Conv2d(12, 12, 5, stride=3, padding=1, groups=12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.a(x)))
        x = F.max_pool2d(F.relu6(self.b(x)), 3, stride=2, padding=1)
        x = F.silu(self.d(F.gelu(self.c(x))))
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """Embedding, LayerNorm, softmax attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        x = self.embedding(ids)
        qkv = self.qkv(self.norm(x))
        q, k, v = qkv[..., :16], qkv[..., 16:32], qkv[..., 32:]
        weights = torch.softmax(q @ k.transpose(1, 2) / 4, -1)
        return self.head((x + weights @ v).mean(1))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), torch.randn(3, 6)),
        (Convolutions(), torch.randn(2, 3, 17, 15)),
        (Tokens(), torch.randint(11, (3, 7))),
    ],
    ids=["dense", "convolutions", "tokens"],
)
def test_gradients_are_those_of_pytorch_in_float64(model, x):
    torch.manual_seed(0)
    labels = torch.randint(4, (len(x),))
    assert_gradients(model, x, labels, "cross-entropy", F.cross_entropy)
    assert_gradients(model, x, torch.randn_like(model(x)), "mse", F.mse_loss)


def test_only_what_is_asked_for_is_differentiated():
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.randn(5, 4)
    data = shorthaul.onnx.grad(exported(model, x), loss="mse", wrt=["1.bias", "x0"])
    found = run(data, {"x0": x, "target": torch.zeros(5, 2)})
    assert found.keys() == {"loss", "1.bias.grad", "x0.grad"}


@pytest.mark.parametrize("network", [DigitsConvNet, DigitsTransformer])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_training_in_onnx_runtime_follows_pytorch(network, optimizer):
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = network().eval()  # statistics of batch normalization stay as they are
    data = shorthaul.onnx.grad(
        exported(model, images[:50]), loss="cross-entropy", optimizer=optimizer
    )
    rate = {"sgd": 0.5, "momentum": 0.1}.get(optimizer, 1e-3)
    ours, opened = [], session(data)
    names = [output.name for output in opened.get_outputs()]
    state: dict[str, np.ndarray] = {}
    for step in range(30):
        rows = slice(50 * step, 50 * step + 50)
        feeds = {
            "x0": images[rows].numpy(),
            "labels": labels[rows].numpy(),
            "lr": np.float32(rate),
            "step": np.float32(step + 1),
            **state,
        }
        for wanted in opened.get_inputs():
            if wanted.name not in feeds:
                feeds[wanted.name] = np.zeros(wanted.shape, np.float32)
        feeds = {i.name: np.asarray(feeds[i.name]) for i in opened.get_inputs()}
        result = dict(zip(names, opened.run(None, feeds | state), strict=True))
        state = {n.removesuffix(".next"): v for n, v in result.items() if n.endswith(".next")}
        ours.append(result["loss"].item())
    make = {
        "sgd": lambda p: torch.optim.SGD(p, rate),
        "momentum": lambda p: torch.optim.SGD(p, rate, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, rate),
        "adamw": lambda p: torch.optim.AdamW(p, rate),
    }[optimizer]
    stepper, theirs = make(model.parameters()), []
    for step in range(30):
        rows = slice(50 * step, 50 * step + 50)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        theirs.append(loss.item())
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)


class Dropping(nn.Module):
    """Dropout in training form; its mask must be the same in both passes."""

    def forward(self, x, w):
        return F.dropout(x * w, 0.5, True).sum()


def test_dropout_has_one_mask():
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Dropping(),
            (torch.ones(64), torch.ones(64)),
            dynamo=True,
            input_names=["x", "w"],
            output_names=["total"],
            verbose=False,
        )
    onnx.save(program.model_proto, buffer)
    data = shorthaul.onnx.grad(buffer.getvalue(), loss="total", wrt=["w"])
    found = run(data, {"x": torch.ones(64), "w": torch.ones(64)})
    gradient = found["w.grad"]
    assert set(gradient.tolist()) == {0.0, 2.0}
    assert found["loss"].item() == gradient.sum().item()


def test_layer_norm_of_everything():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.norm = nn.LayerNorm((3, 4))

        def forward(self, ids):
            return self.norm(self.embedding(ids)).flatten(1)

    torch.manual_seed(0)
    model, ids = Whole(), torch.tensor([[0, 3, 3], [5, 0, 8]])
    assert_gradients(model, ids, torch.randn(2, 12), "mse", F.mse_loss)


def test_the_same_model_gives_the_same_bytes():
    data = exported(nn.Linear(3, 2), torch.randn(2, 3))
    assert shorthaul.onnx.grad(data, loss="mse") == shorthaul.onnx.grad(data, loss="mse")


def test_what_does_not_fit_is_said():
    data = exported(nn.Linear(3, 2), torch.randn(2, 3))
    with pytest.raises(shorthaul.onnx.OnnxError, match="cross-entropy, mse or an output"):
        shorthaul.onnx.grad(data, loss="hinge")
    with pytest.raises(shorthaul.onnx.OnnxError, match="no initializer or input `bais`"):
        shorthaul.onnx.grad(data, loss="mse", wrt=["bais"])
    taken = exported(nn.Linear(3, 2), torch.randn(2, 3)).replace(b"x0", b"lr")
    with pytest.raises(shorthaul.onnx.OnnxError, match="already has a value called `lr`"):
        shorthaul.onnx.grad(taken, loss="mse", optimizer="sgd")
    pooled = exported(nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(1, 1, 1)), torch.randn(2, 1, 4, 4))
    with pytest.raises(shorthaul.onnx.OnnxError, match="cannot be written as ONNX"):
        shorthaul.onnx.grad(pooled, loss="mse", wrt=["x0"])
    with pytest.raises(ValueError, match="sgd, momentum, adam, adamw"):
        shorthaul.onnx.grad(data, loss="mse", optimizer="lion")
    with pytest.raises(shorthaul.onnx.OnnxError, match="damaged"):
        shorthaul.onnx.grad(data[:-20], loss="mse")
