"""Tools for notebooks: ``shorthaul.notebook.Explorer`` shows a step and what was decided in it.

Needs the package ``anywidget``, which ``pip install "shorthaul[notebook]"`` brings.
"""

try:
    import anywidget as _anywidget  # noqa: F401
except ImportError as error:
    raise ImportError(
        'shorthaul.notebook needs anywidget: pip install "shorthaul[notebook]"'
    ) from error

from ._explorer import Explorer

__all__ = ["Explorer"]
