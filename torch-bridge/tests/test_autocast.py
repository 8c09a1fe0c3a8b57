"""Regions of ``torch.autocast`` that change nothing are dropped from a graph; all others stay."""

import warnings

import pytest
import shorthaul
import torch
from shorthaul._autocast import ENTER, EXIT, drop_idle_regions
from torch import fx, nn

#: Arguments with which Dynamo's graphs enter a region.
OFF = ("cpu", torch.bfloat16, False, True)
ON = ("cpu", torch.bfloat16, True, True)
CUDA_OFF = ("cuda", torch.float16, False, True)
CUDA_ON = ("cuda", torch.float16, True, True)


def left_of(*steps):
    """The steps that are left; one that enters a region is the region's arguments."""
    graph, opened = fx.Graph(), []
    x = graph.placeholder("x")
    for step in steps:
        if step == "exit":
            graph.call_function(EXIT, (opened.pop(),))
        elif step == "relu":
            x = graph.call_function(torch.relu, (x,))
        else:
            opened.append(graph.call_function(ENTER, step))
    graph.output(x)
    drop_idle_regions(graph)
    graph.lint()
    names = {EXIT: "exit", torch.relu: "relu"}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node.args if node.target is ENTER else names[node.target] for node in calls]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((OFF, "relu", "exit"), id="one"),
        pytest.param((CUDA_OFF, "relu", "exit"), id="another kind of device"),
        pytest.param((OFF, "exit", "relu"), id="without nodes"),
        pytest.param((OFF, OFF, "relu", "exit", "exit"), id="one in another"),
        pytest.param((OFF, CUDA_OFF, "relu", "exit", "exit"), id="of two kinds"),
    ],
)
def test_a_region_that_switches_off_what_is_off_is_dropped(steps):
    assert left_of(*steps) == ["relu"]


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((ON, "relu", "exit"), id="switches on"),
        pytest.param((ON, OFF, "relu", "exit", "exit"), id="switches off what is on around it"),
        pytest.param(
            (ON, OFF, OFF, "relu", "exit", "exit", "exit"), id="switches off what is on further out"
        ),
        pytest.param((OFF, ON, "relu", "exit", "exit"), id="has a region inside"),
        pytest.param((OFF, OFF, ON, "relu", "exit", "exit", "exit"), id="has one further inside"),
        pytest.param((OFF, CUDA_ON, "relu", "exit", "exit"), id="has one of another kind inside"),
        pytest.param((OFF, "relu"), id="does not end in the graph"),
    ],
)
def test_any_other_region_stays(steps):
    assert left_of(*steps) == list(steps)


def test_regions_are_judged_one_by_one():
    steps = (OFF, "relu", "exit", ON, "relu", "exit", OFF, "relu", "exit")
    assert left_of(*steps) == ["relu", ON, "relu", "exit", "relu"]
    # What is on for one kind of device is not on for another.
    inner = (ON, CUDA_OFF, "relu", "exit", "exit")
    assert left_of(*inner) == [ON, "relu", "exit"]
    # A region that is dropped keeps none around it.
    around = (OFF, "relu", OFF, "relu", "exit", "relu", "exit")
    assert left_of(*around) == ["relu"] * 3


def test_a_region_stays_where_autocast_is_on_when_the_graph_begins():
    steps = (OFF, "relu", "exit")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert left_of(*steps) == list(steps)
        assert left_of(CUDA_OFF, "relu", "exit") == ["relu"]
    assert left_of(*steps) == ["relu"]


def test_of_regions_that_cross_none_loses_the_end_of_another():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(ENTER, OFF) for _ in range(2))
    graph.call_function(EXIT, (first,))
    x = graph.call_function(torch.relu, (x,))
    graph.call_function(EXIT, (second,))
    graph.output(x)
    drop_idle_regions(graph)
    graph.lint()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [ENTER, EXIT, torch.relu]
    assert calls[1].args == (calls[0],)


class Inside(nn.Module):
    """Regions of which the one in the middle counts only if the one around it is on."""

    def __init__(self, is_on):
        super().__init__()
        self.linear, self.is_on = nn.Linear(4, 4), is_on

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.is_on):
            rounded = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                exact = self.linear(x)
        return rounded, exact


@pytest.mark.parametrize("is_on", [False, True])
def test_results_have_the_types_of_eager(is_on):
    model, x = Inside(is_on), torch.randn(2, 4)
    with warnings.catch_warnings():
        # PyTorch may run the regions that stay, which is not what this is about.
        warnings.simplefilter("ignore")
        found = shorthaul.module(model)(x)
    for own, expected in zip(found, model(x), strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected)
    assert found[0].dtype == (torch.bfloat16 if is_on else torch.float32)
    assert found[1].dtype == torch.float32
