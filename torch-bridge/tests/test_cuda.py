"""CUDA programs from Python: executed by the emulator on CPU tensors, against eager PyTorch.

The emulator runs the very text that a device would, at the same offsets of the same buffers, and
reports every access outside of them. What needs a driver is tested as far as it goes without one.
"""

import copy

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from against_eager import assert_emulated_matches, emulated
from shorthaul import _autograd, _place
from shorthaul._autocast import casting
from shorthaul._capture import capture
from shorthaul._program import compile_program
from shorthaul._report import programs_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

#: Nobody waits for a whole network in an interpreter of GPU threads.
BATCH = 2


class ConvNet(nn.Module):
    """A convolution, BatchNorm, pooling and a residual."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x)))
        return self.head(F.max_pool2d(y + 1, 2).mean((2, 3)))


class Attention(nn.Module):
    """Two heads over a short sequence, with a residual and LayerNorm."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.norm(x + self.out(y.transpose(1, 2).reshape(batch, length, width)))


def linear():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "model, shape",
    [(linear, (4, 6)), (ConvNet, (BATCH, 3, 4, 4)), (Attention, (BATCH, 5, 8))],
    ids=["linear", "convolution", "attention"],
)
def test_outputs_gradients_and_buffers_match_eager(model, shape):
    assert_emulated_matches(model(), torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize(
    "model, shape",
    [(linear, (4, 6)), (ConvNet, (BATCH, 3, 4, 4)), (Attention, (BATCH, 5, 8))],
    ids=["linear", "convolution", "attention"],
)
def test_training_steps_match_eager(model, shape):
    original = model()
    inputs = torch.randn(3, *shape)

    def train(candidate):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for x in inputs:
            loss = candidate(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    eager = train(copy.deepcopy(original))
    assert train(emulated(original)) == pytest.approx(eager, rel=1e-4)
    assert len(set(eager)) == 3


def test_dropout_masks_agree_between_the_passes_and_follow_the_seed():
    model = emulated(nn.Dropout(0.25))
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    y = model(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and 0 < (y == 0).sum() < 64
    torch.manual_seed(3)
    assert torch.equal(model(x), y)
    assert not torch.equal(model(x), y)


def test_unaligned_and_strided_tensors_are_copied():
    model = linear()
    compiled = emulated(model)
    flat = torch.randn(4 * 6 + 1)
    for x in (flat[1:].view(4, 6), torch.randn(6, 4).t()):
        torch.testing.assert_close(compiled(x), model(x))
    x, grad = torch.randn(4, 6), torch.randn(4 * 3 + 1)[1:].view(4, 3)
    found = torch.autograd.grad(compiled(x), list(model.parameters()), grad)
    expected = torch.autograd.grad(model(x), list(model.parameters()), grad)
    torch.testing.assert_close(found, expected)


def test_the_same_guards_hold():
    model = linear()
    compiled = emulated(model)
    compiled(torch.randn(4, 6)).sum().backward()
    with torch.no_grad():
        assert not compiled(torch.randn(4, 6)).requires_grad
    with pytest.warns(shorthaul.RecompileWarning, match="again, because.* is 2 instead of 4"):
        assert compiled(torch.randn(2, 6)).shape == (2, 3)
    model.zero_grad()
    model[0].requires_grad_(False)
    with pytest.warns(shorthaul.RecompileWarning, match="because.*requires no gradient any more"):
        compiled(torch.randn(4, 6)).sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_half_precision_with_float32_parameters(dtype):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(8, 16)
    found = {}
    for name in ("emulated", "eager", "exact"):
        own, given = copy.deepcopy(model), x.clone().requires_grad_()
        if name == "exact":
            own, given = own.double(), x.double().requires_grad_()
        called = emulated(own) if name == "emulated" else own
        with torch.autocast("cpu", dtype, enabled=name != "exact"):
            y = called(given)
        # As GradScaler does: a scaled loss, gradients divided afterwards.
        (y.float() if name != "exact" else y).square().sum().mul(1024).backward()
        grads = {key: p.grad / 1024 for key, p in own.named_parameters()}
        assert name == "exact" or y.dtype == dtype
        found[name] = {"output": y.detach(), "input": given.grad / 1024, **grads}
    for key, exact in found["exact"].items():
        error, own = (
            (found[name][key].double() - exact).abs().max() for name in ("emulated", "eager")
        )
        assert error <= 2 * own + torch.finfo(dtype).eps * exact.abs().max(), key
        assert key == "output" or found["emulated"][key].dtype == torch.float32


def test_autocast_is_part_of_a_programs_key():
    compiled = emulated(nn.Linear(8, 4))
    x = torch.randn(2, 8)
    assert compiled(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    assert compiled(x).dtype == torch.float32


SUPPORTED = frozenset(shorthaul._native.supported_targets())


def captured_on_cuda(make, shape, monkeypatch, dtype=None):
    """What capture makes of a model on a CUDA device, which PyTorch can pretend to have."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    device = torch.device("cuda", 0)
    with FakeTensorMode(), device:
        model, x = make(), torch.empty(shape)
    if dtype:
        with torch.autocast("cuda", dtype):
            forward = casting(type(model).forward, device)
        model.__class__ = type("Cast", (type(model),), {"forward": forward})
    return capture(model, (x,), supported=SUPPORTED)


@pytest.mark.parametrize("model", [linear, ConvNet, Attention])
def test_a_model_on_cuda_is_captured_as_on_the_cpu(model, monkeypatch):
    shape = {linear: (4, 6), ConvNet: (BATCH, 3, 4, 4), Attention: (BATCH, 5, 8)}[model]
    there = captured_on_cuda(model, shape, monkeypatch)
    here = capture(model(), (torch.empty(shape),), supported=SUPPORTED)
    assert there.json.replace("cuda:0", "cpu") == here.json


def test_columns_of_truth_values_and_integers_are_summed():
    """Their registers have another type than their arrays."""

    class Columns(nn.Module):
        def forward(self, x):
            chosen = x > 0
            return chosen.sum(0), chosen.any(0), (x * 8).long().amax(0), (x * chosen).sum(0)

    x = torch.randn(64, 16)
    for found, expected in zip(emulated(Columns(), fallback="error")(x), Columns()(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("n", [6, 13])
def test_many_turned_inputs_fit_into_shared_memory(n):
    class Turned(nn.Module):
        def forward(self, *inputs):
            return sum(inputs).t().contiguous()

    inputs = [torch.randint(-8, 8, (70, 80)).to(torch.bfloat16) for _ in range(n)]
    assert torch.equal(emulated(Turned(), fallback="error")(*inputs), Turned()(*inputs))


def assigned(x, i):
    y = x.clone()
    y[i, i] = x[0, 0]
    return y


#: Operators whose rules make tensors of positions or tables, applied to [6, 6] and indices.
WITH_POSITIONS = {
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:3] + 1),
    "index_put": assigned,
    "scatter": lambda x, i: x.scatter(1, i.expand(6, 3), x[:, :3] + 1),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i.expand(6, 3), x[:, :3] + 1, "amax"),
    "take": lambda x, i: x.take(i),
    "unfold": lambda x, i: x.unfold(0, 3, 1) + i,
    "as_strided": lambda x, i: x.as_strided((3, 3), (2, 1)) + i,
    "diagonal_scatter": lambda x, i: x.diagonal_scatter(x[0]) + i[0],
    "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
    "searchsorted": lambda x, i: torch.searchsorted(x, x) + i[0],
    "bucketize": lambda x, i: torch.bucketize(x, x[0]) + i[0],
    "mode": lambda x, i: x.mode(1)[0] + i[0],
    "cummax": lambda x, i: x.cummax(1)[0] + i[0],
    "antialias": lambda x, i: F.interpolate(x[None, None], size=3, mode="bilinear", antialias=True),
    "multinomial": lambda x, i: torch.multinomial(x, 2) + i[0],
}


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_positions_are_on_the_device_of_the_input(name, monkeypatch):
    class Model(nn.Module):
        def forward(self, x):
            return WITH_POSITIONS[name](x, torch.arange(3, device=x.device))

    there = captured_on_cuda(Model, (6, 6), monkeypatch)
    here = capture(Model(), (torch.empty(6, 6),), supported=SUPPORTED)
    assert there.json.replace("cuda:0", "cpu") == here.json


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [linear, ConvNet, Attention])
def test_what_autocast_makes_on_cuda_runs(model, dtype, monkeypatch):
    """The casts of CUDA's lists, which are others than the CPU's, in the emulator."""
    shape = {linear: (4, 6), ConvNet: (BATCH, 3, 4, 4), Attention: (BATCH, 5, 8)}[model]
    captured = captured_on_cuda(model, shape, monkeypatch, dtype)
    origins = [node["origin"]["source"] for node in captured.document["nodes"]]
    assert all(source and "eval_with_key" not in source for source in origins), origins
    own, x = model(), torch.randn(shape)
    wanted = [spec.kind == "parameter" for spec in captured.inputs]
    program = compile_program(captured, wanted, _place.Place(torch.device("cpu"), True))
    tensors = {**dict(own.named_parameters()), **dict(own.named_buffers())}
    fed = [spec for spec in captured.inputs if spec.kind != "constant"]
    inputs = [x if spec.kind == "user" else tensors[spec.target] for spec in fed]
    (y, *_), _ = _autograd.run(program, [program.place.aligned(t) for t in inputs], True)
    exact = copy.deepcopy(own).double()
    reference = exact(x.double())
    grad = torch.rand(y.shape).to(y.dtype)
    y.backward(grad)
    reference.backward(grad.double())
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference, rtol=0, atol=tolerance * 2)
    for p, q in zip(own.parameters(), exact.parameters(), strict=True):
        scale = q.grad.abs().max().item() + 1
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=0, atol=tolerance * scale)


def test_class_labels_are_checked_in_the_emulator():
    class Loss(nn.Module):
        def forward(self, x, label):
            return F.cross_entropy(x, label)

    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    compiled = emulated(Loss())
    torch.testing.assert_close(compiled(x, labels), F.cross_entropy(x, labels))
    with pytest.raises(shorthaul.OutOfRange, match="holds 3"):
        compiled(x, torch.tensor([0, 1, 3, 0]))


def test_report_and_kernel_text_tell_what_would_run():
    model = emulated(linear())
    report = shorthaul.report(model, torch.randn(4, 6))
    assert report.data["kernels"] and report.data["bytes_moved"] >= report.data["bytes_least"] > 0
    (program,) = programs_of(model, (torch.randn(4, 6),))
    names = [name for name, _, text in program.native.cuda_kernels() if "SH_KERNEL" in text]
    assert names


def test_info_says_what_is_missing_in_sentences():
    info = shorthaul.cuda.info()
    assert info.available == shorthaul.cuda.available()
    if torch.cuda.is_available():
        assert info.devices and info.driver
    else:
        assert not info.available and "CUDA" in str(info)
        assert all(problem.strip() and " " in problem for problem in info.problems)


def test_mixed_devices_are_named():
    there = [("argument 0", torch.empty(2)), ("`0.weight`", torch.empty(2, device="meta"))]
    with pytest.raises(shorthaul.InputError, match="on cpu: argument 0; on meta: `0.weight`"):
        _place.place_of(there, "auto")
    with pytest.raises(shorthaul.InputError, match=r"argument 0 on meta.*CPU and on CUDA"):
        _place.place_of([("argument 0", torch.empty(2, device="meta"))], "auto")
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(shorthaul.InputError, match="argument 0 is a torch.sparse_coo"):
        _place.place_of([("argument 0", sparse)], "auto")


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(shorthaul.CapturingError, match="Net would have to be compiled.*warm-up"):
        _place.Place(torch.device("cuda", 0)).refuse_capture("Net")
    _place.Place(torch.device("cpu"), True).refuse_capture("Net")


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="backend must be one of"):
        shorthaul.module(linear(), backend="gpu")


def test_pickled_modules_keep_their_backend():
    model = copy.deepcopy(emulated(linear()))
    assert type(model)._shorthaul_options.backend == "cuda-emulated"
    leaves, _ = pytree.tree_flatten(model(torch.randn(4, 6)))
    assert leaves[0].shape == (4, 3)
