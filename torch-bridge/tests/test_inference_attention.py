"""Layers whose fast paths for inference are one operator in PyTorch are compiled."""

import warnings

import pytest
import shorthaul
import torch
from torch import nn
from torch.testing import assert_close

LAYERS = {
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
