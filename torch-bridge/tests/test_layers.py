"""Products, convolutions, normalizations, pooling, losses, attention, compiled, against eager."""

import pytest
import shorthaul
import torch
import torch.nn.functional as F
from against_eager import assert_matches
from families import between, check, constant, ints, normal
from torch import nn


def test_products():
    check(
        {
            "linear": (F.linear, normal(2, 5, 7), normal(4, 7), normal(4)),
            "linear of a vector": (F.linear, normal(7), normal(4, 7)),
            "linear to a scalar": (F.linear, normal(3, 7), normal(7)),
            "bilinear": (F.bilinear, normal(3, 4), normal(3, 5), normal(2, 4, 5), normal(2)),
            "mm": (torch.mm, normal(3, 4), normal(4, 5)),
            "bmm": (torch.bmm, normal(2, 3, 4), normal(2, 4, 5)),
            "mv": (torch.mv, normal(3, 4), normal(4)),
            "dot": (torch.dot, normal(9), normal(9)),
            "outer": (torch.outer, normal(3), normal(4)),
            "matmul vector": (torch.matmul, normal(4), normal(2, 4, 5)),
            "matmul broadcast": (torch.matmul, normal(2, 1, 3, 4), normal(5, 4, 6)),
            "matmul of transposed": (lambda a, b: a.mT @ b.mT, normal(4, 3), normal(5, 4)),
            "addmm": (
                lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
                normal(5),
                normal(3, 4),
                normal(4, 5),
            ),
            "addmv": (torch.addmv, normal(3), normal(3, 4), normal(4)),
            "baddbmm": (torch.baddbmm, normal(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5)),
            "width 1": (torch.matmul, normal(3, 1), normal(1, 4)),
            "kron": (torch.kron, normal(2, 3), normal(3, 2)),
            "tensordot": (lambda a, b: torch.tensordot(a, b, 2), normal(2, 3, 4), normal(3, 4, 5)),
        }
    )


def test_einsum():
    equations = {
        "ij,jk->ik": [(3, 4), (4, 5)],
        "bij,bkj->bik": [(2, 3, 4), (2, 5, 4)],
        "ij->ji": [(3, 4)],
        "ij->": [(3, 4)],
        "ij,ij->i": [(3, 4), (3, 4)],
        "i,j->ij": [(3,), (4,)],
        "ij,jk": [(3, 4), (4, 5)],
        "bhld,bhmd->bhlm": [(2, 2, 3, 4), (2, 2, 5, 4)],
        "ij,jk,kl->il": [(3, 4), (4, 5), (5, 2)],
        "ijk,k->ij": [(2, 3, 4), (4,)],
        "...ij,...jk->...ik": [(2, 3, 3, 4), (3, 4, 5)],
        "...i,...i": [(2, 3, 4), (1, 4)],
        "i...,ij->j...": [(3, 2, 4), (3, 5)],
        "...ij->...ji": [(2, 3, 4)],
        "b...d,d->b...": [(2, 3, 4), (4,)],
        "ii->i": [(4, 4)],
        "bij,jk->b": [(2, 3, 4), (4, 5)],
        "B i, i j -> B j": [(2, 3), (3, 5)],
    }
    check(
        {
            equation: (
                lambda *x, e=equation: torch.einsum(e, *x),
                *(normal(*shape, seed=str(i)) for i, shape in enumerate(shapes)),
            )
            for equation, shapes in equations.items()
        }
    )


def test_convolutions():
    options = {
        "plain": {},
        "stride and padding": {"stride": 2, "padding": 1},
        "dilated": {"dilation": 2, "padding": 2},
        "same": {"padding": "same"},
        "valid": {"padding": "valid"},
        "groups": {"groups": 2, "padding": 1},
        "depthwise": {"groups": 4, "padding": 1, "stride": 2},
        "uneven": {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    }
    cases = {}
    for name, o in options.items():
        w = normal(8, 4 // o.get("groups", 1), 3, 3)
        function = lambda x, w, b, o=o: F.conv2d(x, w, b, **o)  # noqa: E731
        cases[f"conv2d {name}"] = (function, normal(2, 4, 7, 9), w, normal(8))
    cases |= {
        "conv2d 1x1": (F.conv2d, normal(2, 4, 5, 5), normal(6, 4, 1, 1)),
        "conv2d even kernel, same": (
            lambda x, w: F.conv2d(x, w, padding="same"),
            normal(2, 4, 5, 6),
            normal(6, 4, 2, 4),
        ),
        "conv2d without batch": (F.conv2d, normal(4, 5, 5), normal(6, 4, 3, 3), normal(6)),
        "conv1d": (
            lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=3, dilation=2),
            normal(2, 3, 11),
            normal(4, 3, 3),
            normal(4),
        ),
        "conv1d groups": (
            lambda x, w: F.conv1d(x, w, groups=3, padding="same"),
            normal(2, 3, 11),
            normal(6, 1, 5),
        ),
        "conv3d": (
            lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 1), padding=1),
            normal(2, 2, 4, 5, 4),
            normal(3, 2, 2, 3, 3),
            normal(3),
        ),
    }
    check(cases)


def test_transposed_convolutions():
    check(
        {
            "2d": (
                lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
                normal(2, 4, 5, 4),
                normal(4, 3, 3, 3),
                normal(3),
            ),
            "2d grouped": (
                lambda x, w: F.conv_transpose2d(x, w, groups=2, dilation=2),
                normal(2, 4, 5, 4),
                normal(4, 3, 3, 2),
            ),
            "2d with output padding of a whole stride": (
                lambda x, w, b: F.conv_transpose2d(
                    x, w, b, (3, 2), (1, 2), output_padding=(2, 3), groups=2, dilation=4
                ),
                normal(2, 2, 4, 4),
                normal(2, 2, 4, 5),
                normal(4),
            ),
            "1d": (
                lambda x, w: F.conv_transpose1d(x, w, stride=3),
                normal(2, 4, 5),
                normal(4, 3, 4),
            ),
            "3d": (
                lambda x, w: F.conv_transpose3d(x, w, stride=2, padding=1),
                normal(1, 2, 3, 3, 2),
                normal(2, 3, 2, 3, 2),
            ),
        }
    )


def test_normalizations():
    x = normal(3, 4, 5, 6, scale=3.0) + 2
    mean, var, scale, shift = (
        normal(4),
        between(0.5, 2, 4),
        normal(4, seed="s"),
        normal(4, seed="b"),
    )
    stats = (constant(mean), constant(var))
    check(
        {
            "layer_norm": (
                lambda x, w, b: F.layer_norm(x, (6,), w, b),
                x.clone(),
                normal(6),
                normal(6, seed="b"),
            ),
            "layer_norm of two": (lambda x: F.layer_norm(x, (5, 6), eps=1e-3), x.clone()),
            "layer_norm weight only": (
                lambda x, w: F.layer_norm(x, (6,), w),
                x.clone(),
                normal(6),
            ),
            "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), x.clone(), normal(6)),
            "group_norm": (
                lambda x, w, b: F.group_norm(x, 2, w, b),
                x.clone(),
                scale.clone(),
                shift.clone(),
            ),
            "group_norm without weight": (lambda x: F.group_norm(x, 4), x.clone()),
            "instance_norm": (
                lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
                x.clone(),
                scale.clone(),
                shift.clone(),
            ),
            "batch_norm in eval": (
                lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b),
                x.clone(),
                scale.clone(),
                shift.clone(),
                *(s.detach().clone().requires_grad_() for s in stats),
            ),
            "batch_norm without statistics": (
                lambda x: F.batch_norm(x, None, None, training=True),
                x.clone(),
            ),
            "softmax": (lambda x: x.softmax(-1), x.clone()),
            "softmax inner": (lambda x: x.softmax(1), x.clone()),
            "log_softmax": (lambda x: x.log_softmax(-1), x.clone()),
            "log_softmax inner": (lambda x: x.log_softmax(-3), x.clone()),
            "softmin": (lambda x: F.softmin(x, -1), x.clone()),
            "softmax as double": (lambda x: x.softmax(-1, dtype=torch.float64), x.clone()),
            "large logits": (lambda x: x.softmax(-1), x * 1000),
            "local_response_norm": (lambda x: F.local_response_norm(x, 3), x.clone()),
        }
    )


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_modules(train):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat = nn.BatchNorm1d(4)
            self.rows = nn.BatchNorm1d(4, momentum=0.3)
            self.image = nn.BatchNorm2d(4, affine=False)
            self.volume = nn.BatchNorm3d(4, eps=1e-3)
            self.untracked = nn.BatchNorm2d(4, track_running_stats=False)
            self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

        def forward(self, flat, rows, image, volume):
            return (
                self.flat(flat),
                self.rows(rows),
                self.image(image),
                self.volume(volume),
                self.untracked(image),
                self.instance(image),
            )

    model = Norms().train(train)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(between(0.5, 2, *buffer.shape))
        else:
            buffer.fill_(3)
    shapes = [(6, 4), (3, 4, 5), (3, 4, 5, 2), (2, 4, 2, 3, 2)]
    assert_matches(model, *(normal(*shape, scale=2.0).requires_grad_() for shape in shapes))


def test_pooling():
    image, row, volume = normal(2, 3, 7, 9), normal(2, 3, 11), normal(2, 2, 5, 6, 4)
    functions = {
        "max": lambda x: F.max_pool2d(x, 2),
        "max padded": lambda x: F.max_pool2d(x, 3, 2, 1),
        "max dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
        "max ceil": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
        "max indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
        "average": lambda x: F.avg_pool2d(x, 2),
        "average padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "average without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "average ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        "average divisor": lambda x: F.avg_pool2d(x, (2, 3), divisor_override=5),
        "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
        "adaptive average up": lambda x: F.adaptive_avg_pool2d(x, (10, 2)),
        "adaptive average none": lambda x: F.adaptive_avg_pool2d(x, (None, 3)),
        "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
        "adaptive max indices": lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
        "global average": lambda x: F.adaptive_avg_pool2d(x, 1),
        "global max": lambda x: F.adaptive_max_pool2d(x, 1),
        "lp": lambda x: F.lp_pool2d(x.abs(), 2, 2),
        "without batch": lambda x: F.max_pool2d(x[0], 2),
    }
    cases = {name: (f, image.clone()) for name, f in functions.items()}
    cases |= {
        "max 1d": (lambda x: F.max_pool1d(x, 3, 2), row.clone()),
        "average 1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), row.clone()),
        "adaptive average 1d": (lambda x: F.adaptive_avg_pool1d(x, 4), row.clone()),
        "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 4), row.clone()),
        "max 3d": (lambda x: F.max_pool3d(x, 2, padding=1), volume.clone()),
        "average 3d": (lambda x: F.avg_pool3d(x, (2, 3, 2)), volume.clone()),
        "adaptive average 3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 4, 3)), volume.clone()),
        "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, (2, 4, 3)), volume.clone()),
    }
    check(cases)


def test_max_pooling_of_special_values():
    x = normal(1, 2, 4, 6)
    x[0, 1, :2, :2], x[0, 1, 2, 5] = float("-inf"), float("inf")
    unknown = x.clone()
    unknown[0, 0, 1, 1] = float("nan")
    functions = {
        "max": lambda x: F.max_pool2d(x, 2),
        "adaptive": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
        "average": lambda x: F.avg_pool2d(x, 2),
    }
    cases = {name: (f, x.clone()) for name, f in functions.items()}
    cases |= {f"{n}, NaN": (f, unknown.clone()) for n, f in functions.items()}
    check(cases)


def test_losses_of_numbers():
    x, y = normal(5, 4, scale=2.0), normal(5, 4, seed="y")
    p, t = between(0.01, 0.99, 5, 4), between(0.0, 1.0, 5, 4)
    w, pos = between(0.5, 2, 4), between(0.5, 3, 4)
    cases = {}
    for how in ("none", "mean", "sum"):
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
            function = lambda x, y, f=loss, r=how: f(x, y, reduction=r)  # noqa: E731
            cases[f"{loss.__name__} {how}"] = (function, x.clone(), y.clone())
        cases[f"bce {how}"] = (
            lambda x, y, r=how: F.binary_cross_entropy(x, y, reduction=r),
            p.clone(),
            constant(t.clone()),
        )
        cases[f"bce with logits {how}"] = (
            lambda x, y, w, q, r=how: F.binary_cross_entropy_with_logits(
                x, y, weight=w, pos_weight=q, reduction=r
            ),
            x.clone(),
            constant(t.clone()),
            constant(w.clone()),
            constant(pos.clone()),
        )
        cases[f"kl_div {how}"] = (
            lambda x, y, r=how: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=r),
            x.clone(),
            y.clone(),
        )
    cases |= {
        "huber delta": (lambda x, y: F.huber_loss(x, y, delta=0.3), x.clone(), y.clone()),
        "smooth_l1 beta": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), x.clone(), y.clone()),
        "smooth_l1 beta 0": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.0), x.clone(), y.clone()),
        "bce at 0 and 1": (
            F.binary_cross_entropy,
            torch.tensor([0.0, 1.0, 0.0, 1.0]),
            constant(torch.tensor([0.0, 1.0, 1.0, 0.0])),
        ),
        "bce weighted": (
            lambda x, y, w: F.binary_cross_entropy(x, y, weight=w),
            p.clone(),
            constant(t.clone()),
            constant(w.clone()),
        ),
        "bce of large logits": (
            F.binary_cross_entropy_with_logits,
            torch.tensor([200.0, -200.0, 200.0, -200.0]),
            constant(torch.tensor([0.0, 1.0, 1.0, 0.0])),
        ),
        "mse at equal": (F.mse_loss, x.clone(), x.clone()),
        "l1 at equal": (F.l1_loss, x.clone(), x.clone()),
        "poisson_nll": (F.poisson_nll_loss, x.clone(), constant(t.clone())),
        "soft_margin": (F.soft_margin_loss, x.clone(), constant(y.sign())),
        "hinge_embedding": (F.hinge_embedding_loss, x.clone(), constant(y.sign())),
        "cosine_embedding": (
            F.cosine_embedding_loss,
            x.clone(),
            y.clone(),
            torch.tensor([1, -1, 1, -1, 1]),
        ),
        "triplet": (F.triplet_margin_loss, x.clone(), y.clone(), normal(5, 4, seed="n")),
    }
    check(cases)


def test_losses_of_classes():
    x, weight = normal(6, 5, scale=2.0), between(0.5, 2, 5)
    label, ignored = torch.tensor([0, 4, 2, 2, 1, 3]), torch.tensor([0, -100, 2, 2, -100, 3])
    image, places = normal(2, 5, 3, 4), ints(5, 2, 3, 4)
    soft = normal(6, 5, seed="soft").softmax(-1)
    masked = x.clone()
    masked[0, 1:], masked[1, 0], masked[2, 4] = float("-inf"), float("-inf"), float("-inf")
    cases = {}
    for how in ("none", "mean", "sum"):
        for smoothing in (0.0, 0.1):
            o = {"reduction": how, "label_smoothing": smoothing}
            plain = lambda x, y, o=o: F.cross_entropy(x, y, **o)  # noqa: E731
            weighted = lambda x, y, w, o=o: F.cross_entropy(x, y, w, **o)  # noqa: E731
            end = f"{how} {smoothing}"
            w = constant(weight.clone())
            cases |= {
                f"classes {end}": (plain, x.clone(), label),
                f"ignored {end}": (plain, x.clone(), ignored),
                f"weighted {end}": (weighted, x.clone(), ignored, w),
                f"places {end}": (weighted, image.clone(), places, constant(weight.clone())),
                f"soft {end}": (plain, x.clone(), soft.clone()),
                f"soft, weighted {end}": (
                    weighted,
                    x.clone(),
                    soft.clone(),
                    constant(weight.clone()),
                ),
            }
        cases |= {
            f"-inf elsewhere {how}": (
                lambda x, y, r=how: F.cross_entropy(x, y, reduction=r),
                masked.clone(),
                label,
            ),
            f"nll {how}": (
                lambda x, y, w, r=how: F.nll_loss(x, y, w, reduction=r),
                x.clone(),
                ignored,
                constant(weight.clone()),
            ),
            f"nll of places {how}": (
                lambda x, y, r=how: F.nll_loss(x, y, reduction=r, ignore_index=1),
                image.clone(),
                places,
            ),
        }
    cases |= {
        "one row": (F.cross_entropy, normal(5), torch.tensor(3)),
        "all ignored": (F.cross_entropy, x.clone(), torch.full((6,), -100)),
        "all ignored, summed": (
            lambda x, y: F.cross_entropy(x, y, reduction="sum"),
            x.clone(),
            torch.full((6,), -100),
        ),
        "nll of -inf elsewhere": (F.nll_loss, masked.log_softmax(-1), label),
        "large logits": (F.cross_entropy, x * 1000, label),
        "nll of softmax": (lambda x, y: F.nll_loss(x.log_softmax(1), y), x.clone(), label),
        "multi_margin by hand": (
            lambda x, y: F.relu(1 - x.gather(1, y[:, None]) + x).sum(1).mean(),
            x.clone(),
            label,
        ),
    }
    check(cases)


def test_attention():
    def qkv():
        shapes = [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)]
        return [normal(*shape, seed="qkv") for shape in shapes]

    def square():
        return [normal(2, 2, 4, 4, seed=name) for name in "qkv"]

    truth = ints(2, 3, 5, dtype=torch.bool)
    truth[:, 0] = True
    nothing = truth.clone()
    nothing[1] = False
    padding = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    padding[0, ..., 3:] = False
    added = torch.zeros(3, 5).masked_fill(~nothing, float("-inf"))
    sdpa = F.scaled_dot_product_attention
    causal = torch.ones(4, 4).tril().log()
    check(
        {
            "plain": (sdpa, *qkv()),
            "scaled": (lambda q, k, v: sdpa(q, k, v, scale=0.3), *qkv()),
            "causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True), *square()),
            "causal by mask": (
                lambda q, k, v, m: sdpa(q, k, v, attn_mask=m),
                *square(),
                constant(causal),
            ),
            "truth mask": (sdpa, *qkv(), truth),
            "padding mask": (sdpa, *qkv(), padding),
            "added mask": (sdpa, *qkv(), normal(3, 5)),
            "a row that sees nothing": (sdpa, *qkv(), nothing),
            "a row that sees nothing, added": (sdpa, *qkv(), constant(added)),
            "one head": (sdpa, normal(3, 4), normal(5, 4), normal(5, 2)),
            "grouped queries": (
                lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
                normal(2, 4, 3, 4),
                normal(2, 2, 5, 4),
                normal(2, 2, 5, 4, seed="v"),
            ),
            "by hand": (
                lambda q, k, v, m: (q @ k.mT / 2).masked_fill(~m, float("-inf")).softmax(-1) @ v,
                *qkv(),
                padding,
            ),
        }
    )


def test_a_product_whose_operand_is_one_number_is_compiled():
    class Sums(nn.Module):
        def forward(self, x):
            y = x.reshape(4, 2, 3)
            return torch.matmul(y, y.mT).sum((1, 2)).float() * 2

    # Whole numbers: all sums are exact, whatever the order of their terms.
    eager, compiled = (torch.arange(-12.0, 12).reshape(4, 6).requires_grad_() for _ in range(2))
    model = shorthaul.module(Sums(), fallback="error")
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = Sums()(eager), model(compiled)
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(compiled.grad, eager.grad)
