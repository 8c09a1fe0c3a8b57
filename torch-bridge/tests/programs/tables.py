"""Programs of tables: functions with the values of their inputs, by name."""

import torch

from .facts import observe, step
from .registry import program

DTYPES = (torch.float32, torch.float64)


def floats(value, dtype):
    """Numbers as a tensor of floats with a gradient."""
    return torch.tensor(value, dtype=dtype, requires_grad=True)


def floats_or_integers(value, dtype):
    """Floats as :func:`floats`; integers stay what they are."""
    made = torch.as_tensor(value)
    made = made.to(dtype) if made.is_floating_point() else made
    return made.clone().requires_grad_(made.is_floating_point())


def table(theme, name, rows, given=floats, seen_too=None, dtypes=DTYPES, **options):
    """A program that runs a table's functions in each type, with gradients.

    ``given`` makes an input of a value and a type; ``seen_too`` makes of the outputs what is
    observed beside them.
    """

    def forward(inputs):
        return {key: f(*inputs[key]) for key, (f, _) in rows.items()}

    def run(wrap):
        model = wrap(forward)
        seen = []
        for dtype in dtypes:
            inputs = {key: [given(v, dtype) for v in values] for key, (_, values) in rows.items()}
            out, *_ = step(model, inputs)
            gradients = {key: observe([t.grad for t in ts]) for key, ts in inputs.items()}
            seen.append([out, gradients, seen_too(out) if seen_too else None])
        return seen

    program(run, name=name, theme=theme, **options)
