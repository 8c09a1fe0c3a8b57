"""Graphs become functional without a second trace of PyTorch's, with eager's numbers."""

from __future__ import annotations

import copy
import warnings

import pytest
import shorthaul
import torch
from torch import nn
from torch.nn import functional as F


def regions(x):
    """A mask as window attention makes it."""
    mask = x.new_zeros(4, 6)
    for n, rows in enumerate((slice(0, 2), slice(2, 4))):
        for m, columns in enumerate((slice(0, 3), slice(3, None))):
            mask[rows, columns] = 2 * n + m
    return x * mask


def copies(x):
    y = torch.zeros_like(x)
    y[:, 1:3] = x[:, :2]
    y[0] = x[1]
    return y.sin()


def a_result(x):
    mask = x.new_zeros(4, 6)
    mask[2] = 3
    return mask, x * mask


def whole_and_part(x):
    y = x * 1.5
    y[0] = 0
    y.add_(1)
    y[1] = 2
    y.mul_(x)
    return y


def a_part_of_a_part(x):
    y = x * 1.5
    y[1:3][0, ::2] = x[3, :3]
    return y.cos()


def another_type(x):
    y = torch.zeros(4, 6, dtype=torch.float64)
    y[1] = x[2]
    return y.to(x.dtype) * x


def a_view_before(x):
    y = x * 2
    v = y[0]
    y[0, 1] = 3.0
    return v + y


def a_view_between(x):
    y = x * 2
    y[0] = 1.0
    u = y[1]
    y[1, 2] = 5.0
    return u * y


def a_whole_view_before(x):
    y = x * 2
    v = y.unsqueeze(0)
    y[0] = 1.0
    return v.sin()


def a_view_of_an_input(x):
    y = x.detach()[1:]
    z = y * 1
    z[0] = 4
    return z + x[1:]


#: Whether PyTorch has to trace the graph again, because a view sees the write.
WRITES = {
    regions: False,
    copies: False,
    a_result: False,
    whole_and_part: False,
    a_part_of_a_part: False,
    another_type: False,
    a_view_before: True,
    a_view_between: True,
    a_whole_view_before: True,
    a_view_of_an_input: False,
}

#: Operators that the importer lacks, and operators around them.
OPERATORS = {
    "outer product": lambda x: torch.outer(x[0], x[1]).exp() * 2,
    "repeated": lambda x: x.sin().repeat_interleave(3, dim=1) + 1,
    "several results": lambda x: torch.aminmax(x.cos(), dim=1)[1] * x.sum(),
    "drawn in place": lambda x: x * torch.ones(4, 1).bernoulli_(1.0),
    "a norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1) * x[:, 0],
    "one operand twice": lambda x: torch.kron(x[:2, :2], x[:2, :2]),
    "the input itself": lambda x: torch.atleast_2d(x) * 2,
    "a result": lambda x: (torch.outer(x[0], x[0]), torch.aminmax(x)),
    "without gradients": lambda x: x * torch.outer(x[:, 0].detach(), x[0]).softmax(-1),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def run(model):
    torch.manual_seed(0)
    x = torch.randn(4, 6, requires_grad=True)
    results = model(x)
    leaves = torch.utils._pytree.tree_leaves(results)
    weights = (torch.linspace(-1, 2, leaf.numel()).view(leaf.shape) for leaf in leaves)
    sum((leaf * weight).sum() for leaf, weight in zip(leaves, weights, strict=True)).backward()
    return [*leaves, x.grad]


def traces_again(function, monkeypatch) -> bool:
    """Runs the function compiled, against eager; whether PyTorch traced it a second time."""
    calls = []
    whole = torch.export.ExportedProgram.run_decompositions

    def counted(self, *args, **kwargs):
        calls.append(self)
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
    model = Model(function)
    compiled = shorthaul.module(copy.copy(model), fallback="error")
    for ours, eager in zip(run(compiled), run(model), strict=True):
        torch.testing.assert_close(ours, eager)
    return bool(calls)


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_a_write_to_a_slice(function, monkeypatch):
    assert traces_again(function, monkeypatch) == WRITES[function]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_the_importer_lacks(name, monkeypatch):
    assert not traces_again(OPERATORS[name], monkeypatch)


def test_an_operator_without_gradients_stops_them(monkeypatch):
    def function(x):
        with torch.no_grad():
            y = torch.outer(x[0], x[1])
        return y * x[0]

    assert not traces_again(function, monkeypatch)


def test_dropout_beside_such_an_operator_is_the_same_in_both_passes():
    model = shorthaul.module(Model(lambda x: F.dropout(x, 0.5).repeat_interleave(2, dim=0)))
    x = torch.ones(8, 16, requires_grad=True)
    torch.manual_seed(1)
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach()[::2] * 2)


def test_a_write_to_a_row_of_an_expanded_tensor():
    """All rows are the same memory."""

    class Rows(nn.Module):
        def forward(self, x):
            y = (x * 2)[0].expand(4, 6)
            y[0].fill_(0.0)
            return y + x

    x = torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shorthaul.FallbackWarning)
        torch.testing.assert_close(shorthaul.module(Rows())(x), Rows()(x))


def test_operators_with_several_results_draw_numbers_of_their_own():
    class Dropped(nn.Module):
        def forward(self, x):
            return torch.native_dropout(x, 0.5, True)[0], F.dropout(x, 0.5)

    first, second = shorthaul.module(Dropped())(torch.ones(64, 64))
    same = ((first == 0) == (second == 0)).float().mean().item()
    assert 0.4 < same < 0.6


def test_numbers_drawn_into_slices():
    def function(x):
        mask, noise = torch.full((4, 6), 7.0), torch.full((4, 6), 7.0)
        mask[:2].bernoulli_()
        mask[2:].bernoulli_(0.25)
        noise[1].normal_()
        return x * 0 + mask, x * 0 + noise

    mask, noise = shorthaul.module(Model(function), fallback="error")(torch.randn(4, 6))
    assert mask.unique().tolist() == [0.0, 1.0]
    assert (noise != 7.0).any(1).tolist() == [False, True, False, False]


def test_a_transposed_view_that_nothing_reads_is_no_write():
    def function(x):
        y = x + torch.zeros(2, 3, 3)
        y[0].t_()
        return y

    x = torch.randn(2, 3, 3)
    torch.testing.assert_close(shorthaul.module(Model(function))(x), function(x))
