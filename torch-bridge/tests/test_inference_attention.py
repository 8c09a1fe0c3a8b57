"""Layers whose fast paths for inference are one operator in PyTorch are compiled."""

import warnings

import pytest
import shorthaul
import torch
from torch import nn
from torch.testing import assert_close

LAYERS = {
    "encoder": lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
    "encoder that normalizes first": lambda: nn.TransformerEncoderLayer(
        16, 4, 32, activation="gelu", batch_first=True, norm_first=True
    ),
    "decoder": lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_inference_is_compiled(name):
    layer = LAYERS[name]().eval()
    compiled = shorthaul.module(layer)
    x = torch.randn(2, 5, 16)
    given = (x, torch.randn(2, 3, 16)) if name == "decoder" else (x,)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would say that PyTorch runs a part
        found = compiled(*given)
        assert_close(found, layer(*given), rtol=1e-5, atol=1e-5)
        assert shorthaul.report(layer, *given).data["outside"] == []


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    # Without this, a padding mask makes PyTorch use nested tensors.
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def masks():
    causal = torch.ones(5, 5).triu(1).bool()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return {
        "of positions": {"mask": causal},
        "of padding": {"src_key_padding_mask": padding},
        "of both": {"mask": causal, "src_key_padding_mask": padding},
    }


@pytest.mark.parametrize("name", masks())
def test_an_encoder_with_a_mask_in_inference_is_compiled(name):
    network = encoder()
    compiled = shorthaul.module(network, fallback="error")
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        assert_close(
            compiled(x, **masks()[name]), network(x, **masks()[name]), rtol=1e-5, atol=1e-5
        )


def test_an_encoder_in_inference_within_autocast_has_the_types_of_eager():
    network = encoder()
    compiled = shorthaul.module(network)
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("ignore", shorthaul.FallbackWarning)
        found, wanted = compiled(x), network(x)
    assert found.dtype == wanted.dtype
    assert_close(found, wanted, rtol=0.05, atol=0.05)
