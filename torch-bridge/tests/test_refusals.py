"""What cannot be compiled is refused in one clear sentence that names the place."""

import os
import subprocess
import sys

import numpy as np
import pytest
import shorthaul
import torch
from torch import nn


class Branching(nn.Module):
    """Lets a value decide."""

    def __init__(self):
        super().__init__()
        self.inner = BranchingInner()

    def forward(self, x):
        return self.inner(x)


class BranchingInner(nn.Module):
    """The place that is to be named."""

    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x


def test_data_dependent_control_flow_names_the_place():
    with pytest.raises(
        shorthaul.CaptureError,
        match=r"(?s)`inner` at .*test_refusals.py:\d+: `if x.sum\(\) > 0:`.*torch.where",
    ):
        shorthaul.module(Branching())(torch.randn(3))


def test_fallback_to_eager_is_said_aloud():
    compiled = shorthaul.module(Branching(), fallback="eager")
    x = torch.ones(3)
    with pytest.warns(shorthaul.RecompileWarning, match="runs through PyTorch"):
        y = compiled(x)
    assert torch.equal(y, x * 2)


def test_wrong_dtype_at_call_time():
    compiled = shorthaul.module(nn.Linear(4, 2))
    compiled(torch.randn(3, 4))
    with (
        pytest.raises(
            shorthaul.InputError, match=r"given float64\[3, 4\]; before.*float32\[3, 4\]"
        ),
        pytest.warns(),
    ):
        compiled(torch.randn(3, 4, dtype=torch.float64))


class LookUps(nn.Module):
    """An embedding and a loss, whose indices come from the caller."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens, labels):
        scores = self.table(tokens.view(-1))
        return nn.functional.cross_entropy(scores, labels)


@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        ([0, 5], [0, 1], r"`tokens` holds 5, but aten.embedding.default in `table` takes 0 to 4"),
        ([-1, 4], [0, 1], r"`tokens` holds -1"),
        ([0, 4], [3, -100], r"`labels` holds 3, but .*cross_entropy.* takes 0 to 2 or -100"),
    ],
)
def test_indices_out_of_range(tokens, labels, message):
    compiled = shorthaul.module(LookUps())
    good = torch.tensor([0, 4]), torch.tensor([2, -100])
    expected = compiled(*good)
    with pytest.raises(shorthaul.OutOfRange, match=message):
        compiled(torch.tensor(tokens), torch.tensor(labels))
    with pytest.raises(IndexError):
        compiled(torch.tensor(tokens), torch.tensor(labels))
    assert torch.equal(compiled(*good), expected)


def test_indices_from_the_end_are_in_range():
    class Picked(nn.Module):
        """Plain indexing."""

        def forward(self, x, i):
            return x[:, i]

    x = torch.randn(2, 4)
    compiled = shorthaul.module(Picked())
    assert torch.equal(compiled(x, torch.tensor([-4, 3])), x[:, [-4, 3]])
    with pytest.raises(shorthaul.OutOfRange, match="holds -5, but .* takes -4 to 3"):
        compiled(x, torch.tensor([-5, 3]))


def test_wrong_shape_at_call_time():
    compiled = shorthaul.module(nn.Linear(4, 2))
    compiled(torch.randn(3, 4))
    with (
        pytest.raises(
            shorthaul.InputError, match=r"given float32\[3, 5\]; before.*float32\[3, 4\]"
        ),
        pytest.warns(),
    ):
        compiled(torch.randn(3, 5))


def test_arrays_are_refused():
    with pytest.raises(shorthaul.InputError, match="from_numpy"):
        shorthaul.module(nn.Linear(4, 2))(np.zeros((3, 4)))


def test_other_devices_are_refused():
    with pytest.raises(shorthaul.InputError, match="meta"):
        shorthaul.module(nn.Linear(4, 2))(torch.empty(3, 4, device="meta"))


def test_autocast_is_refused():
    compiled = shorthaul.module(nn.Linear(4, 2))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(shorthaul.CompileError, match="autocast"),
    ):
        compiled(torch.randn(3, 4))


def test_things_that_are_not_modules():
    with pytest.raises(TypeError, match="nn.Module"):
        shorthaul.module(torch.relu)
    with pytest.raises(ValueError, match="fallback"):
        shorthaul.module(nn.Linear(2, 2), fallback="silent")


class TwoMissing(nn.Module):
    """Two operators without an implementation, one of them twice."""

    def __init__(self):
        super().__init__()
        self.first = Products()
        self.second = Products()

    def forward(self, x):
        return torch.linalg.det(self.second(self.first(x)))


class Products(nn.Module):
    """The place that is to be named."""

    def forward(self, x):
        return x.cumprod(0)


def test_all_missing_operators_are_named_at_once():
    with pytest.raises(shorthaul.Unsupported) as caught:
        shorthaul.module(TwoMissing())(torch.eye(3))
    found = dict(caught.value.operators)
    places = next(places for target, places in found.items() if "cumprod" in target)
    assert [place.split()[0] for place in places] == ["first", "second"]
    assert all("test_refusals.py:" in place for place in places)
    assert any("det" in target for target in found)
    assert "cumprod" in str(caught.value) and "det" in str(caught.value)


def test_wrong_dtype_on_the_first_call():
    with pytest.raises(shorthaul.CaptureError, match="float64.*float32.*convert the input"):
        shorthaul.module(nn.Linear(4, 2))(torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_are_refused(dtype):
    model = nn.Linear(4, 2).to(dtype)
    with pytest.raises(shorthaul.CompileError, match="holds b?f16.*use f32"):
        shorthaul.module(model)(torch.randn(3, 4, dtype=dtype))


def run_alone(**environment):
    """A first call in a process of its own."""
    program = (
        "import torch, shorthaul\n"
        "y = shorthaul.module(torch.nn.Linear(4, 2))(torch.ones(3, 4))\n"
        "print('shape', tuple(y.shape))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_without_a_compiler(tmp_path):
    done = run_alone(SHORTHAUL_CC="/nonexistent", SHORTHAUL_CACHE_DIR=str(tmp_path))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "CompileError" in last and "SHORTHAUL_CC" in last and "/nonexistent" in last
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cache_folder_that_cannot_be_written(tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    done = run_alone(SHORTHAUL_CACHE_DIR=str(place))
    assert "shape (3, 2)" in done.stdout, done.stderr
    assert "Warning" in done.stderr and "SHORTHAUL_CACHE_DIR" in done.stderr
    assert place.read_text() == "not a folder"
