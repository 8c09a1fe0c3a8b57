"""Deep copies of compiled modules: they run the programs of the module, on tensors of their own."""

import copy
import gc
import pickle
import warnings
import weakref

import shorthaul
import torch
from shorthaul.module import _MOST_FAILED_COPIES, original_of, runner_of
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU())
        self.head = nn.Linear(8, 3)
        self.scale = 2.0

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


def _step(model, x, target):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), target).backward()
    optimizer.step()


def _rounds_of_averages(server, n_rounds=3, n_clients=6):
    """Federated averaging: each client trains a copy, and the server takes the mean of them."""
    for i in range(n_rounds):
        states = []
        for client in range(n_clients):
            generator = torch.Generator().manual_seed(10 * i + client)
            own = copy.deepcopy(server)
            for _ in range(2):
                x = torch.randn(5, 6, generator=generator)
                _step(own, x, torch.randint(3, (5,), generator=generator))
            states.append(own.state_dict())
        server.load_state_dict(
            {name: torch.stack([s[name].float() for s in states]).mean(0) for name in states[0]}
        )


def test_clients_of_federated_averaging_compile_once():
    torch.manual_seed(0)
    eager = Net()
    compiled = shorthaul.module(copy.deepcopy(eager))
    compiled(torch.zeros(5, 6))
    compiled.load_state_dict(eager.state_dict())
    _rounds_of_averages(eager)
    _rounds_of_averages(compiled)
    assert runner_of(compiled).compiler.n_graphs == 1
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict())


def test_a_copy_is_independent_and_outlives_its_module():
    torch.manual_seed(0)
    compiled, x = shorthaul.module(Net()), torch.randn(5, 6)
    y = compiled(x)
    y.sum().backward()
    twin = copy.deepcopy(compiled)
    assert type(twin) is type(compiled)
    runner = runner_of(compiled)
    with torch.no_grad():
        for p in compiled.parameters():
            p.zero_()
    torch.testing.assert_close(twin(x), y)
    assert torch.count_nonzero(compiled(x)) == 0
    gone = weakref.ref(compiled.head.weight)
    del compiled, y
    gc.collect()
    assert gone() is None, "a copy does not keep the tensors of its module"
    eager = copy.deepcopy(original_of(twin))
    third = copy.deepcopy(twin)
    for model in (eager, third):
        model.zero_grad()
        _step(model, x, torch.arange(5) % 3)
    torch.testing.assert_close(third.state_dict(), eager.state_dict())
    assert runner_of(third) is runner_of(twin) is runner
    assert runner.compiler.n_graphs == 1


def test_a_copy_that_is_changed_has_graphs_of_its_own():
    torch.manual_seed(0)
    compiled, x = shorthaul.module(Net()), torch.randn(5, 6)
    compiled(x)
    changes = {
        "replaced": lambda m: m.body.__setitem__(2, nn.ReLU()),
        "double": lambda m: m.double(),
        "evaluated": lambda m: m.eval(),
        "scaled": lambda m: setattr(m, "scale", 3.0),
        "hooked": lambda m: m.head.register_forward_hook(lambda *a: a[2] + 1),
        "frozen": lambda m: m.head.requires_grad_(False),
    }
    for change in changes.values():
        eager = Net()
        twin = copy.deepcopy(compiled)
        eager.load_state_dict(twin.state_dict())
        for model in (eager, twin):
            change(model)
        dtype = eager.head.weight.dtype
        torch.testing.assert_close(twin(x.to(dtype)), eager(x.to(dtype)))
    torch.testing.assert_close(
        compiled.state_dict()["head.weight"], copy.deepcopy(compiled).head.weight.data
    )


def test_modules_whose_copies_need_graphs_stop_sharing():
    compiled, x = shorthaul.module(Net()), torch.randn(5, 6)
    compiled(x)
    for i in range(_MOST_FAILED_COPIES):
        twin = copy.deepcopy(compiled)
        twin.scale = 10.0 + i
        twin(x)
        assert runner_of(twin) is runner_of(compiled)
    assert runner_of(copy.deepcopy(compiled)) is not runner_of(compiled)


def test_copies_of_parts_and_of_classes_that_copy_themselves():
    class Own(nn.Linear):
        def __deepcopy__(self, memo):
            twin = Own(self.in_features, self.out_features)
            twin.load_state_dict(self.state_dict())
            twin.is_copied = True
            return twin

    torch.manual_seed(0)
    whole = nn.Sequential(shorthaul.module(Net()), nn.Linear(3, 2))
    x = torch.randn(5, 6)
    y = whole(x)
    twin = copy.deepcopy(whole)
    torch.testing.assert_close(twin(x), y)
    assert runner_of(twin[0]) is runner_of(whole[0])
    own = shorthaul.module(Own(6, 6))
    own(x)
    assert copy.deepcopy(own).is_copied
    torch.testing.assert_close(copy.deepcopy(own)(x), own(x))
    loaded = pickle.loads(pickle.dumps(whole[0]))
    assert runner_of(loaded) is not runner_of(whole[0])
    torch.testing.assert_close(loaded(x), whole[0](x))


def test_a_copy_does_not_use_up_the_programs_of_its_module():
    torch.manual_seed(0)
    compiled, x = shorthaul.module(Net(), max_programs=1), torch.randn(5, 6)
    compiled(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(compiled).eval()(x)
