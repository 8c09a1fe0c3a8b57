"""What eager means, where a compiler is tempted to mean something else."""

import pytest
import shorthaul
import torch
from against_eager import assert_matches
from torch import nn


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def compiled(function):
    return shorthaul.module(Function(function))


def test_no_gradient_flows_through_detach():
    def straight_through(x):
        return (x + (torch.round(x * 3) - x).detach()) * x

    assert_matches(Function(straight_through), torch.randn(5, 7, requires_grad=True))


def test_outputs_without_history_are_plain_tensors():
    module = nn.Linear(3, 3)

    class WithCount(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = module

        def forward(self, x, mask):
            return self.fc(x), mask.float().sum()

    out, count = shorthaul.module(WithCount())(torch.randn(2, 3), torch.ones(4, dtype=torch.bool))
    assert out.requires_grad and not count.requires_grad
    assert count.numpy() == 4


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_an_input_that_is_written_may_share_memory():
    def add_to(x, y):
        x.add_(1)
        return x * y

    module, x = compiled(add_to), torch.ones(3)
    assert torch.equal(module(x, torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(module(x, x), torch.full((3,), 9.0))
    both = torch.ones(4)
    assert torch.equal(module(both[:3], both[1:]), torch.tensor([4.0, 4.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_wrap_at_their_width(dtype):
    def arithmetic(a, b):
        return (a + b) // 2, a * b - 1, -a, torch.div(a, b, rounding_mode="trunc"), a**3

    info = torch.iinfo(dtype)
    a = torch.tensor([info.max, info.max - 1, 100, info.min, 7, 1], dtype=dtype)
    b = torch.tensor([info.max, 2, 56, 3, 2, info.max], dtype=dtype)
    for found, expected in zip(compiled(arithmetic)(a, b), arithmetic(a, b), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_large_integers_are_not_rounded_to_floats():
    def divide(a, b):
        return torch.div(a, b, rounding_mode="trunc"), a**4 % 1000003

    a, b = torch.tensor([16777217, -7, 101]), torch.tensor([1, 2, 3])
    for found, expected in zip(compiled(divide)(a, b), divide(a, b), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_division_by_a_scalar_tensor_is_exact(dtype):
    x = torch.arange(-300.0, 300.0, dtype=dtype)
    for scale in (49.0, 3.0, 1e-40, 5e-324):
        divisor = torch.tensor(scale, dtype=dtype)
        found = compiled(lambda x, d: torch.floor(x / d))(x, divisor)
        assert torch.equal(found.nan_to_num(nan=7), torch.floor(x / divisor).nan_to_num(nan=7))


def test_large_scores_are_compared_as_they_were_rounded():
    torch.manual_seed(0)
    x = (torch.randn(60, 6) + 2).requires_grad_()
    assert_matches(Function(lambda x: (x * 1000).softmax(-1)), x)
    assert_matches(Function(lambda x: (x * 1000).log_softmax(-1)), x)
