"""Operators that eager refuses for operands of different types, and norms that it does not."""

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from torch import nn

AT = torch.tensor([0, 1, 1])


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def inference(x, y):
    return F.batch_norm(x, y.mean(0), y.var(0), None, None, False)


def written(x, y):
    x = x * 1
    x[AT] = y
    return x


#: Of two matrices, `[3, 4]`.
REFUSED = {
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0]),
    "bias of layer_norm": lambda x, y: F.layer_norm(x, (4,), x[0], y[0]),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y[0], None, True),
    "statistics": inference,
    "group_norm": lambda x, y: F.group_norm(x, 2, y[0]),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "index_add": lambda x, y: x.index_add(0, AT, y),
    "index_put": lambda x, y: x.index_put((AT,), y),
    "index_put_": written,
    "cdist": torch.cdist,
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "grid_sample": lambda x, y: F.grid_sample(
        x[None, None], y[None, :, None, :2], align_corners=False
    ),
    "mv": lambda x, y: torch.mv(x, y[0]),
    "linear": lambda x, y: F.linear(x, x, y[:, 0]),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_eager_raises_and_so_does_a_compiled_model(case, swapped):
    torch.manual_seed(0)
    operands = [torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)]
    if swapped:
        operands.reverse()
    with pytest.raises(RuntimeError):
        REFUSED[case](*operands)
    with pytest.raises(RuntimeError):
        torch.compile(REFUSED[case], backend="shorthaul")(*operands)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_have_parameters_of_float32(dtype):
    def norms(x, scale):
        return (
            F.layer_norm(x, (4,), scale, scale),
            F.batch_norm(x, scale * 0, scale, scale, scale, False),
            F.group_norm(x, 2, scale),
        )

    torch.manual_seed(0)
    x, scale = torch.randn(3, 4).to(dtype), torch.rand(4) + 0.5
    found = shorthaul.module(Function(norms), fallback="error")(x, scale)
    for one, other in zip(found, norms(x, scale), strict=True):
        torch.testing.assert_close(one, other)
