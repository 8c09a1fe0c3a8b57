"""Blocks and commands of the documents: each is run by a test, or stands in a list with the reason.

A block or a command of a new kind fails here until a test runs it or a list names it.
"""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import (
    OTHERS,
    PAGES,
    ROOT,
    Command,
    blocks,
    name_of,
    program,
    shell_commands,
)
from shorthaul import bench
from shorthaul.bench.options import parse

pytest.importorskip("onnxscript")

ALL = (*PAGES, *OTHERS)
COMMANDS = [command for page in ALL for command in shell_commands(page)]

#: Commands that this file does not run, by their first words: why, and where it is tested instead.
NOT_RUN = {
    "cargo xtask test": "runs all tests, and so this one",
    "cargo xtask package": "`cargo xtask test` builds the package",
    "cargo xtask demo": "installs 6 GB; torch-bridge/tests/test_demo.py trains what it trains",
    "cargo xtask notebook": "opens JupyterLab; torch-bridge/tests/test_notebook.py runs its cells",
    "cargo xtask release": "compiles for minutes; `cargo xtask test` tries another wheel",
    "cargo xtask onnx-coverage": "takes minutes; tests/tests/onnx_coverage.rs tries some cases",
    "pip install dist/": "`cargo xtask test` installs the wheel: xtask/src/release.rs",
    "cargo install --path cli": "compiles for minutes; `cargo xtask test` builds that program",
    "cargo run -p shorthaul-compiler --example stages": "compiler/tests/stages.rs does the same",
    "cargo test": "`cargo xtask test` runs all tests of all crates",
    "cargo install cargo-fuzz": "fuzzing needs a nightly toolchain",
    "cargo +nightly fuzz": "fuzzing needs a nightly toolchain, and hours",
    "python tests/fuzz/seeds.py": "fuzzing needs a nightly toolchain",
    "python docs/api.py": "torch-bridge/tests/test_documents.py runs it with --check",
    "cd torch-bridge/tests": "belongs to the next command",
    "python -m operator_coverage": "torch-bridge/tests/test_operator_coverage.py compares the page",
    "python examples/": "torch-bridge/tests/test_examples.py runs every script with fewer steps",
    "python bench/second_derivatives.py": "measures networks of real size",
    "python bench/custom_functions.py": "measures networks of real size",
    "python bench/small_models.py": "measures networks of real size",
    "python bench/recurrent.py": "measures networks of real size",
    "python bench/long_sequences.py": "measures networks of real size",
    "python bench/onnx/compare.py": "needs other optimizers, and runs for an hour",
    "python bench/onnx/training_graphs.py": "needs onnxsim, and measures networks of real size",
    "torchrun": "torch-bridge/tests/test_distributed.py runs it",
}

#: What makes a measurement short: a later option replaces an earlier one.
SMALL = {
    "python bench/lengths.py": (
        *("--epochs", "1", "--steps", "2", "--shortest", "16", "--longest", "18"),
        *("--width", "16", "--layers", "1", "--heads", "2", "--vocabulary", "50"),
    ),
    "python bench/onnx/peak_memory.py": ("--shorthaul", "PROGRAM"),
    "python bench/bytes_moved.py": ("--small",),
}

QUICK = ("--small", "--rounds", "2", "--warmup", "1", "--no-first-step")

#: Blocks that are neither Python nor commands, by page and language: what holds them.
HELD = {
    ("docs/src/api.md", "text"): "docs/api.py --check",
    ("docs/src/stages.md", "text"): "compiler/tests/stages.rs",
    ("docs/src/stages.md", "c"): "compiler/tests/stages.rs",
    ("docs/src/operators.md", "rust"): "torch-bridge/tests/test_documents.py",
    ("docs/src/operators.md", "text"): "torch-bridge/tests/test_documents.py",
    ("docs/src/pytorch.md", "text"): "torch-bridge/tests/test_distributed.py",
    ("examples/README.md", "text"): "one run on one machine, as the page says",
}


def _is(command: Command, prefix: str) -> bool:
    return f"{command} ".startswith(prefix if prefix.endswith("/") else f"{prefix} ")


def _named(command: Command, prefixes) -> str | None:
    return next((prefix for prefix in prefixes if _is(command, prefix)), None)


def _of(program: str) -> list[Command]:
    return [command for command in COMMANDS if command.words[0] == program]


def _id(command: Command) -> str:
    return f"{command.place} {command}"


def test_every_command_is_run_or_has_a_reason():
    for command in COMMANDS:
        runs = command.words[0] in ("shorthaul", "shorthaul-bench") or _named(command, SMALL)
        assert bool(runs) != bool(_named(command, NOT_RUN)), f"{command.place}: {command}"


@pytest.mark.parametrize("prefixes", [NOT_RUN, SMALL], ids=["NOT_RUN", "SMALL"])
def test_the_lists_name_nothing_else(prefixes):
    used = {_named(command, [prefix]) for command in COMMANDS for prefix in prefixes}
    assert used - {None} == set(prefixes)


@pytest.mark.parametrize("reason", [*NOT_RUN.values(), *HELD.values()])
def test_files_of_the_reasons_exist(reason):
    for name in re.findall(r"[\w-]+(?:/[\w-]+)+\.(?:py|rs)", reason):
        assert (ROOT / name).exists()


def test_every_block_is_held():
    held, used = {"python", "sh"}, set()
    for page in ALL:
        before = None
        for block in blocks(page):
            key = (name_of(page), block.language)
            place = f"{name_of(page)}:{block.line}"
            if block.language == "output":
                # test_documents.py compares what Python prints; the last test here, commands.
                follows = before == "python" or (before == "sh" and page == ROOT / "README.md")
                assert follows, f"{place}: output of nothing"
            elif block.language not in held:
                assert key in HELD, f"{place}: no test holds this block of `{block.language}`"
                used.add(key)
            before = block.language
    assert used == set(HELD)


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_every_fence_is_read(page):
    """A fence that is indented or not closed would hide a block from these tests."""
    n_fences = len(re.findall(r"^\s*(?:```|~~~)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert n_fences == 2 * len(blocks(page))


def run(page: Path, folder: Path) -> None:
    """Runs the Python of a page in a process of its own."""
    code = "\n".join(block.text for block in blocks(page) if block.language == "python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the pages name: all are the network of docs/src/onnx.md."""
    place = tmp_path_factory.mktemp("onnx")
    run(ROOT / "docs/src/onnx.md", place)
    for name in ("smaller.onnx", "bert_large.onnx", "beyond_2_gb.onnx"):
        (place / name).write_bytes((place / "model.onnx").read_bytes())
    return place


@pytest.mark.parametrize("page", sorted({c.page for c in _of("shorthaul")}), ids=name_of)
def test_commands_of_the_program_run(page, folder):
    for command in (command for command in _of("shorthaul") if command.page == page):
        done = subprocess.run(
            [program(), *command.words[1:]], cwd=folder, capture_output=True, text=True, check=False
        )
        # 3: two files differ, which is an answer.
        assert done.returncode in (0, 3), f"{command.place}: {command}: {done.stderr}"


def small(words: tuple[str, ...]) -> list[str]:
    """The same call of the bench with one small network, few rounds, and files in this folder."""
    options = parse(list(words))
    named = {*options.names, "all", *(word for word in words if word.startswith("@"))}
    kept = [word for word in words if word not in named]
    if options.list:
        return kept
    written = [str(path) for path in (options.html, options.json) if path]
    kept = [Path(word).name if word in written else word for word in kept]
    return ["digits_cnn", *kept, *QUICK]


@pytest.mark.parametrize("command", _of("shorthaul-bench"), ids=_id)
def test_commands_of_the_bench_run(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    words = small(command.words[1:])
    monkeypatch.chdir(tmp_path)
    if "--compare" in words:
        old = words[words.index("--compare") + 1]
        assert bench.main(["digits_cnn", *QUICK, "--json", old]) == 0
    assert bench.main(words) == 0
    assert "digits_cnn" in capfd.readouterr().out
    for option in ("--json", "--html"):
        if option in words:
            assert Path(words[words.index(option) + 1]).stat().st_size > 0


def test_commands_of_the_bench_in_sentences_parse(monkeypatch):
    monkeypatch.chdir(ROOT)
    pattern = re.compile(r"`(?:\S*/)?(?:shorthaul-bench|python -m shorthaul\.bench) ([^`]+)`")
    found = [c for page in PAGES for c in pattern.findall(page.read_text(encoding="utf-8"))]
    for line in found:
        options = parse(line.replace("NAME", "digits_cnn").split())
        assert options.list or options.page_from or options.settings
    assert found


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if _named(command, SMALL)], ids=_id
)
def test_measurements_run_when_they_are_small(command, folder):
    more = SMALL[_named(command, SMALL)]
    words = [ROOT / command.words[1], *command.words[2:], *more]
    words = [program() if word == "PROGRAM" else word for word in words]
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def _sources_of(script: Path) -> str:
    """The text of a script and of the modules beside it that it imports."""
    text = script.read_text(encoding="utf-8")
    names = re.findall(r"^from (\w+) import", text, re.MULTILINE)
    beside = [script.with_name(f"{name}.py") for name in names]
    return text + "".join(p.read_text(encoding="utf-8") for p in beside if p.exists())


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.words[0] == "python" and _named(c, NOT_RUN)], ids=_id
)
def test_scripts_that_are_not_run_have_their_options(command):
    if command.words[1] == "-m":
        assert (ROOT / "torch-bridge/tests" / command.words[2] / "__main__.py").exists()
        return
    text = _sources_of(ROOT / command.words[1])
    for option in (word for word in command.words if word.startswith("--")):
        assert f'"{option}"' in text


def _usage() -> str:
    text = (ROOT / "xtask/src/main.rs").read_text(encoding="utf-8")
    return text.partition("const USAGE")[2].partition('";')[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[0] == "cargo"], ids=_id)
def test_cargo_has_what_its_commands_name(command):
    words = command.words
    if words[1] == "xtask":
        usage = " ".join(re.findall(rf"^cargo xtask {words[2]}\b(.*)", _usage(), re.MULTILINE))
        assert usage and all(word in usage for word in words if word.startswith("--"))
    manifests = {p.parent: p.read_text(encoding="utf-8") for p in ROOT.glob("*/Cargo.toml")}
    crates = {re.search(r'^name = "(.*)"', text, re.M)[1]: f for f, text in manifests.items()}
    for kind, name in itertools.pairwise(words):
        if kind == "-p":
            assert name in crates
        elif kind == "--path":
            assert '\nname = "shorthaul"' in manifests[ROOT / name]
        elif kind in ("--example", "--test"):
            place = crates[words[words.index("-p") + 1]] / f"{kind[2:]}s"
            assert (place / f"{name}.rs").exists() or (place / name / "main.rs").exists()


def test_the_readme_shows_what_its_commands_print(tmp_path):
    """To the digit, but for errors: those depend on the last bits of trained weights."""
    page = ROOT / "README.md"
    (shown,) = (b.text for b in blocks(page) if b.language == "output" and "→" in b.text)
    run(page, tmp_path)
    printed = ""
    for command in shell_commands(page):
        if command.words[0] == "shorthaul":
            done = subprocess.run(
                [program(), *command.words[1:]],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
            )
            printed += done.stdout

    def without_errors(text):
        return re.sub(r"\d\.\d+e-?\d+", "…", text)  # of the loss, it may be 0.0e0

    of_optimize, *of_grad = re.split(r"^…\n", shown, flags=re.MULTILINE)
    assert "bytes moved" in of_optimize
    assert "trained: " in of_grad[0] and "verified in float64" in of_grad[1]
    for part in (of_optimize, *of_grad):
        assert without_errors(part) in without_errors(printed)
