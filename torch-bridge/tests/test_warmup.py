"""What happens while kernels compile: eager serves, a signal stops, the log and the cache tell."""

import copy
import logging
import os
import stat
import subprocess
import sys
import threading
import time
import warnings

import pytest
import shorthaul
import torch
from shorthaul import _background
from shorthaul._call import recorded
from shorthaul._errors import InternalError
from torch import nn

SECONDS = 2.0


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    """A compiler that takes two seconds for each file, and an empty cache."""
    compiler = tmp_path / "slow-cc"
    wait = f'case "$*" in *kernel.c*) sleep {SECONDS};; esac'
    compiler.write_text(f'#!/bin/sh\n{wait}\nexec cc "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("SHORTHAUL_CC", str(compiler))
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path / "cache"))
    yield compiler
    # What nobody waits for any more is not the next test's.
    compiler.write_text('#!/bin/sh\nexec cc "$@"\n')
    _background._compiler_of_sizes().shutdown(cancel_futures=True)
    _background._compiler_of_sizes.cache_clear()


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def step(module, x):
    module.zero_grad()
    loss = module(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in module.parameters()]


def test_eager_serves_until_the_kernels_are_there(slow_compiler):
    own = model()
    compiled, x = shorthaul.module(own, warmup="background"), torch.randn(5, 6)
    expected = step(copy.deepcopy(own), x)
    with recorded() as calls:
        first = step(compiled, x)
    assert not calls, "the first step waited for its kernels"
    torch.testing.assert_close(first, expected)
    deadline = time.monotonic() + 60
    while not calls and time.monotonic() < deadline:
        with recorded() as calls:
            torch.testing.assert_close(step(compiled, x), expected)
        time.sleep(0.05)
    assert calls, "the kernels were never used"


def test_a_second_size_does_not_wait_for_the_first(slow_compiler):
    compiled = shorthaul.module(model(), warmup="background")
    with recorded() as calls:
        for n in (3, 4, 5):
            step(compiled, torch.randn(n, 6))
        assert not calls, "a step waited for kernels"


def _until_compiled(model, x, expected) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with recorded() as calls:
            torch.testing.assert_close(step(model, x), expected)
        if calls:
            return
        time.sleep(0.05)
    raise AssertionError("the kernels were never used")


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_later_sizes_are_planned_while_eager_serves(monkeypatch):
    may_plan, niceness = threading.Event(), []
    compile_program = _background.compile_program

    def late(captured, *args):
        if captured.symbolic is not None:
            may_plan.wait(60)
            niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return compile_program(captured, *args)

    monkeypatch.setattr(_background, "compile_program", late)
    own = model()
    compiled, twin = shorthaul.module(own, warmup="background"), copy.deepcopy(own)
    first = torch.randn(3, 6)
    _until_compiled(compiled, first, step(twin, first))
    later = [torch.randn(n, 6) for n in (4, 5, 7)]
    with recorded() as calls:
        for x in later:
            torch.testing.assert_close(step(compiled, x), step(twin, x))
    assert not calls, "a step waited for a plan"
    may_plan.set()
    for x in later:
        _until_compiled(compiled, x, step(twin, x))
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert len(niceness) == 3 and all(n > mine or n == 19 for n in niceness)


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
def test_a_trace_that_fails_in_the_background_is_replaced(monkeypatch):
    compile_program = _background.compile_program

    def broken(captured, *args):
        if captured.symbolic is not None:
            raise InternalError("internal error after pass `fuse`: two writers; please report it")
        return compile_program(captured, *args)

    monkeypatch.setattr(_background, "compile_program", broken)
    own = model()
    compiled, twin = shorthaul.module(own, warmup="background"), copy.deepcopy(own)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in (3, 4, 5):
            x = torch.randn(n, 6)
            _until_compiled(compiled, x, step(twin, x))
    (only,) = [str(w.message) for w in said if w.category is shorthaul.InternalErrorWarning]
    assert "each set of sizes is traced separately" in only and "two writers" in only


def test_a_refused_kernel_runs_through_pytorch(slow_compiler):
    slow_compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *kernel.c*) sleep {SECONDS}; echo no >&2; exit 1;; esac\n'
        'exec cc "$@"\n'
    )
    own = model()
    compiled, x = shorthaul.module(own, warmup="background"), torch.randn(5, 6)
    expected = step(copy.deepcopy(own), x)
    deadline = time.monotonic() + 60
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        while not said and time.monotonic() < deadline:
            torch.testing.assert_close(step(compiled, x), expected)
            time.sleep(0.05)
    assert "the C compiler refused" in str(said[0].message)
    torch.testing.assert_close(step(compiled, x), expected)


STOPPED = """
import threading, os, signal, time
import torch, shorthaul
from torch import nn
# A shell starts background jobs with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
model = shorthaul.module(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)))
compiling = threading.Event()
from shorthaul import _program
def listener():
    return lambda done, total, name: compiling.set()
_program.progress = listener
def interrupt():
    compiling.wait()
    time.sleep(0.2)
    global at
    at = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    model(torch.randn(5, 6)).sum().backward()
    print("finished")
except KeyboardInterrupt:
    print("stopped after", time.monotonic() - at)
"""


def test_an_interrupt_ends_the_compilers(slow_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path / "empty"))
    slow_compiler.write_text(slow_compiler.read_text().replace(str(SECONDS), "30"))
    run = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.startswith("stopped after"), run.stdout + run.stderr
    assert float(run.stdout.split()[-1]) < 15, "it waited for the compiler"
    assert run.returncode == 0


WATCHED = """
import torch, shorthaul
from torch import nn
model = shorthaul.module(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)))
model(torch.randn(5, 6)).sum().backward()
"""


def test_a_terminal_shows_what_is_going_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path / "empty"))
    screen, terminal = os.openpty()
    done = subprocess.run([sys.executable, "-c", WATCHED], stderr=terminal, timeout=300)
    os.close(terminal)
    seen = os.read(screen, 1 << 16).decode()
    os.close(screen)
    assert done.returncode == 0, seen
    lines = [line for line in seen.replace("\033[K", "").split("\r") if line]
    assert lines[0] == "shorthaul: planning kernels"
    assert lines[1].startswith("shorthaul: 0 of ") and lines[1].endswith(" files compiled")
    assert seen.endswith("\r\033[K\r"), "the line is taken away"


PLANNING = """
import os, signal, threading, time
import torch, torchvision, shorthaul
from shorthaul import _program
signal.signal(signal.SIGINT, signal.default_int_handler)
_program.progress = lambda: lambda done, total, name: print("it was planned already")
native = _program._native.Program
def interrupt():
    global at
    at = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
class Watched:
    def __getattr__(self, name):
        if name.startswith("compile"):
            threading.Timer(0.5, interrupt).start()
        return getattr(native, name)
_program._native.Program = Watched()
model = shorthaul.module(torchvision.models.densenet121())
try:
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    print("finished")
except KeyboardInterrupt:
    print("stopped after", time.monotonic() - at)
"""


def test_an_interrupt_ends_the_wait_for_a_plan():
    run = subprocess.run(
        [sys.executable, "-c", PLANNING], capture_output=True, text=True, timeout=300
    )
    assert run.stdout.startswith("stopped after"), run.stdout + run.stderr
    assert float(run.stdout.split()[-1]) < 5, "it waited for the plan"
    assert run.returncode == 0, run.stderr


def test_the_log_has_the_seconds_of_a_compilation(caplog):
    compiled = shorthaul.module(model())
    with caplog.at_level(logging.INFO, logger="shorthaul"):
        compiled(torch.randn(7, 6))
    (line,) = [r.message for r in caplog.records if r.message.startswith("compiled a part of")]
    assert "[7, 6]" in line and "s of capture" in line and "s of compilation" in line


def test_the_log_and_the_report_say_that_a_model_is_small(caplog):
    small, large = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(512, 512)
    for network, x, is_small in (
        (small, torch.randn(4, 8), True),
        (large, torch.randn(512, 512), False),
    ):
        caplog.clear()
        compiled = shorthaul.module(network)
        with caplog.at_level(logging.INFO, logger="shorthaul"):
            compiled(x)
        said = [
            r.message for r in caplog.records if " is small: its kernels are predicted" in r.message
        ]
        assert bool(said) == is_small, said
        report = str(shorthaul.report(compiled, x))
        assert ("this step is small: its kernels are predicted to take" in report) == is_small


def test_the_cache_tells_what_it_holds_and_is_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHORTHAUL_CACHE_LIMIT", "64M")
    mine = tmp_path / "cache" / "notes.txt"
    mine.parent.mkdir(mode=0o700)
    mine.write_text("mine")
    compiled, x = shorthaul.module(model()), torch.randn(9, 6)
    y = compiled(x)
    info = shorthaul.cache.info()
    assert info.folder.startswith(str(tmp_path)) and not info.is_temporary
    assert info.n_entries > 0 and info.limit_bytes == 64 << 20
    assert shorthaul.cache.clear() == info.n_bytes > 0
    assert shorthaul.cache.info().n_entries == 0
    assert mine.read_text() == "mine"
    torch.testing.assert_close(compiled(x), y)
