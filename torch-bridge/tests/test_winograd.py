"""Winograd convolutions: numbers in whole steps, and who decides about it."""

import copy
import os
import subprocess
import sys

import shorthaul
import torch
from torch import nn


def network() -> nn.Module:
    """Padded and unpadded convolutions, whose neighbours join their kernels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.SiLU(),
        nn.Conv2d(64, 32, 3),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(3),
    )


def images() -> torch.Tensor:
    return torch.randn(3, 3, 21, 18, generator=torch.Generator().manual_seed(1))


def everywhere(blocking: str | None) -> shorthaul.Recipe:
    """A recipe that asks for this blocking of every contraction; ``None``: for what was chosen."""
    recipe = shorthaul.recipe(network(), images())
    for decision in [d for d in recipe.decisions if d.kind == "blocking"]:
        recipe = recipe.cut(decision, blocking or decision.blocking)
    return recipe


def paths(recipe: shorthaul.Recipe | None) -> list[str]:
    model = shorthaul.module(network(), recipe=recipe)
    kernels = shorthaul.report(model, images()).data["kernels"]
    return [kernel["path"] for kernel in kernels if kernel["path"].startswith("winograd")]


def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


def test_steps_are_as_close_to_float64_as_eagers():
    recipe = everywhere("winograd")
    assert paths(recipe)
    model, x = network(), images()
    found = gradients(shorthaul.module(copy.deepcopy(model), recipe=recipe), x)
    eager = gradients(copy.deepcopy(model), x)
    exact = gradients(model.double(), x.double())
    for name, want in exact.items():
        error, usual = ((run[name] - want).norm() for run in (found, eager))
        # The bias before a batch norm has a gradient of nothing but rounding.
        floor = 1e-5 if name == "0.bias" else torch.finfo(torch.float32).eps * want.norm()
        assert error <= 2 * usual + floor, (name, error, usual)


def test_a_recipe_decides(monkeypatch):
    asked = paths(everywhere("winograd"))
    # Two convolutions with their gradients; the first has three channels.
    assert sorted(asked) == ["winograd"] * 4 + ["winograd, reduced"] * 2
    recipe = everywhere("winograd")
    first = next(d for d in recipe.decisions if d.kind == "blocking" and d.module == "0")
    assert any("winograd" in note for note in recipe.cut(first, "winograd").notes)
    monkeypatch.setenv("SHORTHAUL_WINOGRAD", "off")
    by_definition = everywhere(None)
    monkeypatch.delenv("SHORTHAUL_WINOGRAD")
    assert paths(by_definition) == []


CHOICES = """
import shorthaul, torch
from torch import nn
first, second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
net = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), nn.AdaptiveAvgPool2d(1))
report = shorthaul.report(net, torch.randn(8, 3, 56, 56))
print(sum(k["path"].startswith("winograd") for k in report.data["kernels"]))
"""


def chosen(value: str) -> subprocess.CompletedProcess:
    told = {**os.environ, "SHORTHAUL_WINOGRAD": value}
    return subprocess.run([sys.executable, "-c", CHOICES], env=told, capture_output=True, text=True)


def test_the_environment_decides():
    assert chosen("off").stdout.strip() == "0"
    assert int(chosen("on").stdout) > 0
    wrong = chosen("maybe")
    assert wrong.returncode and "SHORTHAUL_WINOGRAD is 'maybe', expected on or off" in wrong.stderr
