"""Programs that write in place: to inputs, views, buffers, leaves, intermediates."""

import torch
from torch import nn

from .facts import aliases, observe, raises, randn, step, weighted
from .registry import program


def _write(wrap, function, *args):
    """What ``function`` returns and what it leaves in its arguments, twice."""
    m, seen = wrap(function), []
    for _ in range(2):
        out = m(*args)
        seen.append([observe(out), observe(list(args)), [t._version > 0 for t in args]])
    return seen


@program
def input_written(wrap):
    return _write(wrap, lambda x: x.add_(1) * 2, torch.randn(3))


@program
def input_written_and_returned(wrap):
    def forward(x):
        x.mul_(2)
        return x

    m, x = wrap(forward), torch.ones(3)
    out = m(x)
    return [out is x, out, x, m(x), x]


@program
def input_written_and_not_returned(wrap):
    def forward(x, y):
        x.copy_(y)

    m, x = wrap(forward), torch.zeros(3)
    return [m(x, torch.ones(3)), x]


@program
def slice_of_input_written(wrap):
    def forward(x):
        x[1:] = 5
        x[0] += 2
        return x.sum()

    return _write(wrap, forward, torch.randn(4))


@program
def view_of_input_written(wrap):
    def forward(x):
        x.view(-1)[::2].zero_()
        return x + 1

    return _write(wrap, forward, torch.randn(2, 3))


@program
def transposed_view_of_input_written(wrap):
    def forward(x):
        x.t()[0].fill_(3)
        return x.exp()

    return _write(wrap, forward, torch.randn(2, 3))


@program
def input_with_history_written(wrap):
    def forward(x):
        x.mul_(3)
        return x * x

    m, leaf = wrap(forward), randn(3)
    x = leaf * 2
    out = m(x)
    weighted(out).backward(retain_graph=True)
    first = leaf.grad.clone()
    weighted(x).backward()
    return [out, x, first, leaf.grad]


@program
def view_input_with_history_written(wrap):
    def forward(x):
        x.mul_(3)
        return x.sin()

    m, leaf = wrap(forward), randn(4)
    base = leaf * 2
    out = m(base[1:3])
    (weighted(out) + weighted(base)).backward()
    return [out, base, leaf.grad]


@program
def leaf_that_requires_gradient_written(wrap):
    return raises(wrap(lambda x: x.add_(1)), randn(3))


@program
def leaf_written_without_gradient(wrap):
    def forward(x):
        with torch.no_grad():
            x.add_(1)
        return x * x

    m, x = wrap(forward), randn(3)
    return [step(m, x), x]


@program
def leaf_data_written(wrap):
    def forward(x):
        x.data.mul_(2)
        return x * 3

    m, x = wrap(forward), randn(3)
    return [step(m, x), x]


@program
def parameter_written_in_forward(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.w.clamp_(-0.5, 0.5)
            return x * self.w

    model = Model()
    m = wrap(model)
    return [step(m, randn(3)), step(m, randn(3)), model.w, model.w.grad]


@program
def parameter_normalized_in_place(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            self.w.data = nn.functional.normalize(self.w.data, dim=1)
            return x @ self.w.t()

    model = Model()
    m = wrap(model)
    return [step(m, randn(2, 3)), model.w, model.w.grad]


@program
def intermediate_written(wrap):
    def forward(x):
        y = x * 2
        y.add_(1).mul_(3)
        y[0] = 0
        return y * x

    return step(wrap(forward), randn(4))


@program
def view_of_intermediate_written(wrap):
    def forward(x):
        y = x * 2
        z = y.view(2, 3)
        z[0].mul_(5)
        return y, z

    m = wrap(forward)
    return [step(m, randn(6)), aliases(**dict(zip("yz", m(torch.randn(6)), strict=True)))]


@program
def intermediate_saved_for_backward_written(wrap):
    """Eager has lost the number that exp saved; a compiler may have kept it, and then be right."""

    def forward(x):
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z + y

    m, x = wrap(forward), randn(3)
    try:
        m(x).sum().backward()
    except RuntimeError:
        return "an error or the right gradient"
    right = torch.allclose(x.grad, 3 * x.detach().exp())
    return "an error or the right gradient" if right else x.grad


@program
def two_inputs_written(wrap):
    def forward(x, y):
        x.add_(y)
        y.mul_(x)
        return x - y

    return _write(wrap, forward, torch.randn(3), torch.randn(3))


@program
def same_input_written_and_read(wrap):
    def forward(x, y):
        x.add_(1)
        return x * y

    m, x, y = wrap(forward), torch.ones(3), torch.ones(3)
    return [m(x, y), x, y, m(x, x), x]


@program
def overlapping_inputs_written(wrap):
    def forward(x, y):
        x.add_(1)
        return x + y * 10

    m, base = wrap(forward), torch.zeros(5)
    first = observe(m(torch.zeros(3), torch.zeros(3)))
    return [first, m(base[:3], base[2:]), base]


@program
def expanded_input_written(wrap):
    return raises(wrap(lambda x: x.add_(1)), torch.zeros(1).expand(3))


@program
def metadata_of_input_changed(wrap):
    def forward(x):
        x.t_()
        return x * 2

    m, x = wrap(forward), torch.randn(2, 3)
    return [m(x), x, tuple(x.shape)]


@program
def input_unsqueezed_in_place(wrap):
    def forward(x):
        x.unsqueeze_(0)
        return x.sum()

    m, x = wrap(forward), torch.randn(3)
    return [m(x), tuple(x.shape)]


@program
def input_resized(wrap):
    def forward(x):
        x.resize_(2)
        return x * 2

    m, x = wrap(forward), torch.arange(4.0)
    return [m(x), x]


@program
def data_of_input_replaced(wrap):
    def forward(x, y):
        x.data = y.data
        return x * 2

    m, x, y = wrap(forward), torch.zeros(3), torch.ones(3)
    out = m(x, y)
    return [out, x, aliases(x=x, y=y)]


@program
def requires_grad_set_on_input(wrap):
    def forward(x):
        x.requires_grad_(True)
        return x * 2

    m, x = wrap(forward), torch.ones(3)
    out = m(x)
    return [out, x, out.requires_grad]


@program
def detached_in_place(wrap):
    def forward(x):
        y = x * 2
        y.detach_()
        return y * x

    return step(wrap(forward), randn(3))


@program
def out_argument(wrap):
    def forward(x, y, out):
        torch.add(x, y, out=out)
        return out * 2

    m, out = wrap(forward), torch.empty(3)
    return [m(torch.ones(3), torch.ones(3), out), out]


@program
def out_argument_of_another_size(wrap):
    def forward(x, out):
        return torch.mul(x, 2, out=out)

    m, out = wrap(forward), torch.empty(0)
    result = m(torch.ones(3), out)
    return [result, out, aliases(result=result, out=out)]


@program
def scatter_in_place_on_input(wrap):
    def forward(x, index, y):
        x.scatter_add_(0, index, y)
        x.index_fill_(0, torch.tensor([3]), 7.0)
        return x * 2

    m, x = wrap(forward), torch.zeros(4)
    return [m(x, torch.tensor([0, 0, 2]), torch.ones(3)), x]


@program
def masked_fill_in_place(wrap):
    def forward(x, mask):
        y = x * 1
        y.masked_fill_(mask, -1.0)
        y[mask] += 3
        return y

    return step(wrap(forward), randn(4), torch.tensor([True, False, True, False]))


@program
def setitem_by_index_tensor(wrap):
    def forward(x, index):
        y = torch.zeros(5)
        y[index] = x
        return y

    return step(wrap(forward), randn(3), torch.tensor([4, 0, 2]))


@program
def setitem_with_history_into_buffer(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("slots", torch.zeros(3, 2))

        def forward(self, x, k):
            self.slots[k] = x.detach()
            return self.slots.sum() * x

    model = Model()
    m = wrap(model)
    return [[step(m, randn(2), k) for k in (0, 2, 1)], model.slots]


@program
def buffer_written_with_history(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(3))

        def forward(self, x):
            self.state.add_(x)
            return self.state * 2

    model = Model()
    m, x = wrap(model), randn(3)
    result = step(m, x)
    return [result, model.state]


@program
def cache_filled_by_position(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(2, 6, 4), persistent=False)

        def forward(self, x, start):
            self.keys[:, start : start + x.shape[1]] = x
            return self.keys[:, : start + x.shape[1]].sum(1)

    model = Model()
    m, seen = wrap(model), []
    with torch.no_grad():
        for start, length in ((0, 3), (3, 1), (4, 1), (5, 1)):
            seen.append(m(torch.randn(2, length, 4), start))
    return [seen, model.keys]


@program
def cache_filled_by_index_copy(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(6, 4))

        def forward(self, x, position):
            self.keys.index_copy_(0, position, x)
            return self.keys.cumsum(0)

    model = Model()
    m, seen = wrap(model), []
    with torch.no_grad():
        for position in ([0, 1], [2, 3], [5, 0]):
            seen.append(m(torch.randn(2, 4), torch.tensor(position)))
    return [seen, model.keys]


@program
def relu_in_place(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    from .facts import training

    return training(model, wrap(model), randn(2, 3))


@program
def relu_in_place_on_input(wrap):
    m, x = wrap(nn.ReLU(inplace=True)), torch.randn(4)
    out = m(x)
    return [out is x, out, x]


@program
def batch_norm_statistics_written(wrap):
    model = nn.BatchNorm1d(3)
    m, held = wrap(model), model.running_mean
    alias = held.view(3, 1)
    for _ in range(3):
        m(torch.randn(4, 3))
    return [held is model.running_mean, alias, model.num_batches_tracked]


@program
def exchange_of_two_inputs(wrap):
    def forward(x, y):
        t = x.clone()
        x.copy_(y)
        y.copy_(t)
        return x - y

    return _write(wrap, forward, torch.ones(3), torch.zeros(3))


@program
def random_fill_of_input(wrap):
    m, x = wrap(lambda x: x.uniform_(1, 2)), torch.zeros(100)
    out = m(x)
    return [out is x, bool((x >= 1).all() and (x < 2).all()), len(x.unique()) > 50]


@program
def written_under_inference_mode(wrap):
    def forward(x):
        x.add_(1)
        return x * 2

    m, x = wrap(forward), torch.zeros(3)
    with torch.inference_mode():
        out = m(x)
    return [out, x]


@program
def version_counter_of_written_input(wrap):
    def forward(x):
        x.add_(1)
        return x + 1

    m, x = wrap(forward), torch.zeros(3)
    m(x)
    once = x._version
    m(x)
    return [once > 0, x._version > once]


@program
def caller_saved_the_input_before_it_is_written(wrap):
    """The caller's own graph needs the old numbers, so backward must complain."""

    def forward(x):
        x.add_(1)
        return x * 1

    m, w = wrap(forward), randn(3)
    x = torch.ones(3)
    before = w * x

    def run():
        m(x)
        before.sum().backward()

    return [raises(run), w.grad]


@program
def list_of_inputs_written(wrap):
    def forward(xs):
        for k, x in enumerate(xs):
            x.add_(k)
        xs.append(xs[0] * 2)
        return xs

    m, xs = wrap(forward), [torch.zeros(2), torch.zeros(2)]
    out = m(xs)
    return [out is xs, len(xs), xs]


@program
def dictionary_of_inputs_written(wrap):
    def forward(batch):
        batch["sum"] = batch["x"] + batch.pop("y")
        batch["x"].mul_(2)
        return batch["sum"]

    m, x = wrap(forward), torch.ones(2)
    batch = {"x": x, "y": torch.ones(2)}
    return [m(batch), batch, x]


@program
def set_to_another_storage(wrap):
    def forward(x, y):
        x.set_(y)
        return x * 2

    m, x, y = wrap(forward), torch.zeros(3), torch.ones(3)
    out = m(x, y)
    return [out, x, aliases(x=x, y=y)]


@program
def gradient_written_in_forward(wrap):
    def forward(x):
        if x.grad is not None:
            x.grad.zero_()
        return x * 2

    m, x = wrap(forward), randn(3)
    return [step(m, x), step(m, x), x.grad]


@program
def gradient_read_in_forward(wrap):
    def forward(x):
        return x * 2 if x.grad is None else x + x.grad

    m, x = wrap(forward), randn(3)
    return [step(m, x), step(m, x), step(m, x)]


class _LossInPlace(nn.Module):
    """A sum in place whose other summand comes from a layer with a state."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, y):
        loss = (x * 2).mean()
        loss += 0.4 * self.norm(y).square().mean()
        return loss


@program
def loss_summed_in_place_beside_a_norm(wrap):
    m = wrap(_LossInPlace())
    return [step(m, randn(3, 4), randn(3, 4)), m.norm.running_mean, m.norm.running_var]
