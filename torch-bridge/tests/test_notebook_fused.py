"""The notebook on fusing by hand runs on a small layer, and its bytes go down step by step."""

import re

import nbformat
import pytest
from documents import ROOT
from nbclient import NotebookClient

NOTEBOOK = ROOT / "notebooks" / "fused_by_hand.ipynb"

SMALL = """
batch, n_tokens, width, n_heads, inner = 1, 16, 32, 2, 64
plans = 2
"""


@pytest.fixture(scope="module")
def executed():
    """The notebook with small sizes and everything that its cells show."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (sizes,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    sizes.source = SMALL
    return NotebookClient(notebook, timeout=120).execute(cwd=str(NOTEBOOK.parent))


def printed(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(o["text"] for o in outputs if o.get("name") == "stdout")


def test_every_group_moves_fewer_bytes_and_all_fewer_than_eager(executed):
    rows = re.findall(r"^ *[\d.]+ +(\d+)% +(\d+)  (.*)$", printed(executed), re.MULTILINE)
    assert len(rows) == 5 and rows[0][2] == "nothing"
    parts, kernels = ([int(row[n]) for row in rows] for n in (0, 1))
    assert parts == sorted(parts, reverse=True) and parts[-1] < parts[0] < 100
    assert kernels == sorted(kernels, reverse=True) and kernels[-1] < kernels[0]


def test_the_search_is_not_worse_and_gradients_stay(executed):
    text = printed(executed)
    assert "search: " in text and "at least" in text
    apart = float(re.search(r"apart by at most ([\d.e+-]+)", text)[1])
    assert apart < 1e-4
    assert any(
        "svg" in str(o.get("data", {})) for c in executed.cells for o in c.get("outputs", ())
    )


def test_the_stored_notebook_has_run_in_order():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs and not any(output.output_type == "error" for output in outputs)
