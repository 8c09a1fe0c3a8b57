"""Attention with many scores: one kernel in each pass, which does not store them."""

from __future__ import annotations

import pytest
import shorthaul
import torch
from against_eager import assert_close
from shorthaul import _machine
from torch.nn.functional import scaled_dot_product_attention as attention


def relative_error(found, exact) -> float:
    """The largest error, relative to the largest element."""
    return ((found - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


class Attention(torch.nn.Module):
    """One attention with fixed arguments."""

    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, q, k, v, mask=None):
        return attention(q, k, v, attn_mask=mask, **self.arguments)


def operands(*sizes, dtype=torch.float32):
    """Queries ``[B, H, L, D]`` and keys as a layer's result has them, values ``[B, H, M, E]``."""
    batch, heads, rows, columns, depth, width = sizes
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    q = numbers(batch, rows, heads, depth).transpose(1, 2)
    k = numbers(batch, columns, heads, depth).transpose(1, 2)
    v = numbers(batch, heads, columns, width)
    return [t.requires_grad_() for t in (q, k, v)], numbers(batch, heads, rows, width)


def passes(model, tensors, dy, *mask):
    """The result and the gradients of the operands."""
    y = model(*tensors, *mask)
    return [y, *torch.autograd.grad(y, tensors, dy)]


def against_float64(model, tensors, dy, *mask):
    """Holds each tensor of both passes to the rule of ``against_eager``."""
    for name, a, b, c in runs(model, tensors, dy, *mask):
        assert_close(name, a, b, c)


def runs(model, tensors, dy, *mask):
    """The tensors of both passes by name: compiled, in eager, and in eager in float64."""
    own = passes(shorthaul.module(model), tensors, dy, *mask)
    eager = passes(model, tensors, dy, *mask)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    masks = [m.double() if m.is_floating_point() else m for m in mask]
    exact = passes(model, wide, dy.double(), *masks)
    return zip(("y", "dq", "dk", "dv"), own, eager, exact, strict=True)


def stores_scores(model, *inputs) -> bool:
    """Whether a container has a byte for each score, for example a mask of dropout."""
    q, k = inputs[0], inputs[1]
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    report = shorthaul.report(model, *inputs)
    return any(c["bytes"] >= scores for c in report.data["containers"])


@pytest.mark.parametrize(
    ("sizes", "causal"),
    [
        ((1, 4, 300, 300, 64, 64), True),
        ((2, 2, 700, 600, 17, 33), True),
        ((4, 1, 600, 900, 40, 8), True),
        ((2, 3, 1030, 600, 40, 24), False),
        ((1, 5, 513, 515, 128, 1), False),
    ],
)
def test_both_passes_are_as_close_to_float64_as_eager(sizes, causal):
    model = Attention(is_causal=causal)
    tensors, dy = operands(*sizes)
    for name, own, eager, exact in runs(model, tensors, dy):
        assert_close(name, own, eager, exact)
        # All elements count: the largest error of thousands is mostly luck.
        error, usual = ((t.double() - exact).norm() / exact.norm() for t in (own, eager))
        assert error <= 1.25 * usual + torch.finfo(torch.float32).eps / 4, (name, error, usual)
    assert not stores_scores(model, *tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["causal", "hidden", "added", "wide values"])
def test_operands_of_16_bits(form, dtype):
    tensors, dy = operands(2, 2, 520, 600, 40, 40 if form != "wide values" else 56)
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors]
    generator = torch.Generator().manual_seed(2)
    mask = {
        "hidden": torch.rand(2, 1, 520, 600, generator=generator) > 0.3,
        "added": torch.randn(520, 600, generator=generator).to(dtype),
    }
    given = [mask[form]] if form in mask else []
    model = Attention(is_causal=form == "causal")
    against_float64(model, tensors, dy.to(dtype), *given)
    # Where tiles (AMX) multiply 16-bit numbers, attention stays composed.
    limits = _machine.assumed()
    if limits.pair_operations_per_us <= 2 * limits.product_operations_per_us:
        assert not stores_scores(model, *tensors, *given)


def masks(batch, heads, rows, columns):
    """Masks that broadcast in different ways; some rows see nothing."""
    generator = torch.Generator().manual_seed(1)
    padded = torch.ones(batch, 1, 1, columns, dtype=torch.bool)
    padded[0, ..., columns // 2 :] = False
    padded[1] = False
    every = torch.rand(batch, heads, rows, columns, generator=generator) > 0.5
    every[0, 0, 3] = False
    added = torch.randn(rows, columns, generator=generator)
    ahead = torch.full((rows, columns), -torch.inf).triu(1).repeat(batch, 1, 1, 1)
    ahead[1, :, :, : columns // 3] = -torch.inf
    one = torch.randn(heads, rows, 1, generator=generator)
    return {"padding": padded, "every": every, "added": added, "ahead": ahead, "one": one}


@pytest.mark.parametrize("name", ["padding", "every", "added", "ahead", "one"])
def test_masks(name):
    tensors, dy = operands(2, 2, 520, 540, 16, 16)
    mask = masks(2, 2, 520, 540)[name]
    model = Attention(scale=0.3)
    against_float64(model, tensors, dy, mask)


def test_the_gradient_of_a_mask_is_still_there():
    tensors, dy = operands(1, 4, 512, 512, 16, 16)
    mask = torch.randn(512, 512, requires_grad=True)
    model = Attention()
    y = shorthaul.module(model)(*tensors, mask)
    (own,) = torch.autograd.grad(y, mask, dy)
    (eager,) = torch.autograd.grad(model(*tensors, mask), mask, dy)
    assert relative_error(own, eager) < 1e-5


def test_infinities_and_nan_reach_the_same_elements():
    tensors, dy = operands(1, 4, 512, 512, 16, 16)
    with torch.no_grad():
        tensors[0][0, 0, 5, 3] = torch.nan
        tensors[2][0, 0, 7, 2] = torch.inf
    model = Attention()
    own = passes(shorthaul.module(model), tensors, dy)
    eager = passes(model, tensors, dy)
    for a, b in zip(own, eager, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.isinf(), b.isinf())


def test_some_operands_without_gradient():
    tensors, dy = operands(1, 4, 300, 300, 16, 16)
    model = Attention(is_causal=True)
    for n in range(3):
        own = [t.detach() for t in tensors]
        own[n].requires_grad_()
        y = shorthaul.module(model)(*own)
        (found,) = torch.autograd.grad(y, own[n], dy)
        (eager,) = torch.autograd.grad(model(*own), own[n], dy)
        assert relative_error(found, eager) < 1e-5


def test_inference():
    tensors, _ = operands(1, 4, 700, 700, 16, 24)
    model = Attention(is_causal=True)
    with torch.no_grad():
        assert relative_error(shorthaul.module(model)(*tensors), model(*tensors)) < 1e-5


def test_heads_that_share_keys():
    (q, _, _), dy = operands(1, 6, 520, 520, 16, 16)
    (_, k, v), _ = operands(1, 2, 520, 520, 16, 16)
    against_float64(Attention(is_causal=True, enable_gqa=True), [q, k, v], dy)


def test_results_have_the_same_bits_with_any_number_of_threads():
    tensors, dy = operands(1, 4, 900, 900, 16, 16)
    model = shorthaul.module(Attention(is_causal=True))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(passes(model, tensors, dy))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_later_sizes_share_the_kernels():
    model = Attention(is_causal=True)
    own = shorthaul.module(model)
    for rows in (300, 420, 310, 600, 40, 1):
        tensors, dy = operands(1, 4, rows, rows, 16, 16)
        for a, b in zip(passes(own, tensors, dy), passes(model, tensors, dy), strict=True):
            # With one key, gradients of queries are 0, and eager's are not quite.
            assert (a - b).abs().max() < 1e-5 * b.abs().max().clamp(min=1.0)


def test_second_derivatives():
    tensors, dy = operands(1, 4, 260, 260, 8, 8)
    model = Attention(is_causal=True)

    def twice(f, tensors):
        y = f(*tensors)
        (dq,) = torch.autograd.grad(y, tensors[0], dy.to(y.dtype), create_graph=True)
        return torch.autograd.grad(dq.square().sum(), tensors)

    wide = [t.detach().double().requires_grad_() for t in tensors]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = twice(model, wide)
        own = twice(shorthaul.module(model), tensors)
    for a, b in zip(own, exact, strict=True):
        assert relative_error(a, b) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_is_the_same_in_both_passes(causal, masked):
    """The last values are the unit matrix: the last results are the kept probabilities."""
    probability, width = 0.3, 24
    model = shorthaul.module(Attention(is_causal=causal and not masked, dropout_p=probability))
    tensors, dy = operands(2, 2, 600, 520, 40, width + 520)
    with torch.no_grad():
        tensors[2][..., width:] = torch.eye(520)
    sees = torch.ones(600, 520, dtype=torch.bool)
    if causal:
        sees = sees.tril()
    if masked:
        sees[:, 100:130] = False
        # All rows of a strip see nothing of the first keys.
        sees[64 if causal else 0 :, :40] = False
    own = passes(model, tensors, dy, *([sees] if masked else []))
    kept = own[0].detach()[..., width:] != 0
    drawn = kept[sees.expand(kept.shape)].double().mean().item()
    assert abs(drawn - (1 - probability)) < 0.005

    def composed(q, k, v):
        scores = (q @ k.mT) / q.shape[-1] ** 0.5
        p = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return p * (kept / (1 - probability)).to(p.dtype) @ v

    eager = passes(composed, tensors, dy)
    exact = passes(composed, [t.detach().double().requires_grad_() for t in tensors], dy.double())
    for name, a, b, c in zip(("y", "dq", "dk", "dv"), own, eager, exact, strict=True):
        assert_close(name, a, b, c)
    again = passes(model, tensors, dy, *([sees] if masked else []))
    assert not torch.equal(own[0], again[0])


def test_scores_are_not_stored_with_dropout():
    model = Attention(dropout_p=0.1)
    tensors, _ = operands(1, 4, 640, 640, 16, 16)
    assert not stores_scores(model, *tensors)


def test_probabilities_sum_to_one_where_scores_are_large():
    """In most rows of such scores, one probability is 1."""
    tensors, dy = operands(1, 4, 520, 520, 40, 16)
    with torch.no_grad():
        tensors[0].mul_(1e4)
    against_float64(Attention(scale=0.3), tensors, dy)
