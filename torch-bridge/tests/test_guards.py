"""A program is used again only while what Python gave it at capture still holds."""

import gc
import random
import subprocess
import sys
import warnings
import weakref

import pytest
import shorthaul
import torch
from shorthaul._pytorch_version import VERSION
from shorthaul.module import runner_of
from torch import nn


class Scaled(nn.Module):
    """A linear map times an attribute that users change."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self._temperature = 2.0
        self.table = torch.arange(4.0)

    def forward(self, x):
        return self.fc(x) * self._temperature + self.table


def test_a_changed_number_is_seen():
    module = Scaled()
    compiled, x = shorthaul.module(module), torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), module(x))
    module._temperature = 5.0
    with pytest.warns(shorthaul.RecompileWarning, match="_temperature"):
        torch.testing.assert_close(compiled(x), module(x))
    module._temperature = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the first program serves again
        torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_a_changed_plain_tensor_is_seen():
    module = Scaled()
    compiled, x = shorthaul.module(module), torch.randn(3, 4)
    compiled(x)
    module.table.add_(1)
    torch.testing.assert_close(compiled(x), module(x))
    module.table = torch.zeros(4)
    torch.testing.assert_close(compiled(x), module(x))


def test_dropout_probability_is_an_attribute():
    module = nn.Sequential(nn.Dropout(0.5)).train()
    compiled, x = shorthaul.module(module), torch.ones(64)
    assert (compiled(x) == 0).any()
    module[0].p = 0.0
    with pytest.warns(shorthaul.RecompileWarning):
        assert torch.equal(compiled(x), x)


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_a_parameter_that_was_none_is_seen():
    module = nn.Sequential(nn.Linear(4, 3, bias=False))
    compiled, x = shorthaul.module(module), torch.randn(2, 4)
    compiled(x)
    module[0].bias = nn.Parameter(torch.randn(3))
    out = compiled(x)
    torch.testing.assert_close(out, module(x))
    out.sum().backward()
    assert torch.equal(module[0].bias.grad, torch.full((3,), 2.0))


class Counting(nn.Module):
    """Changes its own attribute in forward."""

    def __init__(self):
        super().__init__()
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return x * 2


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_state_that_forward_changes_changes():
    module = Counting()
    compiled, x = shorthaul.module(module), torch.ones(2)
    for n_calls in range(1, 5):
        assert compiled(x).tolist() == [2.0, 2.0]
        assert module.n_calls == n_calls


def test_modules_that_do_not_read_an_attribute_do_not_depend_on_it():
    module = Scaled()
    compiled, x = shorthaul.module(module), torch.randn(3, 4)
    module.steps = 0
    compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.steps += 1
        compiled(x)


def test_programs_beyond_the_bound_are_not_made():
    module = shorthaul.module(nn.Sequential(nn.Linear(4, 4)), max_programs=1)
    module(torch.randn(1, 4))
    with pytest.warns(shorthaul.RecompileWarning, match="already has 1 programs"):
        module(torch.randn(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in range(3, 9):
            module(torch.randn(batch, 4))
    assert runner_of(module).compiler.n_programs.total() == 1


class _InParts(nn.Module):
    """Python runs between three parts."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        """Layers, with a look at the values behind each."""
        x = self.first(x).tanh()
        if x.sum() > 1000:
            return x
        x = self.second(x).tanh()
        if x.sum() > 1000:
            return x
        return self.third(x).tanh()


def test_the_bound_counts_programs_of_each_part():
    module = shorthaul.module(_InParts(), max_programs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shorthaul.FallbackWarning)
        warnings.filterwarnings("error", "a part of")
        for batch in (2, 3):
            module(torch.randn(batch, 4)).sum().backward()
    assert runner_of(module).compiler.n_programs.total() >= 6


class Classy(nn.Module):
    """Reads an attribute of its class."""

    scale = 2.0

    def forward(self, x):
        return x * self.scale


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_an_attribute_that_hides_its_class_s_is_seen():
    module, x = Classy(), torch.ones(2)
    compiled = shorthaul.module(module)
    assert compiled(x).tolist() == [2.0, 2.0]
    module.scale = 3.0
    assert compiled(x).tolist() == [3.0, 3.0]


def _times(x, factor=2.0):
    return x * factor


class Defaulted(nn.Module):
    """Reads a default of a function."""

    def forward(self, x):
        return _times(x)


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_a_changed_default_is_seen_whatever_dynamo_may_skip(monkeypatch):
    names = ("skip_guards_on_constant_func_defaults", "use_recursive_dict_tags_for_guards")
    settings = {name: True for name in names if hasattr(torch._dynamo.config, name)}
    x = torch.ones(2)
    with torch._dynamo.config.patch(**settings):
        compiled = shorthaul.module(Defaulted())
        assert compiled(x).tolist() == [2.0, 2.0]
        monkeypatch.setattr(_times, "__defaults__", (3.0,))
        assert compiled(x).tolist() == [3.0, 3.0]


def test_a_module_that_nobody_holds_is_freed():
    module = shorthaul.module(nn.Sequential(nn.Linear(4, 4)))
    module(torch.randn(2, 4)).sum().backward()
    parameter, alive = weakref.ref(module[0].weight), weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None and parameter() is None


class Shrunk(nn.Module):
    """Draws a number in Python."""

    def forward(self, x):
        return x * random.random()


def test_a_whole_graph_with_a_random_number_is_right_or_an_error():
    compiled, x = shorthaul.module(Shrunk(), fullgraph=True), torch.ones(3)
    if VERSION < (2, 15):  # Its tracer gives the number another type than the call.
        reasons = "the graph would read it as another type|how to trace the builtin"
        with pytest.raises(Exception, match=reasons):
            compiled(x)
        return
    random.seed(1)
    found = [compiled(x) for _ in range(3)]
    random.seed(1)
    for result in found:
        torch.testing.assert_close(result, x * random.random())


@pytest.mark.parametrize("name", ["torch.compile", "torch._dynamo.optimize"])
def test_the_first_trace_of_a_process_is_guarded(name):
    program = """
import numpy, torch
def loss(x):
    return x.sum() * numpy.sqrt(2)
"""
    if name == "torch.compile":
        program += "compiled = torch.compile(loss, backend='shorthaul')\n"
    else:
        program += "import shorthaul\ncompiled = torch._dynamo.optimize('shorthaul')(loss)\n"
    program += "print(compiled(torch.ones(3)).dtype)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "torch.float32"
