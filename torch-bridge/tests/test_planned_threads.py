"""Training steps whose bits do not depend on how many threads run them: ``planned_threads``."""

import copy

import pytest
import shorthaul
import torch
from torch import nn

PLANNED = 3


class Loss(nn.Module):
    """A network with its loss, so that no sum is left to PyTorch, whose bits may vary."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x).square().mean()


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 32, 1, stride=2),
        nn.GroupNorm(4, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def _transformer() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(64, 32),
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True),
        nn.LayerNorm(32),
    )


NETWORKS = {
    "convolutions": (_convolutions, lambda: torch.randn(8, 3, 48, 48)),
    "transformer": (_transformer, lambda: torch.randint(0, 64, (8, 128))),
}


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _trained(model: nn.Module, x: torch.Tensor, n_threads: int) -> list[torch.Tensor]:
    """Parameters, buffers and gradients after three steps."""
    torch.set_num_threads(n_threads)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    state = [value.clone() for value in model.state_dict().values()]
    return state + [p.grad.clone() for p in model.parameters()]


def _equal(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_bits_are_those_of_the_planned_number(name):
    torch.manual_seed(3)
    make, inputs = NETWORKS[name]
    network, x = Loss(make()), inputs()
    start = copy.deepcopy(network.state_dict())
    model = shorthaul.module(network, planned_threads=PLANNED, fallback="error")
    results = []
    for n_threads in (1, 2, PLANNED, PLANNED + 2):
        network.load_state_dict(start)
        results.append(_trained(model, x, n_threads))
    for other in results[1:]:
        assert _equal(results[0], other)
    assert len(shorthaul.report(model, x).data["one_thread"]) == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_these_networks_have_sums_that_a_plan_cuts(name):
    torch.manual_seed(3)
    make, inputs = NETWORKS[name]
    network, x = make(), inputs()
    results = []
    for planned in (1, PLANNED):
        model = shorthaul.module(Loss(copy.deepcopy(network)), planned_threads=planned)
        results.append(_trained(model, x, 2))
    assert not _equal(*results)


def test_torch_compile_takes_the_option():
    torch.manual_seed(3)
    network, x = Loss(_convolutions()), torch.randn(8, 3, 48, 48)
    start = copy.deepcopy(network.state_dict())
    results = []
    for n_threads in (1, 2):
        torch._dynamo.reset()
        network.load_state_dict(start)
        model = torch.compile(network, backend="shorthaul", options={"planned_threads": PLANNED})
        results.append(_trained(model, x, n_threads))
    assert _equal(*results)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, 100_000])
def test_other_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="planned_threads must be a whole number from 1 to 1024"):
        shorthaul.module(nn.Linear(2, 2), planned_threads=wrong)
