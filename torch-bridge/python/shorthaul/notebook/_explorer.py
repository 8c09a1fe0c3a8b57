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
    """A measured step of ``model`` as a widget; all arguments are those of ``profile``.

    The page sets ``module`` (the path of the module that is open, empty for the model), ``level``,
    ``colour`` and ``selected`` (the chosen kernel's position, or -1); so can Python.

    A decision, by its position in ``profile.data["decisions"]``, may be previewed and taken
    otherwise. ``states`` are the recipes that were applied, in order, ``at`` the present one.
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
        """What was measured in the present state."""
        return self._steering.now.profile

    @property
    def recipe(self) -> Recipe:
        """The present recipe, for ``shorthaul.module(model, recipe=…)``."""
        return self._steering.now.recipe

    @property
    def kernel(self) -> dict[str, Any] | None:
        """The chosen kernel, as in the profile's data, if there is one."""
        return self.profile.data["kernels"][self.selected] if self.selected >= 0 else None

    def preview(self, decision: int) -> dict[str, dict[str, float]]:
        """Numbers ``before`` and ``after`` a decision is taken otherwise; nothing is compiled.

        Both have ``n_kernels``, ``bytes_moved``, ``peak_bytes`` and ``predicted_us``. Raises
        ``ValueError`` where the decision may not be taken otherwise.
        """
        _, recipe = self._steering.changed(decision)
        found = {"before": numbers(self.recipe), "after": numbers(recipe)}
        self.previewed = {"decision": decision, "notes": recipe.notes, **found}
        return found

    def apply(self, decision: int) -> None:
        """Takes a decision otherwise, compiles and measures. Raises as :meth:`preview` does."""
        self._steering.apply(decision)
        self._show()

    def undo(self) -> None:
        """Goes back to the state before. Raises ``ValueError`` where there is none."""
        self._steering.move(-1)
        self._show()

    def redo(self) -> None:
        """Goes forth again after :meth:`undo`. Raises ``ValueError`` where there is nothing."""
        self._steering.move(1)
        self._show()

    def compare(self) -> dict[str, float]:
        """Relative errors against float64 eager, of ``shorthaul`` in this state and of ``eager``.

        Results and gradients of parameters together. Raises ``ValueError`` for a step that draws
        random numbers.
        """
        found = self._steering.errors()
        errors = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        self.message = f"relative errors against float64: {errors}"
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the present recipe to a file."""
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
                f"the step has {n_kernels} kernels, none at {proposal['value']}"
            )
        return proposal["value"]
