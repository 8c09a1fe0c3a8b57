"""The roofline plot: operations for each byte against operations per second.

Owns the drawing, in SVG. The roof is what memory and arithmetic allow at best: the copy bandwidth
times the operations for each byte, and at most the speed of a large matrix product.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable

from .results import short
from .svg import svg

#: Width and height of a drawing, and the margins left of, right of, above and below its field.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 400, 60, 20, 20, 45


def point(result: dict) -> tuple[float, float] | None:
    """Operations for each byte that Shorthaul's step moves, and its GFLOP/s; none without both."""
    own, used = result["variants"].get("shorthaul", {}), result.get("used")
    if not used or "median_ms" not in own or not (used["operations"] and used["bytes_moved"]):
        return None
    per_second = used["operations"] / (own["median_ms"] / 1e3) / 1e9
    return used["operations"] / used["bytes_moved"], per_second


def roof(intensity: float, machine: dict) -> float:
    """The most GFLOP/s that the machine reaches with this many operations for each byte."""
    return min(machine["product_gflop_s"], intensity * machine["copy_gb_s"])


def best_limits(results: list[dict]) -> dict[str, float]:
    """The highest of each limit that was measured: a limit is what is reached at best."""
    found = [result["limits"] for result in results]
    return {name: max(one[name] for one in found) for name in ("copy_gb_s", "product_gflop_s")}


def draw(results: list[dict], title: Callable[[dict], str]) -> str:
    """A point for each result with its use of the machine, on logarithmic axes; or nothing."""
    placed = [(result, point(result)) for result in results if "limits" in result]
    placed = [(result, at) for result, at in placed if at]
    if not placed:
        return ""
    machine = best_limits([result for result, _ in placed])
    ridge = machine["product_gflop_s"] / machine["copy_gb_s"]
    across = _ticks([ridge, *(x for _, (x, _) in placed)])
    up = _ticks([machine["product_gflop_s"], *(y for _, (_, y) in placed)])
    left, right = across[0], across[-1]

    def x_of(value: float) -> float:
        part = math.log10(value / left) / math.log10(right / left)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        part = math.log10(value / up[0]) / math.log10(up[-1] / up[0])
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    shapes = [f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="#888"/>']
    for tick in across:
        x = x_of(tick)
        shapes.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#eee"/>')
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in up:
        y = y_of(tick)
        shapes.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#eee"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    shapes.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">operations per byte</text>'
    )
    shapes.append(f'<text x="{_LEFT + 6}" y="{_TOP + 2}">GFLOP/s</text>')
    # The roof begins where it enters the field: at the left edge or at the bottom.
    begin = max(left, up[0] / machine["copy_gb_s"])
    corners = [(begin, roof(begin, machine)), (ridge, machine["product_gflop_s"])]
    corners.append((right, machine["product_gflop_s"]))
    line = "L".join(f"{x_of(x):.1f} {y_of(y):.1f}" for x, y in corners)
    shapes.append(f'<path class="roof" d="M{line}" fill="none" stroke="#1b6ca8"/>')
    for result, (x, y) in placed:
        said = f"{title(result)}: {short(x)} operations per byte, {short(y)} GFLOP/s, "
        said += f"{100 * y / roof(x, machine):.0f} % of the roof"
        shapes.append(
            f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4" fill="#1b6ca8">'
            f"<title>{html.escape(said)}</title></circle>"
        )
    shapes += _names([(result["name"], x_of(x), y_of(y)) for result, (x, y) in placed])
    return svg(_WIDTH, _HEIGHT, shapes)


def _ticks(values: list[float]) -> list[float]:
    """1, 2 and 5 times powers of ten around these values, at least two."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low or i == 0)
    last = min(i for i, step in enumerate(steps) if step >= high or i == len(steps) - 1)
    return steps[first : max(last, first + 1) + 1]


def _names(placed: list[tuple[str, float, float]]) -> list[str]:
    """The names of points in pixels, where they hide neither a point nor an earlier name."""
    points = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in placed]
    shapes, taken = [], list(points)
    for (name, x, y), own in zip(placed, points, strict=True):
        width = 7.0 * len(name)
        for start in (x + 8, x - 8 - width):
            box = (start, y - 7, start + width, y + 7)
            is_inside = _LEFT < start and start + width < _WIDTH
            if is_inside and not any(_overlap(box, other) for other in taken if other != own):
                taken.append(box)
                end = "" if start > x else ' text-anchor="end"'
                at = x + 8 if start > x else x - 8
                shapes.append(f'<text x="{at:.1f}" y="{y + 4:.1f}"{end}>{html.escape(name)}</text>')
                break
    return shapes


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
