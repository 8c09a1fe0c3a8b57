"""README and guide: their Python runs, their links lead somewhere, what they name exists.

``test_document_commands.py`` runs their commands, ``test_troubleshooting.py`` holds the messages.
"""

import contextlib
import inspect
import io
import re
import subprocess
import sys
import warnings

import pytest
import shorthaul
from documents import OTHERS, PAGES, ROOT, blocks, name_of
from shorthaul import _pytorch_version
from shorthaul.models import EXAMPLES

pytest.importorskip("onnxscript")


GUIDE = ROOT / "docs" / "src"
WITH_PYTHON = [
    page for page in (*PAGES, *OTHERS) if any(b.language == "python" for b in blocks(page))
]


def run_python(page):
    """Runs the Python blocks of a page in one namespace; what they print must be what follows."""
    namespace, printed = {"__name__": "__main__"}, None
    for block in blocks(page):
        if block.language == "python":
            # Lines count as in the page, so that a failure names its place there.
            source = "\n" * (block.line - 1) + block.text
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, str(page), "exec"), namespace)
            printed = out.getvalue()
        elif block.language == "output" and printed is not None:
            assert block.text in printed, f"{name_of(page)}:{block.line}: printed\n{printed}"
        if block.language != "python":
            printed = None


def test_pages_have_python():
    names = {name_of(page) for page in WITH_PYTHON}
    assert {"README.md", "docs/src/pytorch.md", "docs/src/onnx.md"} <= names
    assert "torch-bridge/README.md" in names


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_python(page)


def links():
    """Each relative link of each page, with the heading that it names."""
    pattern = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
    for page in (*PAGES, *OTHERS):
        for target, heading in pattern.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                name = f"{name_of(page)}: {target}#{heading}"
                yield pytest.param(page, target or page.name, heading, id=name)


def _anchors(page) -> set[str]:
    """What links call the headings of a page, on GitHub and in mdBook."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "target", "heading"), list(links()))
def test_links_lead_somewhere(page, target, heading):
    assert (page.parent / target).exists()
    if heading:
        assert heading in _anchors(page.parent / target)
    if page.parent == GUIDE:
        # A built book has the files of the guide only; other files are named by their path.
        assert (page.parent / target).resolve().is_relative_to(GUIDE)


def test_the_description_of_the_package_has_no_relative_links():
    text = (ROOT / "torch-bridge/README.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https://)", text)


def named_files():
    """Paths of the repository that pages name in code, such as `bench/gpu/README.md`."""
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    folders -= {"target", "out", "dist"}
    for page in (*PAGES, *OTHERS):
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
        for name in re.findall(r"`([\w.-]+/[\w./-]+)`", text):
            if name.partition("/")[0] in folders:
                yield pytest.param(name, id=f"{name_of(page)}: {name}")


@pytest.mark.parametrize("name", list(named_files()))
def test_named_files_exist(name):
    assert (ROOT / name).exists()


def test_every_page_is_in_the_summary():
    pages = {p.name for p in PAGES[1:]} - {"SUMMARY.md"}
    summary = (ROOT / "docs/src/SUMMARY.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\S+\.md)\)", summary)) == pages


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_guide_lists_the_options_of_module():
    text = (ROOT / "docs/src/pytorch.md").read_text(encoding="utf-8")
    table = text.partition("## Options")[2].partition("## ")[0]
    options = set(inspect.signature(shorthaul.module).parameters) - {"model"}
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == options


def test_the_guide_lists_the_networks_of_the_bench():
    text = (ROOT / "docs/src/bench.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (\d+) \|", text, re.MULTILINE)
    shown = [(name, int(n.replace(",", "")), int(batch)) for name, n, batch in rows]
    assert shown == [(e.name, e.n_parameters, e.batch) for e in EXAMPLES.values()]


def test_variables_of_the_guide_exist():
    text = (ROOT / "docs/src/pytorch.md").read_text(encoding="utf-8")
    named = set(re.findall(r"SHORTHAUL_[A-Z_]+", text))
    folders = ("kernels/src", "kernels/cuda/src", "onnx/src")
    sources = [source for folder in folders for source in (ROOT / folder).rglob("*.rs")]
    sources += (ROOT / "torch-bridge/python/shorthaul").rglob("*.py")
    known = {v for s in sources for v in re.findall(r"SHORTHAUL_[A-Z_]+", s.read_text("utf-8"))}
    assert named and named <= known


def test_the_worked_example_is_in_the_code():
    shown = [b for b in blocks(GUIDE / "operators.md") if b.language == "rust"]
    for block in shown:
        name, code = block.text.split("\n", 1)
        source = (ROOT / name.removeprefix("// ")).read_text(encoding="utf-8")
        for part in code.strip("\n").split("\n\n"):
            assert part in source, f"operators.md:{block.line}: {name} has no\n{part}"
    assert len(shown) >= 10


def test_the_lines_beside_the_worked_example_are_in_the_code():
    """A block of text follows a sentence whose first path is its file."""
    page = GUIDE / "operators.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    shown = [block for block in blocks(page) if block.language == "text"]
    for block in shown:
        paragraph = "\n".join(lines[: block.line - 2]).rstrip().rpartition("\n\n")[2]
        name = re.search(r"`([\w/-]+\.\w+)`", paragraph)[1]
        assert block.text in (ROOT / name).read_text(encoding="utf-8"), f"{name}: {block.text}"
    assert shown


def test_shell_blocks_are_sh():
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh":
                subprocess.run(["sh", "-n"], input=block.text, text=True, check=True)


def test_the_api_page_is_what_the_docstrings_say():
    command = [sys.executable, ROOT / "docs" / "api.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "run `.venv/bin/python docs/api.py`"


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs/src/api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^##+ `?(?:class )?(?:shorthaul\.)?(\w+)", text, re.MULTILINE))
    assert set(shorthaul.__all__) <= shown


def test_an_older_pytorch_is_refused_with_a_sentence():
    code = "import torch; torch.__version__ = '2.5.1+cpu'; import shorthaul"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    known = "Shorthaul works with PyTorch 2.6 or newer"
    assert f"{known}, and this is 2.5.1+cpu: `pip install 'torch>=2.6'`" in done.stderr


def test_the_package_requires_a_pytorch_that_works():
    oldest = ".".join(map(str, _pytorch_version.OLDEST))
    project = (ROOT / "torch-bridge" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'dependencies = ["torch>={oldest}"]' in project


def test_the_package_is_typed():
    package = ROOT / "torch-bridge" / "python" / "shorthaul"
    assert (package / "py.typed").exists()
    for name in shorthaul.__all__:
        value = getattr(shorthaul, name)
        assert inspect.getdoc(value), f"shorthaul.{name} has no docstring"
        if inspect.isfunction(value):
            for part in inspect.signature(value).parameters.values():
                is_open = part.kind in (part.VAR_POSITIONAL, part.VAR_KEYWORD)
                assert is_open or part.annotation is not part.empty, f"{name}: {part}"
