"""Gradients of some inputs: the backward pass leaves out the kernels that only others need."""

import pytest
import shorthaul
import torch
from shorthaul import _autograd
from shorthaul._memory import Blocks
from shorthaul.bench.options import Setting
from shorthaul.bench.variants import inputs_of, model_of
from torch import nn

NETWORKS = (
    "densenet121",
    "mobilenet_v3_large",
    "swin_t",
    "gpt2",
    "llama_135m",
    "lstm",
    "dlrm",
    "unet_3d_ensemble",
    "digits_transformer",
)


@pytest.fixture
def parts(monkeypatch):
    """The parts that backward passes ran. All memory that they are given holds NaN."""
    backward, lend, empty = _autograd.backward, Blocks.lend_briefly, torch.empty_like
    seen = []

    def noted(program, grads, reads, output_reads, saved, part=None):
        seen.append(part)
        return backward(program, grads, reads, output_reads, saved, part)

    class Poisoned:
        """PyTorch as the module sees it, where new tensors hold NaN."""

        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def empty_like(look):
            return empty(look).fill_(torch.nan) if look.is_floating_point() else empty(look)

    monkeypatch.setattr(_autograd, "backward", noted)
    monkeypatch.setattr(Blocks, "lend_briefly", lambda self, n: lend(self, n).fill_(255))
    monkeypatch.setattr(_autograd, "torch", Poisoned())
    return seen


@pytest.mark.parametrize("name", NETWORKS)
def test_a_part_computes_the_same_bits(name, parts):
    """Each gradient alone, and some sets of three, are those of the whole pass."""
    setting = Setting(name, 2, 2, small=True)
    net = model_of(setting).eval()
    given = [x.requires_grad_() if x.is_floating_point() else x for x in inputs_of(setting)]
    loss = setting.example.loss(shorthaul.module(net)(*given))
    wrt = [*net.parameters(), *(x for x in given if x.requires_grad)]
    whole = torch.autograd.grad(loss, wrt, retain_graph=True, allow_unused=True)
    assert parts == [None]
    step = max(1, len(wrt) // 12)
    sets = [[i] for i in range(0, len(wrt), step)]
    sets += [[i, (i * 7 + 3) % len(wrt), len(wrt) - 1 - i] for i in range(0, len(wrt) // 3, step)]
    for asked in sets:
        tensors = [wrt[i] for i in asked]
        found = torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)
        for i, gradient in zip(asked, found, strict=True):
            assert (gradient is None) == (whole[i] is None)
            assert gradient is None or torch.equal(gradient, whole[i]), (i, asked)
    ran = [part.n_launches for part in parts if part is not None]
    assert len(ran) >= len(sets) // 2
    assert all(0 < own < all_of_them for own, all_of_them in ran)


class _Chain(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return x


def test_how_many_kernels_the_last_layer_and_the_input_need(parts):
    """The weight of the last of eight layers needs few kernels, the input none for weights."""
    torch.manual_seed(0)
    net, x = _Chain(8), torch.randn(2, 8, 12, 12, requires_grad=True)
    run = shorthaul.module(net)
    torch.autograd.grad(run(x).square().mean(), net.layers[-1].weight)
    torch.autograd.grad(run(x).square().mean(), x)
    run(x).square().mean().backward()
    last, first, whole = parts
    assert whole is None
    n_last, n_all = last.n_launches
    assert n_last <= 3 and n_all >= 16
    assert first.n_launches[0] <= n_all - 8, "one kernel for each weight is left out"
    assert len(last.touched) <= 2 and len(first.touched) <= 9, "biases come from the same kernels"
    expected = torch.autograd.grad(net(x).square().mean(), x)[0]
    found = torch.autograd.grad(run(x).square().mean(), x)[0]
    torch.testing.assert_close(found, expected)


def test_the_balance_of_two_losses_by_the_gradients_of_the_last_layer(parts):
    """VQGAN's and GradNorm's weight of a loss: the graph is walked three times."""
    torch.manual_seed(0)
    net, x = _Chain(4), torch.randn(2, 8, 12, 12)
    run = shorthaul.module(net)

    def step(model):
        net.zero_grad()
        y, last = model(x), net.layers[-1].weight
        a, b = (y - x).abs().mean(), y.square().mean()
        norms = [torch.autograd.grad(v, last, retain_graph=True)[0].norm() for v in (a, b)]
        (a + (norms[0] / (norms[1] + 1e-4)).detach() * b).backward()
        return [p.grad.clone() for p in net.parameters()]

    for expected, found in zip(step(net), step(run), strict=True):
        torch.testing.assert_close(found, expected)
    assert [part is None for part in parts] == [False, False, True]


def test_gradients_that_are_asked_of_a_value_in_between(parts):
    """An adversarial step: the input comes from a tensor, whose gradient alone is asked for."""
    torch.manual_seed(0)
    net, seed = _Chain(3), torch.randn(2, 8, 10, 10)
    run = shorthaul.module(net)
    found = {}
    for key, model in (("eager", net), ("shorthaul", run)):
        change = torch.zeros_like(seed, requires_grad=True)
        x = (seed + change).clamp(-1, 1)
        loss = model(x).square().sum()
        of_x = torch.autograd.grad(loss, x, retain_graph=True)[0]
        loss.backward(inputs=[change])
        assert all(p.grad is None for p in net.parameters())
        found[key] = (of_x, change.grad)
    torch.testing.assert_close(found["shorthaul"], found["eager"])
    assert None not in parts


def test_hooks_run_for_what_is_asked_for_alone(parts):
    """A parameter that is not asked for has no gradient, and its hook does not run."""
    torch.manual_seed(0)
    net, x = _Chain(2), torch.randn(2, 8, 6, 6)
    run, calls = shorthaul.module(net), []
    for name, p in net.named_parameters():
        p.register_hook(lambda _, name=name: calls.append(name))
    loss = run(x).square().sum()
    asked = [net.layers[0].bias, net.layers[1].weight]
    loss.backward(inputs=asked, retain_graph=True)
    assert sorted(calls) == ["layers.0.bias", "layers.1.weight"]
    calls.clear()
    loss.backward()
    assert len(calls) == 4 and parts[0] is not None and parts[1] is None
    for p in asked:
        p.grad.div_(2)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    torch.testing.assert_close([p.grad for p in net.parameters()], list(expected))


def test_a_program_keeps_a_bounded_number_of_plans(monkeypatch):
    from shorthaul import _program

    monkeypatch.setattr(_program, "_MOST_PLANS", 4)
    torch.manual_seed(0)
    net, x = _Chain(6), torch.randn(1, 8, 6, 6)
    loss = shorthaul.module(net)(x).square().sum()
    wrt = list(net.parameters())
    whole = torch.autograd.grad(loss, wrt, retain_graph=True)
    for _ in range(2):
        for p, expected in zip(wrt, whole, strict=True):
            assert torch.equal(torch.autograd.grad(loss, p, retain_graph=True)[0], expected)
