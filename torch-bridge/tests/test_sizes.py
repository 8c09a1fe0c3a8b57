"""Later sizes of a model share the kernels that earlier ones compiled."""

from __future__ import annotations

import itertools

import pytest
import shorthaul
import torch
from shorthaul import _region
from shorthaul.module import runner_of
from torch import nn


class Attention(nn.Module):
    """Tokens to classes: embedding, attention with a mask, a layer norm."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.inner = nn.MultiheadAttention(32, 2, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens, padding):
        x = self.tokens(tokens)
        attended, _ = self.inner(x, x, x, key_padding_mask=padding, need_weights=False)
        return self.head(self.norm(x + attended).mean(1))


def _step(model, network, length: int):
    """Loss and gradients of one step with texts of that length."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(50, (4, length), generator=generator)
    padding = torch.zeros(4, length, dtype=torch.bool)
    padding[1, length // 2 :] = True
    labels = torch.randint(3, (4,), generator=generator)
    network.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens, padding), labels)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in network.parameters()]


def _compiled_files() -> int:
    return shorthaul.cache.info().n_entries


def _check(model, network, length: int) -> None:
    found, gradients = _step(model, network, length)
    expected, wanted = _step(network, network, length)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)


def _files_for(model, network, length: int) -> int:
    """How many files that length adds; each is checked, once a program runs it."""
    before = _compiled_files()
    # A size that comes for the first time may run through PyTorch.
    for _ in range(3):
        _check(model, network, length)
    return _compiled_files() - before


def test_a_later_length_compiles_little(monkeypatch, tmp_path):
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    network = Attention()
    model = shorthaul.module(network)
    files = [_files_for(model, network, length) for length in (70, 98, 112, 140)]
    # Each kernel of the second length has a file of its own.
    assert files[1] > 8
    # Of a later one, a few products have tiles that came for the first or second time.
    assert files[-1] * 3 <= files[1], files


@pytest.mark.parametrize("shares", [True, False])
def test_dynamic_says_whether_sizes_share(monkeypatch, tmp_path, shares):
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path))
    network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
    model = shorthaul.module(network, dynamic=None if shares else False)
    files = []
    for batch in (140, 280, 420, 560, 700):
        x = torch.randn(batch, 16, generator=torch.Generator().manual_seed(batch))
        for _ in range(3):
            torch.testing.assert_close(model(x), network(x), rtol=1e-5, atol=1e-6)
        files.append(_compiled_files())
    assert files[1] > files[0]
    # On some machines a product has a tile for the third size that it had for no other.
    assert (files[4] == files[3]) == shares, files


def test_thirty_lengths_are_traced_twice(monkeypatch, tmp_path):
    monkeypatch.setenv("SHORTHAUL_CACHE_DIR", str(tmp_path))
    traced = []
    for name in ("capture", "capture_symbolic"):
        inner = getattr(_region, name)

        def trace(*args, inner=inner, **more):
            traced.append(args)
            return inner(*args, **more)

        monkeypatch.setattr(_region, name, trace)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32))
    model = shorthaul.module(network)
    lengths = [16 + 11 * i % 30 for i in range(30)]
    files = []
    for length in lengths:
        tokens = torch.randint(20, (4, length), generator=torch.Generator().manual_seed(length))
        # A size that comes for the first time may run through PyTorch.
        for _ in range(2):
            found, expected = model(tokens), network(tokens)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        files.append(_compiled_files())
    assert len(set(lengths)) == 30
    assert len(traced) == 2
    assert runner_of(model).compiler.n_sizes.total() == 28, "every size has a program"
    # The first length has kernels of its own, the second those that later ones share; one more may
    # need others.
    n_compiled = sum(after > before for before, after in itertools.pairwise([0, *files]))
    assert n_compiled <= 3, files


class Returned(nn.Module):
    """As GPT-2 of transformers: a product by ``addmm``, viewed by a size, whose parts are given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 24) / 3)
        self.bias = nn.Parameter(torch.randn(24))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        size = x.size()[:-1] + (24,)
        joined = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)
        query, key, value = joined.split(8, -1)
        return self.head(query * torch.tanh(key)), key, value


def test_a_view_of_a_result_that_names_a_size_costs_no_region():
    network = Returned()
    model = shorthaul.module(network)
    for batch, length in ((2, 12), (3, 9), (4, 7)):
        x = torch.randn(batch, length, 8)
        for found, expected in zip(model(x), network(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert found.stride() == expected.stride()
    assert not runner_of(model).compiler.outside


class _Variance(nn.Module):
    """Variances over a length that changes; the loss needs their gradient by the input itself."""

    def forward(self, x):
        """A normalized value, and a variance with a correction."""
        variance, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
        return (x - mean) * (variance + 1e-5).rsqrt(), x.var(0), x.std((0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_of_variances_over_symbolic_sizes(dtype):
    torch.manual_seed(0)
    model = shorthaul.module(_Variance(), dynamic=True)
    for n in (4, 7, 3, 7):
        # Beside it in memory nothing may change: the gradient had another type once.
        x = torch.randn(n, 8, 5).to(dtype).requires_grad_()
        found = []
        for run, given in ((model, x), (_Variance(), x.detach().double().requires_grad_())):
            results = run(given)
            loss = sum(
                (y * torch.linspace(-1, 1, y.numel()).to(y).view(y.shape)).sum() for y in results
            )
            found.append(torch.autograd.grad(loss, given)[0])
        assert found[0].dtype == dtype
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(found[0].double(), found[1], rtol=tolerance, atol=tolerance)


class Marks(nn.Module):
    """Writes slices of zeros that have the sizes of the input."""

    def forward(self, x):
        n = x.shape[0]
        marks = x.new_zeros(x.shape)
        marks[:2] = 1.0
        marks[2 : n - 1, 1:] += 3.0
        return marks * x.sum()


def test_tensors_of_an_input_s_sizes_are_compiled_for_each_size():
    compiled = shorthaul.module(Marks(), fallback="error")
    for n in (6, 5, 3, 4):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), Marks()(x))
