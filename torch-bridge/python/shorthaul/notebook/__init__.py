"""Tools for notebooks: ``Explorer`` is a widget that shows the kernels and decisions of a step.

Import it with ``from shorthaul.notebook import Explorer``. It needs the package ``anywidget``,
which ``pip install "shorthaul[notebook]"`` installs.
"""

try:
    import anywidget as _anywidget  # noqa: F401
except ImportError as error:
    raise ImportError(
        'shorthaul.notebook needs anywidget: pip install "shorthaul[notebook]"'
    ) from error

from ._explorer import Explorer

__all__ = ["Explorer"]
