"""The list of programs and the words that programs are written with.

A program is a function of ``wrap``, which is the identity in eager PyTorch. It builds a model,
wraps it, runs it, and returns what a user could observe.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from shorthaul._pytorch_version import OLDEST

THEMES = (
    "functions",
    "surrogates",
    "hooks",
    "visible",
    "module_hooks",
    "state",
    "statistics",
    "randomness",
    "attributes",
    "norms",
    "parameters",
    "containers",
    "aliasing",
    "mutation",
    "views",
    "modes",
    "casts",
    "integers",
    "control",
    "language",
    "structures",
    "gradients",
    "inner_transforms",
    "transforms",
    "layers",
    "sequences",
    "operators",
    "indexing",
    "losses",
    "kinks",
    "special_values",
    "training",
    "composition",
    "processes",
)


@dataclass(frozen=True)
class Program:
    """One program. ``slack`` multiplies the tolerance that its numbers' dtype has."""

    theme: str
    name: str
    run: Callable
    slack: float = 1.0
    alone: bool = False
    #: The oldest PyTorch that can run it in eager.
    since: tuple[int, int] = OLDEST

    @property
    def full_name(self) -> str:
        return f"{self.theme}.{self.name}"


#: Slack of programs that compute in 16 bits: eager rounds after each operator, a kernel once.
HALF = 800.0

_programs: dict[str, Program] = {}


def program(
    function=None,
    /,
    *,
    slack: float = 1.0,
    alone: bool = False,
    since: tuple[int, int] = OLDEST,
    name: str | None = None,
    theme: str | None = None,
):
    """Registers ``function(wrap)`` under its own name and its file's, or those given.

    ``slack``: how much more rounding its numbers may show, for long or badly conditioned sums.
    ``since``: the version of PyTorch that added what it uses.
    ``alone``: starts processes or threads, so that it always gets a process of its own.
    """
    if function is None:
        return lambda function: program(
            function, slack=slack, alone=alone, since=since, name=name, theme=theme
        )
    theme = theme or function.__module__.rsplit(".", 1)[-1]
    made = Program(theme, name or function.__name__, function, slack, alone, since)
    if made.full_name in _programs:
        raise ValueError(f"two programs are called {made.full_name}")
    _programs[made.full_name] = made
    return function


def programs(theme: str | None = None) -> list[Program]:
    """All programs, or those of one theme, in the order of their files."""
    for known in THEMES if theme is None else (theme,):
        importlib.import_module(f"{__package__}.{known}")
    return [made for made in _programs.values() if theme in (None, made.theme)]
