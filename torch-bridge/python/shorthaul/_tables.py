"""Reports and profiles as HTML for notebooks: a table with bars and heat, and the roofline.

Owns the drawing. What it gives is self-contained: no script, nothing loaded. Colours are laid over
the notebook's own, so that light and dark themes both stay readable.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

#: Tables of one page must not share their switches.
_numbers = itertools.count()

#: Colours of points by what made the kernel: contractions, and everything else.
_POINTS = {"products": "#3b82f6", "loops": "#ea7317"}

_STYLE = """
.shorthaul { font-size: 12.5px; line-height: 1.4; color: inherit; max-width: 100%; }
.shorthaul p { margin: 3px 0; }
.shorthaul .scroll { overflow: auto; max-height: 560px; border: 1px solid rgba(128,128,128,.35);
  border-radius: 6px; margin: 6px 0; }
.shorthaul .scroll { scrollbar-color: rgba(128,128,128,.6) transparent; }
.shorthaul table { border-collapse: collapse; width: 100%; margin: 0; color: inherit;
  font-variant-numeric: tabular-nums; }
.shorthaul tr, .shorthaul tr:nth-child(even) { background: transparent; }
.shorthaul th, .shorthaul td { padding: 2px 8px; text-align: right; white-space: nowrap;
  border: 0; border-bottom: 1px solid rgba(128,128,128,.2); color: inherit; }
.shorthaul th { font-weight: 600; opacity: .75; }
.shorthaul .t { text-align: left; max-width: 34em; overflow: hidden; text-overflow: ellipsis; }
.shorthaul .b { background: linear-gradient(90deg, rgba(59,130,246,.32) var(--w),
  transparent var(--w)); min-width: 5.5em; }
.shorthaul .h { width: 8px; padding: 0; min-width: 8px;
  background: rgba(222,70,20,var(--heat)); }
.shorthaul label { margin-right: 12px; cursor: pointer; }
.shorthaul input { margin: 0 4px 0 0; vertical-align: -1px; }
.shorthaul svg { max-width: 100%; height: auto; color: inherit; }
.shorthaul svg text { fill: currentColor; font-size: 11px; }
.shorthaul details { margin: 4px 0; } .shorthaul summary { cursor: pointer; }
"""


class Column(NamedTuple):
    """A column of a table: its title, a row's text, and a number for its bar."""

    title: str
    text: Callable[[dict[str, Any]], str]
    bar: Callable[[dict[str, Any]], float] | None = None
    is_text: bool = False


class Heat(NamedTuple):
    """A way to colour rows: its label and a row's number; the largest is the hottest."""

    label: str
    value: Callable[[dict[str, Any]], float]


def report(data: dict[str, Any], more: Iterable[str] = ()) -> str:
    """A report as HTML, with more sentences about it."""
    kernels = [
        kernel | {"bytes_moved": kernel["bytes_read"] + kernel["bytes_written"]}
        for kernel in data["kernels"]
    ]
    columns = [
        Column("stage", lambda k: k["stage"], is_text=True),
        Column("made by", lambda k: k["path"], is_text=True),
        _bytes_column("read", "bytes_read"),
        _bytes_column("written", "bytes_written"),
        _bytes_column("least", "bytes_least"),
        Column("MFLOP", lambda k: f"{k['operations'] / 1e6:.2f}", lambda k: k["operations"]),
        _ORIGIN,
    ]
    heats = [
        Heat("bytes moved", lambda k: k["bytes_moved"]),
        Heat("bytes beyond the least", lambda k: k["bytes_moved"] - k["bytes_least"]),
        Heat("operations", lambda k: k["operations"]),
    ]
    memory = data["memory"]
    sentences = [
        f"{len(kernels)} kernels move {n_bytes(data['bytes_moved'])}; the least possible is "
        f"{n_bytes(data['bytes_least'])}; {data['operations'] / 1e9:.2f} GFLOP",
        f"saved for backward {n_bytes(memory['saved_bytes'])}, at most "
        f"{n_bytes(memory['forward_arena_bytes'])} more in forward and "
        f"{n_bytes(memory['backward_arena_bytes'])} in backward",
        *(undone["sentence"] for undone in data.get("undone", ())),
        *(f"warning: {warning['sentence']}" for warning in data.get("warnings", ())),
        *more,
        *(f"outside of the kernels: {sentence}" for sentence in data.get("outside", ())),
    ]
    refusals = _details("rewrites refused", data["refusals"])
    return _page(_paragraphs(sentences), table(kernels, columns, heats), refusals)


def profile(data: dict[str, Any], sentences: list[str]) -> str:
    """A profile as HTML."""
    kernels = sorted(data["kernels"], key=lambda kernel: -kernel["seconds"])
    columns = [
        Column("ms", lambda k: f"{k['seconds'] * 1e3:.3f}", lambda k: k["seconds"]),
        Column("stage", lambda k: k["stage"], is_text=True),
        Column("made by", lambda k: k["path"], is_text=True),
        _bytes_column("moved", "bytes_moved"),
        Column("GB/s", lambda k: f"{k['gb_s']:.1f}", lambda k: k["gb_s"]),
        Column("GFLOP/s", lambda k: f"{k['gflop_s']:.1f}", lambda k: k["gflop_s"]),
        Column("bound ms", lambda k: f"{k['roofline_seconds'] * 1e3:.3f}"),
        Column("× bound", lambda k: f"{k['distance']:.1f}", lambda k: k["distance"]),
        _ORIGIN,
    ]
    heats = [
        Heat("time", lambda k: k["seconds"]),
        Heat("bytes moved", lambda k: k["bytes_moved"]),
        Heat("time beyond the bound", lambda k: max(0.0, k["seconds"] - k["roofline_seconds"])),
    ]
    modules = [
        {"path": path or "(no module)"} | own
        for path, own in sorted(data["modules"].items(), key=lambda item: -item[1]["seconds"])
    ]
    by_module = [
        Column("ms", lambda m: f"{m['seconds'] * 1e3:.3f}", lambda m: m["seconds"]),
        _bytes_column("moved", "bytes_moved"),
        Column("bound ms", lambda m: f"{m['roofline_seconds'] * 1e3:.3f}"),
        Column("module", lambda m: m["path"], is_text=True),
    ]
    return _page(
        _paragraphs(sentences),
        table(kernels, columns, heats),
        f"<details><summary>by module</summary>{table(modules, by_module, [])}</details>",
        f"<details open><summary>roofline</summary>{roofline(kernels, data['limits'])}</details>",
    )


def recipe(sentences: list[str], decisions: list[dict[str, Any]]) -> str:
    """A recipe as HTML: what was applied as a table, then what was refused, the largest first.

    Each decision has ``applied``, ``take``, ``kind``, ``place``, ``sentence`` and ``bytes``, which
    is ``None`` in a recipe that knows no sizes.
    """

    def drawn(applied: bool) -> str:
        rows = [decision for decision in decisions if decision["applied"] == applied]
        rows.sort(key=lambda decision: -(decision["bytes"] or 0))
        columns = [
            Column("kind", lambda d: d["kind"], is_text=True),
            Column(
                "saves" if applied else "would save",
                lambda d: "" if d["bytes"] is None else n_bytes(d["bytes"]),
                lambda d: max(0, d["bytes"] or 0),
            ),
            Column("by the recipe", lambda d: "" if d["take"] is None else "yes", is_text=True),
            Column("place", lambda d: d["place"], is_text=True),
            Column("in words", lambda d: d["sentence"], is_text=True),
        ]
        heats = [
            Heat("bytes", lambda d: max(0, d["bytes"] or 0)),
            Heat("changed by the recipe", lambda d: d["take"] is not None),
        ]
        state = "applied" if applied else "refused"
        opened = " open" if applied else ""
        shown = table(rows, columns, heats) if rows else ""
        return f"<details{opened}><summary>{len(rows)} decisions {state}</summary>{shown}</details>"

    return _page(_paragraphs(sentences), drawn(True), drawn(False))


def table(rows: list[dict[str, Any]], columns: list[Column], heats: list[Heat]) -> str:
    """Rows with bars; switches above them choose what the heat in front of each row shows."""
    number = next(_numbers)
    switches, rules = [], []
    for i, heat in enumerate(heats):
        name, mark = f"shorthaul-heat-{number}", f"shorthaul-heat-{number}-{i}"
        checked = " checked" if i == 0 else ""
        switches.append(
            f'<input type="radio" name="{name}" id="{mark}"{checked}>'
            f'<label for="{mark}">{html.escape(heat.label)}</label>'
        )
        rules.append(f"#{mark}:checked ~ .scroll tr {{ --heat: var(--h{i}); }}")
    tops = [
        max((column.bar(row) for row in rows), default=0) if column.bar else 0 for column in columns
    ]
    hottest = [max((heat.value(row) for row in rows), default=0) for heat in heats]
    body = []
    for row in rows:
        shares = zip(heats, hottest, strict=True)
        style = ";".join(
            f"--h{i}:{heat.value(row) / top if top > 0 else 0:.3f}"
            for i, (heat, top) in enumerate(shares)
        )
        cells = [_cell(column, row, top) for column, top in zip(columns, tops, strict=True)]
        mark = '<td class="h"></td>' if heats else ""
        body.append(f'<tr style="{style}">{mark}{"".join(cells)}</tr>')
    titles = "".join(
        f'<th class="t">{html.escape(c.title)}</th>'
        if c.is_text
        else f"<th>{html.escape(c.title)}</th>"
        for c in columns
    )
    head = f"<tr>{'<th class=h></th>' if heats else ''}{titles}</tr>"
    asked = "<span>heat: </span>" if heats else ""
    return (
        f"<div><style>{' '.join(rules)}</style>{asked}{''.join(switches)}"
        f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'
        "</div></div>"
    )


def _cell(column: Column, row: dict[str, Any], top: float) -> str:
    text = html.escape(column.text(row))
    if column.is_text:
        return f'<td class="t" title="{text}">{text}</td>'
    if column.bar is None:
        return f"<td>{text}</td>"
    share = 100 * column.bar(row) / top if top > 0 else 0.0
    return f'<td class="b" style="--w:{share:.1f}%">{text}</td>'


_WIDTH, _HEIGHT, _LEFT, _BELOW = 620, 300, 62, 38


def roofline(kernels: list[dict[str, Any]], machine: dict[str, float]) -> str:
    """Kernels by operations per byte and GFLOP/s, under what the machine allows; as SVG.

    The area of a point grows with the kernel's time. Kernels without operations have no place.
    """
    points = [
        (kernel["operations"] * kernel["calls"] / kernel["bytes_moved"], kernel)
        for kernel in kernels
        if kernel["operations"] and kernel["bytes_moved"] and kernel["seconds"]
    ]
    peak, rate = machine["product_gflop_s"], machine["copy_gb_s"]
    ridge = peak / rate
    x_axis = _Axis([ridge, *(x for x, _ in points)], _LEFT, _WIDTH - 12)
    y_axis = _Axis([peak, *(k["gflop_s"] for _, k in points)], _HEIGHT - _BELOW, 12)
    slope_end = max(x_axis.low, y_axis.low / rate)
    corners = [(slope_end, slope_end * rate), (ridge, peak), (x_axis.high, peak)]
    path = " L ".join(f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}" for x, y in corners)
    slowest = max((kernel["seconds"] for _, kernel in points), default=1.0)
    drawn = [_grid(x_axis, y_axis), f'<path d="M {path}" fill="none" stroke="#dc2626"/>']
    for x, kernel in sorted(points, key=lambda point: -point[1]["seconds"]):
        radius = 2.5 + 9 * math.sqrt(kernel["seconds"] / slowest)
        title = (
            f"{kernel['origin']}: {kernel['seconds'] * 1e3:.3f} ms, {kernel['gflop_s']:.1f} "
            f"GFLOP/s, {kernel['gb_s']:.1f} GB/s, {kernel['distance']:.1f} × bound"
        )
        colour = _POINTS["products" if kernel.get("products") else "loops"]
        drawn.append(
            f'<circle cx="{x_axis.place(x):.1f}" cy="{y_axis.place(kernel["gflop_s"]):.1f}" '
            f'r="{radius:.1f}" fill="{colour}" fill-opacity="0.45" stroke="{colour}">'
            f"<title>{html.escape(title)}</title></circle>"
        )
    legend = "".join(
        f'<circle cx="{_WIDTH - 150 + 75 * i}" cy="{_HEIGHT - _BELOW - 12}" r="4" fill="{colour}"/>'
        f'<text x="{_WIDTH - 142 + 75 * i}" y="{_HEIGHT - _BELOW - 8}">{name}</text>'
        for i, (name, colour) in enumerate(_POINTS.items())
    )
    n_hidden = len(kernels) - len(points)
    hidden = f"<p>{n_hidden} kernels without operations are not drawn.</p>" if n_hidden else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}{legend}</svg>{hidden}'
    )


class _Axis:
    """A logarithmic axis over whole powers of ten around some values."""

    def __init__(self, values: Iterable[float], start: float, end: float):
        logs = [math.log10(value) for value in values if value > 0]
        self.first, self.last = math.floor(min(logs)), math.floor(max(logs)) + 1
        self.low, self.high = 10.0**self.first, 10.0**self.last
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return self.start + (self.end - self.start) * share


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    bottom, drawn = _HEIGHT - _BELOW, []
    line = 'stroke="currentColor" stroke-opacity="0.2"'
    for power in range(x_axis.first, x_axis.last + 1):
        x = x_axis.place(10.0**power)
        drawn.append(f'<path d="M {x:.1f} 12 V {bottom}" {line}/>')
        drawn.append(
            f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for power in range(y_axis.first, y_axis.last + 1):
        y = y_axis.place(10.0**power)
        drawn.append(f'<path d="M {_LEFT} {y:.1f} H {_WIDTH - 12}" {line}/>')
        drawn.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    middle = (_LEFT + _WIDTH) / 2
    drawn.append(
        f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">operations per byte</text>'
    )
    drawn.append(
        f'<text transform="translate(12 {bottom / 2}) rotate(-90)" text-anchor="middle">'
        "GFLOP/s</text>"
    )
    return "".join(drawn)


def n_bytes(n: float) -> str:
    """A number of bytes in the unit that suits it."""
    if n < 0:
        return f"-{n_bytes(-n)}"
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def _bytes_column(title: str, key: str) -> Column:
    return Column(title, lambda row: n_bytes(row[key]), lambda row: row[key])


_ORIGIN = Column("origin", lambda kernel: kernel["origin"], is_text=True)


def _paragraphs(sentences: list[str]) -> str:
    return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)


def _details(title: str, sentences: list[str]) -> str:
    if not sentences:
        return ""
    return f"<details><summary>{len(sentences)} {title}</summary>{_paragraphs(sentences)}</details>"


def _page(*parts: str) -> str:
    return f'<div class="shorthaul"><style>{_STYLE}</style>{"".join(parts)}</div>'
