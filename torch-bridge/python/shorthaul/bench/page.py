"""The page of ``--html``: one file with bars, memory against time, first steps, limits, a table.

Owns the drawing in SVG, except the roofline plot, which ``roofline`` draws. The page needs no
script and no network connection.
"""

from __future__ import annotations

import html
import statistics

from . import environment, roofline
from .limits import sentence
from .results import error_of, short
from .svg import svg

_COLOURS = {
    "shorthaul": "#1b6ca8",
    "eager": "#b5b5b5",
    "channels_last": "#8fae7e",
    "compile": "#d0905c",
    "compile-max-autotune": "#9a6fb0",
    "jax": "#5fa8a0",
    "onnxruntime": "#c2a83e",
}

#: What the page calls the entries of a record that are not named as a reader would.
_LABELS = {"c_compiler": "C compiler:", "logical_cpus": "number of processors:"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { padding: 0.2rem 0.6rem; text-align: right; }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
tr { border-top: 1px solid #ddd; } svg { max-width: 100%; height: auto; }
text { font: 12px system-ui, sans-serif; fill: #222; } code { background: #f3f3f3; }
"""

#: Width of the drawing, of what stands left and right of its bars, and height of a bar.
_WIDTH, _LEFT, _RIGHT, _BAR = 860, 200, 130, 16


def page(results: list[dict], machines: list[dict]) -> str:
    """The whole page; ``machines`` are the records of the runs, one or several."""
    times = [(r, {v: e["median_ms"] for v, e in _timed(r)}) for r in results]
    parts = [
        "<h1>Training steps beside PyTorch</h1>",
        *map(_about, machines),
        _legend(results),
        "<h2>Time of a step</h2>",
        _mean(results),
        "<p>Median of interleaved rounds; the thin line shows the interquartile range. The number "
        "after a peer's time is that time divided by Shorthaul's, as the median over the "
        "rounds.</p>",
        _bars(times, "ms"),
        _memory(results),
        _first_steps(results),
        _limits(results),
        _roofs(results),
        "<h2>Numbers</h2>\n<p>Error (with --errors): the largest difference of a gradient from "
        "float64, divided by its largest value; the median over all parameters.</p>",
        _table(results),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Shorthaul beside PyTorch</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _about(machine: dict) -> str:
    """Versions, processor, environment and command of a run; older files have fewer of these."""
    said = [
        f"{_LABELS.get(name, name)} {value}"
        for name, value in machine.items()
        if name != "command" and isinstance(value, (str, int))
    ]
    recorded = machine.get("environment")
    said.append(f"measured {environment.sentence(recorded)}")
    if isinstance(recorded, dict) and isinstance(recorded.get("variables"), dict):
        said += [f"{name}={value}" for name, value in recorded["variables"].items()]
        said.append(f"huge pages: {recorded.get('huge_pages')}")
        said.append(f"used processors: {recorded.get('processors')}")
    command = html.escape(str(machine.get("command", "")))
    return f"<p>{html.escape(', '.join(said))}<br><code>{command}</code></p>"


def _timed(result: dict) -> list[tuple[str, dict]]:
    return [(v, e) for v, e in result["variants"].items() if "median_ms" in e]


def _title(result: dict) -> str:
    kind = {"train": "", "forward": ", inference", "step": f", {result.get('optimizer')}"}
    dtype = result.get("dtype", "f32")
    return f"{result['name']}, {result['batch']}, {dtype}{kind.get(result.get('mode'), '')}"


def _colour(variant: str) -> str:
    return _COLOURS.get(variant, "#555555")


def _legend(results: list[dict]) -> str:
    names = dict.fromkeys(v for r in results for v, _ in _timed(r))
    marks = (f'<span style="color:{_colour(v)}">■</span> {html.escape(v)}' for v in names)
    return f"<p>{' &nbsp; '.join(marks)}</p>"


def _mean(results: list[dict]) -> str:
    """How Shorthaul compares with the best peer of each measurement, all together."""
    best = [r["ratios"][r["best_peer"]]["median"] for r in results if r.get("best_peer")]
    if not best:
        return ""
    mean = statistics.geometric_mean(best)
    return (
        f"<p>Shorthaul is {mean:.2f} times as fast as the fastest peer of each measurement "
        f"(geometric mean of {len(best)}), at least {min(best):.2f} and at most {max(best):.2f} "
        "times.</p>"
    )


def _memory(results: list[dict]) -> str:
    drawn = _scatter(results)
    said = (
        "<h2>Memory against time</h2>\n<p>Both relative to Shorthaul: a point to the right is "
        "slower, a point above needs more memory.</p>\n"
    )
    return said + drawn if drawn else ""


def _first_steps(results: list[dict]) -> str:
    of = [(r, {v: e["first_step_s"] for v, e in _timed(r) if "first_step_s" in e}) for r in results]
    said = (
        "<h2>First step</h2>\n<p>With an empty cache of compiled kernels, after PyTorch and its "
        "tracer were loaded.</p>\n"
    )
    return said + _bars(of, "s") if any(values for _, values in of) else ""


def _bars(rows: list[tuple[dict, dict[str, float]]], unit: str) -> str:
    """A group of bars for each measurement, each group scaled by its longest bar."""
    rows = [(result, values) for result, values in rows if values]
    shapes, y = [], 8.0
    for result, values in rows:
        in_ms = unit == "ms"
        spreads = {v: result["variants"][v].get("iqr_ms", 0.0) if in_ms else 0.0 for v in values}
        longest = max(value + spreads[v] / 2 for v, value in values.items()) or 1.0
        height = _BAR * len(values)
        shapes.append(
            f'<text x="{_LEFT - 10}" y="{y + height / 2 + 4:.1f}" text-anchor="end">'
            f"{html.escape(_title(result))}</text>"
        )
        for variant, value in values.items():
            scale = (_WIDTH - _LEFT - _RIGHT) / longest
            shapes.append(
                f'<rect x="{_LEFT}" y="{y:.1f}" width="{value * scale:.1f}" height="{_BAR - 3}" '
                f'fill="{_colour(variant)}"><title>{html.escape(variant)}</title></rect>'
            )
            spread = spreads[variant]
            if spread:
                middle, end = y + (_BAR - 3) / 2, value * scale + _LEFT
                half = spread * scale / 2
                shapes.append(
                    f'<path d="M{end - half:.1f} {middle:.1f}H{end + half:.1f}" stroke="#000"/>'
                )
            ratio = result.get("ratios", {}).get(variant) if in_ms else None
            behind = f" · {ratio['median']:.2f}×" if ratio else ""
            shapes.append(
                f'<text x="{value * scale + _LEFT + 6 + spread * scale / 2:.1f}" '
                f'y="{y + _BAR - 6:.1f}">{short(value)} {unit}{behind}</text>'
            )
            y += _BAR
        y += 12
    return svg(_WIDTH, y, shapes)


def _scatter(results: list[dict]) -> str:
    """A mark for each peer of each measurement: time across, memory up, Shorthaul at 1 and 1.

    Nothing where no memory was measured.
    """
    points = []
    for result in results:
        own = result["variants"].get("shorthaul", {})
        if not own.get("peak_bytes") or "median_ms" not in own:
            continue
        for variant, entry in _timed(result):
            if variant != "shorthaul" and "peak_bytes" in entry:
                time = entry["median_ms"] / own["median_ms"]
                memory = entry["peak_bytes"] / own["peak_bytes"]
                points.append((time, memory, variant, _title(result)))
    if not points:
        return ""
    side = 420
    most = max(2.0, *(max(t, m) for t, m, _, _ in points)) * 1.1
    at = lambda value: 50 + (side - 70) * value / most  # noqa: E731
    one, shapes = at(1.0), []
    for tick in range(int(most) + 1):
        p = at(float(tick))
        shapes.append(f'<text x="{p:.1f}" y="{side - 8}" text-anchor="middle">{tick}</text>')
        shapes.append(f'<text x="40" y="{side - p + 4:.1f}" text-anchor="end">{tick}</text>')
    shapes.append(
        f'<path d="M50 {side - one:.1f}H{side - 20}M{one:.1f} {side - 50}V20" stroke="#1b6ca8" '
        f'stroke-dasharray="4 4"/><path d="M50 20V{side - 50}H{side - 20}" fill="none" '
        f'stroke="#888"/>'
    )
    for time, memory, variant, title in points:
        shapes.append(
            f'<circle cx="{at(time):.1f}" cy="{side - at(memory):.1f}" r="5" '
            f'fill="{_colour(variant)}"><title>{html.escape(f"{title}: {variant}")}</title>'
            f"</circle>"
        )
    return svg(side, side, shapes)


def _limits(results: list[dict]) -> str:
    """The limits that were measured, and how much of them Shorthaul's steps use."""
    of = [r for r in results if "used" in r and "limits" in r]
    if not of:
        return ""
    names = {
        "copy_gb_s": "copy, GB/s read and written",
        "product_gflop_s": "large matrix product, GFLOP/s",
        "pair_gflop_s": "large matrix product in bf16, GFLOP/s",
    }
    heads = "".join(f"<th>{head}</th>" for head in ("limit", "threads", "lowest", "highest"))
    rows = []
    for name, said in names.items():
        for threads in sorted({r["threads"] for r in of if name in r["limits"]}):
            found = [
                r["limits"][name] for r in of if r["threads"] == threads and name in r["limits"]
            ]
            cells = (said, str(threads), f"{min(found):,.1f}", f"{max(found):,.1f}")
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    uses = [
        f"<li>{html.escape(_title(r))}: {html.escape(sentence(r['used'], r['limits']))}</li>"
        for r in of
    ]
    return (
        "<h2>Limits of the machine</h2>\n<p>The lowest and highest of the best speeds that each "
        f"process reached.</p>\n<table>{'<tr>' + heads + '</tr>'}{''.join(rows)}</table>\n"
        "<h2>Use of the machine</h2>\n<p>More than 100 % is possible: the limits are measured with "
        "one copy of a large array and one product of 2,048 × 2,048 matrices. Products of other "
        f"sizes may be faster, and caches serve some of the bytes.</p>\n<ul>{''.join(uses)}</ul>"
    )


def _roofs(results: list[dict]) -> str:
    """A drawing for each number of threads, since the limits depend on it."""
    drawn = []
    for threads in sorted({r["threads"] for r in results}):
        drawing = roofline.draw([r for r in results if r["threads"] == threads], _title)
        if drawing:
            drawn.append(f"<h3>{threads} {'thread' if threads == 1 else 'threads'}</h3>{drawing}")
    if not drawn:
        return ""
    return (
        "<h2>Below the roof</h2>\n<p>Each point is a step of Shorthaul. The line is what the "
        "machine allows: left of its bend memory limits a step, right of it arithmetic. Point at "
        "a mark to see its name.</p>\n" + "\n".join(drawn)
    )


def _table(results: list[dict]) -> str:
    heads = (
        "network",
        "variant",
        "median ms",
        "IQR",
        "/shorthaul",
        "95 %",
        "error",
        "first s",
        "peak MiB",
    )
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for result in results:
        for variant, entry in result["variants"].items():
            cells = [_title(result), variant, *_numbers(result, variant, entry)]
            rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _numbers(result: dict, variant: str, entry: dict) -> list[str]:
    if "error" in entry:
        return [f"skipped: {entry['error']}", "", "", "", "", "", ""]
    found = result.get("ratios", {}).get(variant)
    return [
        f"{entry['median_ms']:.1f}",
        f"{entry['iqr_ms']:.1f}",
        f"{found['median']:.2f}" if found else "",
        f"{found['low']:.2f}–{found['high']:.2f}" if found else "",
        error_of(entry),
        f"{entry['first_step_s']:.1f}" if "first_step_s" in entry else "",
        f"{entry['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in entry else "",
    ]
