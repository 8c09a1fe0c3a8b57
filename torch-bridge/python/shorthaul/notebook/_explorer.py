"""The widget: a measured step by modules and kernels, and the decisions of its reader.

Owns what Python and the page tell each other. The page is ``explorer.js`` and ``explorer.css``, its
data ``_view``'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import torch
import traitlets
from torch import nn

from .._errors import ShorthaulError
from .._profile import Profile
from .._recipe import Recipe
from . import _view
from ._steering import Steering, numbers

_HERE = Path(__file__).parent


class Explorer(anywidget.AnyWidget):
    """A measured step of ``model`` as a widget; the arguments are those of ``profile``.

    Clicks set these attributes, and Python may set them too: ``module`` (the path of the open
    module, empty for the model), ``level`` (``"modules"`` or ``"kernels"``), ``colour``
    (``"time"``, ``"bytes"`` or ``"distance"``) and ``selected`` (the position of the selected
    kernel, or -1).

    ``preview`` and ``apply`` change a decision, which is named by its position in
    ``profile.data["decisions"]``. ``states`` lists the recipes applied so far; ``at`` is the
    position of the current one.
    """

    _esm = _HERE / "explorer.js"
    _css = _HERE / "explorer.css"

    step = traitlets.Dict().tag(sync=True)
    module = traitlets.Unicode("").tag(sync=True)
    level = traitlets.Enum(["modules", "kernels"], "modules").tag(sync=True)
    colour = traitlets.Enum(["time", "bytes", "distance"], "time").tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    #: What a decision would change: its position, and numbers before and after. Empty: nothing.
    previewed = traitlets.Dict().tag(sync=True)
    states = traitlets.List().tag(sync=True)
    at = traitlets.Int(0).tag(sync=True)
    #: What was done last, or why it could not be done.
    message = traitlets.Unicode("").tag(sync=True)

    def __init__(
        self,
        model: nn.Module,
        *inputs: Any,
        rounds: int = 10,
        loss: Callable[[Any], torch.Tensor] | None = None,
        limits: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        options = {"rounds": rounds, "loss": loss, "limits": limits}
        self._title = type(model).__name__
        self._steering = Steering(model, inputs, kwargs, options)
        super().__init__()
        self._show()
        self.on_msg(self._told)

    @property
    def profile(self) -> Profile:
        """The measurement of the current state."""
        return self._steering.now.profile

    @property
    def recipe(self) -> Recipe:
        """The current recipe, for ``shorthaul.module(model, recipe=…)``."""
        return self._steering.now.recipe

    @property
    def kernel(self) -> dict[str, Any] | None:
        """The selected kernel, as in the profile's data, or ``None``."""
        return self.profile.data["kernels"][self.selected] if self.selected >= 0 else None

    def preview(self, decision: int) -> dict[str, dict[str, float]]:
        """Returns numbers ``before`` and ``after`` changing a decision; nothing is compiled.

        Both have ``n_kernels``, ``bytes_moved``, ``peak_bytes`` and ``predicted_us``. Raises
        ``ValueError`` if the decision cannot be changed.
        """
        _, recipe = self._steering.changed(decision)
        found = {"before": numbers(self.recipe), "after": numbers(recipe)}
        self.previewed = {"decision": decision, "notes": recipe.notes, **found}
        return found

    def apply(self, decision: int) -> None:
        """Changes a decision, compiles and measures. Raises as :meth:`preview` does."""
        self._steering.apply(decision)
        self._show()

    def undo(self) -> None:
        """Returns to the previous state. Raises ``ValueError`` if there is none."""
        self._steering.move(-1)
        self._show()

    def redo(self) -> None:
        """Repeats what :meth:`undo` took back. Raises ``ValueError`` if there is nothing."""
        self._steering.move(1)
        self._show()

    def compare(self) -> dict[str, float]:
        """Returns the relative errors of ``shorthaul`` in this state and of ``eager``.

        They compare results and gradients of parameters with eager PyTorch in float64. Raises
        ``ValueError`` for a step that draws random numbers.
        """
        found = self._steering.errors()
        errors = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        self.message = f"relative errors against float64: {errors}"
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the current recipe to a file."""
        self.recipe.save(path)
        self.message = f"saved the recipe as {os.fspath(path)}"

    def _show(self) -> None:
        steering = self._steering
        with self.hold_sync():
            # First, so that no kernel is chosen that the new step does not have.
            self.selected, self.previewed, self.message = -1, {}, ""
            self.step = _view.view(self.profile.data, self._title)
            self.states = [
                numbers(state.recipe)
                | {"title": state.title, "seconds": state.profile.data["kernel_seconds"]}
                for state in steering.states
            ]
            self.at = steering.at

    def _told(self, _, content: dict[str, Any], __) -> None:
        """What a button of the page asks for; what is not possible is a message there."""
        try:
            match content:
                case {"do": "preview", "decision": int(decision)}:
                    self.preview(decision)
                case {"do": "apply", "decision": int(decision)}:
                    self.apply(decision)
                case {"do": "undo"}:
                    self.undo()
                case {"do": "redo"}:
                    self.redo()
                case {"do": "compare"}:
                    self.compare()
                case {"do": "save", "path": str(path)}:
                    self.save(path)
        except (ValueError, OSError, ShorthaulError) as error:
            self.message = str(error)

    @traitlets.validate("selected")
    def _is_a_kernel(self, proposal: dict[str, Any]) -> int:
        n_kernels = len(self.step.get("kernels", ()))
        if not -1 <= proposal["value"] < n_kernels:
            raise traitlets.TraitError(
                f"`selected` is {proposal['value']}, but the step has {n_kernels} kernels; use 0 "
                f"to {n_kernels - 1}, or -1 for none"
            )
        return proposal["value"]
