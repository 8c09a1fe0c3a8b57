"""Optimizers' kernels for the CPU against PyTorch's own optimizers, in float64 and as they are."""

import copy
import io
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import shorthaul
import torch
from shorthaul import optim
from test_optim import CASES, assert_close, give_gradients, parameters
from torch import nn


def pair(name, own, theirs, **settings):
    return getattr(optim, name)(own, **settings), getattr(torch.optim, name)(theirs, **settings)


def step_both(some, optimizers, step, scale=1.0):
    for parameters_, optimizer in zip(some, optimizers, strict=True):
        give_gradients(parameters_, step, scale)
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(case):
    name, settings = CASES[case]
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    wide = [nn.Parameter(p.detach().double()) for p in theirs]
    mine, other = pair(name, own, theirs, **settings)
    reference = getattr(torch.optim, name)(wide, **settings)
    for step in range(4):
        before = [p._version for p in own]
        step_both((own, theirs), (mine, other), step)
        for p, q in zip(theirs, wide, strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        reference.step()
        changed = [p._version > version for p, version in zip(own, before, strict=True)]
        assert changed == [p.grad is not None for p in own]
    assert_close(own, wide, rtol=1e-5, atol=1e-6)
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
    # Rounded no worse than PyTorch's own.
    errors = [
        sum(float((p - q).detach().square().sum()) for p, q in zip(some, wide, strict=True))
        for some in (own, theirs)
    ]
    assert errors[0] <= 1.5 * errors[1] + 1e-14
    for p, q in zip(own[:-1], wide[:-1], strict=True):
        for key, value in reference.state[q].items():
            if isinstance(value, torch.Tensor):
                found = mine.state[p][key].double()
                torch.testing.assert_close(found, value.double(), rtol=1e-5, atol=1e-6)
    assert not mine.state[own[-1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_types(name, dtype):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    own = parameters(dtype)
    wide = [nn.Parameter(p.detach().double()) for p in own]
    mine, other = pair(name, own, wide, lr=0.05, **settings)
    give_gradients(own, 0)
    for p, q in zip(own, wide, strict=True):
        q.grad = None if p.grad is None else p.grad.double()
    mine.step()
    other.step()
    assert all(p.dtype == dtype for p in own)
    # Computed in single precision at least, and rounded once, where it is stored.
    error = {torch.float64: 1e-12, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert_close(own, wide, rtol=error, atol=min(error, 1e-6))


def test_many_elements_on_several_threads():
    shapes = [(1,), (70001,), (33, 1025), (0,), (3,), (200, 300)]
    generator = torch.Generator().manual_seed(0)
    own = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in own]
    mine, other = pair("AdamW", own, theirs, lr=0.1)
    for n_threads in (1, 2, 3):
        torch.set_num_threads(n_threads)
        for p, q in zip(own, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step()
        other.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)


def test_groups_types_and_schedules_together():
    def both(optimizer_of):
        torch.manual_seed(0)
        some = parameters(torch.float32)
        half = nn.Parameter(torch.randn(40).bfloat16())
        optimizer = optimizer_of([{"params": [*some[:3], half]}, {"params": some[3:], "lr": 0.01}])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=9)
        late = nn.Parameter(torch.ones(7))
        for step in range(4):
            give_gradients(some, step)
            half.grad = torch.full((40,), 0.5).bfloat16()
            if step == 2:
                optimizer.add_param_group({"params": [late], "lr": 0.3, "weight_decay": 0.2})
            if step >= 2:
                late.grad = torch.full((7,), 0.25)
            if step == 3:
                some[0].grad = None
            optimizer.step()
            if step < 2:
                schedule.step()
        return [*some, half, late], optimizer

    own, mine = both(lambda groups: optim.AdamW(groups, lr=0.1))
    theirs, other = both(lambda groups: torch.optim.AdamW(groups, lr=0.1))
    for p, q in zip(own, theirs, strict=True):
        # PyTorch rounds bf16 after every operation.
        rtol = 2**-5 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p, q, rtol=rtol, atol=1e-6)
    counts = [
        [float(o.state[p].get("step", 0)) for p in s] for o, s in ((mine, own), (other, theirs))
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_state_is_that_of_pytorch(name):
    settings = {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = pair(name, own, theirs, **settings)
    step_both((own, theirs), (mine, other), 0)
    # There and back, through a file.
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    step_both((own, theirs), (mine, other), 1)
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    step_both((own, theirs), (mine, other), 2)
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
    copied, some = copy.deepcopy((mine, own))
    step_both((own, some), (mine, copied), 3)
    assert all(torch.equal(p, q) for p, q in zip(own, some, strict=True))


def test_a_loaded_state_can_be_loaded_once_more():
    own = parameters(torch.float32)
    mine = optim.AdamW(own, lr=0.1)
    give_gradients(own, 0)
    mine.step()
    kept = mine.state_dict()
    for _ in range(2):
        mine.load_state_dict(kept)
        give_gradients(own, 1)
        mine.step()
        assert {float(state["step"]) for state in mine.state.values()} == {2.0}
        assert {float(state["step"]) for state in kept["state"].values()} == {1.0}


def test_gradients_are_clipped_together_and_kept():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = optim.AdamW(own, lr=0.1, max_norm=0.5), torch.optim.AdamW(theirs, lr=0.1)
    for step, scale in enumerate((1.0, 1e-4)):
        for some in (own, theirs):
            give_gradients(some, step, scale)
        kept = [p.grad.clone() for p in own[:-1]]
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        mine.step()
        other.step()
        assert all(torch.equal(p.grad, k) for p, k in zip(own, kept, strict=False))
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-7)


def test_a_grad_scaler_leaves_the_scale_to_the_kernel():
    torch.manual_seed(0)
    network, other = nn.Linear(6, 4), nn.Linear(6, 4)
    other.load_state_dict(network.state_dict())
    mine = optim.AdamW(network.parameters(), lr=0.1)
    plain = torch.optim.AdamW(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = torch.randn(5, 6)
    for step in range(3):
        given = x * torch.inf if step == 1 else x
        before = [p.detach().clone() for p in network.parameters()]
        mine.zero_grad()
        scaler.scale(network(given).square().mean()).backward()
        scaler.step(mine)
        scaler.update()
        if step == 1:
            assert all(torch.equal(p, b) for p, b in zip(network.parameters(), before, strict=True))
            continue
        plain.zero_grad()
        other(given).square().mean().backward()
        plain.step()
    assert scaler.get_scale() == 128.0
    assert_close(network.parameters(), [q.double() for q in other.parameters()], 1e-5, 1e-6)


def test_closures_hooks_and_rates_that_are_tensors():
    own = [nn.Parameter(torch.ones(5))]
    calls = []
    mine = optim.SGD(own, lr=torch.tensor(0.5), foreach=True)
    mine.register_step_pre_hook(lambda *_: calls.append("before"))
    mine.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        mine.zero_grad()
        loss = own[0].square().sum() / 2
        loss.backward()
        return loss

    assert mine.step(closure).item() == 2.5
    assert torch.equal(own[0].detach(), torch.full((5,), 0.5))
    assert calls == ["before", "after"]


def left_to_pytorch(kind):
    """Parameters of which the first has no kernel, with gradients."""
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(9))
    flat = torch.randn(20)
    made = {
        "gaps in memory": lambda: [nn.Parameter(torch.randn(4, 6)[:, :3])],
        "shares memory": lambda: [nn.Parameter(flat[:15]), nn.Parameter(flat[5:])],
        "complex64": lambda: [nn.Parameter(torch.randn(5, dtype=torch.complex64))],
        "sparse": lambda: [nn.Parameter(torch.randn(5, 2))],
    }[kind]()
    for p in (*made, plain):
        p.grad = torch.randn(p.shape, dtype=p.dtype)
    if kind == "sparse":
        indices, values = torch.tensor([[1, 3]]), torch.randn(2, 2)
        made[0].grad = torch.sparse_coo_tensor(indices, values, (5, 2))
    return [*made, plain]


@pytest.mark.parametrize("kind", ["gaps in memory", "shares memory", "complex64", "sparse"])
def test_what_the_kernel_cannot_update_is_left_to_pytorch(kind):
    name = "SGD" if kind == "sparse" else "AdamW"
    own, theirs = left_to_pytorch(kind), left_to_pytorch(kind)
    mine, other = pair(name, own, theirs, lr=0.1)
    with pytest.warns(shorthaul.FallbackWarning, match=kind):
        mine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine.step()
    for _ in range(2):
        other.step()
    for p, q in zip(own, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    # Numbers of steps stay apart after loading, where equal ones are shared.
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    mine.step()
    other.step()
    for p, q in zip(own, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_nothing_changes_where_pytorch_refuses():
    own = left_to_pytorch("sparse")
    before = [p.detach().clone() for p in own]
    mine = optim.AdamW(own)
    with (
        pytest.warns(shorthaul.FallbackWarning, match="sparse"),
        pytest.raises(RuntimeError, match="does not support sparse gradients"),
    ):
        mine.step()
    assert all(torch.equal(p, b) for p, b in zip(own, before, strict=True))
    clipped = optim.SGD(own, max_norm=1.0)
    with pytest.raises(shorthaul.InputError, match="max_norm takes dense, real gradients"):
        clipped.step()


def test_kernels_are_compiled_once_for_a_rule_and_a_type():
    own = parameters(torch.float32)
    mine = optim.AdamW(own, lr=0.1)
    for step in range(2):
        give_gradients(own, step)
        own[step].grad = None
        mine.param_groups[0]["lr"] /= 2
        mine.step()
    assert len(mine._cpu_steps._compiled) == 1
    ((_, compiled),) = mine._cpu_steps._compiled.items()
    assert compiled.constants == list(mine._constants(mine.param_groups[0]))


def test_state_that_belongs_to_another_parameter_is_refused():
    own, other = [nn.Parameter(torch.ones(64))], [nn.Parameter(torch.ones(8))]
    mine, small = optim.AdamW(own), optim.AdamW(other)
    for some, optimizer in ((own, mine), (other, small)):
        some[0].grad = torch.ones_like(some[0])
        optimizer.step()
    before = own[0].detach().clone()
    mine.load_state_dict(small.state_dict())
    with pytest.raises(shorthaul.InputError, match=r"`exp_avg` of parameter 0 of group 0 has the"):
        mine.step()
    assert torch.equal(own[0], before)
    with pytest.raises(ValueError, match="there is no kernel for amsgrad"):
        mine.param_groups[0]["amsgrad"] = True
        mine.step()


def both_of(kind, make, **settings):
    """Parameters with their optimizer, here and of PyTorch."""
    own, theirs = make(), make()
    return (own, getattr(optim, kind)(own, **settings)), (
        theirs,
        getattr(torch.optim, kind)(theirs, **settings),
    )


def test_settings_that_change_between_steps():
    changes = [
        {},
        {"weight_decay": 0.1, "lr": 0.03},
        {"weight_decay": 0, "maximize": 1, "eps": 1e-5},
        {"betas": (0.5, 0.7), "maximize": False, "lr": torch.tensor(0.2).double()},
        {"weight_decay": torch.tensor(0.2).double()},
    ]
    ours = both_of("AdamW", lambda: parameters(torch.float64), lr=0.1)
    for step, change in enumerate(changes):
        for some, optimizer in ours:
            optimizer.param_groups[0] |= change
            give_gradients(some, step)
            optimizer.step()
    (own, _), (theirs, _) = ours
    # The logarithm of a power and PyTorch's own power differ in the last bits.
    assert_close(own, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_the_state_dict_has_the_entries_of_pytorchs(case):
    name, settings = CASES[case]
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = pair(name, own, theirs, **settings)
    step_both((own, theirs), (mine, other), 0)
    found, wanted = mine.state_dict(), other.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    keys = [{n: set(state) for n, state in some["state"].items()} for some in (found, wanted)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("what", ["parameter", "gradient", "state", "shorter"])
def test_storages_that_were_freed_are_refused(what):
    own = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(100))]
    mine = optim.SGD(own, lr=0.5, momentum=0.5)
    for p in own:
        p.grad = torch.ones_like(p)
    mine.step()
    p = own[1]
    tensor = {"gradient": p.grad, "state": mine.state[p]["momentum_buffer"]}.get(what, p)
    storage, kept = tensor.untyped_storage(), tensor.detach().clone()
    storage.resize_(100 if what == "shorter" else 0)
    named = {"gradient": "the gradient of ", "state": "the optimizer's state of "}.get(what, "")
    for _ in range(2):
        message = rf"storage of {named}a parameter of the sizes \[100\] was freed"
        with pytest.raises(shorthaul.InputError, match=message):
            mine.step()
    assert torch.equal(own[0].detach(), torch.full((3,), 0.5))
    storage.resize_(400)
    with torch.no_grad():
        tensor.copy_(kept)
    mine.step()
    assert torch.equal(p.detach(), torch.full((100,), 0.5 - 0.5 * 1.5))


def test_parameters_that_come_to_share_memory():
    flat = torch.zeros(40)
    own = [nn.Parameter(flat[:20]), nn.Parameter(flat[20:])]
    mine = optim.SGD(own, lr=1.0)
    for p in own:
        p.grad = torch.ones_like(p)
    mine.step()
    # The same addresses, and more elements than before.
    own[0].grad = None
    own[0].data = flat[:30]
    own[0].grad = torch.ones(30)
    with pytest.warns(shorthaul.FallbackWarning, match="shares memory"):
        mine.step()
    assert flat.tolist() == [-2.0] * 20 + [-3.0] * 10 + [-2.0] * 10
    # The same places, and other parameters.
    mine.param_groups[0]["params"] = others = [nn.Parameter(p.detach()) for p in own]
    for p in others:
        p.grad = torch.ones_like(p)
    assert set(mine._cpu_steps.left_to_pytorch(mine.param_groups)) == {id(p) for p in others}


def test_clipping_keeps_the_gradients_of_what_pytorch_updates():
    both = both_of("AdamW", lambda: left_to_pytorch("gaps in memory"), lr=0.1)
    (own, mine), (theirs, other) = both
    mine._max_norm = 0.5
    kept = [p.grad for p in own]
    values = [grad.clone() for grad in kept]
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    other.step()
    with pytest.warns(shorthaul.FallbackWarning, match="gaps in memory"):
        mine.step()
    assert all(p.grad is grad for p, grad in zip(own, kept, strict=True))
    assert all(torch.equal(p.grad, value) for p, value in zip(own, values, strict=True))
    for p, q in zip(own, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_float64_is_clipped_in_float64():
    own, theirs = parameters(torch.float64), parameters(torch.float64)
    mine, other = optim.SGD(own, lr=0.1, max_norm=0.5), torch.optim.SGD(theirs, lr=0.1)
    for some in (own, theirs):
        give_gradients(some, 0)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    mine.step()
    other.step()
    assert_close(own, theirs, rtol=1e-13, atol=1e-14)


def test_gradients_that_are_lazily_negated():
    def make():
        p = nn.Parameter(torch.tensor(2.0))
        conjugate = torch.complex(torch.ones(()), p).conj()
        (conjugate * conjugate).real.backward()
        many = nn.Parameter(torch.ones(4))
        many.grad = torch._neg_view(torch.arange(4.0))
        return [p, many]

    (own, mine), (theirs, other) = both_of("SGD", make, lr=0.25)
    mine.step()
    other.step()
    for p, q in zip(own, theirs, strict=True):
        assert torch.equal(p, q)
    # Of the real part of (1 − 2i)².
    assert own[0].item() == 3.0


def test_a_step_inside_of_a_compiled_function():
    x = torch.randn(5, 6)

    def train(kind, compiled):
        torch.manual_seed(0)
        network = nn.Linear(6, 3)
        optimizer = kind(network.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()

        step = torch.compile(step, backend="eager") if compiled else step
        for _ in range(3):
            step()
        return list(network.parameters())

    torch._dynamo.reset()
    own, theirs = train(optim.AdamW, True), train(torch.optim.AdamW, False)
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)


def test_optimizers_in_threads():
    def train(kind, seed):
        some = parameters(torch.float32, seed)
        optimizer = kind(some, lr=0.1)
        for step in range(20):
            give_gradients(some, step)
            optimizer.step()
        return some

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda seed: train(optim.AdamW, seed), range(4)))
    for seed, own in enumerate(found):
        theirs = train(torch.optim.AdamW, seed)
        assert_close(own, [q.double() for q in theirs], rtol=1e-4, atol=1e-5)


def test_a_default_device_elsewhere():
    (own, mine), (theirs, other) = both_of("AdamW", lambda: parameters(torch.float32), lr=0.1)
    step_both((own, theirs), (mine, other), 0)
    for some in (own, theirs):
        give_gradients(some, 1)
    with torch.device("meta"):
        mine.step()
        other.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
