"""No contraction of a list of networks runs as scalar loops, forward or backward.

Such loops are right and some fifty times slower, so that they are seen only where somebody looks:
the report warns of each. Networks are small versions, with sizes that leave tails, of those that
ran so.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import shorthaul
import torch
import torch.nn.functional as F
import torchvision
from against_eager import assert_network_matches
from torch import nn

images = torchvision.models


class Gpt2Block(nn.Module):
    """A decoder layer with the causal mask as a buffer and dropout on scores and results."""

    def __init__(self, width: int = 48, heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).split(width, 2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = ~self.causal[:length, :length]
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        found = self.dropout(scores.softmax(-1)) @ v
        x = x + self.dropout(self.out(found.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)), approximate="tanh")))


class UNet(nn.Module):
    """Two levels, with transposed convolutions on the way up and a concatenation."""

    def __init__(self, rank: int):
        super().__init__()
        conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][rank - 1]
        up = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][rank - 1]
        self.pool = [nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d][rank - 1](2)
        self.down, self.deep = conv(3, 9, 3, padding=1), conv(9, 18, 3, padding=1)
        self.up, self.out = up(18, 9, 2, stride=2), conv(18, 2, 3, padding=1)

    def forward(self, x):
        wide = F.silu(self.down(x))
        deep = F.silu(self.deep(self.pool(wide)))
        return self.out(torch.cat([self.up(deep), wide], 1))


class Shuffled(nn.Module):
    """Grouped 1x1 convolutions with a shuffle of the channels between them (ShuffleNet)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(24, 24, 1, groups=3)
        self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.last = nn.Conv2d(24, 24, 1, groups=3)

    def forward(self, x):
        y = F.channel_shuffle(F.silu(self.first(x)), 3)
        return x + self.last(self.depthwise(y))


class Attention(nn.Module):
    """PyTorch's own attention, causal, with dropout in training."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(40, 120)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (4, 10)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        dropout = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return y.transpose(1, 2).flatten(2)


class PixelShuffle(nn.Module):
    """Channels become positions, between two convolutions."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(5, 36, 3, padding=1)
        self.after = nn.Conv2d(9, 4, 3, padding=1)

    def forward(self, x):
        y = self.before(x).unflatten(1, (9, 2, 2)).permute(0, 1, 4, 2, 5, 3)
        return self.after(y.flatten(4, 5).flatten(2, 3))


class SpaceToDepth(nn.Module):
    """Positions become channels, before and after a convolution."""

    def __init__(self, padding: int):
        super().__init__()
        self.conv = nn.Conv2d(20, 9, 1 + 2 * padding, padding=padding)
        self.mix = nn.Conv2d(81, 7, 1)

    def forward(self, x):
        for factor, layer in ((2, self.conv), (3, self.mix)):
            y = x.unflatten(3, (-1, factor)).unflatten(2, (-1, factor))
            x = layer(y.permute(0, 1, 3, 5, 2, 4).flatten(1, 3))
        return x


class LstmCells(nn.Module):
    """A cell over a few steps."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(12, 20)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 20)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return h


class Recurrent(nn.Module):
    """Layers over time in both directions, from the last step of an image's rows to the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(12, 20, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(40, 5)

    def forward(self, x):
        return self.out(self.layers(x.flip(1))[0].flip(-1))


class Reversed(nn.Module):
    """Products of rows in reversed order, along each dimension."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Conv1d(20, 6, 3, padding=1)

    def forward(self, x):
        y = self.first(x.flip(1)).flip(2)
        return self.second(y.flip(0).transpose(1, 2)) @ y.flip(1)


def conv_block(*widths: int) -> list[nn.Module]:
    """Convolutions as VGG has them."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.SiLU()]
    return layers


def regnet_block() -> nn.Module:
    return images.regnet.ResBottleneckBlock(
        24, 24, 1, nn.BatchNorm2d, nn.SiLU, group_width=8, bottleneck_multiplier=1.0, se_ratio=0.25
    )


def efficientnet_block() -> nn.Module:
    config = images.efficientnet.MBConvConfig(4, 3, 2, 16, 24, 1)
    return images.efficientnet.MBConv(config, 0.0, nn.BatchNorm2d)


def swin_block() -> nn.Module:
    return images.swin_transformer.SwinTransformerBlock(36, 3, [4, 4], [2, 2], dropout=0.1)


def image(channels: int, size: int = 12, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, requires_grad=True)


class SlicedConvolution(nn.Module):
    """A grouped convolution of even length, whose last position is dropped: that of wav2vec2."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(16, 16, 8, padding=4, groups=4)

    def forward(self, x):
        return F.gelu(self.convolution(x)[:, :, :-1])


class TokenImages(nn.Module):
    """A depthwise convolution between linear layers, of rows that are an image, as in SegFormer."""

    def __init__(self, width: int = 32, size: int = 8):
        super().__init__()
        self.size, self.norm = size, nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)

    def forward(self, x):
        y = self.up(self.norm(x)).transpose(1, 2)
        y = self.depthwise(y.reshape(len(x), -1, self.size, self.size))
        return x + self.down(F.gelu(y.flatten(2).transpose(1, 2)))


def rows(width: int, length: int = 21, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, width, requires_grad=True)


NETWORKS = {
    "densenet": (
        lambda: images.DenseNet(8, (2, 2), 16, memory_efficient=False, num_classes=5),
        lambda: image(3, 40),
    ),
    "vgg": (
        lambda: nn.Sequential(
            *conv_block(3, 20), nn.MaxPool2d(2), *conv_block(20, 36), nn.MaxPool2d(2)
        ),
        lambda: image(3),
    ),
    "cifar": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 20, 3, padding=1),
            nn.SiLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(180, 10),
        ),
        lambda: image(3),
    ),
    "resnext": (
        lambda: images.resnet.Bottleneck(64, 16, groups=8, base_width=16),
        lambda: image(64, 9),
    ),
    "regnet": (regnet_block, lambda: image(24, 9)),
    "shufflenet": (Shuffled, lambda: image(24, 9)),
    "shufflenet v2": (lambda: images.shufflenetv2.InvertedResidual(16, 16, 2), lambda: image(16)),
    "u-net 1-D": (lambda: UNet(1), lambda: torch.randn(2, 3, 20)),
    "u-net 2-D": (lambda: UNet(2), lambda: image(3)),
    "u-net 3-D": (lambda: UNet(3), lambda: torch.randn(1, 3, 4, 6, 8)),
    "gpt-2": (Gpt2Block, lambda: rows(48)),
    "attention": (Attention, lambda: rows(40)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, activation="gelu"),
        lambda: rows(48),
    ),
    "swin": (swin_block, lambda: torch.randn(2, 8, 8, 36, requires_grad=True)),
    "lstm": (LstmCells, lambda: rows(12, 4)),
    "recurrent": (Recurrent, lambda: rows(12)),
    "reversed": (Reversed, lambda: rows(12)),
    "resnet": (lambda: images.resnet.BasicBlock(20, 20), lambda: image(20, 9)),
    "resnet, batch 1": (lambda: images.resnet.BasicBlock(20, 20), lambda: image(20, 9, 1)),
    "mobilenet": (lambda: images.mobilenetv2.InvertedResidual(16, 24, 2, 4), lambda: image(16)),
    "efficientnet": (efficientnet_block, lambda: image(16)),
    "pixel shuffle": (PixelShuffle, lambda: image(5, 7)),
    "space to depth": (lambda: SpaceToDepth(0), lambda: image(5)),
    "grouped 1-D": (
        lambda: nn.Sequential(
            nn.Conv1d(12, 20, 5, stride=2, padding=2, groups=4),
            nn.ConvTranspose1d(20, 12, 4, stride=2, groups=2),
        ),
        lambda: torch.randn(2, 12, 19, requires_grad=True),
    ),
    "grouped 3-D": (
        lambda: nn.Sequential(
            nn.Conv3d(12, 18, 3, padding=1, groups=3),
            nn.ConvTranspose3d(18, 12, 2, stride=2, groups=6),
        ),
        lambda: torch.randn(1, 12, 4, 5, 3, requires_grad=True),
    ),
    "grouped, dilated": (
        lambda: nn.Conv2d(12, 24, 3, dilation=2, padding=2, groups=4),
        lambda: image(12, 9),
    ),
    "sliced 1-D": (SlicedConvolution, lambda: torch.randn(2, 16, 21, requires_grad=True)),
    "segformer": (TokenImages, lambda: rows(32, 64)),
    "convnext": (
        lambda: nn.Sequential(nn.Conv2d(3, 24, 2, 2), images.convnext.CNBlock(24, 1e-6, 0.0)),
        lambda: image(3, 14),
    ),
}


@functools.cache
def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, given = NETWORKS[name]
    return make(), given()


@pytest.mark.parametrize("name", NETWORKS)
def test_no_contraction_is_scalar(name):
    model, x = network(name)
    report = shorthaul.report(model.train(), x)
    assert [w["sentence"] for w in report.data.get("warnings", [])] == []
    # A product of one row reuses nothing and is rightly loops: no network here has only such.
    paths = {k["path"] for k in report.data["kernels"]} - {"loops"}
    assert paths and "generic" not in paths
    assert {k["stage"] for k in report.data["kernels"]} == {"forward", "backward"}


@pytest.mark.parametrize("name", ["segformer", "convnext"])
def test_depthwise_convolutions_among_rows_of_channels_are_depthwise(name):
    # Their arrays have channels last by shape.
    model, x = network(name)
    kernels = shorthaul.report(model.train(), x).data["kernels"]
    paths = [kernel["path"] for kernel in kernels]
    assert [path for path in paths if path.startswith("convolution")] == []
    assert len([path for path in paths if path.startswith("depthwise")]) == 3


def test_depthwise_and_pointwise_convolutions_of_one_image_are_as_of_several():
    """In a batch of 1, the batch's index is constant, as those of taps and of single channels."""
    model, x = network("mobilenet")
    of_one = shorthaul.report(model.train(), x[:1]).data["kernels"]
    of_two = shorthaul.report(model.train(), x).data["kernels"]
    for kernels in (of_one, of_two):
        paths = [kernel["path"] for kernel in kernels]
        assert len([path for path in paths if path.startswith("depthwise")]) >= 2, paths
    assert sorted(k["path"] for k in of_one) == sorted(k["path"] for k in of_two)


GROUPED = (
    "sliced 1-D",
    "resnext",
    "regnet",
    "shufflenet",
    "grouped 1-D",
    "grouped 3-D",
    "grouped, dilated",
)
SPLIT = (
    "reversed",
    "segformer",
    "convnext",
    "cifar",
    "u-net 3-D",
    "pixel shuffle",
    "space to depth",
)


@pytest.mark.filterwarnings("error::shorthaul.FallbackWarning")
@pytest.mark.parametrize("name", GROUPED + SPLIT)
def test_groups_and_digits_compute_what_eager_computes(name):
    model, x = network(name)
    for module in model.modules():
        for child_name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, child_name, nn.SiLU())
    assert_network_matches(model.train(), x)


def test_grouped_convolutions_write_the_layout_that_others_read():
    # Otherwise results go through scratch and are transposed: a reduced path.
    model = nn.Sequential(nn.Conv2d(8, 32, 1), nn.Conv2d(32, 32, 3, groups=8), *conv_block(32, 8))
    kernels = shorthaul.report(model.train(), image(8)).data["kernels"]
    forward = [k["path"] for k in kernels if k["stage"] == "forward"]
    assert "convolution" in forward
    assert not [path for path in forward if "reduced" in path]


def test_a_contraction_of_digits_that_are_not_neighbours_is_warned_of():
    # The data gradient of the padded convolution reads positions as quotient and remainder, between
    # which channels lie in memory.
    report = shorthaul.report(SpaceToDepth(1), image(5))
    assert [w["reason"] for w in report.data["warnings"]] == ["output_axis"]
    assert "(backward): a contraction runs as scalar loops" in str(report)


@pytest.mark.parametrize("name", ["resnext", "mobilenet", "u-net 2-D", "attention", "gpt-2"])
def test_no_contraction_in_float64_is_scalar(name):
    model, x = network(name)
    report = shorthaul.report(copy.deepcopy(model).double().train(), x.detach().double())
    assert [w["sentence"] for w in report.data.get("warnings", [])] == []
    paths = {k["path"] for k in report.data["kernels"]} - {"loops"}
    assert paths and "generic" not in paths


@pytest.mark.filterwarnings("error::shorthaul.FallbackWarning")
def test_gradients_in_float64_are_those_of_differences():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16),
        nn.Conv2d(16, 16, 3, groups=4),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    # The batch's statistics are kept out of the model's buffers, which each call would change.
    model[1].track_running_stats = False
    model[1].running_mean = model[1].running_var = None
    assert torch.autograd.gradcheck(shorthaul.module(model.train()), (x,))


class Stacked(nn.Module):
    """Attention on queries, keys and values that one layer makes, as in vision transformers."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))


def test_gradients_of_stacked_projections_are_written_where_they_belong():
    torch.manual_seed(0)
    model, x = Stacked(), torch.randn(2, 12, 32, requires_grad=True)
    assert_network_matches(model, x)
    recipe = shorthaul.recipe(model, x)
    joined = [d for d in recipe.decisions if d.kind == "join"]
    assert [(d.applied, d.bytes) for d in joined] == [(True, 2 * 4 * 3 * x.numel())]
    # Copied instead, on request, the gradients are the same.
    copied = recipe.without(joined[0])
    assert [d.applied for d in copied.decisions if d.kind == "join"] == [False]
    assert_network_matches(model, x, wrap=lambda m: shorthaul.module(m, recipe=copied))


class Twice(nn.Module):
    """Two convolutions that are applied twice, each with a norm behind it."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.a, self.b = (nn.Conv2d(48, 48, 3, padding=1) for _ in range(2))
        self.norm = norm

    def forward(self, x):
        for _ in range(2):
            x = x + self.norm(self.b(self.norm(self.a(x).relu())))
        return x


def test_convolutions_beside_a_group_norm_are_as_fast_as_alone():
    """The groups divide channels into two dimensions, of which the inner one has 6 elements."""

    def predicted(norm: nn.Module) -> float:
        kernels = shorthaul.report(Twice(norm), torch.randn(8, 48, 32, 32)).data["kernels"]
        products = [k["predicted"]["product_us"] for k in kernels if k.get("products")]
        assert len(products) == 11
        return sum(products)

    assert predicted(nn.GroupNorm(8, 48)) < 1.2 * predicted(nn.Identity())
    assert_network_matches(Twice(nn.GroupNorm(8, 48)), torch.randn(2, 48, 9, 7))
