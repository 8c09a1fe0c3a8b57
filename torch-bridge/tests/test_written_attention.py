"""Attention written as two products with a softmax between them: the kernels of one operator."""

from __future__ import annotations

import math

import pytest
import shorthaul
import torch
from against_eager import assert_close
from test_long_attention import operands, passes, stores_scores
from torch.nn import functional


class Written(torch.nn.Module):
    """A function as a module."""

    def __init__(self, form, mask=None):
        super().__init__()
        self.form, self.mask = form, mask

    def forward(self, q, k, v, *mask):
        return self.form(q, k, v, *(mask or [self.mask]))


def plain(q, k, v, _):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def scaled_queries(q, k, v, _):
    return torch.einsum("bhmd,bhde->bhme", (q * 0.3 @ k.mT).softmax(dim=3), v)


def heads_inside(q, k, v, _):
    """Operands and results with the heads behind the rows."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2
    y = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1), v)
    return y.transpose(1, 2)


def batched(q, k, v, _):
    """Three dimensions, and keys as the first operand."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.einsum("bkd,bqd->bqk", k, q).mul(0.25)
    y = torch.bmm(functional.softmax(scores, -1), v)
    return y.unflatten(0, (-1, 2))


def hidden(q, k, v, mask):
    scores = (q @ k.mT) * 0.125
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def hidden_by_a_number(q, k, v, mask):
    return torch.where(mask, (q @ k.mT) * 0.125, -1e9).softmax(-1) @ v


def hidden_by_a_small_number(q, k, v, mask):
    return (q @ k.mT).masked_fill(mask.logical_not(), -3.0).softmax(-1) @ v


def added(q, k, v, mask):
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return (0.125 * (q @ k.mT) + bias).softmax(-1) @ v


def added_infinity(q, k, v, mask):
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return (bias + q @ k.mT).softmax(-1) @ v


UNMASKED = [plain, scaled_queries, heads_inside, batched]
MASKED = [hidden, hidden_by_a_number, hidden_by_a_small_number, added, added_infinity]


def made_mask(kind: str, rows: int, columns: int) -> torch.Tensor:
    """True where a row sees a key."""
    mask = torch.ones(rows, columns, dtype=torch.bool)
    match kind:
        case "causal":
            return mask.tril()
        case "padded":
            mask = mask[:1].repeat(2, 1)
            mask[0, columns - 37 :] = mask[1, 5:9] = False
            return mask[:, None, None]
        case "empty rows":
            mask[3:7] = mask[200, :] = False
            mask[40:50, 100:120] = False
    return mask


@pytest.fixture(autouse=True)
def fresh_tracer():
    """All forms are attributes of one class: PyTorch compiles its code for eight of them only."""
    torch.compiler.reset()


def compare(form, mask, *sizes):
    """Both passes beside eager and float64; NaN must be where eager's is."""
    tensors, dy = operands(*sizes)

    model = Written(form, mask)
    own = passes(shorthaul.module(model), tensors, dy)
    eager = passes(model, tensors, dy)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = passes(model, wide, dy.double())
    for name, a, b, c in zip(("y", "dq", "dk", "dv"), own, eager, exact, strict=True):
        assert torch.equal(a.isnan(), b.isnan()), name
        assert_close(name, *(t.nan_to_num() for t in (a, b, c)))
    assert not stores_scores(model, *tensors)


@pytest.mark.parametrize("form", UNMASKED)
def test_written_without_a_mask(form):
    compare(form, None, 2, 2, 530, 515, 24, 40)


@pytest.mark.parametrize("kind", ["causal", "padded", "empty rows"])
@pytest.mark.parametrize("form", MASKED)
def test_written_with_a_mask(form, kind):
    compare(form, made_mask(kind, 520, 540), 2, 3, 520, 540, 24, 24)


def dropped(q, k, v, _):
    return functional.dropout((q @ k.mT).mul(0.1).softmax(-1), 0.25) @ v


def test_dropout_behind_the_softmax():
    """The last values are the unit matrix: the last results are the kept probabilities."""
    tensors, dy = operands(1, 4, 300, 280, 16, 8 + 280)
    with torch.no_grad():
        tensors[2][..., 8:] = torch.eye(280)
    model = Written(dropped)
    own = passes(shorthaul.module(model), tensors, dy)
    assert not stores_scores(model, *tensors[:2], tensors[2][..., :8])
    kept = own[0].detach()[..., 8:] != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.01

    def composed(q, k, v):
        return (q @ k.mT).mul(0.1).softmax(-1) * (kept / 0.75).to(q.dtype) @ v

    eager = passes(composed, tensors, dy)
    exact = passes(composed, [t.detach().double().requires_grad_() for t in tensors], dy.double())
    for name, a, b, c in zip(("y", "dq", "dk", "dv"), own, eager, exact, strict=True):
        assert_close(name, a, b, c)


def keeps_probabilities(q, k, v, _):
    p = (q @ k.mT).softmax(-1)
    return p @ v, p.sum()


def trains_the_bias(q, k, v, bias):
    return (q @ k.mT + bias).softmax(-1) @ v


def over_rows(q, k, v, _):
    return (q @ k.mT).softmax(-2) @ v


def twice_the_scores(q, k, v, _):
    scores = q @ k.mT
    return (scores + scores).softmax(-1) @ v


def shared_keys(q, k, v, _):
    """One head of keys and values for all heads of queries."""
    return (q @ k[:, :1].mT).softmax(-1) @ v[:, :1]


@pytest.mark.parametrize(
    "form", [keeps_probabilities, trains_the_bias, over_rows, twice_the_scores, shared_keys]
)
def test_what_is_no_attention_stays_as_it_is_written(form):
    tensors, dy = operands(1, 4, 520, 520, 16, 16)
    bias = torch.randn(520, 520, generator=torch.Generator().manual_seed(1)).requires_grad_()
    given = [*tensors, bias]
    assert stores_scores(Written(form), *given)

    def whole(q, k, v, bias):
        y = form(q, k, v, bias)
        return y if isinstance(y, torch.Tensor) else y[0] * y[1]

    model = Written(whole)

    def gradients(model, given, dy):
        y = model(*given)
        return [y, *torch.autograd.grad(y, given, dy, allow_unused=True)]

    own, eager = (gradients(m, given, dy) for m in (shorthaul.module(model), model))
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = gradients(model, wide, dy.double())
    for a, b, c in zip(own, eager, exact, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_close("gradient", a, b, c)
