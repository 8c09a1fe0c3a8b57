"""Programs whose control flow depends on data, sizes or arguments; errors of the user's own."""

import torch
from torch import nn

from .facts import observe, raises, randn, step, training
from .registry import program


@program
def branch_on_item(wrap):
    m = wrap(lambda x: x * 2 if x.sum().item() > 0 else x * -3)
    return [step(m, (torch.ones(3) * s).requires_grad_()) for s in (1.0, -1.0, 1.0)]


@program
def branch_on_tensor(wrap):
    m = wrap(lambda x: x.sin() if x.mean() > 0 else x.cos())
    return [step(m, (torch.ones(3) * s).requires_grad_()) for s in (1.0, -1.0, 1.0)]


@program
def branch_on_any(wrap):
    m = wrap(lambda x: x.nan_to_num() if torch.isnan(x).any() else x * 2)
    return [m(torch.ones(2)), m(torch.tensor([1.0, float("nan")])), m(torch.ones(2))]


@program
def item_used_as_factor(wrap):
    m = wrap(lambda x: x * x.max().item())
    return [step(m, randn(3)) for _ in range(3)]


@program
def item_returned(wrap):
    m = wrap(
        lambda x: (x.sum().item(), x.argmax().item(), bool(x[0] > 0), float(x[0]), int(x.numel()))
    )
    return [m(torch.tensor([1.5, -1.0])), m(torch.tensor([-3.0, 2.0]))]


@program
def whole_number_item_as_size(wrap):
    m = wrap(lambda x, n: torch.zeros(n.item(), 2) + x)
    return [step(m, randn(2), torch.tensor(n)) for n in (1, 3, 0)]


@program
def item_as_index(wrap):
    m = wrap(lambda x, i: x[i.item()] * 2)
    return [step(m, randn(4), torch.tensor(i)) for i in (0, 3, -1)]


@program
def tolist_drives_a_loop(wrap):
    def forward(x, steps):
        for n in steps.tolist():
            x = x * n
        return x

    m = wrap(forward)
    return [step(m, randn(3), torch.tensor(s)) for s in ([1, 2], [3, 4], [2])]


@program
def split_by_tensor_of_lengths(wrap):
    m = wrap(lambda x, n: [part.sum(0) for part in x.split(n.tolist())])
    return [step(m, randn(6, 2), torch.tensor(n)) for n in ([1, 5], [3, 3], [2, 2, 2])]


@program
def loop_until_convergence(wrap):
    def forward(x):
        n = 0
        while x.abs().max() > 0.1:
            x, n = x / 2, n + 1
        return x, n

    m = wrap(forward)
    return [step(m, (torch.ones(2) * s).requires_grad_()) for s in (1.0, 8.0, 0.05)]


@program
def early_exit(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x):
            for k, layer in enumerate(self.layers):
                x = layer(x)
                if x.norm() < 0.8:
                    return x, k
            return x, -1

    model = Model()
    m = wrap(model)
    return [training(model, m, (torch.randn(2, 3) * s).requires_grad_()) for s in (0.1, 3.0)]


@program
def loop_over_sizes(wrap):
    def forward(x):
        total = torch.zeros(x.shape[1])
        for k in range(x.shape[0]):
            total = total + x[k] * (k + 1)
        return total

    m = wrap(forward)
    return [step(m, randn(n, 2)) for n in (1, 3, 2, 5)]


@program
def loop_over_tensor(wrap):
    m = wrap(lambda x: sum(row * k for k, row in enumerate(x)))
    return [step(m, randn(n, 2)) for n in (1, 3, 4)]


@program
def zip_of_tensors(wrap):
    m = wrap(lambda x, y: torch.stack([a @ b for a, b in zip(x, y, strict=True)]))
    return [step(m, randn(2, 3), randn(2, 3)), raises(m, torch.ones(2, 3), torch.ones(3, 3))]


@program
def number_of_steps_is_an_argument(wrap):
    def forward(x, n):
        for _ in range(n):
            x = x.sin() + 1
        return x

    m = wrap(forward)
    return [step(m, randn(3), n) for n in (0, 1, 3, 2)]


@program
def float_argument_changes(wrap):
    m = wrap(lambda x, scale: x * scale + scale**2)
    return [step(m, randn(3), s) for s in (0.5, 1.5, -2.0, 0.0, float("inf"))]


@program
def string_argument_chooses(wrap):
    m = wrap(lambda x, kind: getattr(torch, kind)(x))
    return [step(m, randn(3), kind) for kind in ("sin", "cos", "tanh", "sin")]


@program
def none_argument_chooses(wrap):
    m = wrap(lambda x, mask=None: x if mask is None else x * mask)
    return [step(m, randn(3)), step(m, randn(3), torch.ones(3)), step(m, randn(3), mask=None)]


@program
def flag_argument_chooses(wrap):
    m = wrap(lambda x, double=False: x * 2 if double else x * 3)
    return [step(m, randn(3)), step(m, randn(3), True), step(m, randn(3), double=False)]


@program
def whole_number_then_float_argument(wrap):
    m = wrap(lambda x, s: x * s)
    return [m(torch.ones(2, dtype=torch.int64), s) for s in (1, 2, 2.5, True)]


@program
def recursion(wrap):
    def tree(x, depth):
        if depth == 0:
            return x.sin()
        half = x.shape[0] // 2
        return torch.cat([tree(x[:half], depth - 1), tree(x[half:], depth - 1) * 2])

    m = wrap(tree)
    return [step(m, randn(8), d) for d in (1, 3)]


@program
def generator_function(wrap):
    def forward(x):
        def parts():
            for k in range(3):
                yield x * k

        return sum(parts())

    return step(wrap(forward), randn(3))


@program
def exception_used_as_control_flow(wrap):
    def forward(x):
        try:
            if x.shape[0] > 2:
                raise ValueError("long")
            return x * 2
        except ValueError:
            return x * 3
        finally:
            x = x + 1

    m = wrap(forward)
    return [step(m, randn(n)) for n in (2, 3)]


@program
def error_of_pytorch_caught_in_forward(wrap):
    def forward(x, y):
        try:
            return x @ y
        except RuntimeError:
            return x.sum() + y.sum()

    m = wrap(forward)
    return [step(m, randn(2, 3), randn(3, 2)), step(m, randn(2, 3), randn(2, 3))]


@program
def value_error_keeps_its_type(wrap):
    def forward(x):
        if x.dim() != 2:
            raise ValueError(f"expected 2 dimensions, got {x.dim()}")
        return x * 2

    m = wrap(forward)
    return [raises(m, torch.ones(n), message=True) for n in ((2,), (2, 2), (1, 1, 1))]


@program
def error_of_own_class(wrap):
    class TooLarge(ArithmeticError):
        pass

    def forward(x):
        if x.abs().max() > 10:
            raise TooLarge("too large")
        return x * 2

    m = wrap(forward)
    return [type(raises(m, torch.ones(2) * s)).__name__ for s in (1.0, 100.0)]


@program
def assertion_in_forward(wrap):
    def forward(x):
        assert x.shape[-1] == 3, "three columns"
        return x * 2

    m = wrap(forward)
    return [raises(m, torch.ones(2, n), message=True) for n in (3, 4)]


@program
def assertion_on_data(wrap):
    def forward(x):
        assert (x >= 0).all(), "no negative numbers"
        return x.sqrt()

    m = wrap(forward)
    return [raises(m, torch.ones(2), message=True), raises(m, -torch.ones(2), message=True)]


@program
def wrong_number_of_arguments(wrap):
    m = wrap(nn.Linear(3, 3))
    return [raises(m), raises(m, torch.ones(1, 3), torch.ones(1)), raises(m, x=torch.ones(1, 3))]


@program
def wrong_size_of_input(wrap):
    m = wrap(nn.Linear(3, 3))
    return [raises(m, torch.ones(2, 4)), m(torch.ones(2, 3)), raises(m, torch.ones(5))]


@program
def wrong_type_of_argument(wrap):
    m = wrap(nn.Linear(3, 3))
    return [raises(m, None), raises(m, "x"), raises(m, [1.0, 2.0, 3.0])]


@program
def error_after_side_effect(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_calls = 0
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.n_calls += 1
            self.count += 1
            if x.shape[0] == 2:
                raise ValueError("two")
            return x * self.n_calls

    model = Model()
    m = wrap(model)
    seen = [raises(m, torch.ones(n), message=True) for n in (1, 2, 3)]
    return [seen, model.n_calls, model.count]


@program
def cond_operator(wrap):
    m = wrap(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    return [raises(lambda x: observe(m(x)), torch.ones(3) * s) for s in (1.0, -1.0)]


@program
def size_compared_with_number(wrap):
    m = wrap(lambda x: x * 2 if x.shape[0] > 3 else x * 3)
    return [step(m, randn(n)) for n in (2, 3, 4, 5, 1)]


@program
def size_used_in_arithmetic(wrap):
    m = wrap(lambda x: x.sum() / x.shape[0] ** 0.5 + x.numel() // 2)
    return [step(m, randn(n, 2)) for n in (1, 4, 5, 6)]


@program
def modulo_of_size(wrap):
    def forward(x):
        pad = -x.shape[0] % 4
        return nn.functional.pad(x, (0, pad)).view(-1, 4).sum(0)

    m = wrap(forward)
    return [step(m, randn(n)) for n in (3, 4, 5, 9)]


@program
def data_dependent_mask_size(wrap):
    def forward(x, lengths):
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return (x[:, : mask.shape[1]] * mask).sum(1)

    m = wrap(forward)
    return [step(m, randn(2, 6), torch.tensor(n)) for n in ([1, 3], [5, 2], [6, 6])]


@program
def ragged_list(wrap):
    m = wrap(lambda xs: torch.cat([x.mean(0, keepdim=True) for x in xs]))
    return [step(m, [randn(n, 2) for n in sizes]) for sizes in ((1, 2), (3, 1, 2))]


@program
def batches_of_every_size(wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    m = wrap(model)
    return [training(model, m, randn(n, 3)) for n in (4, 3, 2, 1, 0, 5)]


@program
def first_batch_of_one(wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    m = wrap(model)
    return [training(model, m, randn(n, 3)) for n in (1, 2, 1, 7)]


@program
def empty_batch_first(wrap):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    m = wrap(model)
    return [training(model, m, randn(n, 3)) for n in (0, 2, 0)]


@program
def reductions_of_empty_tensors(wrap):
    m = wrap(lambda x: (x.sum(), x.mean(), x.prod(), x.sum(0), x.sum(1), x.any(), x.cumsum(0)))
    return [
        m(torch.zeros(0, 2)),
        m(torch.zeros(2, 0)),
        raises(wrap(lambda x: x.max()), torch.zeros(0)),
    ]


@program
def zero_dimensional_tensors(wrap):
    m = wrap(
        lambda x, y: (x * y, x.sum(), x.view(1), x.expand(3), torch.stack([x, y]), x.reshape(1, 1))
    )
    return step(m, torch.tensor(2.0).requires_grad_(), torch.tensor(3.0).requires_grad_())


@program
def dimensions_of_size_one(wrap):
    m = wrap(lambda x, y: (x + y, (x * y).sum(0), x.squeeze(), y.expand_as(x + y)))
    sizes = (((1, 3), (2, 1)), ((2, 3), (2, 3)), ((1, 1), (4, 1)), ((2, 3), (1, 3)))
    return [step(m, randn(*a), randn(*b)) for a, b in sizes]


@program
def rank_changes(wrap):
    m = wrap(lambda x: (x.sum(-1), x.softmax(-1), x.flatten(), x.mT if x.dim() > 1 else x))
    return [step(m, randn(*s)) for s in ((3,), (2, 3), (2, 2, 3), (1, 2, 2, 3))]


@program
def image_sizes_change(wrap):
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    m = wrap(model)
    return [training(model, m, randn(1, 1, *s)) for s in ((6, 6), (7, 6), (8, 10), (5, 5))]
