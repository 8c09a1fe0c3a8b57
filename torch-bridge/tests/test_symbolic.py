"""Traces with symbolic sizes: one serves every size that it holds for, with eager's numbers."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import shorthaul
import torch
from against_eager import assert_close, needs_open_numbers, step
from shorthaul import _region
from shorthaul._sizes import Outside
from shorthaul._symbolic import capture_symbolic
from torch import nn


class Text(nn.Module):
    """Sizes in arithmetic, ranges of positions, a mask, views, integer inputs."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.places = nn.Embedding(64, 8)
        self.inner = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, padding):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length))
        q, k, v = self.inner(x).view(len(tokens), length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        hidden = padding[:, None, None, :] | torch.ones(length, length).triu(1).bool()
        scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e4) / 2
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(len(tokens), -1, 8)
        half = length // 2
        return self.head(x + mixed).mean(1) + mixed[:, half:].sum((1, 2))[:, None] / length

    @staticmethod
    def inputs(size: int):
        generator = torch.Generator().manual_seed(size)
        padding = torch.zeros(3, size, dtype=torch.bool)
        padding[1, 1 + size // 2 :] = True
        return torch.randint(20, (3, size), generator=generator), padding


class Image(nn.Module):
    """Convolutions, statistics in buffers, pooling of odd sizes, an average over positions."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.two = nn.Conv2d(4, 4, 3, stride=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.norm(self.one(x)).relu(), 2)
        x = nn.functional.avg_pool2d(self.two(x), 2, ceil_mode=True)
        return self.head(x.mean((2, 3)))

    @staticmethod
    def inputs(size: int):
        generator = torch.Generator().manual_seed(size)
        return (torch.randn(2, 2, size, size + 3, generator=generator),)


class Rows(nn.Module):
    """A batch of any number of rows, none and one included."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x):
        y = self.inner(x).tanh()
        return torch.cat([y, y.flip(0)]).view(-1, 5) * x.shape[0]

    @staticmethod
    def inputs(size: int):
        return (torch.randn(size, 6, generator=torch.Generator().manual_seed(size)),)


def _traces(monkeypatch) -> list[str]:
    """What is traced from here on."""
    traced = []
    for name in ("capture", "capture_symbolic"):
        inner = getattr(_region, name)

        def trace(*args, name=name, inner=inner, **more):
            traced.append(name)
            return inner(*args, **more)

        monkeypatch.setattr(_region, name, trace)
    return traced


def _check(model, network, inputs) -> None:
    """Results, gradients and buffers beside eager, by the rule of ``against_eager``."""
    network.zero_grad()
    eager, exact = copy.deepcopy(network), copy.deepcopy(network).double()
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    found, near, want = (
        step(each, args, {}) for each, args in ((model, inputs), (eager, inputs), (exact, wide))
    )
    assert found.keys() == near.keys() == want.keys()
    for what in want:
        assert_close(what, found[what], near[what], want[what])


@needs_open_numbers
@pytest.mark.parametrize(
    ("kind", "sizes", "n_traces"),
    [(Text, (9, 14, 2, 33), 3), (Image, (13, 17, 20, 15), 2), (Rows, (4, 7, 9, 1, 0), 3)],
)
def test_one_trace_serves_all_sizes(monkeypatch, kind, sizes, n_traces):
    torch.manual_seed(0)
    network = kind()
    model = shorthaul.module(network)
    traced = _traces(monkeypatch)
    for size in sizes:
        # A size that comes for the first time may run through PyTorch.
        for _ in range(2):
            _check(model, network, kind.inputs(size))
    assert len(traced) <= n_traces, traced
    # Half of two positions is one, for which the guards of other sizes do not hold.
    assert traced.count("capture_symbolic") == 1 + (kind is Text), traced


def test_dropout_draws_for_each_size():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    network[0].weight.data.zero_()
    network[0].bias.data.fill_(1.0)
    model = shorthaul.module(network)
    for rows in (300, 500, 700):
        for _ in range(2):
            network.zero_grad()
            y = model(torch.ones(rows, 4))
            y.sum().backward()
            assert set(y.unique().tolist()) == {0.0, 2.0}
            assert 0.8 < y.mean() < 1.2
            torch.testing.assert_close(network[0].bias.grad, y.sum(0))


def test_an_index_out_of_a_symbolic_size_is_refused():
    class Pick(nn.Module):
        def forward(self, x, places):
            return (x * 2).gather(1, places)

    model = shorthaul.module(Pick())
    for length in (5, 8, 11):
        places = torch.full((2, 3), length - 1)
        for _ in range(2):
            x = torch.randn(2, length)
            torch.testing.assert_close(model(x, places), x[:, -1:].expand(2, 3) * 2)
    with pytest.raises(IndexError):
        model(torch.randn(2, 11), torch.full((2, 3), 11))


def test_a_fraction_that_follows_from_a_size_is_a_number_at_run_time(monkeypatch):
    class Scaled(nn.Module):
        def forward(self, x):
            n = x.shape[1] ** 0.5
            return ((x / n).sin() * n + n).exp()

    network = Scaled()
    model = shorthaul.module(network)
    traced = _traces(monkeypatch)
    for size in (4, 7, 9, 11):
        for _ in range(2):
            x = torch.randn(3, size)
            torch.testing.assert_close(model(x), network(x))
    assert traced == ["capture", "capture_symbolic"]


def test_a_fraction_that_is_an_argument_is_traced_alone(monkeypatch, caplog):
    class Clamped(nn.Module):
        def forward(self, x):
            return x.exp().clamp(max=x.shape[1] ** 0.5).sin()

    network = Clamped()
    model = shorthaul.module(network)
    traced = _traces(monkeypatch)
    caplog.set_level(logging.INFO, logger="shorthaul")
    for size in (4, 7, 9):
        for _ in range(2):
            x = torch.randn(3, size)
            torch.testing.assert_close(model(x), network(x))
    assert "capture_symbolic" not in traced
    assert "has a fraction" in caplog.text


def test_a_remainder_by_a_symbolic_size_stays_symbolic(monkeypatch):
    class Rolled(nn.Module):
        def forward(self, x):
            return x.roll(1, 1).sin()

    network = Rolled()
    model = shorthaul.module(network)
    traced = _traces(monkeypatch)
    for size in (4, 7, 9, 11):
        for _ in range(2):
            x = torch.randn(3, size)
            assert torch.allclose(model(x), network(x))
    assert traced == ["capture", "capture_symbolic"]


class _Branch(nn.Module):
    def forward(self, *inputs):
        x, n = inputs
        return x * n if x.shape[0] > 5 else x + n


@needs_open_numbers
def test_a_trace_says_for_which_sizes_it_holds():
    traced = capture_symbolic(_Branch(), (torch.randn(8, 3), 8), [(True, False), True])
    held = traced.at((torch.randn(6, 3), 4))
    assert sorted(held.sizes.values()) == [4, 6] or list(held.sizes.values()) == [6]
    with pytest.raises(Outside):
        traced.at((torch.randn(5, 3), 4))
    with pytest.raises(Outside):
        traced.at((torch.randn(6, 4), 4))


def test_sizes_that_a_trace_cannot_leave_open_are_traced_alone(monkeypatch, caplog):
    def refuse(*args, **more):
        raise Outside("this test asks for it")

    network = Rows()
    model = shorthaul.module(network)
    monkeypatch.setattr(_region, "capture_symbolic", refuse)
    caplog.set_level(logging.INFO, logger="shorthaul")
    for size in (4, 7, 9):
        for _ in range(2):
            _check(model, network, Rows.inputs(size))
    assert "traced separately: this test asks for it" in caplog.text


class RowsInACheckpoint(nn.Module):
    """Sizes of an intermediate value, sliced, inside of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 3)

    def rows(self, tokens):
        x = self.table(tokens).tanh()
        size = x.size()[:2]
        return self.head(x.view(size[0] * size[1], -1))

    def forward(self, tokens):
        return torch.utils.checkpoint.checkpoint(self.rows, tokens, use_reentrant=False)


def test_slices_of_sizes_cut_no_region():
    module = RowsInACheckpoint()
    model = shorthaul.module(module)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in (3, 5, 4):
            tokens = torch.randint(10, (n, n + 2))
            torch.testing.assert_close(model(tokens), module(tokens))
    fallbacks = [str(w.message) for w in said if w.category is shorthaul.FallbackWarning]
    assert all("`tag_activation_checkpoint`" in fallback for fallback in fallbacks)


class Rotated(nn.Module):
    """A table of complex numbers that ``forward`` moves to where it is already."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.turns = torch.polar(torch.ones(8, 3), torch.randn(8, 3))

    def forward(self, x):
        self.turns = self.turns.to(x.device, non_blocking=True)
        z = torch.view_as_complex(self.inner(x).view(*x.shape[:-1], 3, 2))
        return torch.view_as_real(z * self.turns[: x.shape[1]]).flatten(-2)


def test_a_complex_table_that_stays_where_it_is():
    module = Rotated()
    model, table = shorthaul.module(module, fallback="error"), module.turns
    for n in (5, 7):
        x = torch.randn(2, n, 6)
        torch.testing.assert_close(model(x), module(x))
    assert module.turns is table
