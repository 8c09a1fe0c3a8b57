"""Reports and profiles as HTML: well-formed, self-contained, with the data's numbers."""

import math
import re
from html.parser import HTMLParser

import pytest
import shorthaul
import torch
from shorthaul import _tables
from torch import nn

VOID = {"input", "br", "meta"}
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Page(HTMLParser):
    """Tables as rows of texts, and every element with its attributes; tags must match."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.elements, self.open, self.cell = [], [], [], None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = ""

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self.cell)
            self.cell = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data


def columns(table):
    """A table's columns by title."""
    head, *rows = table
    return {title: [row[i] for row in rows] for i, title in enumerate(head)}


def as_bytes(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 32, 32)
    limits = {"copy_gb_s": 10.0, "product_gflop_s": 100.0}
    found = shorthaul.profile(model, x, rounds=3, warmup=1, limits=limits)
    return shorthaul.report(model, x), found


def test_a_reports_table_sums_to_the_reports_bytes(measured):
    report, _ = measured
    page = Page(report._repr_html_())
    (table,) = page.tables
    kernels = columns(table)
    assert len(kernels["origin"]) == len(report.data["kernels"])
    shown = sum(map(as_bytes, kernels["read"] + kernels["written"]))
    assert shown == pytest.approx(report.data["bytes_moved"], rel=0.01)
    assert kernels["origin"] == [kernel["origin"] for kernel in report.data["kernels"]]


def test_a_profiles_tables_sum_to_the_times(measured):
    _, found = measured
    page = Page(found._repr_html_())
    kernels, modules = map(columns, page.tables)
    whole = sum(kernel["seconds"] for kernel in found.data["kernels"]) * 1e3
    rounding = 0.0005 * len(found.data["kernels"])
    assert sum(map(float, kernels["ms"])) == pytest.approx(whole, abs=rounding)
    assert sum(map(float, modules["ms"])) == pytest.approx(whole, abs=rounding)
    times = [float(text) for text in kernels["ms"]]
    assert times == sorted(times, reverse=True)


def test_pages_load_nothing_and_run_nothing(measured):
    for shown in measured:
        page = Page(shown._repr_html_())
        assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe"}
        names = {name for _, attributes in page.elements for name in attributes}
        assert not {name for name in names if name.startswith("on") or name in ("src", "href")}
        assert "url(" not in shown._repr_html_() and "@import" not in shown._repr_html_()


def test_switches_of_two_tables_are_apart(measured):
    report, _ = measured
    pages = [Page(report._repr_html_()) for _ in range(2)]
    radios = [{a["name"] for tag, a in page.elements if tag == "input"} for page in pages]
    assert len(radios[0]) == len(radios[1]) == 1 and not radios[0] & radios[1]


def test_the_hottest_row_is_the_largest(measured):
    report, _ = measured
    rows = [a["style"] for tag, a in Page(report._repr_html_()).elements if tag == "tr" and a]
    heats = [float(re.match(r"--h0:([\d.]+)", style)[1]) for style in rows]
    moved = [k["bytes_read"] + k["bytes_written"] for k in report.data["kernels"]]
    assert heats == pytest.approx([n / max(moved) for n in moved], abs=5e-4)


def test_roofline_puts_kernels_where_their_numbers_are(measured):
    _, found = measured
    drawn = _tables.roofline(found.data["kernels"], found.data["limits"])
    circles = [a for tag, a in Page(drawn).elements if tag == "circle" and a["r"] != "4"]
    with_operations = [kernel for kernel in found.data["kernels"] if kernel["operations"]]
    assert len(circles) == len(with_operations)
    # On logarithmic axes equal ratios are equal distances; the slowest kernel is drawn first.
    first, second = sorted(with_operations, key=lambda kernel: -kernel["seconds"])[:2]
    decades = math.log10(first["gflop_s"] / second["gflop_s"])
    grid = re.findall(r'<path d="M 62 ([\d.]+) H', drawn)
    decade = abs(float(grid[1]) - float(grid[0]))
    distance = float(circles[1]["cy"]) - float(circles[0]["cy"])
    assert distance == pytest.approx(decades * decade, abs=0.3)


def test_a_recipe_shows_its_decisions(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    recipe = shorthaul.recipe(model, torch.randn(4, 3, 32, 32))
    changed = next(d for d in recipe.decisions if d.applied and d.kind == "fuse")
    recipe = recipe.without(changed)
    for known in (True, False):
        if not known:  # a loaded recipe knows no sizes
            recipe.save(tmp_path / "recipe.toml")
            recipe = shorthaul.Recipe.load(tmp_path / "recipe.toml")
        page = recipe._repr_html_()
        applied, refused = map(columns, Page(page).tables)
        decisions = recipe.decisions
        assert sorted(applied["place"]) == sorted(d.place for d in decisions if d.applied)
        assert sorted(refused["place"]) == sorted(d.place for d in decisions if not d.applied)
        assert applied["by the recipe"].count("yes") + refused["by the recipe"].count("yes") == len(
            recipe.changes
        )
        assert f"{len(applied['place'])} decisions applied" in page
        saves = [as_bytes(text) for text in refused["would save"] if text]
        assert bool(saves) == known and saves == sorted(saves, reverse=True)
    found = shorthaul.search(model, torch.randn(4, 3, 32, 32), plans=1)
    assert "search: " in found._repr_html_()


def test_names_cannot_leave_their_cell():
    kernel = {"stage": "forward", "path": "loops", "origin": "<b>&\"x'", "operations": 1}
    kernel |= {"bytes_read": 1, "bytes_written": 1, "bytes_least": 1}
    memory = dict.fromkeys(("saved_bytes", "forward_arena_bytes", "backward_arena_bytes"), 0)
    data = {"kernels": [kernel], "bytes_moved": 2, "bytes_least": 1, "operations": 1}
    text = _tables.report(data | {"memory": memory, "refusals": ["<i>"]})
    (table,) = Page(text).tables
    assert columns(table)["origin"] == [kernel["origin"]]
    assert "<b>" not in text and "<i>" not in text
