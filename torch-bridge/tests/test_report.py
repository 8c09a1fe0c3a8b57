"""``shorthaul.report`` gives the compiler's numbers."""

import pytest
import shorthaul
import torch
from torch import nn


def test_training_step_in_numbers():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
    report = shorthaul.report(model, torch.randn(32, 64))
    stages = {kernel["stage"] for kernel in report.data["kernels"]}
    assert stages == {"forward", "backward"}
    # Three products for the second layer, two for the first: nobody wants the input's gradient.
    products = 2 * 32 * (3 * 128 * 8 + 2 * 64 * 128)
    assert report.data["operations"] >= products
    assert report.data["bytes_moved"] >= report.data["bytes_least"] > 0
    assert "the least possible is" in str(report)


def test_inference_has_no_backward():
    with torch.no_grad():
        report = shorthaul.report(nn.Linear(4, 4), torch.randn(2, 4))
    assert {kernel["stage"] for kernel in report.data["kernels"]} == {"forward"}
    assert report.data["memory"]["saved_bytes"] == 0


class WritesBetween(nn.Module):
    """Python runs between two parts, and writes into what the first one gives."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        x[x.detach().sum(-1) > 0] = self.first.bias
        return self.second(x)


def test_parts_of_a_model_that_writes_between_them():
    with pytest.warns(shorthaul.FallbackWarning):
        report = shorthaul.report(WritesBetween(), torch.randn(8, 4))
    modules = {decision["module"] for decision in report.data["decisions"]}
    origins = {kernel["origin"] for kernel in report.data["kernels"]}
    assert {"first", "second"} <= modules | {word for o in origins for word in str(o).split()}


def test_decisions_that_no_kernel_carries_out_are_undone():
    # The data gradient of a strided convolution is written in phases, so the ReLU's gradient cannot
    # be its epilogue, nor the sum for the bias.
    first, second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 32, 1, stride=2)
    model = nn.Sequential(first, nn.ReLU(), second)
    report = shorthaul.report(model, torch.randn(4, 16, 32, 32))
    undone = report.data["undone"]
    assert [(one["rewrite"], one["reason"]) for one in undone] == 2 * [("epilogue", "blocks")]
    assert all(one["sentence"] in str(report) for one in undone)
    decisions = report.data["decisions"]
    rows = [row for row in decisions if "this was undone" in row["sentence"]]
    assert not any(row["applied"] for row in rows)
    assert [row["bytes"] for row in rows] == [one["bytes"] for one in undone]
    saved = sum(row["bytes"] for row in decisions if row["applied"])
    assert saved == report.data["bytes_saved"]


def test_a_small_step_says_why_it_runs_on_one_thread():
    n_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        small = shorthaul.report(nn.Linear(4, 4), torch.randn(2, 4)).data["one_thread"]
        large = shorthaul.report(nn.Linear(512, 512), torch.randn(1024, 512)).data["one_thread"]
    finally:
        torch.set_num_threads(n_threads)
    [why] = small
    assert why["program"] == 0 and why["n_threads"] == 2
    assert why["saved_us"] <= why["waited_us"]
    assert large == []
