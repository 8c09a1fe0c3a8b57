"""The errors and warnings of Shorthaul.

Owns the exception types and nothing else. Every message says what was found, where it
came from, and what to do next.
"""

from __future__ import annotations


class ShorthaulError(RuntimeError):
    """The base class of all errors of Shorthaul."""


class CaptureError(ShorthaulError):
    """The module's ``forward`` could not be turned into a graph."""


class Refused(CaptureError):
    """Nodes of a graph that cannot be compiled, with reasons by name. PyTorch runs them."""

    def __init__(self, reasons: dict[str, str]):
        self.reasons = reasons
        super().__init__("; ".join(dict.fromkeys(reasons.values())))

    @classmethod
    def of_node(cls, name: str, error: Exception) -> Exception:
        """A refusal of the node of that name; the error itself where the name is not known."""
        return cls({name: str(error)}) if name else error


class Unsupported(ShorthaulError):
    """The model uses operators that Shorthaul does not have; the message lists all of them.

    ``operators`` is a list of ``(operator, places)``; a place is ``module path (file:line)``.
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
            "Shorthaul runs the rest."
        )


class InputError(ShorthaulError):
    """An argument of a call has a type, dtype, shape or device that cannot be used."""


class OutOfRange(InputError, IndexError):
    """An index or a class label is out of range."""


class DivisionByZero(ShorthaulError, ZeroDivisionError):
    """An integer was divided by zero."""


class CompileError(ShorthaulError):
    """No kernels could be made from the graph of a model."""


class InternalError(CompileError):
    """A defect of Shorthaul. The message says where it is; please report it."""


class ToolchainError(CompileError):
    """This machine cannot compile kernels: it has no C compiler, or no folder for the result."""


class BudgetError(ShorthaulError, ValueError):
    """A memory budget cannot be kept; the message has the least memory that was found."""


class RecipeError(ShorthaulError, ValueError):
    """A file is not a recipe, or has another format."""


class CapturingError(ShorthaulError):
    """A call needs preparation that is not possible while a CUDA graph is being captured."""


class InternalErrorWarning(UserWarning):
    """A defect of Shorthaul that it worked around; the message has the error's text."""


class RecompileWarning(UserWarning):
    """A module is compiled again, or has reached ``max_programs``, because its inputs change."""


class RecipeWarning(UserWarning):
    """A change of a recipe could not be made, or the recipe belongs to another model."""


class FallbackWarning(UserWarning):
    """PyTorch runs a part of a compiled module, or Python runs between two parts."""


def first_line(said: object) -> str:
    """The first line of an error's or a reason's text; an error without text is named."""
    unsaid = type(said).__name__ if isinstance(said, BaseException) else "no reason is given"
    return (str(said).strip() or unsaid).splitlines()[0]
