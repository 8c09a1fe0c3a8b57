"""A compiled module inside the rest of PyTorch."""

import copy
from typing import NamedTuple

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from against_eager import assert_matches
from shorthaul._call import recorded
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def images(batch):
    return torch.randn(batch, 6)


def test_inside_another_compiler():
    class Outer(nn.Module):
        """A compiled part between parts that another backend compiles."""

        def __init__(self):
            super().__init__()
            self.before, self.inner, self.after = nn.Linear(6, 6), mlp(), nn.Linear(4, 2)

        def forward(self, x):
            return self.after(torch.tanh(self.inner(torch.sin(self.before(x)))))

    model = Outer()
    twin = copy.deepcopy(model)
    model.inner = shorthaul.module(model.inner)
    x = images(3)
    with recorded() as calls:
        y = torch.compile(model, backend="aot_eager")(x)
    torch.testing.assert_close(y, twin(x))
    y.sum().backward()
    twin(x).sum().backward()
    torch.testing.assert_close(model.inner[0].weight.grad, twin.inner[0].weight.grad)
    torch.testing.assert_close(model.before.weight.grad, twin.before.weight.grad)
    assert calls, "the inner module ran through PyTorch"


def test_inference_mode():
    model = mlp()
    compiled, x = shorthaul.module(model), images(3)
    with torch.inference_mode():
        y = compiled(x)
        torch.testing.assert_close(y, model(x))
    assert y.is_inference()
    assert compiled(x).requires_grad


def test_named_tuples_come_back():
    class Result(NamedTuple):
        """What a module gives."""

        scores: torch.Tensor
        features: torch.Tensor

    class Net(nn.Module):
        """A module that gives a named tuple."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x):
            features = self.fc(x)
            return Result(features.softmax(-1), features)

    model, x = Net(), images(3)
    result = shorthaul.module(model)(x)
    assert type(result) is Result
    torch.testing.assert_close(result.scores, model(x).scores)


class Written(nn.Module):
    """Writes its input."""

    def forward(self, x):
        x.mul_(2.0)
        return x.sum()


def test_an_input_written_in_place():
    x = torch.randn(3, 4)
    expected = x * 2
    y = shorthaul.module(Written())(x)
    assert torch.equal(x, expected)
    torch.testing.assert_close(y, expected.sum())


@pytest.mark.filterwarnings("ignore::shorthaul.FallbackWarning")
def test_an_input_written_in_place_keeps_its_history():
    given = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    given[1].data.copy_(given[0])
    for leaf, model in zip(given, (Written(), shorthaul.module(Written())), strict=True):
        x = leaf * 1
        (model(x) + x.square().sum()).backward()
    torch.testing.assert_close(given[1].grad, given[0].grad)


def test_no_grad_inside_forward():
    class Net(nn.Module):
        """A teacher whose part gets no gradient."""

        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(self.student(x), target)

    assert_matches(Net(), images(3))


def test_buffers_that_no_grad_updates():
    class Net(nn.Module):
        """Keeps a moving average of its features, and uses it."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 4)
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x):
            y = self.fc(x)
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
                with torch.enable_grad():
                    live = y * 2
            return y * self.average + live

    assert_matches(Net(), images(3))


def test_no_grad_beside_a_write_through_a_view():
    class Net(nn.Module):
        """Needs PyTorch to make it functional."""

        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            y = self.student(x)
            with torch.no_grad():
                target = self.teacher(x) * 2
            y[:, 1:3] += target[:, 1:3]
            return y * target

    assert_matches(Net(), images(3))


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_empty_inputs():
    compiled = shorthaul.module(mlp())
    for batch in (0, 3, 0):
        y = compiled(torch.randn(batch, 6))
        assert y.shape == (batch, 4) and y.requires_grad


def test_modules_without_parameters_and_with_numbers():
    class Scale(nn.Module):
        """A number among its arguments."""

        def forward(self, x, factor):
            return x * factor

    compiled, x = shorthaul.module(Scale()), images(2)
    assert torch.equal(compiled(x, 2.0), x * 2)
    with pytest.warns(shorthaul.RecompileWarning):
        assert torch.equal(compiled(x, 3.0), x * 3)
