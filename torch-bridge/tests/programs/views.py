"""Programs that mix views, writes and history, as PyTorch's functionalization tests do."""

import torch
from torch import nn

from .facts import aliases, observe, raises, randn, step, training, weighted
from .registry import program


@program
def output_is_view_of_written_input(wrap):
    def forward(x):
        x.mul_(2)
        return x.view(-1)

    m, x = wrap(forward), torch.ones(2, 2)
    out = m(x)
    shared = aliases(out=out, x=x)
    out.add_(1)
    return [shared, x, out]


@program
def output_is_view_of_written_input_with_history(wrap):
    def forward(x):
        x.mul_(2)
        return x.view(-1)[:2]

    m, leaf = wrap(forward), randn(2, 2)
    x = leaf * 1
    out = m(x)
    (weighted(out) + weighted(x) * 3).backward()
    return [out, x, leaf.grad, out._is_view()]


@program
def two_views_of_one_base_one_written(wrap):
    def forward(a, b):
        a.add_(1)
        return a * b

    m, base = wrap(forward), torch.arange(4.0)
    return [m(base[:2], base[2:]), m(base[:3], base[1:]), base]


@program
def two_views_of_one_base_both_written(wrap):
    def forward(a, b):
        a.mul_(2)
        b.add_(a)
        return a + b

    m, base = wrap(forward), torch.arange(4.0)
    first = observe(m(torch.ones(2), torch.ones(2)))
    return [first, m(base[:2], base[2:]), base, raises(m, base[:2], base[1:3]), base]


@program
def views_of_a_base_that_learns_one_written(wrap):
    def forward(a, b):
        a.mul_(3)
        return a * b

    m, leaf = wrap(forward), randn(4)
    base = leaf * 1
    out = m(base[:2], base[2:])
    (weighted(out) + weighted(base)).backward()
    return [out, base, leaf.grad]


@program
def transposed_input_written_through_its_base(wrap):
    def forward(x, y):
        x.t().add_(y)
        return x.sum()

    m, x = wrap(forward), torch.zeros(2, 3)
    return [m(x, torch.arange(6.0).view(3, 2)), x]


@program
def write_to_one_chunk(wrap):
    def forward(x):
        y = x * 1
        a, b = y.chunk(2)
        a.mul_(5)
        return y, b

    return raises(step, wrap(forward), randn(4))


@program
def write_to_a_slice_by_index(wrap):
    def forward(x):
        y = torch.zeros(3, 2)
        y[1] = x
        y[:, 0] += x.sum()
        return y

    return step(wrap(forward), randn(2))


@program
def view_taken_before_a_write(wrap):
    def forward(x):
        y = x * 2
        v = y[1:]
        y.add_(10)
        return v + 0, v

    return step(wrap(forward), randn(3))


@program
def view_taken_before_a_write_to_input(wrap):
    def forward(x):
        v = x[1:]
        x.add_(10)
        return v * 2

    m, x = wrap(forward), torch.zeros(3)
    return [m(x), x]


@program
def views_of_one_intermediate_as_outputs(wrap):
    def forward(x):
        y = x.exp()
        return y.view(-1), y.t(), y

    m, x = wrap(forward), randn(2, 3)
    a, b, c = m(x)
    shared = aliases(a=a, b=b, c=c)
    (weighted(a) + weighted(b) * 2).backward()
    return [shared, a, b, c, x.grad]


@program
def one_of_two_outputs_that_share_is_written(wrap):
    def forward(x):
        y = x * 2
        return y.view(-1), y

    m = wrap(forward)
    a, b = m(torch.ones(2, 2))
    a[0] = 100
    return [a, b]


@program
def view_output_written_by_caller_with_history(wrap):
    def forward(x):
        y = x * 2
        return y, y[:1]

    m, x = wrap(forward), randn(3)
    y, v = m(x)

    def write():
        v.mul_(5)
        weighted(y).backward()

    return [raises(write), y, v, x.grad]


@program
def input_view_output_written_by_caller_with_history(wrap):
    m, leaf = wrap(lambda x: x[:2]), randn(3)
    x = leaf * 1
    v = m(x)
    v.mul_(5)
    weighted(x).backward()
    return [v, x, leaf.grad]


@program
def view_output_under_no_grad_then_written(wrap):
    m, x = wrap(lambda x: x.view(-1)), torch.ones(2, 2)
    with torch.no_grad():
        out = m(x)
    out.add_(1)
    return [x, out]


@program
def view_of_parameter_returned(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return x @ self.w, self.w.t()

    model = Model()
    out, view = wrap(model)(torch.ones(1, 2))
    (out.sum() + view.sum()).backward()
    with torch.no_grad():
        view.mul_(3)
    return [aliases(view=view, w=model.w), model.w, model.w.grad]


@program
def parameter_view_written_in_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            with torch.no_grad():
                self.w[0].zero_()
            return x @ self.w

    model = Model()
    return [step(wrap(model), randn(1, 2)), model.w, model.w.grad]


@program
def write_under_no_grad_to_tensor_with_history(wrap):
    def forward(x):
        y = x * 2
        with torch.no_grad():
            y.add_(5)
        return y * y

    return step(wrap(forward), randn(3))


@program
def write_to_detached_view(wrap):
    def forward(x):
        y = x * 2
        y.detach()[0] = 7
        return y + 1

    return step(wrap(forward), randn(3))


@program
def write_to_detached_input(wrap):
    def forward(x):
        x.detach().mul_(2)
        return x * 3

    m, x = wrap(forward), randn(3)
    return [step(m, x), x]


@program
def copy_between_views(wrap):
    def forward(x):
        y = x * 1
        y[:2].copy_(y[2:])
        y[2:] *= 2
        return y

    return step(wrap(forward), randn(4))


@program
def written_twice_and_read_between(wrap):
    def forward(x):
        x.add_(1)
        a = x.sum()
        x.mul_(2)
        return a, x.sum()

    m, x = wrap(forward), torch.ones(3)
    return [m(x), x, m(x), x]


@program
def in_place_operator_on_argument(wrap):
    def forward(x, y):
        x += y
        x *= 2
        return x

    m, x = wrap(forward), torch.ones(3)
    out = m(x, torch.ones(3))
    return [out is x, out, x]


@program
def in_place_with_promotion_is_refused(wrap):
    def forward(x):
        x += 0.5
        return x

    m = wrap(forward)
    return [raises(m, torch.ones(2)), raises(m, torch.ones(2, dtype=torch.int64))]


@program
def in_place_that_would_broadcast_is_refused(wrap):
    m = wrap(lambda x, y: x.add_(y))
    return [raises(m, torch.ones(1), torch.ones(3)), raises(m, torch.ones(3), torch.ones(1))]


@program
def strided_write_into_expanded_view(wrap):
    def forward(x):
        y = torch.zeros(6)
        y.as_strided((2, 2), (3, 1)).copy_(x)
        return y

    return raises(step, wrap(forward), randn(2, 2))


@program
def real_part_written(wrap):
    def forward(x):
        z = torch.view_as_complex(x * 1)
        torch.view_as_real(z)[..., 0] = 0
        return torch.view_as_real(z)

    return raises(step, wrap(forward), randn(3, 2))


@program
def output_and_written_input_are_one(wrap):
    def forward(x, y):
        x.copy_(y.sin())
        return x, x * 2

    m, x, y = wrap(forward), torch.zeros(3), randn(3)
    a, b = m(x, y)
    weighted([a, b]).backward()
    return [a is x, a, b, y.grad]


@program
def accumulated_over_calls(wrap):
    def forward(total, x):
        total += x * 2
        return total

    m, total, xs = wrap(forward), torch.zeros(3), [randn(3) for _ in range(3)]
    for x in xs:
        total = m(total, x)
    weighted(total).backward()
    return [total, [x.grad for x in xs]]


@program
def ring_buffer(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ring", torch.zeros(3, 2))
            self.register_buffer("at", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.ring[self.at % 3] = x.detach()
            self.at += 1
            return x * self.ring.mean(0)

    model = Model()
    m = wrap(model)
    return [[step(m, randn(2)) for _ in range(5)], model.ring, model.at]


@program
def codebook_with_moving_average(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(4, 2))
            self.register_buffer("counts", torch.ones(4))

        def forward(self, x):
            nearest = torch.cdist(x, self.codes).argmin(1)
            hits = nn.functional.one_hot(nearest, 4).to(x)
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                    self.codes.lerp_(hits.t() @ x / self.counts[:, None], 0.1)
            found = self.codes[nearest]
            return x + (found - x).detach(), nearest

    model = Model()
    m = wrap(model)
    return [[step(m, randn(5, 2)) for _ in range(3)], model.codes, model.counts]


@program
def tensors_broadcast_together(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x, y):
            a, scale = torch.broadcast_tensors(self.fc(x), self.scale)
            b, c, d = torch.broadcast_tensors(y[:, None], y[None], y.new_ones(1))
            return (a * scale).tanh().sum(0), b * c + d, b, a

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 4), torch.rand(n)) for n in (3, 5)]


@program
def a_vector_transposed_is_another_tensor(wrap):
    def transposed(x):
        return x.T

    def summed_over_nothing(x):
        return torch.einsum("i->i", x)

    def in_groups_of_one(x):
        return nn.functional.channel_shuffle(x, 1)

    results = []
    for f in (transposed, summed_over_nothing):
        m = wrap(f)
        x = torch.ones(3, requires_grad=True)
        y = m(x)
        y.register_hook(lambda grad: grad * 10)
        (y.sum() + x.sum()).backward()
        z = torch.ones(3)
        m(z).unsqueeze_(0)
        results.append([x.grad, y.is_leaf, z])
    image = torch.ones(1, 4, 2, 2)
    wrap(in_groups_of_one)(image).add_(1)
    return results, image


@program
def long_products(wrap):
    m = wrap(lambda x: x.cumprod(0)[-1])
    x = (1 + 1e-4 * torch.randn(20_000)).requires_grad_()
    return step(m, x)


@program
def intermediates_made_into_views_of_themselves(wrap):
    def forward(x, mask):
        y = x * 2
        half = y[:2]
        y.unsqueeze_(1)
        hidden = (mask > 0).float()
        hidden.unsqueeze_(0).unsqueeze_(-1)
        z = (y * hidden).sum(1)
        z.squeeze_(-1)
        z.transpose_(0, 1)
        w = z + 1
        z.mul_(2)
        return w.t_(), z, half, y

    return step(wrap(forward), randn(3, 4), torch.tensor([1.0, -1.0, 2.0, 3.0]))


@program
def intermediate_made_a_view_in_one_branch(wrap):
    def forward(x, flag):
        y = x * 2
        z = y.relu_()
        if flag:
            z.unsqueeze_(0)
        z.add_(1)
        return y.sum(0), z

    m = wrap(forward)
    return [step(m, torch.randn(3, 4), flag) for flag in (True, False)]


@program
def one_of_two_results_made_a_view(wrap):
    def forward(x):
        largest, at = x.max(0)
        largest.unsqueeze_(0)
        at.unsqueeze_(1)
        return largest @ x.T, at

    return step(wrap(forward), torch.randn(4, 5))


@program
def copy_at_an_offset_in_the_memory_of_a_view(wrap):
    """The offset counts from where the memory begins, not from where the view does."""
    m = wrap(lambda x: torch.as_strided_copy(x, (2, 3), (3, 1), 6) * 2)
    numbers = torch.arange(40.0)
    return [m(numbers[:20]), m(numbers[5:25]), m(numbers[::2])]


@program
def strides_of_windows(wrap):
    """The strides are those of the memory that the windows share."""

    def forward(x):
        windows = (x * 2).unfold(1, 3, 2)
        return torch.as_strided(windows, (2, 3), (3, 1)) * 2, windows.as_strided((4,), (1,))

    return step(wrap(forward), randn(6, 8))


@program
def strides_of_a_result_of_strides(wrap):
    def forward(x):
        turned = torch.as_strided(x * 2, (4, 5), (1, 4))
        return torch.as_strided(turned, (2, 3), (3, 1)) * 2

    return step(wrap(forward), randn(6, 8))


@program
def transposed_and_detached_in_place(wrap):
    def forward(x):
        y = x * 3
        y.t_()
        y.detach_()
        return y, x + 1

    return step(wrap(forward), randn(2, 4))


@program
def order_of_the_elements_of_strides(wrap):
    """What is flattened is a copy, which is written."""

    def forward(x):
        turned = torch.as_strided(x * 2, (4, 6), (1, 8))
        windows = torch.as_strided(x * 3, (4, 3), (1, 1))
        turned.flatten().mul_(3)
        windows.flatten().mul_(3)
        return turned * 1, windows * 1

    def unwritten(x):
        return torch.as_strided(x * 2, (4, 6), (1, 8)) * 2, torch.as_strided(x, (4, 3), (1, 1)) * 2

    return [step(wrap(forward), randn(6, 8)), step(wrap(unwritten), randn(6, 8))]
