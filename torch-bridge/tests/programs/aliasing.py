"""Programs whose outputs or inputs share memory: views of inputs, of buffers, of each other."""

import torch
from torch import nn

from .facts import aliases, observe, randn, step, weighted
from .registry import program


def _observe_view(wrap, function, *shape):
    """Whether the output of ``function`` shares the input's memory, both ways, and its history."""
    m = wrap(function)
    x = torch.randn(*shape)
    out = m(x)
    shared = aliases(out=out, x=x)
    based = [out._is_view(), out._base is x]
    with torch.no_grad():
        out.mul_(2)
    seen = [observe(x), observe(out)]
    with torch.no_grad():
        x.add_(1)
    return [shared, based, seen, out, step(m, randn(*shape))]


@program
def output_is_input(wrap):
    m, x = wrap(lambda x: x), randn(3)
    out = m(x)
    return [out is x, aliases(out=out, x=x), out, step(m, randn(3))]


@program
def output_is_input_among_others(wrap):
    m, x, y = wrap(lambda x, y: (x, x + y, y)), randn(3), randn(3)
    a, b, c = m(x, y)
    return [a is x, c is y, aliases(a=a, b=b, c=c, x=x, y=y), b]


@program
def view_of_input(wrap):
    return _observe_view(wrap, lambda x: x.view(-1), 2, 3)


@program
def reshape_of_input(wrap):
    return _observe_view(wrap, lambda x: x.reshape(3, 2), 2, 3)


@program
def transpose_of_input(wrap):
    return _observe_view(wrap, lambda x: x.t(), 2, 3)


@program
def slice_of_input(wrap):
    return _observe_view(wrap, lambda x: x[1:, ::2], 3, 4)


@program
def element_of_input(wrap):
    return _observe_view(wrap, lambda x: x[0], 3)


@program
def expand_of_input(wrap):
    m, x = wrap(lambda x: x.expand(4, 3)), torch.randn(3)
    out = m(x)
    shared = aliases(out=out, x=x)
    x.add_(1)
    return [shared, out, step(m, randn(3))]


@program
def diagonal_of_input(wrap):
    return _observe_view(wrap, lambda x: x.diagonal(), 3, 3)


@program
def unfold_of_input(wrap):
    m, x = wrap(lambda x: x.unfold(0, 3, 1)), torch.randn(6)
    out = m(x)
    shared = aliases(out=out, x=x)
    x.add_(1)
    return [shared, out, step(m, randn(6))]


@program
def chunks_of_input(wrap):
    m, x = wrap(lambda x: x.chunk(2)), torch.randn(4)
    a, b = m(x)
    shared = aliases(a=a, b=b, x=x)
    a.add_(1)
    return [shared, x, b, step(m, randn(4))]


@program
def unbound_input(wrap):
    m, x = wrap(lambda x: x.unbind(0)), torch.randn(3, 2)
    parts = m(x)
    parts[1].zero_()
    return [x, parts, step(m, randn(3, 2))]


@program
def complex_parts_of_input(wrap):
    m, x = wrap(lambda x: torch.view_as_real(x)), torch.randn(3, dtype=torch.complex64)
    out = m(x)
    out.zero_()
    return [x, out]


@program
def same_bits_of_input(wrap):
    m, x = wrap(lambda x: x.view(torch.int32)), torch.randn(3)
    out = m(x)
    out.add_(1)
    return [x, out, aliases(out=out, x=x)]


@program
def detached_input(wrap):
    m, x = wrap(lambda x: x.detach()), randn(3)
    out = m(x)
    shared = aliases(out=out, x=x)
    out.add_(1)
    return [shared, out, x]


@program
def data_of_input(wrap):
    """A write to it is no write of the input: the backward pass reads what was written."""
    m, x = wrap(lambda x: (x.data[1:], x * x)), randn(3)
    out, y = m(x)
    shared = aliases(out=out, x=x)
    out.add_(1)
    y.sum().backward()
    return [shared, out, x, x.grad]


@program
def data_before_a_write(wrap):
    """The write reaches it, and the backward pass reads what was written."""

    def forward(x, w):
        seen = w.data
        y = x * seen
        with torch.no_grad():
            w.mul_(2)
        return y, seen.sum()

    m, x, w = wrap(forward), randn(3), randn(3)
    out = m(x, w)
    out[0].sum().backward()
    return [out, x.grad, w.grad, w]


@program
def data_that_is_read(wrap):
    def forward(x):
        n, _ = x.data.shape
        y = x.exp()
        return y / y.data.max(1, keepdim=True)[0] * x.data + n

    m = wrap(forward)
    return [step(m, randn(2, 3)), step(m, randn(2, 3))]


@program
def contiguous_input_is_itself(wrap):
    m, x = wrap(lambda x: x.contiguous()), torch.randn(3, 2)
    y = torch.randn(2, 3).t()
    return [m(x) is x, aliases(out=m(x), x=x), aliases(out=m(y), y=y), m(y)]


@program
def same_type_input_is_itself(wrap):
    m, x = wrap(lambda x: x.float()), torch.randn(3)
    return [m(x) is x, aliases(out=m(x), x=x), m(x.double())]


@program
def reshape_that_copies(wrap):
    m = wrap(lambda x: x.t().reshape(-1))
    x = torch.randn(2, 3)
    out = m(x)
    return [aliases(out=out, x=x), out, step(m, randn(2, 3))]


@program
def flatten_of_one_dimension(wrap):
    m, x = wrap(lambda x: x.flatten()), torch.randn(4)
    return [m(x) is x, aliases(out=m(x), x=x)]


@program
def dropout_in_eval_is_its_input(wrap):
    model = nn.Dropout(0.5).eval()
    m, x = wrap(model), torch.randn(4)
    return [m(x) is x, aliases(out=m(x), x=x)]


@program
def identity_module(wrap):
    m, x = wrap(nn.Identity()), randn(4)
    return [m(x) is x, aliases(out=m(x), x=x)]


@program
def outputs_share_memory(wrap):
    def forward(x):
        y = x * 2
        return y, y.view(-1), y[0]

    m = wrap(forward)
    a, b, c = m(torch.randn(2, 3))
    shared = aliases(a=a, b=b, c=c)
    c.zero_()
    return [shared, a, b, step(m, randn(2, 3))]


@program
def one_output_twice(wrap):
    def forward(x):
        y = x * 2
        return y, y

    m = wrap(forward)
    a, b = m(torch.randn(3))
    return [a is b, aliases(a=a, b=b), step(m, randn(3))]


@program
def output_and_its_detached_twin(wrap):
    def forward(x):
        y = x.exp()
        return y, y.detach()

    m, x = wrap(forward), randn(3)
    a, b = m(x)
    return [aliases(a=a, b=b), b, step(m, randn(3))]


@program
def view_of_intermediate(wrap):
    m, x = wrap(lambda x: (x * 2).t()), randn(2, 3)
    out = m(x)
    return [out._is_view(), step(m, randn(2, 3)), out]


@program
def output_written_by_caller(wrap):
    m, x = wrap(lambda x: x.exp()), randn(3)
    out = m(x)
    with torch.no_grad():
        first = observe(out)
    result = out * 3
    result.add_(1)
    weighted(result).backward()
    return [first, result, x.grad]


@program
def output_written_before_backward(wrap):
    """exp saves its output, so that writing to it must be noticed."""
    m, x = wrap(lambda x: x.exp() + 0), randn(3)
    out = m(x)
    out.mul_(2)
    weighted(out).backward()
    return [out, x.grad]


@program
def output_saved_for_backward_written_by_caller(wrap):
    from .facts import raises

    m, x = wrap(lambda x: x.exp()), randn(3)

    def run():
        out = m(x)
        with torch.no_grad():
            out.zero_()
        weighted(out).backward()

    return [raises(run), x.grad]


@program
def input_written_before_backward(wrap):
    from .facts import raises

    m, x, w = wrap(lambda x, w: x * w), torch.randn(3), randn(3)

    def run():
        out = m(x, w)
        x.zero_()
        weighted(out).backward()

    return [raises(run), w.grad]


@program
def parameter_written_before_backward(wrap):
    from .facts import raises

    model = nn.Linear(3, 3, bias=False)
    m, x = wrap(model), randn(2, 3)

    def run():
        out = m(x)
        with torch.no_grad():
            model.weight.zero_()
        weighted(out).backward()

    return [raises(run), x.grad]


@program
def outputs_of_two_calls_are_apart(wrap):
    m, x = wrap(lambda x: x * 2), torch.randn(3)
    a = m(x)
    b = m(x + 1)
    shared = aliases(a=a, b=b)
    b.zero_()
    return [shared, a, b]


@program
def output_fed_back_as_input(wrap):
    m, x = wrap(lambda x: x * 1.5 + 1), torch.ones(3)
    for _ in range(4):
        x = m(x)
    return x


@program
def same_tensor_twice_then_two(wrap):
    m, x, y = wrap(lambda x, y: x * 2 - y), randn(3), randn(3)
    return [step(m, x, x), step(m, x, y), step(m, y, x)]


@program
def two_tensors_then_same_twice(wrap):
    m, x, y = wrap(lambda x, y: x * y), randn(3), randn(3)
    return [step(m, x, y), step(m, x, x)]


@program
def self_attention_then_cross_attention(wrap):
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    m, x, y = wrap(model), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    return [m(x, x, x), m(x, y, y), m(y, x, y), m(x, x, x)]


@program
def same_tensor_inside_a_list(wrap):
    m = wrap(lambda xs: sum(x * (k + 1) for k, x in enumerate(xs)))
    a, b = randn(3), randn(3)
    return [step(m, [a, a]), step(m, [a, b]), step(m, [a, a, b])]


@program
def overlapping_inputs(wrap):
    m, base = wrap(lambda x, y: x * y), torch.randn(5)
    return [m(base[:3], base[2:]), m(base[:3], base[:3]), m(base[:3], torch.randn(3))]


@program
def overlapping_inputs_with_history(wrap):
    m, base = wrap(lambda x, y: x * y.sin()), randn(5)
    out = m(base[:3], base[2:])
    weighted(out).backward()
    return [out, base.grad]


@program
def expanded_input(wrap):
    m, x = wrap(lambda x: x * torch.arange(12.0).reshape(4, 3)), randn(3)
    out = m(x.expand(4, 3))
    weighted(out).backward()
    return [out, x.grad, m(torch.randn(4, 3))]


@program
def input_is_strided_slice(wrap):
    m, x = wrap(lambda x: (x * 2).sin()), randn(4, 6)
    out = m(x[::2, 1::2])
    weighted(out).backward()
    return [out, x.grad]


@program
def input_is_transposed(wrap):
    m, x = wrap(lambda x: x @ torch.ones(3, 2)), randn(3, 4)
    out = m(x.t())
    weighted(out).backward()
    return [out, x.grad, m(torch.randn(4, 3))]


@program
def view_asked_of_transposed_input(wrap):
    from .facts import raises

    m = wrap(lambda x: x.view(-1) * 2)
    return [raises(m, torch.randn(2, 3)), raises(m, torch.randn(3, 2).t())]


@program
def channels_last_input(wrap):
    model = nn.Conv2d(3, 4, 3)
    m, x = wrap(model), torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    out = m(x)
    elementwise = wrap(lambda x: x.relu() + 1)(x)
    return [out.shape, out.contiguous(), elementwise]


@program
def channels_last_model(wrap):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    m = wrap(model.to(memory_format=torch.channels_last))
    seen = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = torch.randn(2, 3, 5, 5).to(memory_format=memory_format)
        out = m(x)
        weighted(out).backward()
        seen.append([observe(out.contiguous()), observe(model[0].weight.grad.contiguous())])
    return seen


@program
def layout_of_outputs(wrap):
    def forward(x):
        return x.t() * 2, x.t().contiguous(), torch.cat([x, x]).t(), x.permute(1, 0).clone()

    return wrap(forward)(torch.randn(2, 3))


@program
def branch_on_layout(wrap):
    m = wrap(lambda x: x * 2 if x.is_contiguous() else x * 3)
    return [m(torch.ones(2, 3)), m(torch.ones(3, 2).t()), m(torch.ones(2, 3))]


@program
def branch_on_stride(wrap):
    m = wrap(lambda x: x * x.stride(0))
    return [m(torch.ones(2, 3)), m(torch.ones(3, 2).t()), m(torch.ones(2, 6)[:, ::2])]


@program
def branch_on_history(wrap):
    m = wrap(lambda x: x * 2 if x.requires_grad else x * 3)
    return [m(torch.ones(3)), m(torch.ones(3, requires_grad=True)), m(torch.ones(3))]


@program
def branch_on_identity(wrap):
    m, x = wrap(lambda x, y: x + 1 if x is y else x + y * 2), torch.ones(3)
    return [m(x, x), m(x, x.clone()), m(x, x)]


@program
def storage_offset_is_seen(wrap):
    m, base = wrap(lambda x: x + x.storage_offset()), torch.zeros(6)
    return [m(base[:3]), m(base[2:5]), m(base[1:4])]


@program
def lazily_conjugated_input(wrap):
    m, x = (
        wrap(lambda x: torch.view_as_real(x.resolve_conj()) * 2),
        torch.randn(3, dtype=torch.cfloat),
    )
    return [m(x), m(x.conj())]


@program
def view_of_buffer_is_written_by_caller(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 2))

        def forward(self, k):
            return self.cache[k] + 0, self.cache.view(-1)

    model = Model()
    m = wrap(model)
    _, flat = m(1)
    flat.add_(torch.arange(8.0))
    return [model.cache, m(1), m(2)]
