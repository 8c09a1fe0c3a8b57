"""Programs with PyTorch's losses, their options, and labels that are ignored or all masked."""

import torch
from torch import nn
from torch.nn import functional

from .facts import raises, randn, step, training
from .registry import program


def _labels(*values):
    return torch.tensor(values)


def _loss(name, compute, *make):
    @program(name=name)
    def loss(wrap):
        return raises(step, wrap(compute), *(one() if callable(one) else one for one in make))


def _float():
    return randn(3, 4)


def _probability():
    return torch.rand(3, 4)


_loss("cross_entropy", functional.cross_entropy, _float, _labels(0, 3, 1))
_loss(
    "cross_entropy_with_all_options",
    lambda x, t: functional.cross_entropy(
        x, t, weight=torch.tensor([1.0, 2, 0.5, 1]), ignore_index=1, label_smoothing=0.1
    ),
    _float,
    _labels(0, 3, 1),
)
_loss("cross_entropy_of_ignored_labels", functional.cross_entropy, _float, _labels(-100, -100, 2))
_loss("cross_entropy_all_ignored", functional.cross_entropy, _float, _labels(-100, -100, -100))
_loss(
    "cross_entropy_of_probabilities",
    lambda x, t: functional.cross_entropy(x, t.softmax(-1)),
    _float,
    _float,
)
_loss(
    "cross_entropy_each",
    lambda x, t: functional.cross_entropy(x, t, reduction="none"),
    _float,
    _labels(0, 3, -100),
)
_loss(
    "cross_entropy_of_images",
    lambda x, t: functional.cross_entropy(x, t, reduction="sum"),
    lambda: randn(2, 3, 2, 2),
    torch.tensor([[[0, 1], [2, 0]], [[1, 1], [-100, 0]]]),
)
_loss(
    "negative_log_likelihood",
    lambda x, t: functional.nll_loss(x.log_softmax(1), t, ignore_index=0),
    _float,
    _labels(0, 3, 1),
)
_loss("mean_squares", functional.mse_loss, _float, _float)
_loss("absolute", lambda x, y: functional.l1_loss(x, y, reduction="sum"), _float, _float)
_loss("smooth_absolute", lambda x, y: functional.smooth_l1_loss(x, y, beta=0.5), _float, _float)
_loss("huber", lambda x, y: functional.huber_loss(x, y, delta=0.3), _float, _float)
_loss("binary", lambda x, t: functional.binary_cross_entropy(x.sigmoid(), t), _float, _probability)
_loss(
    "binary_of_logits",
    lambda x, t: functional.binary_cross_entropy_with_logits(
        x, t, pos_weight=torch.full((4,), 2.0)
    ),
    _float,
    _probability,
)
_loss("divergence", lambda x, t: functional.kl_div(x.log_softmax(1), t.softmax(1)), _float, _float)
_loss("gaussian", lambda x, y: functional.gaussian_nll_loss(x, y, y.exp()), _float, _float)
_loss("poisson", functional.poisson_nll_loss, _float, _probability)
_loss("triplet", functional.triplet_margin_loss, _float, _float, _float)
_loss("margin", functional.multi_margin_loss, _float, _labels(0, 3, 1))
_loss("multilabel", functional.multilabel_soft_margin_loss, _float, lambda: _probability().round())
_loss("soft_margin", functional.soft_margin_loss, _float, lambda: _probability().round() * 2 - 1)
_loss(
    "cosine_embedding",
    lambda x, y, t: functional.cosine_embedding_loss(x, y, t),
    _float,
    _float,
    _labels(1, -1, 1),
)
_loss(
    "ranking",
    lambda x, y, t: functional.margin_ranking_loss(x, y, t, margin=0.2),
    lambda: randn(3),
    lambda: randn(3),
    _labels(1, -1, 1),
)
_loss(
    "connectionist",
    lambda x: functional.ctc_loss(
        x.log_softmax(-1),
        torch.tensor([[1, 2], [2, 2]]),
        torch.tensor([5, 4]),
        torch.tensor([2, 1]),
    ),
    lambda: randn(5, 2, 4),
)


def _connectionist(name, *, flat=False, as_tensors=True, too_short=False, **options):
    """Two rows of 6 and 5 steps; ``too_short``: the labels of the second have no alignment."""

    @program(name=f"connectionist_{name}")
    def loss(wrap):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.scores = nn.Linear(3, 4)

            def forward(self, x, targets, steps, labels):
                scores = self.scores(x).log_softmax(-1)
                return functional.ctc_loss(scores, targets, steps, labels, **options)

        rows = [[1, 2, 2], [2, 3, 0]] if "blank" not in options else [[0, 1, 1], [2, 0, 3]]
        lengths = [[6, 2 if too_short else 5], [3, 2]]
        if too_short:
            rows[1], lengths[1][1] = rows[0], 3
        kept = [label for row, n in zip(rows, lengths[1], strict=True) for label in row[:n]]
        targets = torch.tensor(kept if flat else rows)
        steps, labels = map(torch.tensor if as_tensors else tuple, lengths)
        model = Model()
        m = wrap(model)
        return [raises(training, model, m, randn(6, 2, 3), targets, steps, labels) for _ in "ab"]


_connectionist("of_rows")
_connectionist("of_labels_in_one_row", flat=True)
_connectionist("with_lengths_as_tuples", flat=True, as_tensors=False)
_connectionist("each", reduction="none")
_connectionist("sum", reduction="sum", flat=True)
_connectionist("with_another_blank", blank=3)
_connectionist("without_an_alignment", too_short=True, reduction="none")
_connectionist("with_infinity_as_zero", too_short=True, zero_infinity=True)
_connectionist("each_with_infinity_as_zero", too_short=True, zero_infinity=True, reduction="none")


@program
def targets_of_wrong_type_are_refused(wrap):
    m = wrap(functional.cross_entropy)
    return [
        raises(m, torch.randn(2, 3), torch.tensor([0, 1], dtype=d))
        for d in (torch.int32, torch.int64)
    ]


@program
def sizes_that_broadcast_by_mistake(wrap):
    m = wrap(functional.mse_loss)
    return [raises(step, m, randn(3, 1), randn(3)), raises(step, m, randn(3), randn(4))]


@program
def contrastive_loss(wrap):
    def forward(a, b, temperature):
        a, b = functional.normalize(a), functional.normalize(b)
        logits = a @ b.T / temperature.exp()
        target = torch.arange(a.shape[0])
        return (
            functional.cross_entropy(logits, target) + functional.cross_entropy(logits.T, target)
        ) / 2

    m = wrap(forward)
    return [step(m, randn(n, 4), randn(n, 4), randn(1)) for n in (3, 5)]


@program
def focal_loss_over_positive_places(wrap):
    def forward(x, target):
        p = torch.sigmoid(x)
        pt = torch.where(target > 0, p, 1 - p)
        loss = -((1 - pt) ** 2) * pt.clamp(min=1e-6).log()
        positive = target > 0
        return loss[positive].mean() if positive.any() else loss.sum() * 0

    m = wrap(forward)
    return [step(m, randn(4), torch.tensor(t)) for t in ([1, 0, 0, 1], [0, 0, 0, 0])]


@program
def variational_bound(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(2, 4)

        def forward(self, x, noise):
            mean, log_variance = self.encoder(x).chunk(2, -1)
            z = mean + noise * (0.5 * log_variance).exp()
            divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
            return functional.mse_loss(self.decoder(z), x, reduction="sum") + divergence

    model = Model()
    m = wrap(model)
    return [step(m, randn(3, 4), torch.randn(3, 2)), [p.grad for p in model.parameters()]]


@program
def absolute_errors_with_weights(wrap):
    def forward(x, y, weight):
        all_ = [
            functional.l1_loss(x, y, reduction=reduction, weight=weight)
            for reduction in ("none", "sum", "mean")
        ]
        return all_[0].square().sum() + all_[1] + all_[2], all_

    m = wrap(forward)
    return [step(m, randn(n, 3), randn(n, 3), randn(n, 3)) for n in (2, 4)]
