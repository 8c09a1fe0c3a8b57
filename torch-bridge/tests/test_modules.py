"""Modules of ``torch.nn`` made of several operators, compiled, against eager."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from against_eager import assert_matches, assert_network_matches
from torch import nn


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent(kind):
    model = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)
    assert_matches(model, torch.randn(2, 6, 4, requires_grad=True))


def test_multi_head_attention_with_weights():
    model = nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=7, bias=False)
    q, k, v = torch.randn(2, 3, 8), torch.randn(2, 5, 6), torch.randn(2, 5, 7)
    assert_matches(model, q.requires_grad_(), k, v, need_weights=True)


class Several(nn.Module):
    """Small modules side by side, so that they cost one compilation."""

    def __init__(self):
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.rows = nn.ModuleDict(
            {
                "weight_norm": parametrizations.weight_norm(nn.Linear(6, 3)),
                "prelu": nn.PReLU(6),
                "bottleneck": nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6)),
                "softmin": nn.Softmin(-1),
                "glu": nn.GLU(),
            }
        )
        self.images = nn.ModuleDict(
            {
                "nearest": nn.Upsample(scale_factor=2),
                "nearest to size": nn.Upsample(size=(7, 9)),
                "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
                "aligned": nn.Upsample(size=(9, 5), mode="bilinear", align_corners=True),
                "bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
                "unfold": nn.Unfold(3, padding=1, stride=2),
                "shuffle": nn.PixelShuffle(2),
                "unshuffle": nn.PixelUnshuffle(2),
                "channel shuffle": nn.ChannelShuffle(2),
                "lp": nn.LPPool2d(2, 2),
                "zero pad": nn.ZeroPad2d((1, 0, 2, 1)),
                "circular": nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
                "reflect": nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"),
                "flatten": nn.Flatten(2),
                "local response": nn.LocalResponseNorm(3),
                "group norm": nn.GroupNorm(2, 4),
                "transposed": nn.ConvTranspose2d(4, 3, 3, stride=2),
            }
        )

    def forward(self, rows, images):
        found = {name: module(rows) for name, module in self.rows.items()}
        return found | {name: module(images) for name, module in self.images.items()}


def test_small_modules():
    rows, images = torch.randn(5, 6), torch.randn(2, 4, 6, 4)
    assert_matches(Several(), rows.requires_grad_(), images.abs().requires_grad_())


def test_functions_of_pairs():
    class Pairs(nn.Module):
        """Distances and losses of two values."""

        def forward(self, x, y):
            return {
                "distance": F.pairwise_distance(x, y),
                "similarity": F.cosine_similarity(x, y),
                "ranking": F.margin_ranking_loss(x, y, torch.sign(x.detach())),
                "multilabel": F.multilabel_soft_margin_loss(x, (y > 0).float()),
                "multi_margin": F.multi_margin_loss(x, torch.tensor([0, 3, 2, 1, 0])),
                "kl": F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
            }

    x, y = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    assert_matches(Pairs(), x, y)


def test_swin_block():
    kind = torchvision.models.swin_transformer.SwinTransformerBlock
    block = kind(8, 2, window_size=[4, 4], shift_size=[2, 2])
    assert_network_matches(block, torch.randn(2, 8, 8, 8, requires_grad=True))


def test_vision_transformer():
    model = torchvision.models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=4)
    nn.init.normal_(model.heads.head.weight)  # it is made of zeros
    assert_network_matches(model, torch.randn(2, 3, 16, 16, requires_grad=True))
