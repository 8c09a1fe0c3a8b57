"""What fails inside is said: defects, tracers without words, places that a PyTorch lacks."""

from __future__ import annotations

import functools
import io
import json
import logging
import random
import subprocess
import sys
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import shorthaul
import torch
from shorthaul import _dynamo, _dynamo_mends, _functional_graph, _native, _region
from shorthaul._changes import what_changed, why_broken
from shorthaul._errors import InternalError, first_line
from shorthaul._frames import FrameCompiler
from shorthaul._guard_names import as_written
from shorthaul._pytorch_version import VERSION
from shorthaul.module import runner_of
from torch import nn
from torch._dynamo.exc import InternalTorchDynamoError


class Rows(nn.Module):
    """A batch of any number of rows."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x):
        return self.inner(x).tanh()


def _check(model, network, rows: int) -> None:
    x = torch.randn(rows, 6)
    # A size that comes for the first time may run through PyTorch.
    for _ in range(2):
        torch.testing.assert_close(model(x), network(x))


class First:
    factor = 1.0


class Second:
    factor = 2.0


class Scaled(nn.Module):
    """A layer whose result follows from an argument and an attribute as well."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = 2.0
        self.kind, self.function = First(), torch.tanh

    def forward(self, x, shift=None):
        y = self.function(self.inner(x) * self.kind.factor) * self.scale
        return y if shift is None else y + shift


def _frozen(module):
    module.inner.weight.requires_grad_(False)
    return (torch.randn(3, 4),)


def _scaled(module):
    module.scale = 3.0
    return (torch.randn(3, 4),)


def _of_another_class(module):
    module.kind = Second()
    return (torch.randn(3, 4),)


def _with_another_function(module):
    module.function = torch.sigmoid
    return (torch.randn(3, 4),)


@pytest.mark.parametrize(
    "change, clause",
    [
        (lambda _: (torch.randn(5, 4),), "size 0 of `x` is 5 instead of 3"),
        (lambda _: (torch.randn(2, 3, 4),), "`x` has 3 dimensions instead of 2"),
        (
            lambda m: (m.double() and torch.randn(3, 4).double(),),
            "the type float64 instead of float32",
        ),
        (lambda _: (torch.randn(3, 4, requires_grad=True),), "`x` requires a gradient now"),
        (_frozen, "`self.inner.weight` requires no gradient any more"),
        (lambda _: (torch.randn(4, 3).t(),), "stride 0 of `x` is 1 instead of 4: its elements"),
        (lambda _: (torch.randn(3, 4),) * 2, "`shift` is no longer None ("),
        (_scaled, "`self.scale` is no longer 2.0 ("),
        (_of_another_class, "`self.kind` is no longer a `First` ("),
        (_with_another_function, "`self.function` is another function ("),
    ],
)
def test_a_new_compilation_says_what_changed(change, clause):
    module = Scaled()
    model = shorthaul.module(module)
    model(torch.randn(3, 4))
    with pytest.warns(shorthaul.RecompileWarning) as said:
        model(*change(module))
    assert any(clause in str(w.message) for w in said)


def test_a_new_compilation_says_which_mode_changed():
    model = shorthaul.module(Scaled())
    x = torch.randn(3, 4)
    model(x)
    with (
        pytest.warns(shorthaul.RecompileWarning, match="gradients are switched off"),
        torch.no_grad(),
    ):
        model(x)
    with pytest.warns(shorthaul.RecompileWarning, match="autocast is switched on"):
        with torch.autocast("cpu"):
            model(x)


def test_a_reason_of_a_form_that_is_not_known_is_passed_on():
    assert what_changed("3/1: something new").endswith("changed (PyTorch says: something new)")
    assert why_broken("Something new") == "Something new"
    leaked = "requires_grad_() intermediate leaked as output"
    assert why_broken(leaked) == "it returns a tensor on which it called `requires_grad_()`"


#: A model with a graph break, compiled by a backend, whose name comes first.
READING = """
import sys
import torch
class Reading(torch.nn.Module):
    def forward(self, x):
        scale = float(x.sum())
        return x * scale
if sys.argv[1] == "shorthaul":
    import shorthaul
    model = shorthaul.module(Reading())
else:
    model = torch.compile(Reading(), backend=sys.argv[1])
model(torch.ones(3))
"""


def test_a_break_is_said_in_plain_words_and_once():
    def said_by(backend: str) -> str:
        command = [sys.executable, "-c", READING, backend]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr

    ours = said_by("shorthaul")
    assert "(a tensor's value becomes a Python number)" in ours
    assert "capture_scalar_outputs" not in ours
    assert "capture_scalar_outputs" in said_by("eager")


class Drawing(nn.Module):
    """A branch at Python's random numbers, or at a tensor beside one."""

    def __init__(self, at_tensor: bool):
        super().__init__()
        self.at_tensor = at_tensor

    def forward(self, x):
        y = x * random.random()
        if y.sum() > 0 if self.at_tensor else random.random() < 0.5:
            y = y + 1
        return y * 2


@pytest.mark.parametrize(
    ("at_tensor", "what"), [(False, "a random number"), (True, "a tensor's values")]
)
def test_a_branch_at_a_random_number_is_said_as_one(at_tensor, what):
    with pytest.warns(shorthaul.FallbackWarning, match=f"a branch depends on {what}"):
        shorthaul.module(Drawing(at_tensor))(torch.ones(3))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("L['self']._modules['fc'].weight", "`self.fc.weight`"),
        ("___stack0", "an intermediate value"),
        ("___stack0[1].size()[0]", "`[1].shape[0]` of an intermediate value"),
        ("L['f'].__closure__[0].cell_contents", "a variable of a function around it"),
    ],
)
def test_values_have_the_names_of_their_owner(name, written):
    assert as_written(name) == written


def test_a_model_that_breaks_as_a_whole_says_why():
    model = shorthaul.module(nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.ReLU()))
    with pytest.warns(shorthaul.FallbackWarning, match="a tensor's value becomes a Python number"):
        model(torch.randn(3, 4))


def test_a_defect_that_leaves_a_model_to_pytorch_is_said_as_one(monkeypatch):
    def broken(*_args, **_more):
        raise InternalError("internal error after pass `fuse`: two writers; please report it")

    monkeypatch.setattr(_region, "compile_program", broken)
    network = Rows()
    model = shorthaul.module(network)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (4, 7, 9):
            _check(model, network, rows)
    defects = [str(w.message) for w in said if w.category is shorthaul.InternalErrorWarning]
    assert defects[0].startswith("Rows: PyTorch runs a part of it")
    assert all("two writers; please report it" in defect for defect in defects)
    assert any(w.category is shorthaul.FallbackWarning for w in said)


def test_a_defect_in_a_trace_with_symbolic_sizes_is_said_once(monkeypatch):
    compile_program = _region.compile_program

    def broken(captured, *args, **more):
        if captured.symbolic is not None:
            raise InternalError("internal error after pass `fuse`: two writers; please report it")
        return compile_program(captured, *args, **more)

    monkeypatch.setattr(_region, "compile_program", broken)
    network = Rows()
    model = shorthaul.module(network)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (4, 7, 9):
            _check(model, network, rows)
    (only,) = [str(w.message) for w in said if w.category is shorthaul.InternalErrorWarning]
    assert only.startswith("Rows, inner: each set of sizes is traced separately")
    assert "internal error after pass `fuse`: two writers; please report it" in only


def test_what_is_no_defect_is_in_the_log_alone(monkeypatch, caplog):
    compile_program = _region.compile_program

    def refuses(captured, *args, **more):
        if captured.symbolic is not None:
            raise shorthaul.CompileError("`x` has the sizes [8], which is more than 1 TiB")
        return compile_program(captured, *args, **more)

    monkeypatch.setattr(_region, "compile_program", refuses)
    caplog.set_level(logging.INFO, logger="shorthaul")
    network = Rows()
    model = shorthaul.module(network)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (4, 7):
            _check(model, network, rows)
    assert {w.category for w in said} <= {shorthaul.RecompileWarning}
    assert "traced separately: `x` has the sizes [8]" in caplog.text


def test_a_second_module_of_the_same_functions_is_compiled_for_the_first_time():
    def broken(x):
        x = x.relu()
        torch._dynamo.graph_break()
        return x + 1

    class Twice(nn.Module):
        def forward(self, x):
            return broken(x) * 2

    x = torch.randn(3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            network = Twice()
            assert torch.equal(shorthaul.module(network)(x), network(x))
    assert {w.category for w in said} == {shorthaul.FallbackWarning}


def test_a_panic_of_the_native_half_is_an_internal_error():
    x, y = ({"name": name, "shape": [2], "dtype": "float32"} for name in "xy")
    sine = {"name": "y", "target": "aten.sin.default", "args": {"self": {"ref": "x"}}}
    origin = {"module": "", "kind": "", "source": ""}
    document = {
        "version": 1,
        "symbols": [],
        "inputs": [{**x, "kind": "user", "target": None, "constant": None}],
        "nodes": [{**sine, "outputs": [y], "origin": origin}],
        "outputs": [{"kind": "user", "target": None, "value": "y"}],
    }
    with pytest.raises(_native.InternalFailure, match=r"internal error at .*\.rs:\d+.*report it"):
        # There is no hundredth input to differentiate with respect to.
        _native.Program.compile(json.dumps(document), [], [99], 1)
    assert issubclass(_native.InternalFailure, _native.CompileFailure)


def test_the_last_trace_with_symbolic_sizes_is_said_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(_region, "_MOST_TRACES", 0)
    caplog.set_level(logging.INFO, logger="shorthaul")
    network = Rows()
    model = shorthaul.module(network)
    for rows in (4, 7):
        _check(model, network, rows)
    assert "traces with symbolic sizes holds for them, and no more are made" in caplog.text


def test_a_message_that_is_logged_once_needs_no_graph_break():
    @functools.lru_cache(None)
    def warning_once(logger, *args):
        logger.warning(*args)

    class Logger(logging.Logger):
        pass

    Logger.warning_once = warning_once
    log, text = Logger("once"), io.StringIO()
    log.addHandler(logging.StreamHandler(text))

    class Model(nn.Module):
        def forward(self, x):
            y = torch.sin(x)
            log.warning_once(f"slow for {x.ndim} dimensions")
            return y * 2

    model = shorthaul.module(Model())
    for n in (3, 3, 5):
        x = torch.randn(n, 2)
        torch.testing.assert_close(model(x), torch.sin(x) * 2)
    assert text.getvalue() == "slow for 2 dimensions\n"
    assert not runner_of(model).compiler.outside


def _never(compiler) -> bool:
    return False


@pytest.fixture
def forgotten():
    """What was said of this PyTorch before is said again."""
    _dynamo_mends.say_cannot_apply.cache_clear()
    yield
    _dynamo_mends.say_cannot_apply.cache_clear()


def test_a_mend_that_this_pytorch_has_no_place_for_is_said(monkeypatch, forgotten):
    def fails(is_ours):
        raise AttributeError("module 'builtin' has no attribute 'vt_identity_compare'")

    fails.__name__ = "_guard_identity"
    mends = ("_break_", "_guard_", "_log_once")
    for name in [name for name in vars(_dynamo_mends) if name.startswith(mends)]:
        monkeypatch.setattr(_dynamo_mends, name, lambda is_ours: None)
    monkeypatch.setattr(_dynamo_mends, "_guard_identity", fails)
    with pytest.warns(shorthaul.FallbackWarning, match="cannot apply guard_identity to PyTorch"):
        _dynamo_mends.apply.__wrapped__(_never)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _dynamo_mends.apply.__wrapped__(_never)


@pytest.mark.skipif(VERSION < (2, 14), reason="one function of Dynamo's serves all names there")
def test_a_function_of_random_that_the_tracer_lacks_is_said(monkeypatch, forgotten):
    monkeypatch.setattr(_dynamo_mends, "_BAKED", ("jumble",))
    with pytest.warns(shorthaul.FallbackWarning, match="graph break at random.jumble"):
        _dynamo_mends._break_at_baked_random_numbers(_never)


def test_a_setting_that_dynamo_lacks_is_said(monkeypatch, forgotten):
    monkeypatch.setattr(_dynamo, "_SETTINGS", {"skip_guards_of_tomorrow": False})
    with pytest.warns(shorthaul.FallbackWarning, match="config.skip_guards_of_tomorrow"):
        _dynamo.make_guards_complete()


def test_an_error_without_text_is_named():
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("\nfirst\nsecond")) == "first"
    assert first_line("") == "no reason is given"


def test_decompositions_that_fail_without_text():
    def fails(table):
        raise AssertionError

    exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    exported.run_decompositions = fails
    with pytest.raises(shorthaul.CaptureError, match="cannot decompose .*: AssertionError$"):
        _functional_graph._decompose(exported, None)


def test_a_tracer_that_fails_without_text_leaves_the_frame_to_python():
    def convert(*frame):
        raise InternalTorchDynamoError

    convert._torchdynamo_orig_backend = None
    frame = sys._getframe()
    options = SimpleNamespace(fallback="eager")
    left = SimpleNamespace(to_python=[])
    compiler = SimpleNamespace(left=left, failures=Counter(), options=options)
    FrameCompiler(convert, compiler)(frame)
    (message,) = left.to_python
    start = "PyTorch's tracer failed: InternalTorchDynamoError, in"
    assert message.startswith(f"{start} `{frame.f_code.co_name}` (")
    assert message.endswith(f"test_messages.py:{frame.f_code.co_firstlineno})")


class Unguarded(tuple):
    """A tuple whose length PyTorch's tracer asks for when it makes a guard."""

    def __len__(self):
        raise NotImplementedError


class HoldsUnguarded(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds, self.fc = (Unguarded((2, 3)), Unguarded((4, 5))), nn.Linear(6, 6)

    def forward(self, x):
        for kind in self.kinds:
            x = self.fc(x) * kind[0]
        return x


def test_code_on_which_the_tracer_fails_is_traced_twice_at_most(caplog):
    model = HoldsUnguarded()
    compiled, x = shorthaul.module(model), torch.randn(3, 6)
    with pytest.warns(
        shorthaul.FallbackWarning, match=r"tracer failed: .* in `forward` \(.*:\d+\)"
    ):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
    _is_not_traced_again(compiled, model, x)


def _is_not_traced_again(compiled, model, x) -> None:
    traced = torch._dynamo.utils.counters["frames"]["total"]
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x))
    assert torch._dynamo.utils.counters["frames"]["total"] == traced


class OfItsLength(nn.Module):
    """Traced, it makes a shape that does not fit; in eager it does not."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        wide = 5 if torch.compiler.is_compiling() else 6
        return self.fc(x) + x.new_ones(wide)


def test_code_that_runs_in_eager_alone_is_traced_thrice_at_most():
    model = OfItsLength()
    compiled, x = shorthaul.module(model), torch.randn(3, 6)
    with pytest.warns(shorthaul.FallbackWarning, match="tracer failed"):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    _is_not_traced_again(compiled, model, x)


def test_errors_that_eager_raises_too_do_not_end_the_tracing():
    model = nn.Sequential(nn.Linear(6, 6))
    compiled = shorthaul.module(model)
    for _ in range(4):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            compiled(torch.randn(3, 5))
    assert not runner_of(compiled).compiler.failures
    before = torch._dynamo.utils.counters["frames"]["ok"]
    x = torch.randn(3, 6)
    torch.testing.assert_close(compiled(x), model(x))
    assert torch._dynamo.utils.counters["frames"]["ok"] > before


class _Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).sin()


class _Experts(nn.Module):
    """Rows go to the layer whose column is positive; how many, only the numbers say."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(_Inner() for _ in range(2))

    def forward(self, x):
        out = torch.zeros_like(x)
        for k, inner in enumerate(self.inner):
            (rows,) = torch.where(x[:, k] > 0)
            out.index_add_(0, rows, inner(x[rows]))
        return out


@pytest.mark.skipif(VERSION < (2, 14), reason="older tracers do not say so")
def test_a_graph_that_ends_inside_of_a_loop_is_told():
    x = torch.tensor([[1.0, -1.0, 0.0], [1.0, 1.0, 0.5], [-1.0, 1.0, 2.0]])
    model = _Experts()
    said = r"its tracer leaves `forward` to Python at .*:\d+: the size of .*, inside of a loop$"
    with pytest.warns(shorthaul.FallbackWarning, match=said):
        torch.testing.assert_close(shorthaul.module(model)(x), model(x))
    strict = shorthaul.module(_Experts(), fallback="error")
    with pytest.raises(shorthaul.CaptureError, match="the size of a result depends on"):
        strict(x)
