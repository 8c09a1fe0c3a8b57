"""The widget: a measured step by modules and kernels, with everything known about the chosen one.

Owns what Python and the page tell each other. The page is ``explorer.js`` and ``explorer.css``, its
data ``_view``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import torch
import traitlets
from torch import nn

from .._profile import Profile, profile
from . import _view

_HERE = Path(__file__).parent


class Explorer(anywidget.AnyWidget):
    """A measured step of ``model`` as a widget; ``rounds`` and ``loss`` as for ``profile``.

    The page sets ``module`` (the path of the module that is open, empty for the model), ``level``,
    ``colour`` and ``selected`` (the chosen kernel's position, or -1); so can Python.
    """

    _esm = _HERE / "explorer.js"
    _css = _HERE / "explorer.css"

    step = traitlets.Dict().tag(sync=True)
    module = traitlets.Unicode("").tag(sync=True)
    level = traitlets.Enum(["modules", "kernels"], "modules").tag(sync=True)
    colour = traitlets.Enum(["time", "bytes", "distance"], "time").tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)

    def __init__(
        self,
        model: nn.Module,
        *inputs: Any,
        rounds: int = 10,
        loss: Callable[[Any], torch.Tensor] | None = None,
        limits: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        #: What was measured.
        self.profile: Profile = profile(
            model, *inputs, rounds=rounds, loss=loss, limits=limits, **kwargs
        )
        super().__init__(step=_view.view(self.profile.data, type(model).__name__))

    @property
    def kernel(self) -> dict[str, Any] | None:
        """The chosen kernel, as in the profile's data, if there is one."""
        return self.profile.data["kernels"][self.selected] if self.selected >= 0 else None

    @traitlets.validate("selected")
    def _is_a_kernel(self, proposal: dict[str, Any]) -> int:
        if not -1 <= proposal["value"] < len(self.step["kernels"]):
            raise traitlets.TraitError(
                f"the step has {len(self.step['kernels'])} kernels, none at {proposal['value']}"
            )
        return proposal["value"]
