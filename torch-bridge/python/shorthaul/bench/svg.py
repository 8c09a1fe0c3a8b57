"""One drawing as text, for pages without scripts."""

from __future__ import annotations


def svg(width: float, height: float, shapes: list[str]) -> str:
    """The shapes in a frame of this size in pixels."""
    inner = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n{inner}\n</svg>'
    )
