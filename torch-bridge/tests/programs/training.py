"""Programs that train for several steps: optimizers, averages, clipping, schedules, checkpoints."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .facts import gradients, observe, raises, randn, step
from .registry import program


def _mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _steps(m, optimizer, n=5, after=lambda k: None, sizes=(6,)):
    losses = []
    for k in range(n):
        optimizer.zero_grad()
        loss = m(torch.randn(sizes[k % len(sizes)], 4)).pow(2).mean()
        loss.backward()
        after(k)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _optimizer(name, make):
    @program(name=f"optimizer_{name}", slack=20)
    def optimizer(wrap):
        model = _mlp()
        return [_steps(wrap(model), make(model.parameters())), list(model.parameters())]


_optimizer("sgd", lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True))
_optimizer("adam", lambda ps: torch.optim.Adam(ps, 0.01))
_optimizer("adamw", lambda ps: torch.optim.AdamW(ps, 0.01, foreach=True))
_optimizer("adamw_fused", lambda ps: torch.optim.AdamW(ps, 0.01, fused=True))
_optimizer("rmsprop", lambda ps: torch.optim.RMSprop(ps, 0.01))
_optimizer("adagrad", lambda ps: torch.optim.Adagrad(ps, 0.05))


@program(slack=20)
def optimizer_with_closure(wrap):
    model = _mlp()
    m, x = wrap(model), torch.randn(6, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss

    return [[optimizer.step(closure).item() for _ in range(3)], list(model.parameters())]


@program(slack=20)
def optimizer_over_wrapped_parameters(wrap):
    model = _mlp()
    m = wrap(model)
    return [_steps(m, torch.optim.SGD(m.parameters(), 0.1)), list(model.parameters())]


@program(slack=20)
def gradients_clipped(wrap):
    model, norms = _mlp(), []

    def clip(k):
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())

    losses = _steps(wrap(model), torch.optim.SGD(model.parameters(), 0.1), after=clip)
    return [losses, norms, list(model.parameters())]


@program(slack=20)
def moving_average_of_weights(wrap):
    model = _mlp()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = _steps(wrap(model), optimizer, after=lambda k: average.update_parameters(model))
    return [losses, average(torch.ones(1, 4)), list(average.buffers())]


@program(slack=20)
def scaled_losses(wrap):
    model = _mlp()
    m, optimizer = wrap(model), torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = m(torch.randn(6, 4)).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append([loss.item(), scaler.get_scale()])
    return [seen, list(model.parameters())]


@program(slack=20)
def learning_rate_schedule(wrap):
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    losses = _steps(wrap(model), optimizer, after=lambda k: schedule.step())
    return [losses, schedule.get_last_lr(), list(model.parameters())]


@program(slack=20)
def batches_whose_last_is_smaller(wrap):
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [_steps(wrap(model), optimizer, 6, sizes=(4, 4, 3)), list(model.parameters())]


@program(slack=20)
def training_resumed_from_checkpoint(wrap):
    model = nn.Sequential(nn.BatchNorm1d(4), _mlp())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    m = wrap(model)
    _steps(m, optimizer, 3)
    held = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    torch.manual_seed(3)
    first = _steps(m, optimizer, 2)
    model.load_state_dict(held[0])
    optimizer.load_state_dict(held[1])
    torch.manual_seed(3)
    return [first, _steps(m, optimizer, 2), dict(model.state_dict())]


@program(slack=20)
def training_with_evaluation_between(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    m, optimizer, seen = wrap(model), torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        model.train()
        seen.append(_steps(m, optimizer, 2))
        model.eval()
        with torch.no_grad():
            seen.append(observe(m(torch.randn(3, 4))))
    return [seen, list(model.buffers())]


@program(slack=20)
def adversarial_pair(wrap):
    maker, judge = nn.Linear(2, 4), _mlp()
    make, decide = wrap(maker), wrap(judge)
    for_maker = torch.optim.SGD(maker.parameters(), 0.1)
    for_judge = torch.optim.SGD(judge.parameters(), 0.1)
    for _ in range(3):
        made = make(torch.randn(5, 2))
        for_judge.zero_grad()
        (decide(made.detach()).mean() - decide(torch.randn(5, 4)).mean()).backward()
        for_judge.step()
        for_maker.zero_grad()
        decide(made).mean().neg().backward()
        for_maker.step()
    return [
        list(maker.parameters()),
        list(judge.parameters()),
        [p.grad for p in judge.parameters()],
    ]


@program(slack=20)
def teacher_and_student(wrap):
    teacher, student = _mlp().eval().requires_grad_(False), _mlp()
    teach, learn = wrap(teacher), wrap(student)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(5, 4)
        with torch.no_grad():
            target = teach(x)
        optimizer.zero_grad()
        (learn(x) - target).pow(2).mean().backward()
        optimizer.step()
    return [list(student.parameters()), [p.grad is None for p in teacher.parameters()]]


@program(slack=20)
def momentum_encoder(wrap):
    online = _mlp()
    target = copy.deepcopy(online).requires_grad_(False)
    a, b = wrap(online), wrap(target)
    optimizer = torch.optim.SGD(online.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(5, 4)
        optimizer.zero_grad()
        (a(x) - b(x)).pow(2).mean().add(a(x + 1).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(target.parameters(), online.parameters(), strict=True):
                p.lerp_(q, 0.1)
    return [list(target.parameters()), list(online.parameters())]


@program(slack=20)
def parameter_group_added(wrap):
    model = _mlp()
    m, optimizer = wrap(model), torch.optim.SGD(model[2].parameters(), 0.1)
    first = _steps(m, optimizer, 2)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    return [first, _steps(m, optimizer, 2), list(model.parameters())]


@program(slack=20)
def sharpness_aware_step(wrap):
    model = _mlp()
    m, x = wrap(model), torch.randn(6, 4)
    for _ in range(2):
        model.zero_grad()
        m(x).pow(2).mean().backward()
        moves = [0.05 * p.grad for p in model.parameters()]
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.add_(e)
        model.zero_grad()
        m(x).pow(2).mean().backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                p.sub_(e).sub_(0.1 * p.grad)
    return list(model.parameters())


@program(slack=20)
def autocast_training(wrap):
    model = _mlp()
    m, optimizer, seen = wrap(model), torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(torch.randn(6, 4))
        loss = out.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        seen.append([observe(out), str(model[0].weight.grad.dtype)])
    return seen


@program(slack=20)
def gradient_noise_and_freezing_by_hook(wrap):
    model = _mlp()
    model[0].weight.register_hook(lambda g: g * (torch.arange(8) % 2)[:, None])
    return [_steps(wrap(model), torch.optim.SGD(model.parameters(), 0.1)), list(model.parameters())]


@program(slack=20)
def optimizer_step_inside_wrapped_function(wrap):
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def one_step(x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    m = wrap(one_step)
    seen = [raises(m, torch.randn(6, 4)) for _ in range(3)]
    return [seen, list(model.parameters())]


@program(slack=20)
def batch_of_inputs_that_learn(wrap):
    """Style transfer: the optimizer moves the input, the model is frozen."""
    model = nn.Conv2d(1, 2, 3).requires_grad_(False)
    m, x = wrap(model), randn(1, 1, 5, 5)
    optimizer = torch.optim.Adam([x], 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (m(x) - 1).pow(2).mean().backward()
        optimizer.step()
    return [x, x.grad]


@program
def statistics_written_in_a_checkpoint(wrap):
    """A batch norm in a checkpoint counts each batch twice."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(6, 3, 1, bias=False)
            self.last = nn.BatchNorm2d(3)

        def part(self, x, y):
            return self.last(self.conv(self.norm(x).relu().repeat(1, 2, 1, 1) + y))

        def forward(self, x):
            x = checkpoint(self.part, x, 1.0, use_reentrant=False)
            return checkpoint(self.part, x.tanh(), 2.0, use_reentrant=False)

    model = Model()
    m = wrap(model)
    return [
        [step(m, randn(2, 3, 4, 4)), gradients(model), dict(model.named_buffers())]
        for _ in range(3)
    ]


@program
def counter_written_at_the_end_of_a_checkpoint(wrap):
    """Eager computes a checkpoint again up to the last value that it needs: it counts once."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("calls", torch.zeros(()))

        def part(self, x):
            y = self.fc(x).tanh()
            self.calls.add_(1)
            return y

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    model = Model()
    m = wrap(model)
    return [[step(m, randn(2, 3)), gradients(model), model.calls.clone()] for _ in range(2)]


@program
def argument_of_a_checkpoint_written_before_the_backward_pass(wrap):
    def forward(x, given):
        return checkpoint(
            lambda x, other: (x * other).sin(), x, given["other"], use_reentrant=False
        )

    m = wrap(forward)

    def run():
        x, other = torch.randn(3, requires_grad=True), torch.randn(3)
        out = m(x, {"other": other})
        other.mul_(2)
        out.sum().backward()
        return x.grad

    return raises(run)
