"""NumPy's scalars that meet tensors count as Python's numbers, and NumPy's arrays as tensors."""

import numpy as np
import pytest
import torch

SCALAR = np.float64(3.0)
WHOLE = np.int64(3)
ARRAY = np.array(1.5)
SIZES = (10, 4)
NEAR = np.float64(0.1)  # only in float32 a tenth of 1 is equal to it


def _doubled(array):
    array *= 2
    return array


def _scaled_in_place(x):
    loss = x.sum()
    loss *= np.sqrt(2)
    return loss


CASES = {
    "a result of a function": lambda x: x.sum() * np.sqrt(2),
    "a product of sizes": lambda x: x.mean() * np.prod(SIZES[2:]),
    "a mean of a list": lambda x: x.mean() - np.array([1.0, 4.0]).mean(),
    "written there": lambda x: x.sum() / np.float64(3.0),
    "in front": lambda x: np.float64(1.0) - x.sum(),
    "a global": lambda x: x.sum() * SCALAR,
    "arithmetic of scalars": lambda x: x.sum() * (np.sqrt(2) + SCALAR),
    "a power": lambda x: x.sum() ** np.float64(2.0),
    "an argument": lambda x: torch.add(torch.mul(x.sum(), np.sqrt(2)), 1.0),
    "a bound": lambda x: x.sum().clamp(min=np.float64(0.5)),
    "a choice": lambda x: torch.where(x.sum() > 0, x.sum(), np.float64(0.5)),
    "positions": lambda x: x[:4] * (torch.arange(4) * np.log(10.0)),
    "a quotient of positions": lambda x: x[:4] * (torch.arange(4) / np.sqrt(2)),
    "whole numbers": lambda x: (x.sum(), torch.arange(4).int().sum(dtype=torch.int32) + WHOLE),
    "bits of whole numbers": lambda x: (x.sum(), x.int().sum(dtype=torch.int32) & WHOLE),
    "a comparison": lambda x: (x.sum(), x.sum() * 0.1 < np.float64(0.6), (x / 10)[0] == NEAR),
    "an element of a list": lambda x: x.sum() * np.array([1.5, 2.5])[1],
    "elements of a list": lambda x: sum(x.sum() * w for w in np.array([1.5, 2.5])),
    "rows": lambda x: x / np.sqrt(3),
    "in place": _scaled_in_place,
    "an array": lambda x: x * (torch.arange(4) * ARRAY),
    "an array of the same type": lambda x: x * (torch.arange(4) * ARRAY.astype(np.float64)),
    "an array changed in place": lambda x: x * (torch.arange(4) * _doubled(np.array(1.5))),
    "an array that is made there": lambda x: x * (torch.arange(4) * np.asarray(1.5)),
    "a tensor": lambda x: x.sum() * torch.tensor(np.sqrt(2)),
    "a filled tensor": lambda x: x * torch.full_like(x, np.sqrt(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name):
    function = CASES[name]
    found, expected = torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.tensor([1.0, -2.0, 3.0, 4.0])
    found.requires_grad_()
    expected.requires_grad_()
    compiled = torch.compile(function, backend="shorthaul", fullgraph=True)(found)
    eager = function(expected)
    torch.testing.assert_close(compiled, eager)
    for results in (compiled, eager):
        (results[0] if isinstance(results, tuple) else results).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


def test_another_scalar_of_a_global_is_another_number(monkeypatch):
    compiled = torch.compile(CASES["a global"], backend="shorthaul")
    x = torch.tensor([1.0, 2.0])
    for scalar in (np.float64(3.0), np.float64(5.0), np.float32(7.0)):
        monkeypatch.setattr(f"{__name__}.SCALAR", scalar)
        result = compiled(x)
        assert result.dtype == torch.float32
        assert result.item() == 3.0 * scalar
