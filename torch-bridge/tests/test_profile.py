"""``shorthaul.profile``: every launch is counted once, by the kernel that it belongs to."""

import json
import os
import subprocess
import sys

import pytest
import shorthaul
import torch
from against_eager import breaks_at_recurrent_layers
from shorthaul import _autograd, _limits
from torch import nn
from torch.profiler import ProfilerActivity

LIMITS = {"copy_gb_s": 10.0, "product_gflop_s": 100.0}


class Recurrent(nn.Module):
    """PyTorch runs the LSTM between two compiled parts; the second linear layer runs twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        # Layers with projections have no kernel.
        self.lstm = nn.LSTM(16, 20, batch_first=True, proj_size=16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        hidden, _ = self.lstm(self.norm(x))
        return self.head(hidden)


class Repeated(nn.Module):
    """Two calls of one compiled function make one program that runs twice."""

    def __init__(self):
        super().__init__()
        self.layer = shorthaul.module(nn.Linear(16, 16))

    @torch.compiler.disable
    def forward(self, x):
        return self.layer(self.layer(x))


@pytest.fixture(scope="module")
def encoder():
    """A measured transformer layer."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return shorthaul.profile(model, torch.randn(4, 16, 32), rounds=3, warmup=1, limits=LIMITS)


def test_kernels_add_up_to_their_passes(encoder):
    data = encoder.data
    kernels = data["kernels"]
    assert {kernel["stage"] for kernel in kernels} == {"forward", "backward"}
    assert all(kernel["seconds"] > 0 and kernel["calls"] == 1 for kernel in kernels)
    for part in ("seconds", "bytes_moved", "roofline_seconds"):
        by_module = sum(own[part] for own in data["modules"].values())
        assert by_module == pytest.approx(sum(kernel[part] for kernel in kernels))
    assert 0 < data["kernel_seconds"] < data["step_seconds"]
    assert sum(kernel["bytes_moved"] for kernel in kernels) == data["bytes_moved"]


def test_launches_belong_to_the_kernels_that_the_report_says(encoder):
    for one in encoder._step.passes:
        kernels = [kernel for kernel in encoder.data["kernels"] if kernel["program"] == one.program]
        assert len(one.kernels) == len(one.timed.launches)
        assert one.kernels == sorted(one.kernels)
        for at in set(one.kernels):
            assert kernels[at]["stage"] == one.timed.stage
            assert one.kernels.count(at) == kernels[at]["launches"]
        own = {i for i, kernel in enumerate(kernels) if kernel["stage"] == one.timed.stage}
        assert own == set(one.kernels)


def test_operators_and_containers_say_the_same_as_origins_and_bytes(encoder):
    sizes = {container["name"]: container["bytes"] for container in encoder.data["containers"]}
    n_whole = 0
    for kernel in encoder.data["kernels"]:
        nodes = dict.fromkeys(operator["node"] for operator in kernel["operators"])
        assert kernel["origin"].startswith("+".join(nodes))
        # Parts of the packed weights of query, key and value are slices.
        whole = [sum(sizes[name] for name in kernel[key]) for key in ("reads", "writes")]
        assert 0 <= kernel["bytes_read"] <= whole[0] and 0 < kernel["bytes_written"] <= whole[1]
        n_whole += whole == [kernel["bytes_read"], kernel["bytes_written"]]
    assert len(encoder.data["kernels"]) > n_whole > len(encoder.data["kernels"]) // 2
    assert {"linear1", "linear2", "norm1", "norm2", "self_attn"} <= encoder.data["modules"].keys()
    saved = [c for c in encoder.data["containers"] if c["role"] == "saved"]
    assert saved and all(container["title"] == container["name"] for container in saved)
    inputs = {c["title"] for c in encoder.data["containers"] if c["role"] == "input"}
    assert "linear1.weight" in inputs


def test_rates_and_bounds_come_from_the_limits(encoder):
    for kernel in encoder.data["kernels"]:
        moved, computed = kernel["bytes_moved"] / 10e9, kernel["operations"] / 100e9
        assert kernel["roofline_seconds"] == pytest.approx(max(moved, computed))
        assert kernel["gb_s"] == pytest.approx(kernel["bytes_moved"] / kernel["seconds"] / 1e9)
        bound = kernel["roofline_seconds"]
        assert kernel["distance"] == pytest.approx(kernel["seconds"] / bound)
        # MUE: the bytes that must move, per second, of what a copy moves.
        assert ("mue" in kernel) == ("bound" in kernel)
        if "bound" in kernel:
            least = kernel["calls"] * kernel["bound"]["compulsory_bytes"]
            assert kernel["mue"] == pytest.approx(100 * least / kernel["seconds"] / 10e9)
    of_step = encoder.data["bytes_least"] / encoder.data["kernel_seconds"] / 10e9
    assert encoder.data["mue"] == pytest.approx(100 * of_step)


def test_slow_kernels_are_those_far_from_the_limits(encoder):
    whole = encoder.data["kernel_seconds"]
    slow = {
        (kernel["program"], kernel["name"])
        for kernel in encoder.data["kernels"]
        if kernel["seconds"] > max(5 * kernel["roofline_seconds"], 0.01 * whole, 20e-6)
    }
    found = encoder.data["slow"]
    assert {(kernel["program"], kernel["kernel"]) for kernel in found} == slow
    assert all("measured" in kernel["sentence"] for kernel in found)
    for kernel in found[:5]:
        assert f"slow: {kernel['sentence']}" in str(encoder)


BF16 = """
import json, shorthaul, torch
limits = {"copy_gb_s": 1e9, "product_gflop_s": 1.0, "pair_gflop_s": 10.0}
model, x = torch.nn.Linear(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
found = shorthaul.profile(model, x, rounds=1, warmup=0, limits=limits)
print(json.dumps(found.data["kernels"]))
"""


def test_products_in_bf16_have_a_limit_of_their_own():
    # The instructions are chosen once in a process; these run on every CPU.
    environment = os.environ | {"SHORTHAUL_PAIRS": "plain"}
    run = subprocess.run(
        [sys.executable, "-c", BF16], env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    kernels = json.loads(run.stdout)
    assert "bf16" in [kernel.get("products") for kernel in kernels]
    for kernel in kernels:
        rate = kernel["calls"] * kernel["operations"] / kernel["roofline_seconds"] / 1e9
        assert rate == pytest.approx(10 if kernel.get("products") == "bf16" else 1), kernel


def test_text_is_sorted_by_time(encoder):
    lines = str(encoder).splitlines()
    table = lines[1 : lines.index("")]
    times = [float(line.split()[0]) for line in table]
    assert times == sorted(times, reverse=True) and len(times) == len(encoder.data["kernels"])
    assert "PyTorch and Python between the kernels take" in str(encoder)
    assert any(line.endswith("  linear1") for line in lines)


def test_trace_is_json_with_launches_in_order(encoder, tmp_path):
    encoder.trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    (step,) = (event for event in spans if event["tid"] == tracks["step"])
    for event in spans:
        assert event["ts"] >= 0 and event["ts"] + event["dur"] <= step["dur"] * (1 + 1e-9)
    launches = [event for event in spans if event["tid"] == tracks["kernels"]]
    n_launches = sum(kernel["launches"] for kernel in encoder.data["kernels"])
    assert len(launches) == n_launches
    for before, after in zip(launches, launches[1:], strict=False):
        assert after["ts"] >= before["ts"] + before["dur"] - 1e-6
    regions = [event["name"] for event in spans if event["tid"] == tracks["regions"]]
    title = "TransformerEncoderLayer, self_attn … norm2"
    assert regions == [f"forward: {title}", f"backward: {title}"]


@breaks_at_recurrent_layers
def test_pytorchs_part_lies_outside_the_kernels():
    with pytest.warns(shorthaul.FallbackWarning):
        found = shorthaul.profile(
            Recurrent(), torch.randn(4, 64, 16), rounds=3, warmup=1, limits=LIMITS
        )
    assert {kernel["program"] for kernel in found.data["kernels"]} == {0, 1}
    assert found.data["outside_seconds"] > 0
    # LSTM's time is in no module: nothing of it ran in our kernels.
    assert "lstm" not in found.data["modules"]


def test_a_program_that_runs_twice_is_listed_once():
    x = torch.randn(8, 16, requires_grad=True)
    found = shorthaul.profile(Repeated(), x, rounds=2, warmup=1, limits=LIMITS)
    report = shorthaul.report(nn.Linear(16, 16), x)
    assert {kernel["calls"] for kernel in found.data["kernels"]} == {2}
    forward = [k for k in found.data["kernels"] if k["stage"] == "forward"]
    expected = [k for k in report.data["kernels"] if k["stage"] == "forward"]
    assert len(forward) == len(expected)
    assert forward[0]["bytes_moved"] == 2 * (
        expected[0]["bytes_read"] + expected[0]["bytes_written"]
    )


def test_nothing_of_the_model_changes():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    shorthaul.profile(model, torch.randn(16, 8), rounds=2, warmup=1, limits=LIMITS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8)) and model[0].bias.grad is None
    torch.randn(16, 8)
    assert not torch.equal(torch.get_rng_state(), state)
    assert _autograd.timings is None


def test_inference_and_a_loss():
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    with torch.no_grad():
        forward = shorthaul.profile(model, x, rounds=1, warmup=0, limits=LIMITS)
    assert {kernel["stage"] for kernel in forward.data["kernels"]} == {"forward"}
    seen = []

    def loss(result):
        seen.append(result.shape)
        return result.square().sum()

    both = shorthaul.profile(model, x, rounds=2, warmup=1, loss=loss, limits=LIMITS)
    assert {kernel["stage"] for kernel in both.data["kernels"]} == {"forward", "backward"}
    assert seen == [(16, 4)] * 3


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="`rounds` is at least 1"):
        shorthaul.profile(nn.Linear(4, 4), torch.randn(2, 4), rounds=0)
    emulated = shorthaul.module(nn.Linear(4, 4), backend="cuda-emulated")
    with pytest.raises(ValueError, match="emulated kernels are not timed"):
        shorthaul.profile(emulated, torch.randn(2, 4), limits=LIMITS)


def test_limits_are_measured_and_threads_stay():
    threads = torch.get_num_threads()
    found = _limits.limits(1, copied=1 << 16, side=64, seconds=0.01)
    assert found["copy_gb_s"] > 0 and found["product_gflop_s"] > 0
    assert torch.get_num_threads() == threads
    assert _limits.roofline_s(20e9, 1, LIMITS) == pytest.approx(2.0)
    assert _limits.roofline_s(1, 300e9, LIMITS) == pytest.approx(3.0)


def test_passes_are_ranges_of_torch_profiler(tmp_path):
    model, x = shorthaul.module(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), torch.randn(4, 8)
    model(x).sum().backward()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(x).sum().backward()
    ranges = [event.key for event in recorded.key_averages() if event.key.startswith("shorthaul ")]
    assert sorted(ranges) == [
        "shorthaul backward: Sequential, 0 … 1",
        "shorthaul forward: Sequential, 0 … 1",
    ]
