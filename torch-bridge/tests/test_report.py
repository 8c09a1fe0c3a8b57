"""``shorthaul.report`` gives the compiler's numbers."""

import functools
import warnings

import pytest
import shorthaul
import torch
from against_eager import (
    assert_network_matches,
    breaks_at_recurrent_layers,
    compiles_recurrent_layers,
)
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


@pytest.mark.parametrize("dtype, expected", [(torch.float32, "f32"), (torch.float64, "f64")])
def test_products_say_the_type_that_they_multiply_and_loops_none(dtype, expected):
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)).to(dtype)
    with torch.no_grad():
        kernels = shorthaul.report(model, torch.randn(4, 8, dtype=dtype)).data["kernels"]
    assert {kernel.get("products") for kernel in kernels} == {expected, None}


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


class Spoken(nn.Module):
    """Rows of several lengths, a recurrent layer, and a loss over alignments."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(3, 8), nn.Linear(12, 5)
        self.layer = nn.LSTM(8, 6, bidirectional=True)

    def forward(self, x, lengths, targets, counts):
        x = self.before(x).tanh()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])
        scores = self.after(padded).log_softmax(-1)
        return nn.functional.ctc_loss(scores, targets, lengths, counts)


def spoken_inputs():
    lengths, counts = torch.tensor([5, 7, 4]), torch.tensor([2, 3, 1])
    return torch.randn(7, 3, 3), lengths, torch.randint(1, 5, (3, 3)), counts


@breaks_at_recurrent_layers
def test_what_runs_outside_of_the_kernels_is_listed_once():
    compiled, inputs = shorthaul.module(Spoken()), spoken_inputs()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(*inputs).backward()
        report = shorthaul.report(compiled, *inputs)
    found = report.data["outside"]
    assert len(set(found)) == len(found)
    assert all(f"outside of the kernels: {sentence}" in str(report) for sentence in found)
    for name in ("ctc_loss", "pack"):
        assert sum(name in sentence for sentence in found) == 1, found
    fallbacks = [str(w.message) for w in said if w.category is shorthaul.FallbackWarning]
    assert len(set(fallbacks)) == len(fallbacks) and set(fallbacks) <= set(found)
    # A layer without a compiled part before it breaks no graph that could say so.
    alone = shorthaul.report(
        Last(functools.partial(nn.LSTM, proj_size=4), 5), torch.randn(4, 2, 3)
    ).data["outside"]
    assert any("LSTM" in sentence for sentence in alone)


@compiles_recurrent_layers
def test_an_lstm_is_two_loops_over_time_and_nothing_runs_outside():
    found = shorthaul.report(Last(nn.LSTM, 4), torch.randn(4, 2, 3)).data
    assert found["outside"] == []
    loops = [k["stage"] for k in found["kernels"] if k["path"] == "loop over time"]
    assert sorted(loops) == ["backward", "forward"]


class Last(nn.Module):
    """A recurrent layer, and a linear one on its last step."""

    def __init__(self, kind, width):
        super().__init__()
        self.layer, self.head = kind(3, width), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x)[0][-1])


def test_packed_sequences_and_alignments_train_as_in_eager():
    assert_network_matches(Spoken(), *spoken_inputs())


def test_a_lookup_counts_its_rows_and_not_the_table():
    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(10_000, 64)
            self.norm = torch.nn.LayerNorm(64)

        def forward(self, x):
            return self.norm(self.table(x))

    kernels = shorthaul.report(Rows(), torch.randint(10_000, (32,))).data["kernels"]
    rows, table = 32 * 64 * 4, 10_000 * 64 * 4
    forward = [k for k in kernels if k["stage"] == "forward"]
    lookups = [k for k in forward if any("table" in r or "inputs" in r for r in k["reads"])]
    assert lookups and all(rows <= k["bytes_read"] < 3 * rows for k in lookups)
    # The gradient of the table has all of its elements.
    assert any(k["bytes_written"] >= table for k in kernels if k["stage"] == "backward")


class Gathered(nn.Module):
    """Many exponentials of each element: arithmetic takes far longer than moving the bytes."""

    def forward(self, x):
        y = x
        for _ in range(40):
            y = torch.erfinv(torch.tanh(y) * 0.5)
        return y


def test_kernels_far_from_the_limits_are_named():
    model, x = Gathered(), torch.randn(512, 1024, requires_grad=True)
    report = shorthaul.report(model, x)
    assert report.data["slow"]
    for kernel in report.data["slow"]:
        assert kernel["predicted_us"] > 5 * kernel["roofline_us"] and kernel["predicted_us"] > 20
        assert kernel["cause"] == "loops" and "operations of its loops" in kernel["sentence"]
        assert kernel["kernel"] in {k["name"] for k in report.data["kernels"]}
    times = [kernel["predicted_us"] for kernel in report.data["slow"]]
    assert times == sorted(times, reverse=True)
    assert f"slow: {report.data['slow'][0]['sentence']}" in str(report)
    assert "slow: " in report._repr_html_()


def test_a_fast_step_names_no_kernel():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    report = shorthaul.report(model, torch.randn(512, 512))
    assert report.data["slow"] == [] and "slow: " not in str(report)
