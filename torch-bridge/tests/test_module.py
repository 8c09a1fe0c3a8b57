"""``shorthaul.module`` behaves as the module it wraps."""

import copy
import io
import pickle
import warnings

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from against_eager import assert_matches
from shorthaul._call import recorded
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint


class ConvNet(nn.Module):
    """Convolutions, BatchNorm, in-place ReLU, pooling and a residual."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        z = self.bn2(self.conv2(y))
        z += y
        return self.head(F.adaptive_avg_pool2d(self.relu(z), 1).flatten(1))


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))


def images(batch=2, **kwargs):
    return torch.randn(batch, 3, 8, 8, **kwargs)


@pytest.mark.parametrize("train", [True, False])
def test_convolutional_net_matches_eager(train):
    model = ConvNet().train(train)
    model.bn1.running_mean.uniform_()
    assert_matches(model, images(requires_grad=True))


def test_three_training_steps_match_eager():
    def train(model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            loss = F.cross_entropy(model(images(4)), torch.tensor([0, 1, 2, 3]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = ConvNet()
    eager = train(copy.deepcopy(model))
    assert train(shorthaul.module(model)) == pytest.approx(eager, rel=1e-5)
    assert model.bn1.num_batches_tracked == 3


def test_state_dict_keys_and_parameters_are_the_models():
    model = ConvNet()
    compiled = shorthaul.module(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert isinstance(compiled, ConvNet)
    compiled.eval()
    assert not model.training and not model.bn1.training


def test_decorator_compiles_instances():
    @shorthaul.module
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            return torch.relu(self.linear(x))

    net = Net()
    x = torch.randn(5, 4)
    torch.testing.assert_close(net(x), torch.relu(F.linear(x, net.linear.weight, net.linear.bias)))
    assert list(net.state_dict()) == ["linear.weight", "linear.bias"]


def test_no_grad_and_eval_need_no_gradient():
    compiled = shorthaul.module(mlp())
    with torch.no_grad():
        assert not compiled(torch.randn(3, 6)).requires_grad
    assert compiled(torch.randn(3, 6)).requires_grad


def test_frozen_parameters_get_no_gradient():
    model = mlp()
    model[0].weight.requires_grad_(False)
    assert_matches(model, torch.randn(3, 6))


def test_input_gradient_only():
    assert_matches(mlp().requires_grad_(False), torch.randn(3, 6, requires_grad=True))


def test_freezing_later_is_noticed():
    model = mlp()
    compiled = shorthaul.module(model)
    compiled(torch.randn(3, 6)).sum().backward()
    model.zero_grad()
    model[0].requires_grad_(False)
    x = torch.randn(3, 6)
    compiled(x).sum().backward()
    assert model[0].weight.grad is None
    (expected,) = torch.autograd.grad(model(x).sum(), model[2].weight)
    torch.testing.assert_close(model[2].weight.grad, expected)


def test_shared_parameters_sum_their_gradients():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(6, 6, bias=False)
            self.decode = nn.Linear(6, 6, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(torch.tanh(self.encode(x)))

    assert_matches(Tied(), torch.randn(3, 6))


def test_several_outputs_dicts_and_tuples():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch, scale=2.0, *, pair):
            y = self.linear(batch["x"]) * scale
            return {
                "y": y,
                "both": (y + pair[0], pair[1] * 2),
                "given": batch["x"],
                "number": 3,
                "again": y,
            }

    model = Net()
    x, pair = torch.randn(2, 4), (torch.randn(2, 4), torch.randn(3))
    result = shorthaul.module(model)({"x": x}, pair=pair)
    assert result["given"] is x and result["number"] == 3 and result["again"] is result["y"]
    assert_matches(model, {"x": torch.randn(2, 4, requires_grad=True)}, pair=pair)


def test_unused_output_needs_no_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x), self.b(x)

    model = Two()
    first, _ = shorthaul.module(model)(torch.randn(2, 3))
    first.sum().backward()
    assert torch.isfinite(model.a.weight.grad).all() and model.a.weight.grad.abs().sum() > 0


def test_non_contiguous_inputs_and_parameters():
    model = ConvNet().to(memory_format=torch.channels_last)
    x = images().to(memory_format=torch.channels_last).requires_grad_()
    assert_matches(model, x)
    assert_matches(mlp(), torch.randn(6, 3).t())


def test_new_shapes_compile_again_and_say_so():
    compiled = shorthaul.module(mlp())
    compiled(torch.randn(3, 6))
    with pytest.warns(shorthaul.RecompileWarning, match=r"because size 0 of .* is 5 instead of 3"):
        assert compiled(torch.randn(5, 6)).shape == (5, 4)


def test_programs_are_bounded_and_the_rest_runs_in_eager():
    model = mlp()
    compiled = shorthaul.module(model, max_programs=1)
    compiled(torch.randn(3, 6))
    x = torch.randn(5, 6)
    with pytest.warns(shorthaul.RecompileWarning, match="PyTorch runs calls that need another one"):
        y = compiled(x)
    assert torch.equal(y, model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)


def test_dropout_follows_the_seed():
    compiled = shorthaul.module(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    first = compiled(x)
    second = compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    assert torch.equal(first, again) and not torch.equal(first, second)
    dropped = (first == 0).float().mean().item()
    assert 0.35 < dropped < 0.65


def test_dropout_backward_uses_the_forward_mask():
    compiled = shorthaul.module(nn.Dropout(0.25))
    x = torch.ones(64, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_random_numbers_have_their_distribution():
    class Noise(nn.Module):
        """A variational layer's noise, and other random numbers."""

        def forward(self, mean, scale):
            noise = torch.randn_like(mean)
            return mean + scale * noise, noise, torch.randn(64, 64), torch.rand(64, 64)

    compiled = shorthaul.module(Noise())
    mean, scale = torch.ones(64, 64), torch.full((64, 64), 2.0, requires_grad=True)
    value, noise, normal, uniform = compiled(mean, scale)
    value.sum().backward()
    assert torch.equal(scale.grad, noise)
    torch.testing.assert_close(value, mean + 2 * noise)
    for sample in (noise, normal):
        assert abs(sample.mean().item()) < 0.06 and abs(sample.std().item() - 1) < 0.05
        assert abs((sample.abs() < 1).float().mean().item() - 0.683) < 0.03
    assert abs((noise * normal).mean().item()) < 0.06
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean().item() - 0.5) < 0.02
    again = compiled(mean, scale)[1]
    assert not torch.equal(again, noise)


def test_checkpointing_recomputes_the_same_dropout():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.ReLU())
    compiled = shorthaul.module(model)
    x = torch.randn(4, 8)
    grads = []
    for run in (compiled, lambda x: checkpoint(compiled, x, use_reentrant=False)):
        model.zero_grad()
        torch.manual_seed(5)
        run(x).square().sum().backward()
        grads.append(model[0].weight.grad.clone())
    assert torch.equal(*grads)


def test_hooks_run_once_outside():
    model = mlp()
    compiled = shorthaul.module(model)
    seen = []
    compiled.register_forward_hook(
        lambda module, args, output: seen.append(output.shape) or output * 2
    )
    x = torch.randn(3, 6)
    y = compiled(x)
    assert seen == [(3, 4)]
    torch.testing.assert_close(y, model(x))


def test_functional_call_uses_the_given_parameters():
    model = mlp()
    compiled = shorthaul.module(model)
    x = torch.randn(3, 6)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.count_nonzero(torch.func.functional_call(compiled, zeros, (x,))) == 0
    assert torch.count_nonzero(compiled(x)) > 0


def test_deepcopy_and_pickle():
    compiled = shorthaul.module(mlp(), max_programs=3)
    x = torch.randn(3, 6)
    y = compiled(x)
    twin = copy.deepcopy(compiled)
    assert twin[0].weight is not compiled[0].weight
    assert torch.equal(twin(x), y)
    loaded = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(loaded(x), y)
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    fresh = mlp()
    fresh.load_state_dict(torch.load(buffer))
    torch.testing.assert_close(fresh(x), y)


def test_buffer_written_by_forward():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls += 1
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return x - self.mean

    assert_matches(Counter(), torch.randn(3, 4))
    model = Counter()
    compiled = shorthaul.module(model)
    compiled(torch.randn(3, 4))
    compiled(torch.randn(3, 4))
    assert model.calls == 2


def test_a_replaced_submodule_is_noticed():
    model = mlp()
    compiled = shorthaul.module(model)
    x = torch.randn(3, 6)
    compiled(x)
    model[1] = nn.ReLU()
    torch.testing.assert_close(compiled(x), model[2](torch.relu(model[0](x))))


def test_torch_compile_backend():
    model = ConvNet()
    twin = copy.deepcopy(model)
    x = images()
    y = torch.compile(model, backend="shorthaul")(x)
    torch.testing.assert_close(y, twin(x))
    y.sum().backward()
    expected = copy.deepcopy(twin).double()
    expected(x.double()).sum().backward()
    scale = expected.conv1.weight.grad.abs().max()
    error = (model.conv1.weight.grad - expected.conv1.weight.grad).abs().max()
    assert error < 1e-5 * scale
    torch.testing.assert_close(model.bn1.running_mean, twin.bn1.running_mean)


def test_tensors_without_elements_give_shapes():
    compiled = torch.compile(lambda x: (x.sin() + 1).relu(), backend="shorthaul")
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(2, 3))
    with mode:
        y = compiled(x)
    assert type(y) is FakeTensor
    assert y.shape == (2, 3)
    expected = (torch.ones(2, 3).sin() + 1).relu()
    torch.testing.assert_close(compiled(torch.ones(2, 3)), expected)


class Combining(nn.Module):
    """A map of products and sums between two layers, as scans of state-space models have it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        rows = torch.vmap(lambda a, b: a * b + b)(self.first(x)[::2], x[1::2])
        return self.second(rows)


def test_slices_that_end_before_they_start_are_compiled():
    """A mask of shifted windows has them where nothing is shifted: ``m[-2:-0]``."""

    class Mask(nn.Module):
        def forward(self, x):
            m, shift = x.new_zeros(4, 6), 0
            for i, rows in enumerate((slice(0, -2), slice(-2, -shift), slice(-shift, None))):
                for k, columns in enumerate((slice(0, -3), slice(-3, -1), slice(-1, None))):
                    m[rows, columns] = 3 * i + k
            m[:, 5:2] += 1
            return m * x.sum(), m[3:1]

    eager, compiled = Mask(), shorthaul.module(Mask(), fallback="error")
    x = torch.randn(3)
    for ours, theirs in zip(compiled(x), eager(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_map_of_elements_is_compiled_with_what_is_around_it():
    with recorded() as calls:
        assert_matches(
            Combining(),
            torch.randn(6, 4, requires_grad=True),
            wrap=lambda model: shorthaul.module(model, fallback="error"),
        )
    assert len(calls) == 1
