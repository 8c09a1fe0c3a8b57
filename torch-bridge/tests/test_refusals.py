"""What cannot be compiled is refused in one clear sentence that names the place."""

import contextlib
import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import shorthaul
import torch
from shorthaul.module import runner_of
from torch import nn


@contextlib.contextmanager
def ignored():
    """Inside, warnings are not what a test is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


def test_python_that_no_graph_holds_runs_between_regions_and_is_named():
    compiled = shorthaul.module(Branching())
    for sign in (1.0, -1.0):
        x = torch.full((3,), sign)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = compiled(x)
        assert torch.equal(y, x * 2 if sign > 0 else x)
        if sign > 0:
            place = r"at .*test_refusals.py:\d+: `if x.sum\(\) > 0:` \(a branch depends on a tensor"
            assert re.search(place, str(said[0].message))


def test_a_module_without_a_graph_is_pytorchs_and_is_named():
    model = shorthaul.module(nn.LSTM(4, 4, proj_size=2))
    with pytest.warns(shorthaul.FallbackWarning, match="PyTorch runs all of LSTM"):
        model(torch.randn(3, 2, 4))[0].sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(3, 2, 4))
        shorthaul.module(nn.Linear(4, 4))(torch.randn(2, 4))


def test_what_runs_outside_of_programs_can_be_an_error():
    strict = {"fallback": "error"}
    with pytest.raises(shorthaul.CaptureError, match=r"test_refusals.py:\d+: `if x.sum\(\) > 0:`"):
        shorthaul.module(Branching(), **strict)(torch.ones(3))
    with pytest.raises(shorthaul.CaptureError, match="PyTorch runs all of LSTM"), ignored():
        shorthaul.module(nn.LSTM(4, 4, proj_size=2), **strict)(torch.randn(3, 2, 4))
    mixed = nn.Sequential(nn.LSTM(4, 5, proj_size=4), First(), nn.Linear(4, 4))
    with pytest.raises(shorthaul.CaptureError, match="error because of"), ignored():
        shorthaul.module(mixed, **strict)(torch.randn(3, 2, 4))
    with pytest.raises(shorthaul.CaptureError, match=r"higher-order|torch.func"):
        shorthaul.module(Mapped(), **strict)(torch.ones(3))
    # Nothing here runs outside.
    linear = shorthaul.module(nn.Linear(4, 4), **strict)
    with torch.autocast("cpu"):
        linear(torch.randn(2, 4)).sum().backward()


class First(nn.Module):
    """What a recurrent layer gives for each step."""

    def forward(self, both):
        return both[0]


class Mapped(nn.Module):
    """A transform within autocast, which is PyTorch's."""

    def forward(self, x):
        with torch.autocast("cpu"):
            return torch.func.vmap(torch.sin)(x) * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"speed": 3},
            "backend='shorthaul' has no option speed; its options are backend, fallback",
        ),
        ({"fallback": "no"}, "fallback must be one of ('eager', 'error'), not 'no'"),
        ({"max_programs": "2"}, "max_programs must be a whole number of at least 1, not '2'"),
    ],
)
def test_options_of_torch_compile_that_are_wrong(options, said):
    torch._dynamo.reset()
    compiled = torch.compile(nn.Linear(4, 2), backend="shorthaul", options=options)
    with pytest.raises(ValueError) as caught:
        compiled(torch.randn(3, 4))
    assert str(caught.value).startswith(said) and "TORCHDYNAMO" not in str(caught.value)


def test_errors_of_torch_compile_are_shorthauls():
    torch._dynamo.reset()
    options = {"fallback": "error"}
    compiled = torch.compile(TwoMissing(), backend="shorthaul", options=options)
    with pytest.raises(shorthaul.Unsupported, match="matrix_exp") as caught:
        compiled(torch.eye(3))
    assert len(caught.value.operators) == 2 and "TORCHDYNAMO" not in str(caught.value)


def test_fullgraph_refuses_what_breaks_the_graph():
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)test_refusals.py"):
        shorthaul.module(Branching(), fullgraph=True)(torch.ones(3))


def test_wrong_dtype_is_eagers_error():
    compiled = shorthaul.module(nn.Linear(4, 2))
    compiled(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="must have the same dtype"), ignored():
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
        ([0, 5], [0, 1], r"`tokens` holds 5, but .* in `table` \(.*refusals.py:149\) takes 0 to 4"),
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


def test_wrong_shape_is_eagers_error():
    compiled = shorthaul.module(nn.Linear(4, 2))
    compiled(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="3x5 and 4x2") as caught, ignored():
        compiled(torch.randn(3, 5))
    assert "fake" not in str(caught.value) and caught.value.__context__ is None


def test_arrays_become_tensors():
    y = shorthaul.module(nn.Linear(4, 2))(np.ones((3, 4), np.float32))
    assert y.shape == (3, 2)


def test_autocast_casts_as_pytorch_does():
    model = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), ignored():
        found, expected = shorthaul.module(model)(x), model(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


class Wide(nn.Module):
    """Autocast, which is off, is switched off for a part."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            x = self.linear(x.float())
        return self.linear(x)


def test_switching_off_autocast_that_is_off_ends_no_region():
    model = shorthaul.module(Wide())
    model(torch.randn(2, 4)).sum().backward()
    assert not runner_of(model).compiler.outside
    with torch.autocast("cpu", dtype=torch.bfloat16), ignored():
        model(torch.randn(2, 4))
    assert any("autocast" in sentence for sentence in runner_of(model).compiler.outside)


def test_things_that_are_not_modules():
    with pytest.raises(TypeError, match="nn.Module"):
        shorthaul.module(torch.relu)
    with pytest.raises(ValueError, match="fallback"):
        shorthaul.module(nn.Linear(2, 2), fallback="silent")


class TwoMissing(nn.Module):
    """Two operators without an implementation, one of them twice."""

    def __init__(self):
        super().__init__()
        self.first = Exponential()
        self.second = Exponential()

    def forward(self, x):
        return torch.linalg.det(self.second(self.first(x)))


class Exponential(nn.Module):
    """The place that is to be named."""

    def forward(self, x):
        return torch.matrix_exp(x)


def test_all_missing_operators_are_named_at_once():
    with pytest.raises(shorthaul.Unsupported) as caught:
        shorthaul.module(TwoMissing(), fallback="error")(torch.eye(3))
    found = dict(caught.value.operators)
    places = next(places for target, places in found.items() if "matrix_exp" in target)
    assert [place.split()[0] for place in places] == ["first", "second"]
    assert all("test_refusals.py:" in place for place in places)
    assert any("det" in target for target in found)
    assert "matrix_exp" in str(caught.value) and "det" in str(caught.value)


def test_missing_operators_are_pytorchs_and_are_named():
    model = TwoMissing()
    compiled = shorthaul.module(model)
    x = torch.rand(3, 3, requires_grad=True)
    with pytest.warns(shorthaul.FallbackWarning, match="matrix_exp"):
        y = compiled(x)
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x)[0] for f in (compiled, model)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats(dtype):
    model = nn.Linear(4, 2).to(dtype)
    x = torch.randn(3, 4, dtype=dtype)
    with ignored():
        torch.testing.assert_close(shorthaul.module(model)(x), model(x))


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
    assert "ToolchainError" in last and "SHORTHAUL_CC" in last and "/nonexistent" in last
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_cache_folder_that_cannot_be_written(tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    done = run_alone(SHORTHAUL_CACHE_DIR=str(place))
    assert "shape (3, 2)" in done.stdout, done.stderr
    assert "Warning" in done.stderr and "SHORTHAUL_CACHE_DIR" in done.stderr
    assert place.read_text() == "not a folder"
