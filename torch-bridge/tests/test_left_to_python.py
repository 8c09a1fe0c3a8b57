"""Calls that PyTorch's tracer cannot follow are said, and spoil no other call."""

from __future__ import annotations

import copy
import warnings

import pytest
import shorthaul
import torch
from torch import nn


class Loop(nn.Module):
    """A loop that may end early by a tensor's value, or not run at all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = "plain"

    def forward(self, x):
        if self.kind == "nothing":
            return x
        for _ in range(3):
            x = self.layer(x).tanh()
            if self.kind == "may stop" and x.sum() > 100:
                break
        return x


def _calls(model, kinds):
    """For each call: whether a program ran, and what was said about PyTorch or Python."""
    x, found = torch.randn(2, 4), []
    for kind in kinds:
        model.kind = kind
        with (
            warnings.catch_warnings(record=True) as said,
            torch.profiler.profile() as profile,
        ):
            warnings.simplefilter("always")
            y = model(x)
        torch.testing.assert_close(y, model._shorthaul_forward(x))
        ran = any(event.name.startswith("shorthaul forward") for event in profile.events())
        found.append(
            (ran, [str(w.message) for w in said if w.category is shorthaul.FallbackWarning])
        )
    return found


@pytest.mark.parametrize("first", ["plain", "may stop", "nothing"])
def test_a_call_that_cannot_be_traced_leaves_others_compiled(first):
    model = shorthaul.module(Loop())
    kinds = [first] + ["plain", "may stop", "nothing"] * 5
    for kind, (ran, _) in zip(kinds, _calls(model, kinds), strict=True):
        assert ran == (kind == "plain")


def test_a_call_that_cannot_be_traced_is_said_once():
    found = _calls(shorthaul.module(Loop()), ["plain", "may stop", "may stop", "nothing", "plain"])
    assert [len(said) for _, said in found] == [0, 1, 0, 0, 0]
    (message,) = found[1][1]
    assert message.startswith(
        "PyTorch runs a part of Loop: its tracer leaves `forward` to Python at "
    )
    assert message.endswith(": a branch depends on a tensor's values, inside of a loop")


def test_a_first_call_that_cannot_be_traced_names_the_place():
    ((_, (message,)),) = _calls(shorthaul.module(Loop()), ["may stop"])
    assert message.startswith("PyTorch runs all of Loop: its tracer leaves `forward` to Python at ")


def test_each_call_that_cannot_be_traced_is_refused_where_that_is_an_error():
    model, x = shorthaul.module(Loop(), fallback="error"), torch.randn(2, 4)
    for _ in range(5):
        model.kind = "may stop"
        with pytest.raises(shorthaul.CaptureError, match="leaves `forward` to Python"):
            model(x)
        model.kind = "plain"
        model(x)
        model.kind = "nothing"
        assert model(x) is x


class Labelled(torch.Tensor):
    """A class of tensors that changes nothing."""


@pytest.mark.parametrize("by_name", [False, True])
def test_a_class_of_tensors_is_said(by_name):
    x = torch.randn(2, 4).as_subclass(Labelled)
    args, kwargs = ((), {"x": x}) if by_name else ((x,), {})
    with pytest.warns(shorthaul.FallbackWarning, match="an argument is of `Labelled`"):
        shorthaul.module(Loop())(*args, **kwargs)
    with pytest.raises(shorthaul.CaptureError, match="an argument is of `Labelled`"):
        shorthaul.module(Loop(), fallback="error")(*args, **kwargs)


class Centered(nn.Module):
    """A running mean that gets other memory in each step, as in losses of self-distillation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("center", torch.zeros(4))

    @torch.no_grad()
    def update(self, y):
        self.center.data = 0.9 * self.center + 0.1 * y.mean(0)

    def forward(self, x):
        y = self.layer(x)
        scores = (y - self.center).softmax(-1)
        self.update(y)
        return scores


def test_python_runs_an_assignment_to_data_and_nothing_else():
    eager = Centered()
    model, x = shorthaul.module(copy.deepcopy(eager)), torch.randn(3, 4)
    with pytest.warns(shorthaul.FallbackWarning) as said:
        model(x), eager(x)
    assert [str(w.message).endswith("(assignment to `.data`)") for w in said] == [True]
    for _ in range(2):
        with torch.profiler.profile() as profile:
            found = model(x)
        names = {event.name for event in profile.events()}
        assert any(name.startswith("shorthaul forward") for name in names)
        assert not names & {"aten::addmm", "aten::_softmax", "aten::mean"}
        expected = eager(x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model.center, eager.center)
        for one, scores in ((model, found), (eager, expected)):
            one.zero_grad()
            (scores * scores).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, eager.layer.weight.grad)


class Checked(nn.Module):
    """Asks for types as code does that is also meant for TorchScript."""

    def forward(self, x, scale):
        if torch.jit.isinstance(scale, str):
            return x.exp() if scale == "exp" else x.tanh()
        if torch.jit.isinstance(scale, bool):
            return x.sin() if scale else x.cos()
        return x * scale if torch.jit.isinstance(x, torch.Tensor) else None


def test_type_checks_of_torchscript_do_not_break_the_graph():
    compiled, x = shorthaul.module(Checked(), fallback="error"), torch.randn(3)
    for scale in ("exp", "tanh", True, False, 3.0):
        torch.testing.assert_close(compiled(x, scale), Checked()(x, scale))


class ReadsData(nn.Module):
    """Reads ``.data``, as code from before PyTorch 0.4 does, of an input, a weight and a result."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        n, _ = x.data.shape
        y = self.layer(x)
        largest = y.data.abs().max(1, keepdim=True)[0]
        return (y / largest).sum() / n + (self.layer.weight.data[0] * y).mean()


def test_reads_of_data_are_compiled():
    torch.manual_seed(0)
    eager = ReadsData()
    compiled = shorthaul.module(copy.deepcopy(eager), fallback="error")
    given = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
    given[1].data = given[0].data.clone()
    for model, x in zip((eager, compiled), given, strict=True):
        model(x).backward()
    torch.testing.assert_close(given[1].grad, given[0].grad)
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
