"""Training as people do it: modes, optimizers, loaded states, buffers, and nothing copied."""

import copy

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from against_eager import assert_matches
from shorthaul import _autograd
from torch import nn


class Normed(nn.Module):
    """A convolution with BatchNorm and dropout-free head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.silu(self.bn(self.conv(x))).mean((2, 3)))


def images(batch=6):
    return torch.randn(batch, 2, 5, 5)


def assert_same_state(model, twin, **tolerance):
    for (name, found), expected in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def test_from_train_to_eval_and_back():
    model = Normed()
    twin, compiled = copy.deepcopy(model), shorthaul.module(model)
    for train in (True, False, True, False):
        for candidate in (compiled, twin):
            candidate.train(train).zero_grad()
        x = images()
        found, expected = compiled(x), twin(x)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(model.conv.weight.grad, twin.conv.weight.grad)
        assert_same_state(model, twin)
    assert model.bn.num_batches_tracked == 2


def test_decorated_classes_train():
    @shorthaul.module(max_programs=2, fallback="error")
    class Net(Normed):
        """The same, compiled."""

        def forward(self, x):
            return super().forward(x) * 2

    net = Net()
    twin = Normed()
    twin.load_state_dict(net.state_dict())
    x = images()
    net(x).square().sum().backward()
    (twin(x) * 2).square().sum().backward()
    torch.testing.assert_close(net.conv.weight.grad, twin.conv.weight.grad)
    assert_same_state(net, twin)
    net(images(3))
    with pytest.warns(shorthaul.RecompileWarning, match="already has 2 programs"):
        net(images(4))


def test_adamw_with_a_schedule():
    def train(model):
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        losses = []
        for _ in range(8):
            loss = F.cross_entropy(model(images()), torch.tensor([0, 1, 2, 0, 1, 2]))
            optimizer.zero_grad(set_to_none=len(losses) % 2 == 0)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    model = Normed()
    twin = copy.deepcopy(model)
    assert train(shorthaul.module(model)) == pytest.approx(train(twin), rel=1e-4)
    assert_same_state(model, twin, rtol=1e-3, atol=1e-4)


def test_gradients_accumulate():
    model = Normed().eval()
    compiled, x = shorthaul.module(model), images()
    compiled(x).sum().backward()
    once = model.conv.weight.grad.clone()
    compiled(x).sum().backward()
    torch.testing.assert_close(model.conv.weight.grad, 2 * once)


def test_a_state_loaded_later_is_used():
    model, other = Normed(), Normed()
    other.bn.running_mean.uniform_()
    compiled, x = shorthaul.module(model.eval()), images()
    compiled(x)
    compiled.load_state_dict(other.state_dict())
    torch.testing.assert_close(compiled(x), other.eval()(x))
    compiled.load_state_dict(Normed().state_dict(), assign=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_nothing_is_copied(monkeypatch):
    model = Normed()
    compiled, x = shorthaul.module(model), images().requires_grad_()
    compiled(x)
    seen = []
    forward = _autograd.forward

    def spy(program, inputs):
        seen.extend(tensor.data_ptr() for tensor in inputs)
        return forward(program, inputs)

    copies = []
    contiguous = torch.Tensor.contiguous
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda t, *a: copies.append(t) or contiguous(t, *a)
    )
    monkeypatch.setattr(_autograd, "forward", spy)
    compiled(x)
    assert {x.data_ptr(), *(p.data_ptr() for p in model.parameters())} <= set(seen)
    assert not copies


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_without_running_statistics(train):
    norms = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    assert_matches(norms.train(train), torch.randn(6, 4, requires_grad=True))


@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning", "ignore::UserWarning")
def test_batch_norm_without_momentum():
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=None))
    twin = copy.deepcopy(model)
    compiled = shorthaul.module(model)
    for _ in range(3):
        x = torch.randn(6, 4)
        torch.testing.assert_close(compiled(x), twin(x))
        torch.testing.assert_close(model[0].running_mean, twin[0].running_mean)
    model.eval()
    assert_matches(model, torch.randn(6, 4))


def test_gradients_of_what_is_unused():
    class Spare(nn.Module):
        """A layer that forward does not read, one read for its sign, one behind a comparison."""

        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)
            self.sign, self.test = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.used(x) * torch.sign(self.sign(x))
            return torch.where(self.test(x) > 0, y, -y)

    model = Spare()
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    for candidate in (shorthaul.module(model), twin):
        candidate(x).sum().backward()
    for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
    assert torch.count_nonzero(model.sign.weight.grad) == 0
