"""Optimizers' kernels for CUDA, executed by the emulator, against PyTorch's own in float64."""

import copy
import io

import pytest
import shorthaul
import torch
from shorthaul import optim
from torch import nn

#: Name here and there, and the settings of both.
CASES = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd decay": ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam decay": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-6}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "adamw maximize": ("AdamW", {"lr": 0.01, "maximize": True}),
}

#: Whole vectors and not, more than a block takes, one that never has a gradient.
SHAPES = [(4, 8), (5,), (), (70, 70), (2, 3, 4, 4), (3,)]


def parameters(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    # One lies in memory as images do.
    made[4] = made[4].to(memory_format=torch.channels_last)
    return [nn.Parameter(p.to(dtype)) for p in made]


def give_gradients(some, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for p in some[:-1]:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def emulated(name, some, **settings):
    return getattr(optim, name)(some, **settings, backend="cuda-emulated")


def assert_close(found, wanted, rtol, atol):
    for p, q in zip(found, wanted, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=rtol, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_pytorch(case):
    name, settings = CASES[case]
    own, theirs = parameters(torch.float32), parameters(torch.float64)
    with torch.no_grad():
        for p, q in zip(own, theirs, strict=True):
            q.copy_(p)
    mine, other = emulated(name, own, **settings), getattr(torch.optim, name)(theirs, **settings)
    for step in range(4):
        for some in (own, theirs):
            give_gradients(some, step)
        with torch.no_grad():
            # What both have is rounded alike.
            for p, q in zip(own, theirs, strict=True):
                if p.grad is not None:
                    q.grad.copy_(p.grad)
        before = [p._version for p in own]
        mine.step()
        other.step()
        changed = [p._version > version for p, version in zip(own, before, strict=True)]
        assert changed == [p.grad is not None for p in own]
    assert_close(own, theirs, rtol=1e-5, atol=1e-6)
    assert [p.grad is None for p in own].count(True) == 1
    for p, q in zip(own[:-1], theirs[:-1], strict=True):
        for key, value in other.state[q].items():
            if isinstance(value, torch.Tensor):
                found = mine.state[p][key].double()
                # Sums of some numbers of about 1, each rounded to single precision.
                torch.testing.assert_close(found, value.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    own = parameters(dtype)
    wide = [nn.Parameter(p.detach().double()) for p in own]
    mine, other = emulated("AdamW", own, lr=0.05), torch.optim.AdamW(wide, lr=0.05)
    give_gradients(own, 0)
    for p, q in zip(own, wide, strict=True):
        q.grad = None if p.grad is None else p.grad.double()
    mine.step()
    other.step()
    assert all(p.dtype == dtype for p in own)
    # Rounded once, where it is stored.
    error = 2**-8 if dtype == torch.bfloat16 else 2**-11
    assert_close(own, wide, rtol=error, atol=1e-6)


def test_one_launch_and_every_byte_once():
    own = parameters(torch.float32)
    mine = emulated("AdamW", own)
    give_gradients(own, 0)
    mine.step()
    (step,) = mine._steps.values()
    assert len(step.cuda_kernels()) == 1
    n = sum(p.numel() for p in own[:-1])
    # Parameter and two of state in and out, gradient in.
    assert step.bytes_moved == 28 * n
    give_gradients(own, 1)
    mine.step()
    assert len(mine._steps) == 1


def test_rates_change_and_may_be_tensors():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("AdamW", own, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (mine, other)]
    for step in range(3):
        for some, optimizer, schedule in zip((own, theirs), (mine, other), schedules, strict=True):
            give_gradients(some, step)
            optimizer.step()
            schedule.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
    given = parameters(torch.float32)
    tensor = emulated("SGD", given, lr=torch.tensor(0.5))
    give_gradients(given, 0)
    wanted = [p.detach() - 0.5 * p.grad for p in given[:-1]]
    tensor.step()
    assert_close(given[:-1], [w.double() for w in wanted], rtol=1e-6, atol=1e-7)


def test_schedules_of_momentum_need_no_other_kernel():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("AdamW", own, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=9) for o in (mine, other)
    ]
    for step in range(4):
        for some, optimizer, schedule in zip((own, theirs), (mine, other), schedules, strict=True):
            give_gradients(some, step)
            optimizer.step()
            schedule.step()
    assert len(mine._steps) == 1
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)


def test_constants_come_in_the_order_that_kernels_read_them():
    for name, settings in CASES.values():
        own = parameters(torch.float32)
        mine = emulated(name, own, **settings)
        give_gradients(own, 0)
        mine.step()
        (step,) = mine._steps.values()
        assert step.constants == list(mine._constants(mine.param_groups[0]))


def test_state_follows_its_parameter():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("AdamW", own, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        for some, optimizer in ((own, mine), (theirs, other)):
            if step == 1:
                # Images lie in memory otherwise from here on.
                some[4].data = some[4].data.contiguous()
            give_gradients(some, step)
            optimizer.step()
        if step == 1:
            # One parameter goes on with a rate of its own.
            for optimizer in (mine, other):
                moved = optimizer.param_groups[0]["params"].pop(0)
                optimizer.add_param_group({"params": [moved], "lr": 0.01})
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)


def test_state_that_belongs_to_another_parameter_is_refused():
    own, other = [nn.Parameter(torch.ones(64))], [nn.Parameter(torch.ones(8))]
    mine, small = emulated("AdamW", own), emulated("AdamW", other)
    for some, optimizer in ((own, mine), (other, small)):
        some[0].grad = torch.ones_like(some[0])
        optimizer.step()
    before = own[0].detach().clone()
    mine.load_state_dict(small.state_dict())
    with pytest.raises(shorthaul.InputError, match=r"`exp_avg` of parameter 0 of group 0 has the"):
        mine.step()
    assert torch.equal(own[0], before)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = emulated("SGD", [own[0], own[0]])
    with pytest.raises(shorthaul.InputError, match="group 0 has the same parameter twice"):
        twice.step()


def test_state_takes_the_type_of_its_parameter():
    own = [nn.Parameter(torch.ones(64).bfloat16())]
    mine = emulated("AdamW", own, lr=0.1)
    own[0].grad = torch.ones_like(own[0])
    mine.step()
    own[0].data = own[0].data.float()
    own[0].grad = torch.ones(64)
    mine.step()
    assert mine.state[own[0]]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(own[0].detach(), torch.full((64,), 0.8), rtol=0, atol=0.01)


def test_large_gradients_in_half_precision_are_clipped():
    own = [nn.Parameter(torch.zeros(1000).half())]
    mine = emulated("SGD", own, lr=1.0, max_norm=1.0)
    own[0].grad = torch.full((1000,), 3000.0).half()
    mine.step()
    torch.testing.assert_close(own[0].detach().float().norm(), torch.tensor(1.0), rtol=1e-3, atol=0)


def test_a_scaler_with_nothing_to_do():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = (emulated("AdamW", list(n.parameters())) for n in (one, two))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(one(torch.ones(1, 2)).sum()).backward()
    scaler.step(first)
    second.grad_scale, second.found_inf = torch.tensor(2.0), 0
    assert second.step() is None
    assert not second.state


def test_a_copy_goes_on_by_itself():
    own = parameters(torch.float32)
    mine = emulated("AdamW", own, lr=0.1)
    give_gradients(own, 0)
    mine.step()
    copied, other = copy.deepcopy((mine, own))
    for optimizer, some in ((mine, own), (copied, other)):
        give_gradients(some, 1)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(own, other, strict=True))


def test_rates_at_any_address():
    own = [nn.Parameter(torch.ones(5))]
    rates = torch.tensor([0.1, 0.5])
    mine = emulated("SGD", own, lr=rates[1])
    own[0].grad = torch.ones(5)
    mine.step()
    assert torch.equal(own[0].detach(), torch.full((5,), 0.5))


def test_decay_is_as_the_group_says():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("Adam", own, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    for optimizer in (mine, other):
        optimizer.param_groups[0] |= {"decoupled_weight_decay": True, "weight_decay": 0.3}
    for some, optimizer in ((own, mine), (theirs, other)):
        give_gradients(some, 0)
        optimizer.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)


def test_a_parameter_that_comes_later_counts_its_own_steps():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("Adam", own, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    for step in range(4):
        for some, optimizer in ((own, mine), (theirs, other)):
            give_gradients(some, step)
            if step < 2:
                some[0].grad = None
            if step == 2:
                some[1].grad = None
            optimizer.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
    steps = [float(mine.state[p]["step"]) for p in own[:3]]
    assert steps == [2.0, 3.0, 4.0]


def test_a_scaled_loss_is_undone_and_what_is_not_finite_is_skipped():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("AdamW", own, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step, found in enumerate((0.0, 1.0, 0.0)):
        give_gradients(own, step, scale=1024.0)
        # As GradScaler does for optimizers that undo the scale themselves.
        mine.grad_scale, mine.found_inf = torch.tensor(1024.0), torch.tensor(found)
        if found:
            own[0].grad[0, 0] = torch.inf
        before = [p.detach().clone() for p in own]
        mine.step()
        del mine.grad_scale, mine.found_inf
        if found:
            assert all(torch.equal(p, b) for p, b in zip(own, before, strict=True))
            continue
        give_gradients(theirs, step)
        other.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
    assert float(mine.state[own[0]]["step"]) == 2.0


def test_a_grad_scaler_leaves_the_scale_to_the_kernel():
    torch.manual_seed(0)
    network, other = nn.Linear(6, 4), nn.Linear(6, 4)
    other.load_state_dict(network.state_dict())
    mine = emulated("AdamW", list(network.parameters()), lr=0.1)
    plain = torch.optim.AdamW(other.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = torch.randn(5, 6)
    for step in range(3):
        given = x * torch.inf if step == 1 else x
        for n, optimizer in ((network, mine), (other, plain)):
            optimizer.zero_grad()
            loss = n(given).square().mean()
            if optimizer is mine:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            elif step != 1:
                loss.backward()
                optimizer.step()
    assert scaler.get_scale() == 128.0
    assert_close(network.parameters(), [q.double() for q in other.parameters()], 1e-5, 1e-6)


def test_gradients_are_clipped_together():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine = emulated("SGD", own, lr=0.1, max_norm=0.5)
    other = torch.optim.SGD(theirs, lr=0.1)
    for step, scale in enumerate((1.0, 1e-4)):
        for some in (own, theirs):
            give_gradients(some, step, scale)
        kept = [p.grad.clone() for p in own[:-1]]
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        mine.step()
        other.step()
        assert all(torch.equal(p.grad, k) for p, k in zip(own, kept, strict=False))
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-7)


def test_arrays_at_any_address():
    flat = torch.arange(41, dtype=torch.float32)
    own = [nn.Parameter(flat[1:18]), nn.Parameter(flat[18:])]
    mine = emulated("SGD", own, lr=0.5)
    for p in own:
        p.grad = torch.ones_like(p)
    mine.step()
    assert torch.equal(flat[1:], torch.arange(41, dtype=torch.float32)[1:] - 0.5)
    assert flat[0] == 0


def test_state_is_that_of_pytorch():
    own, theirs = parameters(torch.float32), parameters(torch.float32)
    mine, other = emulated("AdamW", own, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for some, optimizer in ((own, mine), (theirs, other)):
        give_gradients(some, 0)
        optimizer.step()
    # There and back, through a file.
    file = io.BytesIO()
    torch.save(mine.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    mine.load_state_dict(copy.deepcopy(other.state_dict()))
    for step in (1, 2):
        for some, optimizer in ((own, mine), (theirs, other)):
            give_gradients(some, step)
            optimizer.step()
    assert_close(own, [q.double() for q in theirs], rtol=1e-5, atol=1e-6)
    # Equal numbers of steps are one launch again.
    assert len({id(mine.state[p]["step"]) for p in own[:-1]}) == 1
    copied = copy.deepcopy(mine)
    assert copied._max_norm is None and copied._backend == "cuda-emulated"


def test_training_with_a_module():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model = shorthaul.module(copy.deepcopy(plain), backend="cuda-emulated")
    x, labels = torch.randn(12, 8), torch.randint(3, (12,))
    pairs = (
        (plain, torch.optim.AdamW(plain.parameters(), lr=0.02)),
        (model, emulated("AdamW", list(model.parameters()), lr=0.02)),
    )
    for network, optimizer in pairs:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), labels).backward()
            optimizer.step()
    wanted = [q.detach().double() for q in plain.parameters()]
    assert_close(model.parameters(), wanted, rtol=1e-4, atol=1e-5)


def test_what_has_no_kernel_is_refused():
    own = parameters(torch.float32)
    with pytest.raises(ValueError, match="only `lr` may be a tensor"):
        optim.AdamW(own, betas=(torch.tensor(0.9), torch.tensor(0.99)))
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        optim.AdamW(own, max_norm=0.0)
    mine = emulated("Adam", own)
    mine.param_groups[0]["amsgrad"] = True
    give_gradients(own, 0)
    with pytest.raises(ValueError, match="there is no kernel for amsgrad"):
        mine.step()
    gaps = [nn.Parameter(torch.zeros(4, 6)[:, :3])]
    gaps[0].grad = torch.zeros(4, 3)
    with pytest.raises(shorthaul.InputError, match="gaps in memory"):
        emulated("SGD", gaps).step()
    wide = [nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    wide[0].grad = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(shorthaul.InputError, match="float64"):
        emulated("SGD", wide).step()
