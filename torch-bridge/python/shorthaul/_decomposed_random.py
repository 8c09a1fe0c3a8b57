"""Random numbers of other distributions, made from uniform and normal ones.

Owns the formulas. A draw with a generator of its own stays PyTorch's. What eager refuses (a
negative probability, a negative deviation) is refused here too: it names an element of an empty
range (``held``).
"""

from __future__ import annotations

import torch

from ._decomposed_elements import with_zero_slope
from ._decomposed_indexing import held

aten = torch.ops.aten

#: Bits of one uniform number.
_BITS = 24

#: Widest range of whole numbers: two uniform numbers have as many bits.
_WIDEST = 1 << (2 * _BITS)

#: Most numbers of a permutation; a sort of more takes longer than PyTorch's exchanges.
_N_PERMUTED = 4096


def _whole(low, high, size, dtype):
    """Whole numbers in ``[low, high)``, from two uniform numbers, which leave no visible bias."""
    numbers = isinstance(low, int) and isinstance(high, int)
    if not numbers or not 0 < high - low <= _WIDEST:
        return NotImplemented
    upper, lower = (torch.rand(size, dtype=torch.float64) for _ in range(2))
    drawn = ((upper + lower * 2.0**-_BITS) * (high - low)).floor() + low
    return drawn.to(torch.int64 if dtype is None else dtype)


def randint(high, size, *, dtype=None, **kwargs):
    return _whole(0, high, size, dtype)


def randint_low(low, high, size, *, dtype=None, **kwargs):
    return _whole(low, high, size, dtype)


def randint_like(x, high, *, dtype=None, **kwargs):
    return _whole(0, high, x.shape, dtype or x.dtype)


def randint_like_low(x, low, high, *, dtype=None, **kwargs):
    return _whole(low, high, x.shape, dtype or x.dtype)


def randperm(n, *, dtype=torch.int64, **kwargs):
    """The order of n uniform numbers."""
    if n > _N_PERMUTED:
        return NotImplemented
    upper, lower = (torch.rand((n,), dtype=torch.float64) for _ in range(2))
    return (upper + lower * 2.0**-_BITS).sort()[1].to(dtype or torch.int64)


def _none_of(is_wrong):
    """Zero; what is wrong anywhere is refused."""
    return held(is_wrong.any().to(torch.int64).reshape(1), 1).reshape(())


def normal(mean, std=1.0, *, generator=None):
    """Mean, deviation or both are tensors; neither gets a slope, as in eager."""
    tensors = [value for value in (mean, std) if isinstance(value, torch.Tensor)]
    if generator is not None or not all(value.is_floating_point() for value in tensors):
        return NotImplemented
    shape = torch.broadcast_shapes(*(value.shape for value in tensors))
    value = torch.randn(shape, dtype=tensors[0].dtype) * std + mean
    if isinstance(std, torch.Tensor):
        value = value + _none_of(std < 0).to(value.dtype)
    elif std < 0:
        return NotImplemented
    return with_zero_slope(value, sum(tensor.expand(shape) for tensor in tensors))


def normal_sized(mean, std, size, *, generator=None, dtype=None, **kwargs):
    if generator is not None or std < 0:
        return NotImplemented
    return torch.randn(size, dtype=dtype) * std + mean


def normal_in_place(x, mean=0.0, std=1.0, *, generator=None):
    """Normal numbers in the place of x, which it does not read."""
    if generator is not None or not x.is_floating_point() or std < 0:
        return NotImplemented
    return torch.randn_like(x) * std + mean


def uniform(x, low=0.0, high=1.0, *, generator=None):
    """Numbers in ``[low, high)`` in the place of x, which it does not read."""
    if generator is not None or not x.is_floating_point() or not low <= high:
        return NotImplemented
    return torch.rand_like(x) * (high - low) + low


def multinomial(weights, num_samples, replacement=False, *, generator=None):
    """With replacement by the cumulative weights; without, the largest weights by exponential ones.

    The second is Efraimidis and Spirakis' reservoir (2006), which PyTorch uses, too.
    """
    if generator is not None or weights.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    n = weights.shape[-1]
    rows = weights.detach().reshape(-1, n).to(torch.float64)
    is_wrong = ~(rows >= 0) | rows.isinf()
    refused = _none_of(is_wrong) + _none_of(rows.sum(-1) <= 0)
    if replacement:
        reach = rows.cumsum(-1)
        total = reach.narrow(-1, n - 1, 1)
        drawn = torch.rand((rows.shape[0], num_samples), dtype=torch.float64) * total
        found = (reach.unsqueeze(1) <= drawn.unsqueeze(-1)).to(torch.int64).sum(-1)
        # A product that was rounded up to the whole weight names the last one with a weight.
        last = (reach < total).to(torch.int64).sum(-1, keepdim=True)
        found = torch.minimum(found, last)
    else:
        waits = -torch.log(1.0 - torch.rand_like(rows) + 2.0**-60)
        found = (rows / waits.clamp(min=2.0**-60)).topk(num_samples, -1)[1]
    return (found + refused).reshape([*weights.shape[:-1], num_samples])


RULES = {
    aten.multinomial.default: multinomial,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
    aten.normal.float_float: normal_sized,
    aten.normal_functional.default: normal_in_place,
    aten.randint.default: randint,
    aten.randint.low: randint_low,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_low,
    aten.randperm.default: randperm,
    aten.uniform.default: uniform,
}

__all__ = ["RULES"]
