"""Programs whose forward draws random numbers: Python's, NumPy's, PyTorch's; and NumPy arrays."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from .facts import randn, step
from .registry import program


@program
def python_random_number(wrap):
    m = wrap(lambda x: x * random.random())
    return [step(m, randn(3)) for _ in range(3)]


@program
def python_random_choice_of_branch(wrap):
    m = wrap(lambda x: x.sin() if random.random() < 0.5 else x.cos())
    return [step(m, randn(3)) for _ in range(6)]


@program
def python_random_layer_drop(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                if not self.training or random.uniform(0, 1) > 0.5:
                    x = layer(x)
            return x

    m = wrap(Model())
    return [step(m, randn(2, 3)) for _ in range(4)]


@program
def python_random_state_afterwards(wrap):
    m = wrap(lambda x: x + random.randint(0, 9))
    m(randn(3))
    return [random.random(), step(m, randn(3)), random.random()]


@program
def own_random_generator(wrap):
    generator = random.Random(5)
    m = wrap(lambda x: x * generator.uniform(1, 2))
    return [step(m, randn(3)) for _ in range(3)]


@program
def shuffled_list(wrap):
    def forward(x):
        order = [0, 1, 2, 3]
        random.shuffle(order)
        return x[order] * torch.arange(4)

    m = wrap(forward)
    return [step(m, randn(4)) for _ in range(3)]


@program
def numpy_random_number(wrap):
    m = wrap(lambda x: x * float(np.random.rand()))
    return [step(m, randn(3)) for _ in range(3)]


@program
def numpy_random_array(wrap):
    m = wrap(lambda x: x + torch.from_numpy(np.random.rand(3).astype("float32")))
    return [step(m, randn(3)) for _ in range(3)]


@program
def numpy_generator(wrap):
    generator = np.random.default_rng(3)
    m = wrap(lambda x: x * generator.random())
    return [step(m, randn(3)) for _ in range(3)]


@program
def numpy_in_forward(wrap):
    def forward(x):
        weights = np.linspace(0, 1, x.shape[-1], dtype=np.float32)
        return x * torch.from_numpy(weights)

    m = wrap(forward)
    return [step(m, randn(2, n)) for n in (3, 5)]


@program
def tensor_through_numpy(wrap):
    m = wrap(lambda x: x + torch.from_numpy(np.sort(x.detach().numpy())))
    return [step(m, randn(4)) for _ in range(2)]


@program
def torch_seed_inside_forward(wrap):
    def forward(x):
        torch.manual_seed(3)
        return x + torch.rand(3)

    m, x = wrap(forward), torch.zeros(3)
    a, after_a = m(x), torch.rand(2)
    b, after_b = m(x), torch.rand(2)
    return [
        torch.equal(a, b),
        torch.equal(after_a, after_b),
        bool((a >= 0).all() and (a < 1).all()),
    ]


@program
def torch_random_numbers_do_not_repeat(wrap):
    m = wrap(lambda x: x * 0 + torch.rand(1000))
    a, b = m(randn(1000)), m(randn(1000))
    return [torch.equal(a, b), bool((a >= 0).all() and (a < 1).all()), abs(a.mean() - 0.5) < 0.1]


@program
def torch_random_numbers_follow_the_seed(wrap):
    m = wrap(lambda x: x + torch.randn_like(x))
    x, seen = torch.zeros(5), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seen.append(m(x))
    return [torch.equal(seen[0], seen[1]), torch.equal(seen[0], seen[2])]


@program
def permutation_inside_forward(wrap):
    """Which one is drawn is Shorthaul's own; the generator goes on, and all occur."""

    def forward(x):
        order = torch.randperm(x.shape[0])
        return x[order], order

    m = wrap(forward)
    seen = []
    for n in (5, 8):
        x = randn(n, 3)
        y, order = m(x)
        y.sum().backward()
        seen += [torch.equal(y, x[order]), order.sort()[0], order.dtype, x.grad]
    drawn = {tuple(m(randn(3, 1))[1].tolist()) for _ in range(200)}
    return [*seen, len(drawn)]


def _are_masks_the_same(m, n, reentrant):
    """Whether the gradient of a checkpoint around two dropouts is that of the masks it drew."""
    x = torch.ones(n, 8, requires_grad=True)
    first, second = checkpoint(m, x, use_reentrant=reentrant)
    second.sum().backward()
    return torch.allclose(x.grad, (first * second / (first + 1)).detach())


@program
def masks_of_a_checkpoint_around_values_that_are_seen(wrap):
    """Gradients cut the graph behind the first value, which the first pass does not know."""

    def forward(x):
        first = dropout(x, 0.5)
        return first, dropout(first + 1, 0.5)

    m = wrap(forward)
    return [_are_masks_the_same(m, n, way) for way in (True, False) for n in (64, 64, 32)]


@program
def masks_of_a_checkpoint_around_what_pytorch_runs(wrap):
    """PyTorch runs ``floor_divide`` only where it needs a gradient."""

    def forward(x):
        first = dropout(x * 1.0, 0.5)
        apart = torch.floor_divide(first, 2.0)
        return first, dropout(first + 1, 0.5) + apart.detach() * 0

    m = wrap(forward)
    return [_are_masks_the_same(m, n, way) for way in (True, False) for n in (64, 64, 48)]


@program
def masks_of_a_checkpoint_of_sizes_that_come_for_the_first_time(wrap):
    m, seen = wrap(lambda x: dropout(x * 2, 0.5)), []
    with torch.no_grad():
        for n in (20, 30, 40, 50, 60, 70):
            m(torch.ones(n, 8))
    for n in (20, 30, 40, 50, 60, 70, 50, 60):
        x = torch.ones(n, 8, requires_grad=True)
        y = checkpoint(m, x, use_reentrant=True)
        y.sum().backward()
        seen.append(torch.equal(x.grad, y.detach()))
    return seen


@program
def masks_of_a_checkpoint_around_gumbel_softmax(wrap):
    def forward(x):
        first = nn.functional.gumbel_softmax(x, hard=False)
        return first, dropout(first + 1, 0.5)

    m, seen = wrap(forward), []
    for way in (True, False):
        torch.manual_seed(3)
        x = torch.ones(64, 8, requires_grad=True)
        first, second = checkpoint(m, x, use_reentrant=way)
        weight = (second / (first + 1)).detach()
        given = torch.autograd.grad(second.sum(), x) if not way else [None]
        if way:
            second.sum().backward()
            given = [x.grad]
        # The slope of a softmax of equal numbers, by the masks and probabilities of the first pass.
        exact = first * (weight - (first * weight).sum(-1, keepdim=True))
        seen.append(torch.allclose(given[0], exact.detach(), rtol=1e-3, atol=1e-5))
    return seen


@program
def dropout_within_inference_mode_and_outside(wrap):
    def forward(x):
        with torch.inference_mode():
            hidden = dropout(x * 2, 0.5).sum() * 0
        return dropout(x * 3, 0.5) + float(hidden)

    m = wrap(forward)
    x = torch.ones(16, 8, requires_grad=True)
    y = m(x)
    y.sum().backward()
    return torch.equal(x.grad, y.detach())


@program
def masks_repeat_between_gradient_modes(wrap):
    """A seed gives the same masks with gradients and without."""
    m = wrap(lambda x: (dropout(x, 0.5), dropout(x.sin() + 2, 0.5)))
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        with_gradient = m(torch.ones(16, 8, requires_grad=True))
        torch.manual_seed(5)
        with torch.no_grad():
            without = m(torch.ones(16, 8))
        seen += [torch.equal(a, b) for a, b in zip(with_gradient, without, strict=True)]
        seen.append(with_gradient[0].unique())
    return seen
