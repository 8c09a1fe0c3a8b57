"""Programs that gather, scatter, index and pad, with repeats, negatives and masks."""

import torch
from torch import nn

from .facts import raises, randn, step
from .registry import program


def _index(name, select, shape=(4, 5)):
    @program(name=f"index_{name}")
    def index(wrap):
        return step(wrap(lambda x: select(x) * 2), randn(*shape))


_index("by_tensor", lambda x: x[torch.tensor([0, 3, 3, -1])])
_index("by_two_tensors", lambda x: x[torch.tensor([0, 1, 1]), torch.tensor([2, 0, 0])])
_index("by_tensors_that_broadcast", lambda x: x[torch.tensor([[0], [2]]), torch.tensor([1, 4])])
_index("by_slice_and_tensor", lambda x: x[1:3, torch.tensor([4, 0, 4])])
_index("by_tensors_apart", lambda x: x[torch.tensor([0, 1]), :, torch.tensor([2, 2])], (2, 3, 4))
_index("by_mask", lambda x: x[x > 0])
_index("by_mask_of_rows", lambda x: x[torch.tensor([True, False, True, True])])
_index("by_list", lambda x: x[[0, 2]])
_index("by_none_and_ellipsis", lambda x: x[None, ..., ::2])
_index("by_negative_step_flip", lambda x: x.flip(0)[1::2, -3:-1])
_index("by_zero_dimensional_tensor", lambda x: x[torch.tensor(2)])
_index("by_empty_tensor", lambda x: x[torch.zeros(0, dtype=torch.int64)])
_index("take", lambda x: x.take(torch.tensor([0, 19, -1, 7])))
_index("take_along_dimension", lambda x: x.take_along_dim(x.argsort(1)[:, :2], 1))
_index("empty_slice", lambda x: x[2:2])
_index("slice_past_the_end", lambda x: x[1:100, -100:2])


@program
def gather_with_repeats(wrap):
    m = wrap(lambda x, i: x.gather(1, i) * torch.arange(3.0))
    return step(m, randn(2, 4), torch.tensor([[0, 0, 3], [1, 1, 1]]))


@program
def index_put_with_repeats(wrap):
    def forward(x, y):
        out = x.clone()
        return out.index_put((torch.tensor([0, 0, 2]),), y, accumulate=True)

    return step(wrap(forward), randn(3), randn(3))


@program
def index_put_without_repeats(wrap):
    m = wrap(lambda x, y: x.index_put((torch.tensor([2, 0]), torch.tensor([1, 1])), y))
    return step(m, randn(3, 2), randn(2))


@program
def index_put_by_mask(wrap):
    def forward(x, mask):
        y = x.clone()
        y[mask] = y[mask] * 10
        return y

    return step(wrap(forward), randn(4), torch.tensor([True, False, False, True]))


@program
def scatter_add_with_repeats(wrap):
    m = wrap(lambda x, i: torch.zeros(3, 2).scatter_add(0, i, x))
    return step(m, randn(4, 2), torch.tensor([[0, 0], [0, 1], [2, 1], [0, 0]]))


@program
def scatter_reduce(wrap):
    def forward(x, i):
        base = torch.ones(3)
        kinds = ("sum", "mean", "amax", "amin", "prod")
        return [base.scatter_reduce(0, i, x, k, include_self=k == "amax") for k in kinds]

    return step(wrap(forward), randn(4), torch.tensor([0, 0, 2, 0]))


@program
def scatter_of_a_number(wrap):
    m = wrap(lambda x, i: x.scatter(1, i, 7.0))
    return step(m, randn(2, 4), torch.tensor([[0, 2], [3, 3]]))


@program
def index_add_copy_fill(wrap):
    def forward(x, y):
        i = torch.tensor([0, 2])
        return x.index_add(0, i, y, alpha=2), x.index_copy(0, i, y), x.index_fill(1, i, -1.0)

    return step(wrap(forward), randn(3, 3), randn(2, 3))


@program
def index_add_with_repeats(wrap):
    m = wrap(lambda x, i: torch.zeros(3, 2).index_add(0, i, x))
    return step(m, randn(4, 2), torch.tensor([1, 1, 1, 0]))


@program
def masked_scatter(wrap):
    m = wrap(lambda x, mask, y: x.masked_scatter(mask, y))
    return step(m, randn(2, 2), torch.tensor([[True, False], [True, True]]), randn(4))


@program
def select_and_slice_scatter(wrap):
    m = wrap(
        lambda x, y: (
            x.select_scatter(y, 0, 1),
            x.slice_scatter(y[None], 0, 2, 3),
            x.diagonal_scatter(y),
        )
    )
    return step(m, randn(3, 3), randn(3))


@program
def message_passing(wrap):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x, edges):
            messages = self.fc(x)[edges[0]]
            degree = torch.zeros(x.shape[0]).index_add(0, edges[1], torch.ones(edges.shape[1]))
            out = torch.zeros_like(x).index_add(0, edges[1], messages)
            return out / degree.clamp(min=1)[:, None]

    m = wrap(Layer())
    graphs = (
        torch.tensor([[0, 1, 1], [1, 0, 2]]),
        torch.tensor([[0], [0]]),
        torch.zeros(2, 0).long(),
    )
    return [step(m, randn(3, 3), edges) for edges in graphs]


@program
def token_dropping(wrap):
    def forward(x, scores):
        keep = scores.topk(2, dim=1).indices.sort(dim=1).values
        return x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))

    return step(wrap(forward), randn(2, 4, 3), randn(2, 4))


@program
def mixture_of_experts(wrap):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(3, 2)
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

        def forward(self, x):
            chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for k, expert in enumerate(self.experts):
                rows = (chosen.indices == k).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]) * chosen.values[rows, None])
            return out

    model = Experts()
    m = wrap(model)
    seen = [step(m, randn(n, 3)) for n in (4, 1, 6)]
    return [seen, [p.grad for p in model.parameters()]]


@program
def padding_by_numbers(wrap):
    m = wrap(lambda x, p: nn.functional.pad(x, p, value=1.5))
    return [step(m, randn(2, 3), p) for p in ((1, 0), (0, 2, 1, 0), (-1, 0), (0, 0))]


@program
def padded_batch_of_ragged_rows(wrap):
    m = wrap(lambda xs: nn.utils.rnn.pad_sequence(xs, batch_first=True, padding_value=-1.0))
    return [step(m, [randn(n) for n in sizes]) for sizes in ((2, 3), (1, 4, 2))]


@program
def rolled_by_an_argument(wrap):
    m = wrap(lambda x, n: x.roll(n, 0))
    return [step(m, randn(4, 2), n) for n in (1, -1, 3, 0)]


@program
def where_with_one_argument(wrap):
    m = wrap(lambda x: x[torch.where(x > 0)])
    return [step(m, randn(5)), step(m, (-torch.ones(3)).requires_grad_())]


def _filled(x, mask):
    y = x * 2
    y[mask] = 5.0
    return y


@program
def numbers_written_where_a_mask_says(wrap):
    m = wrap(_filled)
    seen = [raises(step, m, randn(n, 4, 2), torch.rand(n) > 0.5) for n in (3, 5, 4)]
    seen += [raises(step, m, randn(n, 4, 2), torch.rand(n, 4) > 0.5) for n in (3, 5, 4)]
    # Masks of other sizes are errors, not broadcast.
    seen += [raises(step, m, randn(3, 4), torch.ones(sizes, dtype=torch.bool)) for sizes in (1, 5)]
    return seen


@program
def numbers_written_where_a_mask_says_in_other_types(wrap):
    def forward(x):
        counts, halves, flags = x.long(), x.bfloat16(), x > 0
        counts[x > 0.5] = 7
        halves[x > 0.5] = 3
        flags[x > 0.5] = False
        return counts, halves, flags

    m = wrap(forward)
    return [m(randn(n, 4).detach()) for n in (3, 5)]


@program
def numbers_written_through_views_that_overlap(wrap):
    def forward(x, mask):
        y = x[:1].clone().expand(3, 4)
        y[mask] = 5.0
        return y + 0

    m = wrap(forward)
    return raises(m, randn(3, 4).detach(), torch.rand(3, 4) > 0.5)


@program
def products_are_scattered(wrap):
    """A product and a copy of it that is subtracted may be rounded differently."""
    at = torch.tensor([[0], [3], [3]])
    m = wrap(lambda x: torch.zeros(3, 4).scatter(1, at, 3 * x))
    return [step(m, randn(3, 1)) for _ in range(2)]


@program
def products_are_written_at_indices(wrap):
    at = torch.tensor([0, 2, 2])

    def forward(x):
        z = x.new_zeros(4, 3).index_copy(0, at, 1.7 * x.sin())
        z[at] = z[at] + 0.3 * x
        z[at, at] = 0.7 * x[0]
        return z

    m = wrap(forward)
    return [step(m, randn(3, 3)) for _ in range(2)]


@program
def filled_diagonals(wrap):
    """As the similarities of a contrastive loss, where each sample is its own neighbour."""

    def forward(x):
        y = (x @ x.mT) / 0.5
        y.fill_diagonal_(-1e4)
        z = (3 * x).diagonal_scatter(0.7 * x[0, : min(x.shape)])
        return y.log_softmax(-1), z

    m = wrap(forward)
    return [step(m, randn(n, 4)) for n in (3, 6)]


@program
def scatter_into_every_other_element(wrap):
    def forward(x, y):
        return torch.as_strided_scatter(x * 8, y * 2, (3, 2), (4, 2), 0)

    return step(wrap(forward), randn(3, 4), randn(3, 2))


@program
def gather_with_sparse_gradient(wrap):
    x = randn(2, 4)
    found = wrap(lambda x: x.gather(1, torch.tensor([[0, 2]]), sparse_grad=True) * 2)(x)
    found.sum().backward()
    return [found, x.grad.is_sparse, x.grad]
