"""A type checker knows the package: no error in a right program, each error of a wrong one.

The stub of the native half is compared with what the compiled module has.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shorthaul
from shorthaul import _native

PROGRAMS = Path(__file__).parent / "typed_programs"
PACKAGE = Path(shorthaul.__file__).parent
#: What mypy knows of PyTorch is kept: to read all of it takes most of the time.
CACHE = Path(__file__).resolve().parents[2] / "target" / "mypy-cache"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A module of mypy's, with ``folder`` as the only place of packages besides the installed."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(folder), "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> set[tuple[str, int, str]]:
    """File, line and kind of each error that mypy finds in the programs."""
    folder = tmp_path_factory.mktemp("typed")
    # A package of this name, wherever it is installed and whatever its folder is called.
    (folder / "shorthaul").symlink_to(PACKAGE)
    programs = [str(PROGRAMS / name) for name in ("right.py", "wrong.py")]
    done = run(
        folder,
        *("mypy", "--strict", "--follow-imports=silent", "--config-file=", "--no-pretty"),
        *("--hide-error-context", f"--cache-dir={CACHE}", *programs),
    )
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    lines = re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    assert len(lines) == done.stdout.count(": error: "), done.stdout
    return {(name, int(line), kind) for name, line, kind in lines}


def test_a_right_program_has_no_error(found):
    assert [one for one in sorted(found) if one[0] != "wrong.py"] == []


def test_each_mistake_is_found_where_it_is(found):
    lines = (PROGRAMS / "wrong.py").read_text().splitlines()
    planted = {
        ("wrong.py", number, line.split("# error: ")[1])
        for number, line in enumerate(lines, 1)
        if "# error: " in line
    }
    assert len(planted) > 15
    assert {one for one in found if one[0] == "wrong.py"} == planted


def test_the_stub_is_the_compiled_module(tmp_path):
    assert compared(tmp_path, stub()) == ""


#: Damage to the stub, and what then is said.
DAMAGE = (
    ("def machine_key() -> str: ...\n", "", "machine_key is not present in stub"),
    ("def cache_clear()", "def clear_cache()", "clear_cache is not present at runtime"),
    ("def recipe_text(model: str, ", "def recipe_text(name: str, ", "recipe_text is inconsistent"),
    ("blocking: str | None = None", "blocking: str | None", "Kernels.key is inconsistent"),
    ("def saved_bytes(self)", "def bytes_saved(self)", "Program.bytes_saved is not present"),
)


def test_a_stub_that_differs_is_refused(tmp_path):
    text = stub()
    for before, after, _ in DAMAGE:
        assert before in text
        text = text.replace(before, after)
    said = compared(tmp_path, text)
    assert [what for _, _, what in DAMAGE if what not in said] == [], said


def test_the_classes_of_the_stub_derive_from_the_same_ones():
    """What `stubtest` does not compare."""
    classes = [node for node in ast.parse(stub()).body if isinstance(node, ast.ClassDef)]
    own = {
        node.name: [ast.unparse(base) for base in node.bases] or ["object"]
        for node in classes
        if not node.name.startswith("_")
    }
    assert own == {
        name: [base.__name__ for base in getattr(_native, name).__bases__] for name in own
    }


def stub() -> str:
    return (PACKAGE / "_native.pyi").read_text()


def compared(folder: Path, text: str) -> str:
    """What mypy's `stubtest` says of a stub of the native half; nothing if it fits."""
    (folder / "_native.pyi").write_text(text)
    (folder / "_native.abi3.so").symlink_to(_native.__file__)
    done = run(folder, "mypy.stubtest", "_native", "--concise")
    assert (done.returncode != 0) == bool(errors := _errors(done.stdout)), done.stdout + done.stderr
    return errors


def _errors(said: str) -> str:
    return "" if said.startswith("Success") else said
