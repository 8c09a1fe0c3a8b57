"""What can go wrong on the way from a PyTorch module to a compiled program.

Owns the exception types and nothing else. Every message says what was found, where it
came from, and what to do next.
"""

from __future__ import annotations


class ShorthaulError(RuntimeError):
    """Base of every error that Shorthaul raises on purpose."""


class CaptureError(ShorthaulError):
    """The module's ``forward`` could not be turned into a graph."""


class Refused(CaptureError):
    """Nodes of a graph that no program can hold: names with reasons. They are PyTorch's to run."""

    def __init__(self, reasons: dict[str, str]):
        self.reasons = reasons
        super().__init__("; ".join(dict.fromkeys(reasons.values())))

    @classmethod
    def of_node(cls, name: str, error: Exception) -> Exception:
        """A refusal of the node of that name; the error itself where the name is not known."""
        return cls({name: str(error)}) if name else error


class Unsupported(ShorthaulError):
    """The graph uses operators that Shorthaul does not have; all of them are listed.

    ``operators`` is a list of ``(target, places)`` where a place is ``module path (file:line)``.
    """

    def __init__(self, operators: list[tuple[str, list[str]]]):
        self.operators = operators
        #: Nodes of the region's graph that need them, with the reason.
        self.nodes: dict[str, str] = {}
        lines = [
            f"  {target} at {', '.join(places[:4])}"
            + (f" and {len(places) - 4} more" if len(places) > 4 else "")
            for target, places in operators
        ]
        super().__init__(
            f"Shorthaul has no implementation of {len(operators)} operator(s) of this model:\n"
            + "\n".join(lines)
            + '\nReplace them, or leave out `fallback="error"`: then PyTorch runs them, and '
            "Shorthaul the rest."
        )


class InputError(ShorthaulError):
    """An argument of a call has a type, dtype, shape or device that cannot be used."""


class OutOfRange(InputError, IndexError):
    """An index or a class label lies outside of what it looks up."""


class DivisionByZero(ShorthaulError, ZeroDivisionError):
    """An integer was divided by zero."""


class CompileError(ShorthaulError):
    """The graph was understood, but no kernels could be made from it."""


class ToolchainError(CompileError):
    """This machine cannot compile any kernel: no C compiler, or no place for what it makes."""


class RecipeError(ShorthaulError, ValueError):
    """A file or text is no recipe of Shorthaul's, or one of another format."""


class CapturingError(ShorthaulError):
    """Something that must happen before a CUDA graph is captured was left to the capture."""


class RecompileWarning(UserWarning):
    """A module is compiled again, or no longer, because its inputs or mode keep changing."""


class RecipeWarning(UserWarning):
    """A recipe says something that could not be done, or is of another model."""


class FallbackWarning(UserWarning):
    """PyTorch runs a part of a module, or Python runs between two parts of it."""
