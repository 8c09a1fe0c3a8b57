"""The bench runs, says what it cannot measure, and its check compares with float64."""

import copy
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shorthaul
import torch
from shorthaul import _machine, _tune, bench
from shorthaul._tuning_database import Database
from shorthaul.bench import (
    accuracy,
    alone,
    jax_peer,
    onnxruntime_peer,
    options,
    separate,
    timing,
)
from shorthaul.bench.options import Setting, parse
from shorthaul.bench.variants import inputs_of, model_of, optimizer_of
from shorthaul.models import EXAMPLES, without_dropout
from torch import nn

QUICK = ["--rounds", "2", "--warmup", "1"]


@pytest.mark.parametrize("name", ["digits_cnn", "digits_transformer"])
def test_check_finds_no_difference(name, capsys):
    assert bench.main([name, "--check", "--batch", "16"]) == 0
    assert "0 beyond" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bf16", "autocast"])
def test_checks_are_of_the_type_that_is_asked_for(dtype, capsys):
    assert bench.main(["digits_cnn", "--check", "--batch", "16", "--dtype", dtype]) == 0
    assert f"digits_cnn, batch 16, {dtype}: " in capsys.readouterr().out
    checked = bench.check(EXAMPLES["digits_cnn"], 16, dtype=dtype)
    errors = {t["name"]: t["eager"] / t["scale"] for t in checked["tensors"]}
    # A rounding to bf16 is at most 2^-9 of a number, one to f32 at most 2^-24.
    assert 1e-5 < errors["output"] < 0.1


def test_checks_in_float64_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["digits_cnn", "--check", "--dtype", "f64"])
    assert "--check compares with f64" in capsys.readouterr().err


def test_check_fails_on_a_difference(monkeypatch, capsys):
    found = bench.check

    def worse(*arguments, **options):
        checked = found(*arguments, **options)
        return {**checked, "beyond": checked["tensors"][:1]}

    monkeypatch.setattr(bench, "check", worse)
    assert bench.main(["digits_cnn", "--check", "--batch", "4"]) == 1
    assert "1 beyond" in capsys.readouterr().out


def test_smooth_networks_have_no_relu():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU6(), nn.Linear(2, 2)))
    kinds = [
        type(child) for child in accuracy.smoothed(model).modules() if not list(child.children())
    ]
    assert kinds == [nn.SiLU, nn.SiLU, nn.Linear]


def test_measures_every_variant(tmp_path, capsys):
    path, drawn = tmp_path / "bench.json", tmp_path / "bench.html"
    arguments = ["digits_cnn", "--batch", "8", *QUICK, "--against", "eager"]
    assert bench.main([*arguments, "--json", str(path), "--html", str(drawn)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert list(result["variants"]) == ["shorthaul", "eager"]
    for entry in result["variants"].values():
        assert entry["median_ms"] > 0 and entry["first_step_s"] > 0 and entry["peak_bytes"] > 0
    assert result["best_peer"] == "eager" and result["n_parameters"] == 19_562
    found = result["ratios"]["eager"]
    assert found["low"] <= found["median"] <= found["high"]
    text = drawn.read_text()
    assert "digits_cnn" in text and text.count("<rect") == 4 and "http" not in _without_names(text)
    # The file can be compared with, and nothing is new.
    assert bench.main([*arguments, "--no-first-step", "--compare", str(path)]) == 0
    assert "of eager's time →" in capsys.readouterr().out


def _without_names(text):
    return text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("mode", ["forward", "step"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "autocast"])
def test_modes_and_types(mode, dtype, tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["digits_cnn", "--batch", "4,6", "--mode", mode, "--dtype", dtype, *QUICK]
    arguments += ["--optimizer", "sgd", "--against", "eager", "--no-first-step"]
    assert bench.main([*arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["results"]
    assert [r["batch"] for r in found] == [4, 6]
    assert {(r["mode"], r["dtype"]) for r in found} == {(mode, dtype)}
    assert "2 measurements" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["shorthaul", "eager"])
def test_a_step_updates_parameters_with_an_optimizer_of_its_own(variant):
    from shorthaul.bench.variants import model_of, optimizer_of

    setting = Setting("digits_cnn", 4, 2, mode="step", optimizer="sgd")
    model = model_of(setting)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizer_of(setting, variant, list(model.parameters()))
    assert isinstance(optimizer, shorthaul.optim.SGD) == (variant == "shorthaul")
    setting.example.loss(model(*setting.example.inputs(4))).backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_unknown_names_are_refused(capsys):
    for arguments, said in (
        (["digits_cnn", "--against", "tensorflow"], "not tensorflow"),
        (["no_such_network"], "there is no network no_such_network"),
        ([], "give the names of networks"),
        (["digits_cnn", "--batch", "0"], "at least 1"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert said in capsys.readouterr().err


def test_a_peer_that_fails_is_said_and_skipped(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no C++ compiler here\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    arguments = ["digits_cnn", "--batch", "4", *QUICK, "--no-first-step"]
    assert bench.main([*arguments, "--against", "eager,compile"]) == 0
    said = capsys.readouterr().out
    assert "skipped: RuntimeError: no C++ compiler here" in said and "best peer, eager" in said


def test_shorthaul_failing_is_a_failure(monkeypatch, capsys):
    def broken(*_, **__):
        raise shorthaul.CompileError("no kernels")

    monkeypatch.setattr(shorthaul, "module", broken)
    arguments = ["digits_cnn", "--batch", "4", *QUICK, "--no-first-step", "--against", "eager"]
    assert bench.main(arguments) == 1
    assert "skipped: CompileError: no kernels" in capsys.readouterr().out


def test_a_network_without_memory_is_said_and_skipped(monkeypatch, capsys):
    found = timing.stepper

    def full(setting, *arguments):
        if setting.name == "yolo_block":
            return lambda: torch.empty(1 << 60, dtype=torch.uint8)
        return found(setting, *arguments)

    monkeypatch.setattr(timing, "stepper", full)
    arguments = ["yolo_block", "digits_cnn", "--small", *QUICK, "--no-first-step"]
    assert bench.main(arguments) == 0
    said = capsys.readouterr().out
    assert "yolo_block, small" in said and "does not fit into memory" in said
    assert "digits_cnn" in said


def test_a_killed_network_is_said_and_skipped(monkeypatch, capsys):
    started = []

    def killed(command, **_):
        started.append(command)
        return subprocess.CompletedProcess(command, -signal.SIGKILL)

    monkeypatch.setattr(separate.subprocess, "run", killed)
    arguments = ["yolo_block", "digits_cnn", "--small", "--separate", "--plain-environment"]
    assert bench.main([*arguments, "--no-first-step"]) == 1
    said = capsys.readouterr().out
    assert said.count("skipped, the system killed the process, most likely because") == 2
    assert len(started) == 2, "the peers are not tried alone"


def test_options_that_separate_processes_would_drop_are_refused(capsys):
    for option in (["--predicted"], ["--recipes", "folder"]):
        with pytest.raises(SystemExit):
            bench.main(["lstm", "--separate", *option])
        assert "leave --separate out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--warmup"])
def test_counts_begin_with_one(option, capsys):
    with pytest.raises(SystemExit):
        bench.main(["lstm", option, "0"])
    assert "it must be at least 1" in capsys.readouterr().err


def test_rounds_alternate_and_ratios_are_of_pairs():
    order = []
    times = timing.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "b", "a"] and [len(t) for t in times.values()] == [2, 2]
    found = timing.ratio([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert found == {"median": 2.0, "low": 2.0, "high": 3.0}


def test_limits_are_what_a_step_is_held_against(tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["digits_cnn", "--batch", "4", *QUICK, "--no-first-step", "--against", "eager"]
    assert bench.main([*arguments, "--limits", "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    seconds = result["variants"]["shorthaul"]["median_ms"] / 1e3
    used, machine = result["used"], result["limits"]
    assert used["bytes_moved"] >= used["bytes_least"] > 0
    speed = used["bytes_moved"] / seconds / 1e9
    assert used["of_copy"] == pytest.approx(speed / machine["copy_gb_s"])
    assert 0 < used["of_product"] < 1
    assert "of the copy bandwidth" in capsys.readouterr().out


def test_networks_are_listed(capsys):
    assert bench.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "bert_large" in said and "335,174,458 parameters" in said


def test_networks_of_other_libraries(tmp_path, capsys):
    asked = tmp_path / "networks.txt"
    asked.write_text(
        "# two of them\ntorchvision:squeezenet1_1 --batch 1\ntransformers:bert # text\n"
    )
    names = [setting.name for setting in parse([f"@{asked}"]).settings]
    assert names == ["torchvision:squeezenet1_1", "transformers:bert"]
    assert bench.main(["torchvision:squeezenet1_1", "--batch", "1", "--report"]) == 0
    assert "kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torchvision:resnet51", "torchvision has no network resnet51"),
        ("transformers:bort", "transformers has no family bort"),
        ("keras:resnet50", "there is no library keras"),
    ],
)
def test_unknown_networks_of_other_libraries(name, said, capsys):
    with pytest.raises(SystemExit):
        parse([name])
    assert said in capsys.readouterr().err


def test_a_network_in_a_process_of_its_own(tmp_path):
    path = tmp_path / "bench.json"
    arguments = ["digits_cnn", "--batch", "4,6", "--against", "eager", "--no-first-step"]
    assert bench.main([*arguments, *QUICK, "--separate", "--json", str(path)]) == 0
    assert [r["batch"] for r in json.loads(path.read_text())["results"]] == [4, 6]


def test_networks_in_processes_of_their_own_share_the_one_that_measures_memory(
    tmp_path, monkeypatch
):
    start, started = alone.Processes._start, []

    def noted(self):
        started.append(self)
        start(self)

    monkeypatch.setattr(alone.Processes, "_start", noted)
    path = tmp_path / "bench.json"
    arguments = ["digits_cnn", "--batch", "4,6", "--against", "eager", "--separate"]
    assert bench.main([*arguments, *QUICK, "--json", str(path)]) == 0
    for result in json.loads(path.read_text())["results"]:
        own, eager = (result["variants"][name] for name in ("shorthaul", "eager"))
        assert own["warm_first_step"]["first_step_s"] > 0 and own["peak_bytes"] > 0
        assert eager["peak_bytes"] > 0 and "first_step_error" not in own | eager
    assert len(started) == 1


def test_a_process_that_measures_memory_starts_again_after_its_end():
    setting = Setting("digits_cnn", 4, 1)
    with alone.Processes() as processes:
        assert processes.alone(setting, "eager")["peak_bytes"] > 0
        processes._process.kill()
        with pytest.raises(RuntimeError, match="--serve` ended with signal 9"):
            processes.alone(setting, "eager")
        assert processes.alone(setting, "eager")["peak_bytes"] > 0


def test_a_peer_that_crashes_alone_too_is_left_out(monkeypatch, capsys):
    """PyTorch's channels_last crashes on a few networks."""
    setting = Setting("digits_cnn", 4, 1)
    asked = []

    def ended(command, **_):
        peers = command[command.index("--against") + 1].split(",")
        asked.append(peers)
        if "channels_last" in peers:
            return subprocess.CompletedProcess(command, -11)
        written = Path(command[command.index("--json") + 1])
        written.write_text(json.dumps({"results": [{"variants": {peers[0]: {"median_ms": 1.0}}}]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(separate.subprocess, "run", ended)
    monkeypatch.setattr(
        separate.alone, "crash", lambda _, peer: "signal 11" if peer == "channels_last" else None
    )
    asked_for = ["digits_cnn", "--against", "eager,channels_last", "--separate"]
    options = parse([*asked_for, "--no-first-step"])
    found, is_good = separate.run(setting, options, alone.Processes())
    assert is_good
    assert asked == [["eager", "channels_last"], ["eager"]]
    assert found[0]["variants"] == {
        "eager": {"median_ms": 1.0},
        "channels_last": {"error": "its process ends with signal 11"},
    }
    said = capsys.readouterr().out
    assert "the process ended with signal 11" in said
    assert (
        "channels_last also crashes without Shorthaul; measuring again without channels_last"
        in said
    )


#: The entries of AdamW's state that are moments of gradients.
MOMENTS = ("exp_avg", "exp_avg_sq")


def _small(name, mode="train"):
    setting = Setting(name, 2, len(os.sched_getaffinity(0)), mode=mode, small=True)
    return setting, without_dropout(model_of(setting)), inputs_of(setting)


@pytest.mark.parametrize("name", ["resnet50", "bert_large_layer", "llama_135m", "unet_2d", "dlrm"])
def test_the_peer_in_jax_computes_the_same_step(name):
    setting, model, inputs = _small(name)
    loss, gradients = jax_peer.stepper(setting, copy.deepcopy(model), inputs)()
    expected = setting.example.loss(model(*inputs))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    scale = max(p.grad.abs().max().item() for p in model.parameters())
    for parameter_name, parameter in model.named_parameters():
        found = gradients[f"model.{parameter_name}"]
        np.testing.assert_allclose(found, parameter.grad.numpy(), rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("name", ["resnet50", "bert_large_layer"])
def test_the_peer_in_onnx_runtime_computes_the_same_step(name):
    setting, model, inputs = _small(name)
    found = onnxruntime_peer.stepper(setting, copy.deepcopy(model), inputs)()
    expected = setting.example.loss(model(*inputs))
    expected.backward()
    np.testing.assert_allclose(found["loss"], expected.item(), rtol=1e-5)
    scale = max(p.grad.abs().max().item() for p in model.parameters())
    for parameter_name, parameter in model.named_parameters():
        gradient = found[f"model.{parameter_name}.grad"]
        np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("peer", [jax_peer, onnxruntime_peer])
def test_other_peers_infer_what_eager_does(peer):
    setting, model, inputs = _small("digits_cnn", "forward")
    found = peer.stepper(setting, model, inputs)()
    found = next(iter(found.values())) if isinstance(found, dict) else found
    with torch.no_grad():
        expected = model(*inputs).numpy()
    np.testing.assert_allclose(np.asarray(found).reshape(expected.shape), expected, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("peer", [jax_peer, onnxruntime_peer])
def test_other_peers_update_parameters_as_eager_does(peer, optimizer):
    setting, model, inputs = _small("digits_cnn", "step")
    setting = replace(setting, optimizer=optimizer)
    step = peer.stepper(setting, copy.deepcopy(model), inputs)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    updates = optimizer_of(setting, "eager", list(model.parameters()))
    for _ in range(3):
        found = step()
        updates.zero_grad()
        setting.example.loss(model(*inputs)).backward()
        updates.step()
    for name, parameter in model.named_parameters():
        if peer is jax_peer:
            value = np.asarray(found[1][f"model.{name}"])
        else:
            value = found[f"model.{name}.next"].numpy()
        change = (parameter.detach() - before[name]).numpy()
        difference = np.linalg.norm(value - before[name].numpy() - change)
        # AdamW divides by gradients, and those close to 0 are rounding errors.
        assert difference <= 0.02 * np.linalg.norm(change), name


def test_the_update_in_jax_is_pytorchs(monkeypatch):
    monkeypatch.setitem(options.OPTIMIZERS, "adamw", 0.1)
    parameter = nn.Parameter(torch.randn(32))
    updates = torch.optim.AdamW([parameter], lr=0.1)
    found = [jax_peer.to_jax(x) for x in (parameter, torch.zeros(32), torch.zeros(32))]
    for step in range(1, 6):
        parameter.grad = torch.randn(32)
        gradient = jax_peer.to_jax(parameter.grad)
        updates.step()
        found = jax_peer._adamw(found[0], gradient, found[1:], float(step))
    state = updates.state[parameter]
    for own, theirs in zip(found, (parameter, *(state[n] for n in MOMENTS)), strict=True):
        np.testing.assert_allclose(own, theirs.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["efficientnet_b0", "swin_t"])
def test_the_peer_in_jax_has_operators_of_random_depth_and_windows(name):
    setting, model, inputs = _small(name, "forward")
    exported = torch.export.export(model.train(), inputs, strict=False).run_decompositions()
    jax_peer.Translated(exported)


def test_other_peers_say_what_they_cannot_measure():
    for peer in (jax_peer, onnxruntime_peer):
        setting, model, inputs = _small("digits_cnn")
        with pytest.raises(RuntimeError, match="computes in f32"):
            peer.stepper(replace(setting, dtype="f64"), model, inputs)
    with pytest.raises(RuntimeError, match="cannot compute a network's own loss"):
        onnxruntime_peer.stepper(*_small("dlrm"))


def test_the_peer_in_jax_names_an_operator_that_it_lacks():
    class Sorted(nn.Module):
        def forward(self, x):
            return x.sort().values

    setting, _, inputs = _small("digits_cnn", "forward")
    with pytest.raises(RuntimeError, match=r"lacks aten\.sort\.default"):
        jax_peer.stepper(setting, Sorted(), inputs)


def test_limits_are_not_of_a_step_with_an_optimizer(capsys):
    with pytest.raises(SystemExit):
        parse(["digits_cnn", "--limits", "--mode", "step"])
    assert "--limits does not count the optimizer" in capsys.readouterr().err


def test_recipes_are_made_and_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shorthaul, "machine", _machine.assumed)
    monkeypatch.setattr(_tune, "Database", lambda: Database(tmp_path / "tuning.json"))
    arguments = ["digits_cnn", "--small", "--threads", "1", "--recipes", str(tmp_path)]
    assert bench.main([*arguments, "--rounds", "2"]) == 1
    assert "there is no" in capsys.readouterr().out
    assert bench.main([*arguments, "--tune", "1", "--json", str(tmp_path / "made.json")]) == 0
    (recipe,) = tmp_path.glob("digits_cnn-*-small.toml")
    assert shorthaul.Recipe.load(recipe).programs[0].training
    (made,) = json.loads((tmp_path / "made.json").read_text())["results"]
    assert made["layouts"][0]["n_containers"] > 0 and made["recipe"] == str(recipe)
    assert bench.main([*arguments, "--rounds", "3", "--json", str(tmp_path / "with.json")]) == 0
    assert "of the time (95 % interval" in capsys.readouterr().out
    (compared,) = json.loads((tmp_path / "with.json").read_text())["results"]
    assert compared["ratio"]["low"] <= compared["ratio"]["median"] <= compared["ratio"]["high"]
    assert compared["ratio_again"]["median"] > 0


def test_tuning_needs_a_folder_for_recipes(capsys):
    with pytest.raises(SystemExit):
        bench.main(["digits_cnn", "--tune", "5"])
    assert "--recipes" in capsys.readouterr().err
