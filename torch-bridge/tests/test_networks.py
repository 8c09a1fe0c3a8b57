"""Whole networks, compiled, against eager: outputs, gradients and running statistics."""

import pytest
import torch
import torchvision
from against_eager import assert_network_matches
from torch import nn


def smooth(model: nn.Module) -> nn.Module:
    """The model without dropout, and with SiLU for ReLU.

    An element within rounding of a kink is decided either way, which changes a gradient by far more
    than rounding does.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.ReLU, nn.ReLU6)):
                setattr(parent, name, nn.SiLU())
            if isinstance(child, nn.Dropout):
                child.p = 0.0
            if isinstance(child, nn.MultiheadAttention):
                child.dropout = 0.0
    return model


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
@pytest.mark.parametrize("train", [True, False])
def test_torchvision(name, train):
    model = smooth(getattr(torchvision.models, name)(num_classes=10)).train(train)
    assert_network_matches(model, torch.randn(4, 3, 64, 64, requires_grad=True))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_layer(norm_first):
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, activation="gelu", batch_first=True, norm_first=norm_first
    )
    padding = torch.zeros(2, 16, dtype=torch.bool)
    padding[1, 12:] = True
    x = torch.randn(2, 16, 32, requires_grad=True)
    assert_network_matches(smooth(layer), x, src_key_padding_mask=padding)


def test_transformer_layer_in_eval():
    layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True).eval()
    assert_network_matches(layer, torch.randn(2, 16, 32, requires_grad=True))


def test_decoder_layer():
    layer = smooth(nn.TransformerDecoderLayer(32, 4, 64, activation="gelu", batch_first=True))
    causal = nn.Transformer.generate_square_subsequent_mask(16)
    x, memory = torch.randn(2, 16, 32, requires_grad=True), torch.randn(2, 8, 32)
    assert_network_matches(layer, x, memory, tgt_mask=causal, tgt_is_causal=True)
