"""The notebook's widget in a headless Chromium: clicks reach Python, and Python's changes the page.

The page has what a notebook gives a widget, an element and a model; here the model's messages go to
the widget through Playwright instead of a Jupyter kernel.
"""

import json
import re
import shutil

import pytest
import shorthaul
import torch
import traitlets
from playwright.sync_api import expect, sync_playwright
from shorthaul.notebook import Explorer
from torch import nn

LIMITS = {"copy_gb_s": 10.0, "product_gflop_s": 100.0}

TRAITS = (
    "step",
    "module",
    "level",
    "colour",
    "selected",
    "previewed",
    "states",
    "at",
    "message",
)

HOST = """
const state = {state}, listeners = new Map();
let changed = {};
const fire = (names) => {
  for (const name of names) for (const f of listeners.get(`change:${name}`) ?? []) f();
};
const model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value; changed[name] = value; },
  on: (event, f) => listeners.set(event, [...(listeners.get(event) ?? []), f]),
  off: (event, f) => listeners.set(event, (listeners.get(event) ?? []).filter((g) => g !== f)),
  send: (content) => send(content),
  save_changes: () => { toPython(changed); fire(Object.keys(changed)); changed = {}; },
};
window.fromPython = (values) => { Object.assign(state, values); fire(Object.keys(values)); };
widget.render({ model, el: document.body });
"""


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    assert found, "no Chromium: install it, on Debian `apt-get install chromium`"
    flags = ["--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", *flags])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(32, 4))
    return Explorer(model, torch.randn(4, 16, 32), rounds=2, limits=LIMITS)


@pytest.fixture
def explorer(measured):
    """The widget as it is at first."""
    while measured.at:
        measured.undo()
    measured.module, measured.level = "", "modules"
    measured.colour, measured.selected = "time", -1
    return measured


@pytest.fixture
def page(browser, explorer):
    """The widget's page; errors in its script fail the test."""
    opened = browser.new_page()
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.expose_function(
        "toPython", lambda values: [explorer.set_trait(*item) for item in values.items()]
    )
    opened.expose_function("send", lambda content: explorer._handle_custom_msg(content, []))
    state = json.dumps({name: explorer.get_state()[name] for name in TRAITS})
    script = str(explorer._esm).replace("export default", "const widget =")
    script += HOST.replace("{state}", state)
    text = f"<meta charset=utf-8><style>{explorer._css}</style><body></body>"
    opened.set_content(text)
    opened.add_script_tag(content=script, type="module")
    opened.wait_for_selector(".shorthaul-explorer")
    yield opened
    opened.close()
    assert errors == []


def heard(page, explorer, **expected):
    """Whether Python has these values; what the page says takes a moment to arrive."""
    for _ in range(200):
        if all(getattr(explorer, name) == value for name, value in expected.items()):
            return True
        page.wait_for_timeout(10)
    return False


def show(page, explorer):
    """Brings the page what Python has changed."""
    state = explorer.get_state()
    page.evaluate("values => fromPython(values)", {name: state[name] for name in TRAITS})


def milliseconds(cards):
    """The times on cards."""
    return [float(re.search(r"([\d.]+) ms", text)[1]) for text in cards.all_inner_texts()]


def test_modules_add_up_and_open(page, explorer):
    cards = page.locator(".map .card")
    whole = sum(kernel["seconds"] for kernel in explorer.profile.data["kernels"]) * 1e3
    assert sum(milliseconds(cards)) == pytest.approx(whole, abs=0.002)
    page.click('[data-module="0"]')
    assert heard(page, explorer, module="0", level="modules")
    expect(page.locator('[data-module="0.linear1"]')).to_be_visible()
    page.click('[data-module="0.linear1"]')
    assert heard(page, explorer, module="0.linear1", level="kernels")
    kernels = explorer.profile.data["kernels"]
    inside = [
        str(i)
        for i, kernel in enumerate(kernels)
        if any(operator["module"] == "0.linear1" for operator in kernel["operators"])
    ]
    shown = page.locator(".map [data-kernel]")
    assert sorted(card.get_attribute("data-kernel") for card in shown.all()) == sorted(inside)
    page.click('[data-crumb=""]')
    assert heard(page, explorer, module="", level="modules")


def test_a_click_on_a_kernel_shows_its_data(page, explorer):
    page.click('[data-level="kernels"]')
    chosen = next(
        i
        for i, kernel in enumerate(explorer.profile.data["kernels"])
        if kernel["stage"] == "backward" and len(kernel["operators"]) > 1
    )
    page.click(f'[data-kernel="{chosen}"]')
    assert heard(page, explorer, selected=chosen)
    kernel = explorer.kernel
    assert page.inner_text(".details h3") == kernel["origin"]
    details = page.inner_text(".details")
    assert f"{kernel['seconds'] * 1e3:.3f} ms" in details
    for operator in kernel["operators"]:
        assert operator["node"] in details
    by_name = {c["name"]: c for c in explorer.profile.data["containers"]}
    items = page.locator(".details [data-container]").all_inner_texts()
    assert len(items) == len(kernel["reads"]) + len(kernel["writes"])
    for name, item in zip(kernel["reads"] + kernel["writes"], items, strict=True):
        container = by_name[name]
        assert item.startswith(f"{container['title']}: {container['dtype']}, ")
        assert item.split(", ")[-1].startswith(container["role"])
    nodes = [operator["node"] for operator in kernel["operators"]]
    decisions = explorer.profile.data["decisions"]
    own = [d for d in decisions if d["node"] in nodes and d["stage"] == "backward"]
    assert own and all(decision["sentence"] in details for decision in own)


def test_a_container_leads_to_its_writer(page, explorer):
    page.click('[data-level="kernels"]')
    kernels = explorer.profile.data["kernels"]
    written = {name: i for i, kernel in enumerate(kernels) for name in kernel["writes"]}
    reader, name = next(
        (i, name)
        for i, kernel in enumerate(kernels)
        for name in kernel["reads"]
        if name in written and kernel["stage"] == "backward"
    )
    page.click(f'[data-kernel="{reader}"]')
    expect(page.locator(f'[data-kernel="{written[name]}"].near')).to_be_visible()
    page.locator(".details [data-container]", has_text=f"{name}: ").locator("button").click()
    assert heard(page, explorer, selected=written[name])
    assert page.inner_text(".details h3") == kernels[written[name]]["origin"]


def test_heat_follows_the_colour(page, explorer):
    page.click('[data-level="kernels"]')
    page.click('[data-colour="bytes"]')
    assert heard(page, explorer, colour="bytes")
    moved = [kernel["bytes_moved"] for kernel in explorer.profile.data["kernels"]]
    heats = page.eval_on_selector_all(
        "[data-kernel]",
        "cards => Object.fromEntries(cards.map(c => [c.dataset.kernel,"
        " +c.style.getPropertyValue('--heat')]))",
    )
    expected = [n / max(moved) for n in moved]
    assert [heats[str(i)] for i in range(len(moved))] == pytest.approx(expected, abs=1e-3)


def test_python_chooses_too(page, explorer):
    explorer.level, explorer.selected = "kernels", 0
    page.evaluate("values => fromPython(values)", {"level": "kernels", "selected": 0})
    assert page.inner_text(".details h3") == explorer.profile.data["kernels"][0]["origin"]
    assert page.get_attribute('[data-kernel="0"]', "aria-pressed") == "true"


def test_a_kernel_that_is_not_there_is_refused(explorer):
    with pytest.raises(traitlets.TraitError, match="`selected` is 1000"):
        explorer.selected = 1000
    assert explorer.kernel is None
    with pytest.raises(traitlets.TraitError):
        explorer.colour = "red"


def changeable(explorer, kind):
    """The first applied decision of a kind that may be left undone, and a kernel that shows it."""
    for kernel, shown in enumerate(explorer.step["kernels"]):
        for at in shown["decisions"]:
            decision = explorer.step["decisions"][at]
            if decision["kind"] == kind and decision["applied"] and decision["may_change"]:
                return at, kernel
    raise AssertionError(f"no decision of {kind} is applied")


def test_preview_apply_undo_redo_by_clicks(page, explorer, tmp_path):
    at, kernel = changeable(explorer, "epilogue")
    moved, n_kernels = explorer.profile.data["bytes_moved"], len(explorer.step["kernels"])
    page.click('[data-level="kernels"]')
    page.click(f'[data-kernel="{kernel}"]')
    page.click(f'[data-decision="{at}"] button')
    for _ in range(200):
        if explorer.previewed:
            break
        page.wait_for_timeout(10)
    before, after = explorer.previewed["before"], explorer.previewed["after"]
    assert before["bytes_moved"] == moved and after["bytes_moved"] > moved
    assert after["n_kernels"] == n_kernels + 1
    show(page, explorer)
    preview = page.inner_text(".preview")
    assert f"kernels {n_kernels} → {n_kernels + 1}" in preview
    page.click('.preview [data-do="apply"]')
    assert heard(page, explorer, at=1)
    # What was previewed is what is measured.
    assert explorer.profile.data["bytes_moved"] == after["bytes_moved"]
    assert len(explorer.profile.data["kernels"]) == n_kernels + 1
    show(page, explorer)
    states = page.locator(".states li")
    assert states.count() == 2 and "without epilogue" in states.nth(1).inner_text()
    page.click('[data-do="undo"]')
    assert heard(page, explorer, at=0) and explorer.profile.data["bytes_moved"] == moved
    show(page, explorer)
    assert page.is_disabled('[data-do="undo"]')
    page.click('[data-do="redo"]')
    assert heard(page, explorer, at=1)
    show(page, explorer)
    path = tmp_path / "told.toml"
    page.fill("input", str(path))
    page.click('[data-do="save"]')
    assert heard(page, explorer, message=f"saved the recipe as {path}")
    (change,) = shorthaul.Recipe.load(path).changes
    assert (change.kind, change.take) == ("epilogue", False)


def test_numbers_stay_those_of_float64(explorer):
    at, _ = changeable(explorer, "inline")
    explorer.apply(at)
    found = explorer.compare()
    # Both are single precision, with sums in another order.
    assert found["shorthaul"] < 4 * found["eager"]
    assert f"{found['shorthaul']:.1e}" in explorer.message


def test_what_cannot_be_done_is_a_message(page, explorer):
    refused = next(
        i
        for i, decision in enumerate(explorer.profile.data["decisions"])
        if not decision["applied"] and not decision["may_change"]
    )
    page.evaluate("decision => send({ do: 'apply', decision })", refused)
    show(page, explorer)
    assert "is not possible: " in page.inner_text(".message")
    page.evaluate("send({ do: 'undo' })")
    show(page, explorer)
    assert page.inner_text(".message") == "there is nothing to undo"
    page.evaluate("send({ do: 'save', path: '/no/such/folder/recipe.toml' })")
    show(page, explorer)
    assert "No such file" in page.inner_text(".message")
    assert explorer.at == 0 and len(explorer.states) == len(page.locator(".states li").all())


def test_random_numbers_are_not_compared():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    explorer = Explorer(model, torch.randn(4, 8), rounds=1, limits=LIMITS)
    with pytest.raises(ValueError, match="turn dropout off"):
        explorer.compare()
