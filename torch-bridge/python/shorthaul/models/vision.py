"""torchvision's networks, full and in a size for tests; it is imported when one is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from .example import Example, images


def _network(name: str, **options) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(**options)

    return make


def _small_basic_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock

    project = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        BasicBlock(16, 16),
        BasicBlock(16, 32, 2, project),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class _ShortResNet(nn.Module):
    """The first blocks of a ResNet, whose later stages are too large for a test."""

    def __init__(self, **options):
        from torchvision.models import resnet

        super().__init__()
        width = options.pop("base_width", 16)
        groups = options.pop("groups", 1)
        block = partial(resnet.Bottleneck, groups=groups, base_width=width)
        project = nn.Sequential(nn.Conv2d(16, 64, 1, 2, bias=False), nn.BatchNorm2d(64))
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.blocks = nn.Sequential(block(16, 16, 2, project), block(64, 16))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _small_mobilenet_v2() -> nn.Module:
    from torchvision.models import MobileNetV2

    settings = [[1, 16, 1, 1], [6, 24, 2, 2]]
    return MobileNetV2(num_classes=10, inverted_residual_setting=settings)


def _small_mobilenet_v3() -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    block = partial(InvertedResidualConfig, width_mult=1.0)
    blocks = [
        block(16, 3, 16, 16, True, "RE", 2, 1),
        block(16, 5, 64, 24, True, "HS", 2, 1),
    ]
    return MobileNetV3(blocks, 64, num_classes=10)


def _small_efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 32, 16, 1), MBConvConfig(6, 5, 2, 16, 24, 2)]
    return EfficientNet(blocks, dropout=0.2, num_classes=10, last_channel=64)


def _small_densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2), 16, memory_efficient=False, num_classes=10)


def _small_vgg() -> nn.Module:
    from torchvision.models.vgg import make_layers

    features = make_layers([8, "M", 16, 16, "M"], batch_norm=True)
    head = [nn.Flatten(), nn.Linear(16 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(features, *head)


def _small_regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    params = BlockParams(
        depths=[1, 2],
        widths=[16, 32],
        group_widths=[8, 8],
        bottleneck_multipliers=[1.0, 1.0],
        strides=[2, 2],
        se_ratio=0.25,
    )
    return RegNet(params, num_classes=10, stem_width=16)


def _small_shufflenet() -> nn.Module:
    from torchvision.models import ShuffleNetV2

    return ShuffleNetV2([2, 2, 2], [24, 32, 48, 64, 128], num_classes=10)


def _small_googlenet() -> nn.Module:
    from torchvision.models.googlenet import BasicConv2d, Inception

    return nn.Sequential(
        BasicConv2d(3, 16, kernel_size=3, stride=2, padding=1),
        Inception(16, 8, 8, 16, 4, 8, 8),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        Inception(40, 8, 8, 16, 4, 8, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, 10),
    )


def _small_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=10)


def _small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=10)


#: Name, small maker, parameters of the full network.
_ROWS: tuple[tuple[str, Callable[[], nn.Module], int, dict], ...] = (
    ("resnet18", _small_basic_resnet, 11_689_512, {}),
    ("resnet50", _ShortResNet, 25_557_032, {}),
    ("wide_resnet50_2", partial(_ShortResNet, base_width=128), 68_883_240, {}),
    ("resnext50_32x4d", partial(_ShortResNet, groups=4, base_width=32), 25_028_904, {}),
    ("mobilenet_v2", _small_mobilenet_v2, 3_504_872, {}),
    ("mobilenet_v3_large", _small_mobilenet_v3, 5_483_032, {}),
    ("efficientnet_b0", _small_efficientnet, 5_288_548, {}),
    ("densenet121", _small_densenet, 7_978_856, {}),
    ("vgg11_bn", _small_vgg, 132_868_840, {}),
    ("regnet_y_400mf", _small_regnet, 4_344_144, {}),
    ("shufflenet_v2_x1_0", _small_shufflenet, 2_278_604, {}),
    ("googlenet", _small_googlenet, 6_624_904, {"aux_logits": False, "init_weights": False}),
    ("swin_t", _small_swin, 28_288_354, {}),
    ("vit_b_16", _small_vit, 86_567_656, {}),
)

#: It halves an image so often that BatchNorm would see only four numbers of a smaller one.
_DEEP = ("shufflenet_v2_x1_0",)

EXAMPLES = tuple(
    Example(
        name,
        _network(name, **options),
        images(224),
        8,
        1000,
        n_parameters,
        small=Example(name, small, images(64 if name in _DEEP else 32), 4, 10),
    )
    for name, small, n_parameters, options in _ROWS
)
