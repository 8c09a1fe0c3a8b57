"""The coverage page is what a run of its operators says, shown on a part of them."""

import pytest
from operator_coverage.judge import DIFFERENT, judge
from operator_coverage.page import PAGE, row_of, text_of
from operator_coverage.samples import operators

#: One operator of each family, and those that decompositions serve in unusual ways.
CHECKED = (
    "__getitem__",
    "addbmm",
    "argmax",
    "cdist",
    "cumprod",
    "erfinv",
    "flip",
    "index_put",
    "kthvalue",
    "lgamma",
    "linalg.norm",
    "masked_scatter",
    "matmul",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.dropout",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "nn.functional.pad (circular)",
    "nonzero",
    "scatter_reduce (prod)",
    "softmax",
    "std",
    "view",
)


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHECKED)
def test_row(page, name):
    verdict = judge(name, operators()[name])
    assert DIFFERENT not in verdict.samples, verdict.reasons
    assert row_of(name, page) == row_of(name, text_of([verdict]))


def test_nothing_is_different(page):
    assert "| different | 0 | 0.0 % |" in page


def test_every_operator_stands_in_the_page(page):
    names = [name.replace("_", "\\_") for name in operators()]
    listed = page.split("Out of scope:")[1]
    missing = [n for n in names if f"| {n} |" not in page and n not in listed]
    assert not missing
