"""The list of operators that eager refuses for their types is eager's own."""

import warnings

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from shorthaul import _refused_types
from torch import nn

TYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)


def padded(mode, n_dims):
    return lambda x: F.pad(x.expand([2] * (n_dims + 1)), (1, 1) * n_dims, mode=mode)


def resized(n_dims):
    return lambda x: F.interpolate(x.expand(*[1] * n_dims, 2, 2), scale_factor=2.0)


def sampled(operator, n_dims):
    return lambda x: operator(
        x.expand(*[1] * n_dims, 2, 2), torch.zeros([1] * (n_dims + 1) + [n_dims]), 0, 0, False
    )


def twice(operator):
    return lambda x: operator(x, x)


#: A call of each operator with matrices of 2 × 2.
CALLS = {
    "abs": torch.abs,
    "absolute": torch.absolute,
    "addbmm": lambda x: torch.addbmm(x, x[None], x[None]),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "addmm": lambda x: torch.addmm(x, x, x),
    "addmv": lambda x: torch.addmv(x[0], x, x[0]),
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "binary_cross_entropy": twice(F.binary_cross_entropy),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "ceil": torch.ceil,
    "celu": F.celu,
    "chain_matmul": twice(torch.chain_matmul),
    "dot": lambda x: torch.dot(x[0], x[0]),
    "fix": torch.fix,
    "floor": torch.floor,
    "frac": torch.frac,
    "glu": F.glu,
    "grid_sampler": sampled(torch.grid_sampler, 2),
    "grid_sampler_2d": sampled(torch.grid_sampler_2d, 2),
    "grid_sampler_3d": sampled(torch.grid_sampler_3d, 3),
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "huber_loss": twice(F.huber_loss),
    "inner": twice(torch.inner),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "linear": twice(F.linear),
    "log_sigmoid": F.logsigmoid,
    "logaddexp": twice(torch.logaddexp),
    "logaddexp2": twice(torch.logaddexp2),
    "matmul": twice(torch.matmul),
    "mish": F.mish,
    "mm": twice(torch.mm),
    "mv": lambda x: torch.mv(x, x[0]),
    "reflection_pad1d": padded("reflect", 1),
    "reflection_pad2d": padded("reflect", 2),
    "reflection_pad3d": padded("reflect", 3),
    "replication_pad1d": padded("replicate", 1),
    "replication_pad2d": padded("replicate", 2),
    "replication_pad3d": padded("replicate", 3),
    "round": torch.round,
    "silu": F.silu,
    "smooth_l1_loss": twice(F.smooth_l1_loss),
    "softplus": F.softplus,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 1, 0),
    "topk": lambda x: torch.topk(x, 1),
    "trunc": torch.trunc,
    "upsample_nearest1d": resized(1),
    "upsample_nearest2d": resized(2),
    "upsample_nearest3d": resized(3),
    "vdot": lambda x: torch.vdot(x[0], x[0]),
}


def is_listed(name, dtype):
    if name in _refused_types._NO_INTEGERS:
        return True
    if name in _refused_types._BYTES_ONLY:
        return dtype != torch.uint8
    return name in _refused_types._NO_TRUTH_VALUES and dtype == torch.bool


def test_the_list_is_what_eager_refuses():
    listed = _refused_types._NO_INTEGERS | _refused_types._NO_TRUTH_VALUES
    assert CALLS.keys() == listed | _refused_types._BYTES_ONLY
    refused = set()
    for name, call in CALLS.items():
        for dtype in TYPES:
            try:
                call(torch.tensor([[1, 0], [1, 1]]).to(dtype))
            except NotImplementedError:
                refused.add((name, dtype))
    assert refused == {(name, dtype) for name in CALLS for dtype in TYPES if is_listed(name, dtype)}


class Both(nn.Module):
    """What eager has of truth values."""

    def forward(self, x):
        return torch.addr(x, x[0], x[1]), F.pad(x, (1, 1), mode="circular")


def test_what_eager_has_of_truth_values_is_compiled():
    x = torch.tensor([[True, False], [True, True]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = shorthaul.module(Both())(x)
    assert all(map(torch.equal, found, Both()(x)))


def test_a_refused_operator_is_named():
    model = shorthaul.module(nn.SiLU(), fallback="error")
    with pytest.raises(shorthaul.CaptureError, match="PyTorch has no silu of int64"):
        model(torch.arange(3))
