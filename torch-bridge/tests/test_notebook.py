"""The guided notebook runs from top to bottom, on small sizes, and shows what it speaks of."""

import re

import nbformat
import pytest
from documents import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "notebooks" / "guided_tuning.ipynb"

SMALL = """
batch, n_tokens, width, n_heads = 2, 16, 32, 2
n_images, n_channels, side = 2, 8, 8
rounds = 2
limits = {"copy_gb_s": 10.0, "product_gflop_s": 100.0}
"""


@pytest.fixture(scope="module")
def executed():
    """The notebook with small sizes and everything that its cells show."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (sizes,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    sizes.source = SMALL
    return NotebookClient(notebook, timeout=120).execute(cwd=str(NOTEBOOK.parent))


def shown(notebook, kind):
    """Results of a kind, of all cells in order."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(o["text"] for o in outputs if o.get("name") == "stdout")


def test_reports_profiles_and_widgets_are_shown(executed):
    pages = shown(executed, "text/html")
    assert len(pages) == 3 and all("<table>" in page for page in pages)
    assert sum("<svg" in page for page in pages) == 2
    assert len(shown(executed, "application/vnd.jupyter.widget-view+json")) == 3


def test_numbers_are_near_those_of_eager(executed):
    lines = [line for line in printed(executed).splitlines() if "relative error" in line]
    found = [(line.split()[0], float(line.split()[-1])) for line in lines]
    assert [name for name, _ in found] == ["shorthaul", "eager"] * 3
    # Both are single precision; neither order of summation is the better one.
    for (_, ours), (_, eager) in zip(found[::2], found[1::2], strict=True):
        assert ours < 4 * eager + 1e-6


def test_a_decision_is_taken_otherwise_and_back(executed):
    text = printed(executed)
    losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", text)]
    assert len(losses) == 3 and losses[2] < losses[0]
    states = re.findall(r"([\d.]+) ms +([\d.]+) MiB  (.*)", text)
    assert states[0][2] == "as the compiler decides" and states[1][2].startswith("without ")
    assert "0 changes after undo" in text


def test_python_and_the_widget_share_the_choice(executed):
    (cell,) = (cell for cell in executed.cells if "explorer.selected =" in cell.source)
    text = cell.outputs[0]["text"]
    assert "reads " in text and "writes " in text


def test_the_stored_notebook_has_run_in_order():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs and not any(output.output_type == "error" for output in outputs)
