"""Attention by PyTorch's operators in CUDA programs, executed by the emulator on CPU tensors.

There PyTorch's operator for the CPU stands for those of a device: it is called with the views, in
the order and with the saved sums that they would be. Calls of those themselves are held to their
schemas.
"""

import copy
import json

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from against_eager import assert_emulated_matches, emulated
from shorthaul import _attention, products
from shorthaul._report import programs_of
from torch import nn

KINDS = products.ATTENTION_KINDS
BATCH, LENGTH, WIDTH, HEADS = 2, 16, 32, 2


class Layer(nn.Module):
    """Self-attention with one product for queries, keys and values, and one for the result."""

    def __init__(self, is_stacked=True, is_causal=False):
        super().__init__()
        self.is_stacked, self.is_causal = is_stacked, is_causal
        self.inward = nn.ModuleList(
            [nn.Linear(WIDTH, 3 * WIDTH)]
            if is_stacked
            else [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        )
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        all_three = [inward(x) for inward in self.inward]
        if self.is_stacked:
            all_three = all_three[0].chunk(3, dim=-1)
        q, k, v = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in all_three)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.outward(y.transpose(1, 2).reshape(x.shape))


class Core(nn.Module):
    """Attention alone, with what SDPA is given besides."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


@pytest.fixture
def called(monkeypatch):
    """Counts calls of the operators that stand for a device's."""
    counts = {"forward": 0, "backward": 0}

    def count(table, which):
        own = table["cpu"]

        def counted(*arguments):
            counts[which] += 1
            return own(*arguments)

        monkeypatch.setitem(table, "cpu", counted)

    count(_attention.FORWARD, "forward")
    count(_attention.BACKWARD, "backward")
    return counts


def qkv(batch=1, heads=2, rows=8, columns=8, width=8, dtype=torch.bfloat16):
    shapes = (rows, columns, columns)
    return [
        torch.randn(batch, heads, n, width).to(dtype).requires_grad_(dtype.is_floating_point)
        for n in shapes
    ]


def native_of(model, *inputs):
    (program,) = programs_of(model, inputs)
    return program.native


def choices(model, *inputs):
    """Kind and reason of each attention."""
    return [(kind, reason) for *_, kind, reason, _ in native_of(model, *inputs).cuda_attentions()]


def assert_matches(model, *args, kind="torch_efficient"):
    """Forward and backward by the operator, held to float64 as eager's own results are."""
    with products.every(kind, 0, 0):
        assert_emulated_matches(model, *args)


@pytest.mark.parametrize("is_stacked", [True, False], ids=["stacked", "apart"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_a_layer_trains_by_the_operator(called, is_stacked, is_causal):
    model = Layer(is_stacked, is_causal)
    assert_matches(model, torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True))
    assert called == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_half_precision(called, kind):
    assert_matches(Core(scale=0.3), *qkv(columns=16), kind=kind)
    assert called == {"forward": 1, "backward": 1}


def test_without_gradients_only_the_forward_operator_runs(called):
    q, k, v = (x.detach().float() for x in qkv())
    with products.every("torch_efficient", 0, 0):
        compiled = emulated(Core())
        torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))
        (call,) = native_of(compiled, q, k, v).cuda_calls(False)
    assert "lse" not in [operand[0] for operand in call[-1]]
    assert called == {"forward": 1, "backward": 0}


def test_gradients_that_nobody_wants_have_no_place(called):
    q, k, v = (x.detach().float() for x in qkv())
    with products.every("torch_efficient", 0, 0):
        compiled = emulated(Core())
        k.requires_grad_()
        compiled(q, k, v).sum().backward()
        (call,) = native_of(compiled, q, k, v).cuda_calls(True)
    assert [operand[0] for operand in call[-1]][-1] == "dk"
    expected = k.detach().clone().requires_grad_()
    F.scaled_dot_product_attention(q, expected, v).sum().backward()
    torch.testing.assert_close(k.grad, expected.grad)


def test_operands_are_views_and_scores_are_not_stored():
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    with products.every("torch_efficient", 0, 0):
        compiled = emulated(Layer())
        compiled(x).sum().backward()
        native = native_of(compiled, x)
        data = shorthaul.report(compiled, x).data
    (forward,), (backward,) = native.cuda_calls(False), native.cuda_calls(True)
    places = {role: (block, at) for role, block, at, *_ in forward[-1]}
    assert places["q"] == places["k"] == places["v"], "all three lie in one product's result"
    offsets = {role: offset for role, _, _, _, offset, _, _ in forward[-1]}
    assert [offsets[role] for role in "qkv"] == [0, WIDTH, 2 * WIDTH]
    # What the backward pass reads of the forward one is read where that left it.
    known = {role: (block, at) for role, block, at, *_ in backward[-1]}
    assert all(known[role] == places[role] for role in ("q", "k", "v", "y", "lse"))
    attention = [k for k in data["kernels"] if k["path"] == "torch_efficient"]
    assert [k["stage"] for k in attention] == ["forward", "backward"]
    element, rows = 4, BATCH * LENGTH * WIDTH
    assert attention[0]["bytes_copied"] == 2 * element * (rows + BATCH * HEADS * LENGTH)
    assert attention[1]["bytes_copied"] == 2 * element * 3 * rows
    scores = BATCH * HEADS * LENGTH * LENGTH * element
    kept = element * (4 * rows + BATCH * HEADS * LENGTH)
    # The input of the second product is y itself.
    assert native.saved_bytes < kept + scores
    # Nothing is copied between the products and the operator.
    forward_paths = [k["path"] for k in data["kernels"] if k["stage"] == "forward"]
    assert forward_paths == ["simt", "torch_efficient", "simt"], forward_paths


def table(path, candidates, product, rest="gradients"):
    rows = [{"kind": kind, "microseconds": time} for kind, time in candidates.items()]
    path.write_text(
        json.dumps(
            {
                "format": "shorthaul products",
                "version": 1,
                "machine": {"device": "emulator", "driver": "none", "cublaslt": "none"},
                "workspace_bytes": 0,
                "entries": [{"product": product, "rest": rest, "candidates": rows}],
            }
        )
    )


def test_a_table_chooses(called, tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    monkeypatch.setenv(products.TABLE_VARIABLE, str(path))
    product = "attention batch 1 heads 2 rows 8 columns 8 width 8 values 8; bf16"
    for times, kind in [
        ({"own": 3, "torch_flash": 2, "torch_cudnn": 1}, "torch_cudnn"),
        ({"own": 1, "torch_flash": 2}, "own"),
    ]:
        table(path, times, product)
        compiled, inputs = emulated(Core()), qkv()
        compiled(*inputs).sum().backward()
        ((found, reason),) = choices(compiled, *inputs)
        assert found == kind and "1 us in" in reason, reason
        assert reason in str(shorthaul.report(compiled, *inputs))
    assert called == {"forward": 1, "backward": 1}
    # Of forward alone the table has no time.
    ((found, reason),) = choices(emulated(Core()), *(x.detach() for x in qkv()))
    assert found == "own" and "has no time for it" in reason


@pytest.mark.parametrize(
    "options, shapes, why",
    [
        ({}, {"dtype": torch.float32}, "it takes bf16 and f16, not f32"),
        ({}, {"width": 12}, "it takes heads whose width is a multiple of 8 up to 256, not 12"),
        ({"dropout_p": 0.5}, {}, "its dropout draws other random numbers than ours"),
        ({"attn_mask": torch.zeros(8, 8)}, {}, "it takes no mask but the causal one"),
        ({"is_causal": True}, {"columns": 16}, "a causal mask of 8 rows and 16 columns"),
    ],
    ids=["dtype", "width", "dropout", "mask", "unequal causal"],
)
def test_what_an_operator_cannot_is_ours_and_told(
    called, tmp_path, monkeypatch, options, shapes, why
):
    inputs = qkv(**shapes)
    if "attn_mask" in options:
        options = {"attn_mask": options["attn_mask"].to(inputs[0].dtype)}
    model = Core(**options)
    with products.every("torch_flash", 0, 0):
        compiled = emulated(copy.deepcopy(model))
        compiled(*inputs)
        ((kind, reason),) = choices(compiled, *inputs)
    assert kind == "own" and "PyTorch's flash attention cannot compute it" in reason
    assert why in reason, reason
    # In a table it may stand, and be the fastest: it is told, and not taken.
    product = native_of(compiled, *inputs).cuda_attentions()[0][0]
    path = tmp_path / "table.json"
    table(path, {"own": 3, "torch_flash": 2}, product)
    monkeypatch.setenv(products.TABLE_VARIABLE, str(path))
    ((kind, reason),) = choices(emulated(copy.deepcopy(model)), *inputs)
    assert kind == "own" and f"PyTorch's flash attention cannot: {why}" in reason, reason
    assert called == {"forward": 0, "backward": 0}


def test_three_dimensions_are_told():
    inputs = [x.detach()[0] for x in qkv()]
    with products.every("torch_flash", 0, 0):
        ((kind, reason),) = choices(emulated(Core()), *inputs)
    assert kind == "own" and "not 3 dimensions" in reason


def test_a_failing_operator_is_named(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(_attention.FORWARD, "cpu", fail)
    with (
        products.every("torch_flash", 0, 0),
        pytest.raises(
            shorthaul.ShorthaulError,
            match=r"flash attention failed for .*no such kernel.*Leave the table",
        ),
    ):
        emulated(Core())(*qkv())


@pytest.mark.parametrize("raised", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_is_not_the_operators_own_failure_is_raised_as_it_is(monkeypatch, raised):
    def fail(*_):
        raise raised("now")

    monkeypatch.setitem(_attention.FORWARD, "cpu", fail)
    with products.every("torch_flash", 0, 0), pytest.raises(raised, match="^now$"):
        emulated(Core())(*qkv())


def test_a_mask_of_one_column_is_ours():
    with products.every("torch_efficient", 0, 0):
        model = Core(attn_mask=torch.zeros(8, 1, dtype=torch.bfloat16))
        ((kind, reason),) = choices(emulated(model), *qkv())
    assert kind == "own" and "a number for each of the 8 columns" in reason, reason


@pytest.mark.parametrize(
    "kind, is_masked", [*((k, False) for k in KINDS), (KINDS[1], True), (KINDS[2], True)]
)
@pytest.mark.parametrize("rows", [32, 40])
def test_operators_of_a_device_take_these_arguments(kind, is_masked, rows):
    shape = (2, 3, rows, 64)
    q, k, v, dy = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(4))
    mask = torch.empty(2, 1, 1, rows, dtype=torch.bfloat16, device="meta") if is_masked else None
    y, lse = _attention.FORWARD[kind](q, k, v, mask, not is_masked, 0.125, True)
    assert y.shape == shape and lse.shape == shape[:3]
    grads = _attention.BACKWARD[kind](dy, q, k, v, mask, y, lse, not is_masked, 0.125)
    assert [g.shape for g in grads] == [shape] * 3


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((8, 16), torch.float32),
        ((2, 1, 1, 16), torch.float32),
        ((2, 2, 8, 16), torch.float32),
        ((2, 8, 16), torch.bool),
    ],
    ids=["square", "of sequences", "of everything", "truth values"],
)
def test_masks_are_added(called, shape, dtype):
    class Masked(nn.Module):
        def forward(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    mask = torch.randn(shape)
    if dtype == torch.bool:
        # Every row sees its first column.
        mask = (mask > 0) | (torch.arange(16) == 0)
    inputs = qkv(batch=2, columns=16, dtype=torch.float32)
    if mask.dim() == 3:
        mask = mask[:, None]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = Masked()(*exact, mask if dtype == torch.bool else mask.double())
    grad = torch.randn(wanted.shape)
    wanted.backward(grad.double())
    with products.every("torch_efficient", 0, 0):
        found = emulated(Masked())(*inputs, mask)
        found.backward(grad)
    assert called == {"forward": 1, "backward": 1}
    gradients = [(x.grad, y.grad) for x, y in zip(inputs, exact, strict=True)]
    for own, expected in [(found, wanted), *gradients]:
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_mask_is_ours():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.randn(8, 8))

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)

    inputs = qkv(dtype=torch.float32)
    with products.every("torch_efficient", 0, 0):
        ((kind, reason),) = choices(emulated(Biased()), *inputs)
    assert kind == "own" and "not asked for the gradient of a mask" in reason
